"""What the ranks of test_fsdp do: ``python fsdp_ranks.py FOLDER`` runs every scene in turn.

Results are as scenes.py says.
"""

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.fake_device import THERE, FakeDevice
from tests.integrations.mesh_models import Model, experts_on, trial
from tests.integrations.mesh_models import corrupting as corrupting_model
from tests.integrations.mesh_models import sharded as sharded_model
from tests.integrations.mesh_models import train as train_model
from tests.integrations.scenes import (
    HANG_TIMEOUT,
    LIAR,
    WORLD,
    Fault,
    FaultyLinear,
    Play,
    Tokens,
    act,
    dense_network,
    outcome,
    rejection,
    start_ranks,
    warned,
    with_patched,
)
from tests.integrations.scenes import scene as add_to
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import phocas
from phocas.detection.observer import RankObserver, Segment
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.fsdp import FlaggedRank, Guard, protect, watch
from phocas.integrations.fsdp.exchange import Sharded, Unit
from phocas.integrations.fsdp.reduce_scatter import RobustReduceScatter
from phocas.integrations.fsdp.step import FSDPAggregator
from phocas.integrations.reactions import Reactions
from phocas.integrations.wire import Wire

NAN = float("nan")
SCENES: dict[str, Play] = {}
DEVICE_RULES = ("phocas:b=1", "heraclius:b=1", "median")
COMBINED = ("frozen", "compiled", "offloaded", "all")
COMBINED_ALONE = ("tied", "recomputed", "accumulated", "mixed", "experts", "compiled whole")
scene = add_to(SCENES)


def network(**options: Any) -> Any:
    """Return five sharded units whose sizes four ranks do not divide."""
    torch.manual_seed(1)
    widths = (30, 61, 60, 37, 5)
    blocks = [nn.Sequential(FaultyLinear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.Linear(5, 5))
    return sharded(model, **options)


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in list(model)[:-1]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class Steps:
    """What every unit was given and what it kept, step by step."""

    def __init__(self) -> None:
        self.each: list[list[dict[str, Any]]] = []

    def during(self, run: Callable[[], Any]) -> Any:
        reduce = RobustReduceScatter.__call__

        def noted(
            comm: Any, output_tensor: Any, input_tensor: Any, group: Any, op: Any, **options: Any
        ) -> None:
            sent = input_tensor.clone()
            reduce(comm, output_tensor, input_tensor, group, op, **options)
            got = output_tensor.clone()
            self.each[-1].append({"unit": comm.unit.name, "sent": sent, "got": got})

        return with_patched(RobustReduceScatter, "__call__", noted, run)


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    poison: float = 1.0,
    begin: int = 0,
    noted: Steps | None = None,
    seed: int = 100,
    clip: float | None = None,
) -> list[float]:
    """Take steps in which the liar's inputs are poisoned; return the norms before clipping."""
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    norms = []
    for step in range(steps):
        for module in model.modules():
            if isinstance(module, FaultyLinear) and module.fault is not None:
                module.fault.step = step
        optimizer.zero_grad()
        inputs = torch.randn(8, 30)
        if rank == LIAR and step >= begin:
            inputs = inputs * poison
        if noted is not None:
            noted.each.append([])
        model(inputs).float().square().mean().backward()
        if clip is not None:
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(float(norm.full_tensor()))
        optimizer.step()
    return norms


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.full_tensor().detach()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }


def trained(
    rule: str, rank: int, poison: float = NAN, prepare: Any = None, **options: Any
) -> dict[str, Any]:
    noted = Steps()
    model = network(**options)
    protect(model, rule, per_unit="krum" in rule or "nnm" in rule)
    if prepare is not None:
        prepare(model)
    noted.during(lambda: train(model, rank, 3, poison, noted=noted))
    return {"steps": noted.each, "weights": whole(model)}


@scene
def columns(rank: int) -> Any:
    return trained("phocas:b=1", rank)


@scene
def blocks(rank: int) -> Any:
    return trained("heraclius:b=1", rank, reshard_after_forward=False)


@scene
def watched(rank: int) -> Any:
    return trained("monitor:rule=heraclius:b=1", rank, poison=3.0)


@scene
def averaged(rank: int) -> Any:
    return trained("mean", rank, poison=3.0)


@scene
def per_unit(rank: int) -> Any:
    return trained("nnm:b=1|phocas:b=1", rank)


@scene
def filtered(rank: int) -> Any:
    return trained("cell-filter:b=1,cutoff=2|nnm:b=1|phocas:b=1", rank, poison=40.0)


