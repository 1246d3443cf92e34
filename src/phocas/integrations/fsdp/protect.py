"""The functions that protect and watch a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch.distributed.fsdp import FSDPModule

from phocas.integrations.detection_state import DetectionState
from phocas.integrations.fsdp.guard import MeshDetection, MeshesGuard
from phocas.integrations.fsdp.reduce_scatter import RobustReduceScatter
from phocas.integrations.fsdp.replay import ShardedReplay
from phocas.integrations.fsdp.step import FSDPAggregator, ModelStep
from phocas.integrations.fsdp.units import (
    Mesh,
    check_gradients,
    meshes_of,
    names_of,
    records_of,
    units_of,
)
from phocas.integrations.guard import Guard, GuardSettings, Options, options_of, watching
from phocas.integrations.job import check_job, join_job, ranks_of_job
from phocas.integrations.joining import check_rule, join, join_part, tell_all, uncompiled
from phocas.integrations.replicas import EVERY, Replicas
from phocas.integrations.wire import Wire
from phocas.rules import Rule, parse_rule
from phocas.specs import unknown


def protect(
    model: torch.nn.Module,
    rule: Rule | str,
    *,
    per_unit: bool = False,
    small_groups: Literal["reject", "average"] = "reject",
    **options: Unpack[Options],
) -> Guard:
    """Aggregate the gradients of a sharded model by a rule; call it on all ranks.

    Use ``heraclius:b=1`` alone or :func:`watch` for language models and mixtures of experts: other
    column rules drop the gradients of rare tokens of honest ranks (docs/costs.md).

    Args:
        model: The whole model, after ``fully_shard`` was called on its parts and on itself.
        rule: ``phocas.Heraclius(b=1)`` or ``"phocas:b=1"``; row i is rank i of the mesh.
        per_unit: Whether a rule that measures whole rows (Krum, NNM, ...) is applied to each unit
            separately. Without it such a rule is rejected, because units are reduced one by one.
        small_groups: What to do if the model has several meshes and one of them has too few ranks
            for the rule: ``"reject"`` the model, or ``"average"`` the gradients of that mesh as
            without phocas, and protect the others.
        **options: :class:`phocas.integrations.guard.Options`. The ``timeout`` applies to the
            reports of a step. The exchange of gradients has the timeout of the mesh's group.
    """
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    chosen = options_of("per_unit", "small_groups", **options)
    if small_groups not in ("reject", "average"):
        raise ValueError(unknown("small_groups", small_groups, ["reject", "average"], "values"))
    model = uncompiled(model)
    meshes = meshes_of(model)
    jobs = [ranks_of_job(mesh.info.mesh, chosen.job_group) for mesh in meshes]
    ranks = sorted({rank for job in jobs for rank in job})
    for mesh in meshes:
        check_job(mesh.ranks, ranks)
    failure: Exception | None = None
    kept: list[Mesh] = []
    try:
        kept = _kept(rule, meshes, per_unit=per_unit, average=small_groups == "average")
        _check_replicas(chosen, kept)
        if chosen.confirm:
            _check_replay(model, meshes, ranks)
    except (ValueError, TypeError) as error:
        failure = error
    settings = {
        "rule": str(rule),
        "per_unit": bool(per_unit),
        "small_groups": small_groups,
        **chosen.shared(),
    }
    info = meshes[0].info
    device = torch.device(info.mesh.device_type)
    whole, hosts = join(info.shard_process_group, device, settings, chosen.timeout, ranks, failure)
    named = names_of(model, kept)
    said = _compare(whole, kept, named)
    averaged = [mesh for mesh in meshes if mesh not in kept]
    step = ModelStep(
        [group for mesh in averaged for _, group in mesh.units], speaks=whole.rank == 0
    )
    parts = []
    replay: ShardedReplay | None = None
    before: list[tuple[Any, Any]] = []
    for mesh, parameters, (groups, mates) in zip(kept, named, said, strict=True):
        wire = whole if mesh.ranks == whole.ranks else join_part(whole, groups, chosen.timeout)
        own_hosts = [hosts[whole.ranks.index(rank)] for rank in wire.ranks]
        names = list(parameters)
        state = DetectionState(
            rule, names, own_hosts, wire.rank, chosen.reactions, chosen.threat, wire
        )
        state.job = join_job(wire, ranks, state.detector.b, chosen.timeout)
        weights = partial(_current, records_of(mesh, parameters.values()))
        if mesh.copies:
            every = EVERY if chosen.digest_every is None else chosen.digest_every
            state.replicas = Replicas(wire, names, weights, every, chosen.optimizer, mesh.copies)
        if chosen.confirm:
            replay = ShardedReplay(
                wire, own_hosts, model, device, mesh.reduces, names, weights, mesh.copies
            )
        exchange = mesh.exchange(wire)
        aggregator = FSDPAggregator(
            wire, state, shards=exchange.shards, seed=chosen.seed, together=step, replay=replay
        )
        parts.append(MeshDetection(state, aggregator.observer, mates))
        for unit, group in units_of(mesh, parameters.values(), first=len(before)):
            step.units.update([unit.number] if unit.segments else [])
            # The public set_custom_reduce_scatter rejects modules with several meshes.
            before.append((group, group._reduce_scatter_comm))  # noqa: SLF001
            comm = RobustReduceScatter(unit, group, aggregator, exchange)
            group._reduce_scatter_comm = comm  # noqa: SLF001
    if step.speaks:
        _say_averaged(rule, averaged)

    def close() -> None:
        step.catch_up()
        step.react()
        for group, comm in before:
            group._reduce_scatter_comm = comm  # noqa: SLF001
        if replay is not None:
            replay.remove()

    if len(parts) == 1:
        state, observer, _ = parts[0]
        step.react = state.react
        return Guard(state, observer, catch_up=step.catch_up, close=close)
    guard = MeshesGuard(parts, whole, catch_up=step.catch_up, close=close)
    step.react = guard.react
    return guard


def watch(
    model: torch.nn.Module,
    b: int,
    *,
    small_groups: Literal["reject", "average"] = "reject",
    **options: Unpack[Options],
) -> Guard:
    """Average gradients as before, and detect faulty ranks as with Heraclius.

    Args:
        model: The whole model, after ``fully_shard`` was called on its parts and on itself.
        b: The largest number of faulty ranks, 2b < m.
        small_groups: As for :func:`protect`; nothing is detected on a mesh that is too small.
        **options: As for :func:`protect`.
    """
    return protect(model, watching(b), small_groups=small_groups, **options)


def _kept(rule: Rule, meshes: Sequence[Mesh], *, per_unit: bool, average: bool) -> list[Mesh]:
    """Return the meshes to protect; raise if the rule cannot hold on all of them."""
    if rule.whole:
        raise ValueError(
            f"{rule} needs all columns on one rank, and under FSDP2 each rank has a shard: use a"
            " column rule (heraclius, phocas, trimmed-mean)"
        )
    if not rule.columnwise and not per_unit:
        raise ValueError(
            f"{rule} measures whole gradients, and FSDP2 reduces them unit by unit: use a column"
            " rule (heraclius, phocas, trimmed-mean), or per_unit=True to let it choose for each"
            " unit by itself, which protects against rows that are wrong in all of a unit only"
        )
    kept, small = [], {}
    for mesh in meshes:
        try:
            check_rule(rule, len(mesh.ranks))
        except ValueError as error:
            if len(meshes) == 1:
                raise
            small[mesh] = error
        else:
            kept.append(mesh)
            check_gradients(mesh)
    if small and not (average and kept):
        said = "; ".join(
            f"{mesh.describe()}: {small[mesh]}" if mesh in small else f"{mesh.describe()}: holds"
            for mesh in meshes
        )
        raise ValueError(
            f"{rule} must hold on every mesh of the model: {said}; choose a smaller b or meshes"
            " with more ranks, or small_groups='average' to protect only the meshes on which it"
            " holds"
        )
    return kept


def _check_replicas(chosen: GuardSettings, meshes: Sequence[Mesh]) -> None:
    if (chosen.digest_every or chosen.optimizer) and not any(mesh.copies for mesh in meshes):
        option = "digest_every" if chosen.digest_every else "optimizer"
        raise ValueError(
            f"{option} compares ranks that keep the same shard, and {meshes[0].describe()}, keep"
            " one shard each: leave it out, or shard on a mesh of two dimensions (HSDP)"
        )


def _check_replay(model: torch.nn.Module, meshes: Sequence[Mesh], ranks: Sequence[int]) -> None:
    """Raise ValueError unless all ranks of the job can compute a micro-batch again together."""
    if not isinstance(model, FSDPModule):
        raise ValueError(  # noqa: TRY004 - the type is right, the option is not
            "confirm replays the whole model: call fully_shard on the model itself, too, or leave"
            " confirm out"
        )
    if len(meshes) > 1 or set(meshes[0].ranks) != set(ranks):
        raise ValueError(
            "confirm replays the micro-batch of one rank on another, and the ranks of this job"
            f" share samples or have several meshes: {meshes[0].describe()}, of {len(ranks)} ranks;"
            " leave confirm out"
        )


def _current(records: Sequence[Any]) -> list[torch.Tensor]:
    """Return the shards of parameters; torch replaces them when a model is moved."""
    return [each.sharded_param for each in records]


def _compare(
    whole: Wire, meshes: Sequence[Mesh], named: Sequence[Mapping[str, Any]]
) -> list[tuple[list[tuple[int, ...]], dict[int, list[int]]]]:
    """Raise on every rank of the job if the ranks of one mesh are not sharded alike.

    Returns:
        For each mesh, the ranks of its groups, and the mates of each rank (:meth:`Mesh.mates`).
    """
    own = [
        {
            "places": [list(place) for place in mesh.places],
            "units": len(mesh.units),
            "values": sum(parameter.numel() for parameter in parameters.values()),
            "mates": mesh.mates(),
        }
        for mesh, parameters in zip(meshes, named, strict=True)
    ]
    said = dict(zip(whole.ranks, tell_all(whole, own), strict=True))
    first, expected = next(iter(said.items()))
    for rank, theirs in said.items():
        if len(theirs) != len(expected):
            raise ValueError(
                f"all ranks of a job must have the same number of meshes: rank {first} has"
                f" {len(expected)}, rank {rank} has {len(theirs)}; if these are stages of a"
                " pipeline, pass job_group=..., the process group of the ranks of one stage"
            )
    for rank, theirs in said.items():
        for number, mesh in enumerate(theirs):
            for member, _, _ in mesh["places"]:
                other = said[member][number]
                if {**other, "mates": 0} != {**mesh, "mates": 0}:
                    raise ValueError(
                        f"all ranks of a mesh must be sharded alike: rank {rank} has"
                        f" {_text(mesh)}, rank {member} has {_text(other)}"
                    )
    columns = [
        {rank: theirs[number] for rank, theirs in said.items()} for number in range(len(own))
    ]
    return [
        (
            sorted({tuple(rank for rank, _, _ in mesh["places"]) for mesh in column.values()}),
            {rank: mesh["mates"] for rank, mesh in column.items()},
        )
        for column in columns
    ]


def _text(mesh: Mapping[str, Any]) -> str:
    ranks, replicas, _ = zip(*mesh["places"], strict=True)
    units = "1 unit" if mesh["units"] == 1 else f"{mesh['units']} units"
    copies = f" in {1 + max(replicas)} replicas" if any(replicas) else ""
    return f"{mesh['values']} values in {units} on ranks {', '.join(map(str, ranks))}{copies}"


def _say_averaged(rule: Rule, meshes: Sequence[Mesh]) -> None:
    for mesh in meshes:
        warnings.warn(
            f"{rule} cannot hold on {mesh.describe()}: their gradients are averaged by torch, and"
            " their faults are not seen",
            RuntimeWarning,
            stacklevel=3,
        )
