"""The reduce-scatter that FSDP2 calls for each unit, and the functions that install it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from phocas.detection.observer import Segment
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.fsdp.exchange import Replicated, Sharded
from phocas.integrations.fsdp.step import FSDPAggregator, Unit
from phocas.integrations.guard import Guard, Options, options_of, watching
from phocas.integrations.job import join_job, ranks_of_job
from phocas.integrations.joining import check_dtypes, check_rule, join, uncompiled
from phocas.integrations.wire import Wire
from phocas.rules import Rule, parse_rule


class RobustReduceScatter:
    """A ``ReduceScatter`` of torch that exchanges the rows and then applies a rule to them."""

    def __init__(
        self, unit: Unit, group: Any, aggregator: FSDPAggregator, exchange: Sharded | Replicated
    ) -> None:
        self.unit, self.group = unit, group
        self.aggregator, self.exchange = aggregator, exchange

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients of a unit to this rank's shard of the aggregate."""
        del async_op  # torch never sets it
        aggregator = self.aggregator
        self._say_if_partial()
        self._say_if_reduced_twice()
        try:
            value = aggregator.reduce(self.unit, self.exchange.scatter(input_tensor, group))
            self.exchange.gather(value, output_tensor)
        except RuntimeError as error:  # raised by every collective that fails
            aggregator.state.failure = aggregator.state.failure or error
            raise RuntimeError(
                f"step {aggregator.step + 1}, gradients of {self.unit.name}: waited for all"
                f" {aggregator.wire.m} ranks to exchange them: {error}"
            ) from error
        factor = _factor(op, group.size())
        if factor != 1:
            output_tensor.mul_(factor)

    def _say_if_partial(self) -> None:
        """Warn once, on one rank, if the model has units that no guard protects.

        Torch knows all units of a model only after the first forward pass.
        """
        if self.aggregator.said_partial:
            return
        self.aggregator.said_partial = True
        context = self.group.modules[0]._get_fsdp_state()._state_ctx  # noqa: SLF001
        groups = [group for state in context.all_states for group in state._fsdp_param_groups]  # noqa: SLF001
        bare = [
            group
            for group in groups
            if not isinstance(group._reduce_scatter_comm, RobustReduceScatter)  # noqa: SLF001
            and any(each.sharded_param.requires_grad for each in group.fsdp_params)
        ]
        if bare and self.aggregator.wire.rank == 0:
            warnings.warn(
                f"only {len(groups) - len(bare)} of {len(groups)} units of the model are protected:"
                " the gradients of the others are averaged by torch, and their faults are not seen;"
                " call protect on the model that fully_shard was called on last",
                RuntimeWarning,
                stacklevel=3,
            )

    def _say_if_reduced_twice(self) -> None:
        if self.aggregator.said_twice:
            return
        for parameter in self.group.fsdp_params:
            grad = parameter.sharded_param.grad
            if grad is not None and bool(grad.to_local().any()):
                self.aggregator.said_twice = True
                warnings.warn(
                    f"{self.unit.name} is reduced again before its gradient is used: rules are not"
                    " linear, so that the sum of reduced micro-batches is not the reduced sum;"
                    " call model.set_requires_gradient_sync(False) for all but the last",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return


def protect(
    model: torch.nn.Module,
    rule: Rule | str,
    *,
    per_unit: bool = False,
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
        **options: :class:`phocas.integrations.guard.Options`. The ``timeout`` applies to the
            reports of a step. The exchange of gradients has the timeout of the mesh's group.
    """
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    threat, seed, timeout, job_group, reactions = options_of("per_unit", **options)
    model = uncompiled(model)
    found = list(_sharded(model))
    info = _common_mesh(found)
    check_rule(rule, len(_ranks(info)))
    _check_rule(rule, per_unit=per_unit)
    named = dict(model.named_parameters())
    wire, hosts = join(
        info.shard_process_group,
        torch.device(info.mesh.device_type),
        {
            "rule": str(rule),
            "per_unit": bool(per_unit),
            "threat": threat,
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in named.values()),
            "units": len(found),
        },
        timeout,
        _ranks(info),
    )
    exchange = _exchange(info, wire)
    detection = DetectionState(rule, list(named), hosts, wire.rank, reactions, threat, wire)
    ranks = ranks_of_job(info.mesh, job_group)
    detection.job = join_job(wire, ranks, detection.detector.b, timeout)
    aggregator = FSDPAggregator(wire, detection, shards=exchange.shards, seed=seed)
    numbers = {id(parameter): number for number, parameter in enumerate(named.values())}
    before = []
    for number, (name, module, group) in enumerate(found):
        unit = _unit(name, number, group, numbers)
        before.append((module, group._reduce_scatter_comm))  # noqa: SLF001 - restored by close
        module.set_custom_reduce_scatter(
            RobustReduceScatter(unit, group, aggregator, exchange)  # type: ignore[arg-type]  # its base class is private
        )

    def close() -> None:
        aggregator.catch_up()
        detection.react()
        for module, comm in before:
            module.set_custom_reduce_scatter(comm)

    return Guard(detection, aggregator.observer, catch_up=aggregator.catch_up, close=close)


def watch(model: torch.nn.Module, b: int, **options: Unpack[Options]) -> Guard:
    """Average gradients as before, and detect faulty ranks as with Heraclius.

    Args:
        model: The whole model, after ``fully_shard`` was called on its parts and on itself.
        b: The largest number of faulty ranks, 2b < m.
        **options: As for :func:`protect`.
    """
    return protect(model, watching(b), **options)


def _factor(op: Any, size: int) -> float:
    """Return the factor from the mean to the reduction that torch requests."""
    # Torch passes a plain kind, or an operation whose factor only its pickled state has.
    bare = isinstance(op, dist.ReduceOp.RedOpType)
    state: Any = (op, None) if bare else op.__getstate__()
    kind, premultiplied = state
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(size)
    if premultiplied is not None:
        return float(size * premultiplied)
    raise ValueError(f"gradients must be averaged or summed: got {op}")


def _sharded(model: Any) -> Iterator[tuple[str, FSDPModule, Any]]:
    """Yield the name, the module and the parameter group of each unit that is reduced."""
    if isinstance(model, DistributedDataParallel):
        raise TypeError("model is a DistributedDataParallel: use phocas.integrations.ddp")
    if not isinstance(model, torch.nn.Module) or not any(
        isinstance(module, FSDPModule) for module in model.modules()
    ):
        raise TypeError(
            f"model must be sharded: got {type(model).__name__}; call fully_shard on its blocks"
            " and on itself first"
        )
    known: list[Any] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 - torch has no other way
        if len(groups) > 1:
            raise ValueError(
                f"all parameters must be on one mesh: {name or 'the model'} has {len(groups)}"
                " parameter groups, from a shard_placement_fn that names several meshes; call"
                " fully_shard without it. Experts on a mesh of their own (torchtitan's expert"
                " parallelism) can be neither protected nor watched"
            )
        for group in groups:
            if any(group is other for other in known):
                continue  # several modules were sharded together, as one unit
            known.append(group)
            if isinstance(group._reduce_scatter_comm, RobustReduceScatter):  # noqa: SLF001
                raise ValueError(  # noqa: TRY004 - the type is right, the state is not
                    f"{name or 'the model'} is protected already: close its guard first"
                )
            yield name or "the model", module, group
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is in no sharded unit, so that its gradient is not reduced at all: call"
                " fully_shard on the whole model, too"
            )


def _common_mesh(found: Sequence[tuple[str, FSDPModule, Any]]) -> Any:
    """Return the mesh of all units; raise if there are several, or unsupported gradient types."""
    if not found:
        raise ValueError("there is nothing to protect: no unit of the model has parameters")
    first, info = found[0][0], found[0][2].mesh_info
    for name, _, group in found:
        if group.mesh_info.mesh != info.mesh:
            raise ValueError(
                f"all units must be on one mesh: {first} is on {info.mesh}, {name} on"
                f" {group.mesh_info.mesh}; call fully_shard with the same mesh for all. Experts on"
                " a mesh of their own (torchtitan's expert parallelism) can be neither protected"
                " nor watched"
            )
        check_dtypes(
            group.mp_policy.reduce_dtype or parameter.sharded_param.dtype
            for parameter in group.fsdp_params
        )
    if info.shard_mesh_dim is None:
        raise ValueError(f"the mesh must have a dimension to shard on: got {info.mesh}; use DDP")
    if info.replicate_mesh_dim is not None and info.mesh.ndim != 2:
        raise ValueError(
            f"replicas need a mesh of two dimensions, (replicate, shard): got {info.mesh}"
        )
    return info


def _ranks(info: Any) -> list[int]:
    """Return all ranks that compute gradients of the same parameters."""
    if info.replicate_mesh_dim is None:
        return dist.get_process_group_ranks(info.shard_process_group)
    ranks: list[int] = info.mesh.mesh.flatten().tolist()
    return sorted(ranks)


def _exchange(info: Any, wire: Wire) -> Sharded | Replicated:
    if info.replicate_mesh_dim is None:
        return Sharded(wire)
    where = {
        rank: (place[info.replicate_mesh_dim], place[info.shard_mesh_dim])
        for rank in _ranks(info)
        for place in (info.mesh.mesh == rank).nonzero().tolist()
    }
    places = [where[rank] for rank in _ranks(info)]
    return Replicated(wire, info.replicate_process_group, places)


def _check_rule(rule: Rule, *, per_unit: bool) -> None:
    if rule.whole:
        raise ValueError(f"{rule} needs all columns in one place, and under FSDP2 there is none")
    if not rule.columnwise and not per_unit:
        raise ValueError(
            f"{rule} measures whole gradients, and FSDP2 reduces them unit by unit: use a column"
            " rule (heraclius, phocas, trimmed-mean), or per_unit=True to let it choose for each"
            " unit by itself, which protects against rows that are wrong in all of a unit only"
        )


def _unit(name: str, number: int, group: Any, numbers: dict[int, int]) -> Unit:
    """Return a unit with the ranges of its parameters in the shard of this rank."""
    segments = []
    begin = 0
    rank, size = group.mesh_info.shard_mesh_rank, group.mesh_info.shard_mesh_size
    for each in group.fsdp_params:
        if not each.sharded_param.requires_grad:
            continue
        padded = each.padded_sharded_param_size.numel()
        shape, cut = each._orig_size, each.fsdp_placement.dim  # noqa: SLF001 - not public
        tail = math.prod(shape[cut:])
        segments.append(
            Segment(
                numbers[id(each.sharded_param)],
                begin,
                begin + each.sharded_size.numel(),
                first=rank * (tail // size if cut else padded),
                run=tail // size if cut else 0,
                jump=tail if cut else 0,
            )
        )
        begin += padded
    return Unit(name, number, tuple(segments), begin)