@scene
def crosswise(rank: int) -> Any:
    """Shard square weights by columns."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(30, 32), *layers, nn.Linear(32, 4))

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.shape == (32, 32) else 0)

    noted = Steps()
    sharded(model, shard_placement_fn=place)
    guard = protect(model, "trimmed-mean:b=1")
    noted.during(lambda: train(model, rank, 3, NAN, noted=noted))
    addresses = {name: places["addresses"] for name, places in guard.flagged()[0].places.items()}
    return {"steps": noted.each, "weights": whole(model), "addresses": addresses}


def summed(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def undivided(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)


@scene
def sum_op(rank: int) -> Any:
    return trained("mean", rank, poison=1.0, prepare=summed)


@scene
def premultiplied(rank: int) -> Any:
    return trained("heraclius:b=1", rank, prepare=undivided)


@scene
def bfloat16(rank: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return trained("phocas:b=1", rank, mp_policy=policy)


@scene
def reduced_in_float32(rank: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained("heraclius:b=1", rank, mp_policy=policy)


@scene
def float16(rank: int) -> Any:
    """Have torch divide before and after the sum, as it does where there is little range."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return trained("phocas:b=1", rank, mp_policy=policy)


@scene
def plain(rank: int) -> Any:
    """Train with torch's own reduce-scatter, as the mean, and watched: all from one beginning."""
    found = {}
    variants: dict[str, Any] = {
        "average": {},
        "sum": {"prepare": summed},
        "bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "float16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    }
    for name, options in variants.items():
        prepare: Any = options.pop("prepare", lambda _: None)
        weights = []
        for wrap in (
            lambda _: None,
            lambda model: protect(model, "mean"),
            lambda model: watch(model, b=1),
        ):
            model = network(**options)
            prepare(model)
            guard = wrap(model)
            train(model, rank, 2)
            weights.append(whole(model))
            del guard
        found[name] = weights
    return found


@scene
def replicated(rank: int) -> Any:
    """Have two replicas of two shards: the rule sees the rows of all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"place": mesh.get_coordinate()}
    for rule in ("phocas:b=1", "mean"):
        noted = Steps()
        model = network(mesh=mesh)
        guard = protect(model, rule)
        poison = 1.0 if rule == "mean" else NAN
        noted.during(partial(train, model, rank, 3, poison, noted=noted))
        found[rule] = {"steps": noted.each, "weights": whole(model), "dropped": guard.dropped()}
    model = network(mesh=mesh)
    train(model, rank, 3)
    found["plain"] = whole(model)
    return found


@scene
def clipped(rank: int) -> Any:
    model = network()
    protect(model, "heraclius:b=1")
    return train(model, rank, 4, NAN, clip=0.01)


@scene
def accumulated(rank: int) -> Any:
    """Add up three batches and reduce once; then reduce each, which is said to be wrong."""
    noted = Steps()
    model = network()
    protect(model, "phocas:b=1")
    torch.manual_seed(rank)

    def micro_batches() -> None:
        noted.each.append([])
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            model(torch.randn(8, 30)).square().mean().backward()

    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        noted.during(micro_batches)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(8, 30)).square().mean().backward()
    return {
        "steps": noted.each,
        "quiet": [str(warning.message) for warning in quiet],
        "said": [str(warning.message) for warning in caught],
    }


@scene
def resumed(rank: int) -> Any:
    """Save after three steps by torch.distributed.checkpoint, and go on from there twice."""
    folder = Path(sys.argv[1]) / "checkpoint"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    guard = protect(model, "heraclius:b=1")
    train(model, rank, 3, NAN)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    state_dict_saver.save({**parts, "guard": guard}, checkpoint_id=folder)
    train(model, rank, 3, NAN, seed=200)
    fresh = network()
    other = torch.optim.SGD(fresh.parameters(), 0.05)
    saved: Any = dict(zip(("model", "optimizer"), get_state_dict(fresh, other), strict=True))
    told: list[FlaggedRank] = []
    again = protect(fresh, "heraclius:b=1", on_flagged=told.append)
    state_dict_loader.load({**saved, "guard": again}, checkpoint_id=folder)
    at_once = [one.rank for one in again.flagged()]
    set_state_dict(
        fresh,
        other,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    train(fresh, rank, 3, NAN, seed=200)
    return {
        "weights": (whole(model), whole(fresh)),
        "reports": (guard.report(), again.report()),
        "at once": at_once,
        "told": told,
    }


class Branches(nn.Module):
    """Use the first branch, on odd ranks the second too, and the third nowhere."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList([nn.Linear(30, 20) for _ in range(3)])
        self.second = second

    def forward(self, inputs: torch.Tensor) -> Any:
        out = self.branches[0](inputs)
        return out + self.branches[1](inputs) if self.second else out


@scene
def unused(rank: int) -> Any:
    """Leave a parameter unused everywhere; with zeros sent for it, use one on some ranks only."""
    found = {}
    for name, second, zeros in (("nowhere", False, False), ("somewhere", rank % 2 == 1, True)):
        model: Any = fully_shard(Branches(second))
        model.set_reduce_scatter_unused_params(zeros)
        protect(model, "median")
        torch.manual_seed(rank)
        noted = Steps()

        def step(model: Any = model, noted: Steps = noted) -> None:
            noted.each.append([])
            model(torch.randn(8, 30)).square().mean().backward()

        noted.during(step)
        found[name] = {
            "steps": noted.each,
            "grads": [parameter.grad is not None for parameter in model.parameters()],
        }
    return found


def named(guard: Guard) -> list[dict[str, Any]]:
    return guard.report()["suspects"]  # type: ignore[return-value]


@scene
def one_parameter(rank: int) -> Any:
    """Send NaN in one weight only, from the fifth step on."""
    model = network()
    fault = Fault(begin=4, stride=1)
    object.__setattr__(fault.attack, "nan", 1.0)
    if rank == LIAR:
        model[1][0].fault = fault
    guard = protect(model, "heraclius:b=1")
    train(model, rank, 12)
    finite = all(bool(weight.isfinite().all()) for weight in whole(model).values())
    return {"suspects": named(guard), "text": guard.report_text(), "finite": finite}


def corrupting(rank: int, seeds: range) -> Any:
    """Corrupt one weight silently on one rank from a step on, with several seeds."""
    found = []
    for seed in seeds:
        model = network()
        fault = Fault(begin=6, seed=seed)
        bad = seed % WORLD
        if rank == bad:
            model[2][0].fault = fault
        told: list[FlaggedRank] = []
        guard = protect(model, "heraclius:b=1", seed=seed, on_flagged=told.append)
        train(model, rank, 17, seed=1000 * seed)
        found.append(
            {
                "bad": bad,
                "struck": fault.struck,
                "suspects": named(guard),
                "told": [one.rank for one in told],
                "line": [str(one) for one in guard.flagged()],
            }
        )
    return found


@scene
def corrupted(rank: int) -> Any:
    return corrupting(rank, range(2))


def corrupted_long(rank: int) -> Any:
    return corrupting(rank, range(20))


@scene
def honest(rank: int) -> Any:
    """Name nobody where nobody is wrong."""
    model = network()
    guard = watch(model, b=1)
    train(model, rank, 24)
    return {"report": guard.report(), "text": guard.report_text()}


@scene
def rare(rank: int) -> Any:
    """Protect and watch a model with rare tokens, and protect a dense one against a liar."""

    def run(model: nn.Module, guarded: Any, poison: float = 1.0) -> Any:
        guarded(fully_shard(model))
        return warned(lambda: train(model, rank, 20, poison))

    return {
        "rare": run(Tokens(), lambda model: protect(model, "phocas:b=1")),
        "kept": run(Tokens(), lambda model: protect(model, "heraclius:b=1")),
        "watched": run(Tokens(), lambda model: watch(model, b=1)),
        "dense": run(dense_network(), lambda model: protect(model, "heraclius:b=1"), 1e20),
    }


@scene
def partial_model(rank: int) -> Any:
    """Protect one block of a model, all blocks one by one, and the whole model."""

    def said(*blocks: int) -> list[str]:
        model = network()
        guards = [protect(model[block], "phocas:b=1") for block in blocks]
        guards += [] if blocks else [protect(model, "phocas:b=1")]
        return warned(lambda: train(model, rank, 2))

    return {"one": said(0), "four": said(0, 1, 2, 3), "whole": said()}


@scene
def compiled(rank: int) -> Any:
    """Protect what torch.compile returned; return the names of parameters that are wrong."""
    model = network()
    quick: Any = torch.compile(model, backend="aot_eager")
    guard = protect(quick, "phocas:b=1")
    train(quick, rank, 4, NAN)
    return set(guard.flagged()[0].layers) <= set(dict(model.named_parameters()))


def partly_frozen() -> Model:
    model = Model()
    for part in (model.tokens, model.blocks[0], model.blocks[1].up):
        part.requires_grad_(False)
    return model


def compiled_blocks() -> Model:
    model = Model()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def combining(rank: int, names: Sequence[str]) -> Any:
    """Try what is often combined with FSDP2, each with a rank that sends wrong gradients."""
    flat = init_device_mesh("cpu", (WORLD,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    place = experts_on(flat)
    models: dict[str, Callable[[], Any]] = {
        "frozen": lambda: sharded_model(partly_frozen()),
        "tied": lambda: sharded_model(Model(tied=True)),
        "recomputed": lambda: sharded_model(Model(recompute=True)),
        "accumulated": lambda: sharded_model(Model()),
        "mixed": lambda: sharded_model(Model(), mp_policy=half),
        "compiled": lambda: sharded_model(compiled_blocks()),
        "compiled whole": lambda: torch.compile(sharded_model(Model()), backend="aot_eager"),
        "offloaded": lambda: sharded_model(Model(), offload_policy=offload),
        "experts": lambda: sharded_model(
            Model(experts=True), mesh=hybrid, shard_placement_fn=place
        ),
        "all": lambda: sharded_model(
            Model(experts=True, tied=True, recompute=True),
            mesh=hybrid,
            shard_placement_fn=place,
            mp_policy=half,
        ),
    }
    return {
        name: trial(
            rank,
            LIAR,
            models[name],
            partial(train_model, micro=2) if name in ("accumulated", "all") else train_model,
            steps=5,
        )
        for name in names
    }


@scene
def combined(rank: int) -> Any:
    return combining(rank, COMBINED)


def combined_alone(rank: int) -> Any:
    return combining(rank, COMBINED_ALONE)


@scene
def small(rank: int) -> Any:
    """Average the experts, which are on meshes of two ranks, and protect the rest."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = sharded_model(Model(experts=True), shard_placement_fn=experts_on(pairs["b"]))
    guards: list[Guard] = []
    told = warned(lambda: guards.append(protect(model, "heraclius:b=1", small_groups="average")))
    told += warned(lambda: corrupting_model(rank, LIAR, lambda: train_model(model, rank, 5)))
    return {"told": told, "flagged": [one.rank for one in guards[0].flagged()]}


@scene
def framing(rank: int) -> Any:
    """Let one rank find absurd values of rank 0 in every step, which nobody else sees."""
    look = RankObserver.look

    def lie(witness: RankObserver, rows: torch.Tensor, segments: Any, place: int) -> None:
        rows = rows.clone()
        rows[0] = NAN
        look(witness, rows, segments, place)

    def run() -> Any:
        model = network()
        guard = protect(model, "heraclius:b=1", threat="adversaries")
        train(model, rank, 10)
        return [one.rank for one in guard.flagged()]

    return with_patched(RankObserver, "look", lie, run) if rank == LIAR else run()


@scene
def reactions(rank: int) -> Any:
    """Write down who is named, once, and go back to the mean when the guard is closed."""
    log = Path(sys.argv[1]) / "suspects.jsonl"
    model = network()
    told: list[Any] = []
    with protect(model, "phocas:b=1", on_flagged=told.append, log=log) as guard:
        train(model, rank, 8, NAN, begin=2)
    dist.barrier()
    train(model, rank, 1, NAN)
    return {
        "told": [one.rank for one in told],
        "log": log.read_text(),
        "steps": guard.steps,
        "after": [bool(weight.isnan().all()) for weight in whole(model).values()],
    }


@scene
def rejected(rank: int) -> Any:
    model = network()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    two = sharded_on(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), pairs["b"])
    on_pairs: Any = fully_shard(nn.Linear(4, 4), mesh=pairs["b"])
    partly: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0])
    replicas = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    unsharded: Any = fully_shard(nn.Linear(4, 4), mesh=replicas)
    flat = init_device_mesh("cpu", (WORLD,))
    odd: Any = fully_shard(nn.Linear(4, 4), mesh=pairs if rank == LIAR else flat)
    said = {
        "too many": rejection(lambda: protect(model, phocas.Phocas(b=2))),
        "krum": rejection(lambda: protect(model, "krum:b=0")),
        "bare": rejection(lambda: protect(nn.Linear(3, 3), "phocas:b=1")),
        "no model": rejection(lambda: protect("model", "phocas:b=1")),  # type: ignore[arg-type]
        "ddp": rejection(
            lambda: protect(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)), "mean")
        ),
        "partly": rejection(lambda: protect(partly, "phocas:b=1")),
        "two meshes": rejection(lambda: protect(two, "phocas:b=1")),
        "small": rejection(lambda: protect(two, "phocas:b=1", small_groups="averaged")),  # type: ignore[arg-type]
        "one shard": rejection(lambda: protect(unsharded, "phocas:b=1")),
        "unlike b": rejection(lambda: protect(model, phocas.Phocas(b=2 if rank == LIAR else 1))),
        "unlike meshes": rejection(lambda: protect(odd, "phocas:b=1")),
        "unlike numbers": rejection(lambda: protect(two if rank == LIAR else model, "mean")),
        "unlike": rejection(lambda: protect(model, "median" if rank == LIAR else "mean")),
        "option": rejection(lambda: protect(model, "mean", per_units=True)),  # type: ignore[call-arg]
        "nobody": rejection(lambda: watch(model, b=0)),
        "pairs": rejection(lambda: protect(on_pairs, "phocas:b=1")),
        "exit code": rejection(lambda: protect(model, "median", exit_code=256)),
        "callback": rejection(lambda: protect(model, "median", on_flagged=3)),  # type: ignore[arg-type]
    }
    other = "0" if rank == LIAR else phocas.__version__
    said["version"] = with_patched(
        phocas, "__version__", other, lambda: rejection(lambda: protect(model, "mean"))
    )
    protect(model, phocas.Phocas(b=1))
    said["twice"] = rejection(lambda: watch(model, b=1))

    several: Any = sharded_model(Model(experts=True), shard_placement_fn=experts_on(pairs["b"]))
    said["groups"] = rejection(lambda: protect(several, "phocas:b=1"))
    together: Any = nn.Sequential(nn.Linear(30, 4), nn.Linear(4, 4))
    fully_shard(list(together))
    fully_shard(together)
    protect(together, "median").close()
    with protect(together, "median") as guard:
        train(together, rank, 2)
    said["together"] = f"{guard.steps} steps"
    return said


class _Reduced(torch.autograd.Function):
    """A step whose backward pass reduces a unit's gradients, wherever they are."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, reduce: Callable[[], None]) -> torch.Tensor:
        ctx.reduce = reduce
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reduce()
        return grad, None


@scene
def on_a_device(rank: int) -> Any:
    """Reduce units that lie on a device in a backward pass, and count what leaves it."""
    wire = Wire(dist.new_group(), THERE)
    width = 75_000
    unit = Unit("unit", 0, (Segment(0, 0, width // 3), Segment(1, width // 3, width)), width)
    found = {}
    with FakeDevice() as device:
        for text in DEVICE_RULES:
            names = ["a", "b"]
            ledger = DetectionState(
                phocas.parse_rule(text), names, ["here"] * WORLD, rank, Reactions()
            )
            aggregator = FSDPAggregator(wire, ledger, shards=WORLD, seed=0)
            aggregator.together.said_partial = (
                True  # there is no model of which this could be a part
            )
            nothing_twice = SimpleNamespace(fsdp_params=[])
            comm = RobustReduceScatter(unit, nothing_twice, aggregator, Sharded(wire))
            generator = torch.Generator().manual_seed(rank)
            sent = torch.randn(WORLD * width, generator=generator)
            sent[: width // 9] *= NAN if rank == LIAR else 1.0
            there, kept = sent.to(THERE), torch.empty(width, device=THERE)
            device.sent.clear()
            device.fetched.clear()
            reduce = partial(comm, kept, there, wire.group, dist.ReduceOp.AVG)
            scalar = torch.ones((), requires_grad=True)
            _Reduced.apply(scalar, reduce).backward()  # type: ignore[no-untyped-call]  # torch has it so
            aggregator.catch_up()
            moved = sum(device.sent), sum(device.fetched)
            steps = ledger.detector.rounds
            found[text] = {"sent": sent, "got": kept.cpu(), "moved": moved, "steps": steps}
    return found


def sharded_on(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model)
    return model


@scene
def hung(rank: int) -> Any:
    """Let a rank not turn up in backward: the others must raise within the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=HANG_TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = network(mesh=mesh, reshard_after_forward=False)
    guard = protect(model, "phocas:b=1")
    train(model, rank, 2)
    loss = model(torch.randn(8, 30)).square().mean()
    dist.barrier()
    found = {} if rank == LIAR else outcome(loss.backward)
    dist.barrier()  # where the liar waits meanwhile
    return {**found, "failure": str(guard.failure)}


@scene
def dead(rank: int) -> Any:
    """Let a rank exit before backward: the others must raise long before their timeout."""
    model = network(reshard_after_forward=False)
    protect(model, "phocas:b=1")
    train(model, rank, 2)
    loss = model(torch.randn(8, 30)).square().mean()
    dist.barrier()
    if rank == LIAR:
        os._exit(0)
    return outcome(loss.backward)


if __name__ == "__main__":
    long: dict[str, Play] = {"corrupted_long": corrupted_long, "combined_alone": combined_alone}
    scenes = long if "long" in sys.argv[2:] else SCENES
    act(scenes, start_ranks(), Path(sys.argv[1]))
