"""What the ranks of test_ddp do: ``python ddp_ranks.py FOLDER`` runs every scene in turn.

Results are as scenes.py says.
"""

import copy
import io
import itertools
import os
import sys
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.fake_device import THERE, FakeDevice
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import phocas
from phocas import integrations
from phocas.detection.evalues import EValueTest
from phocas.integrations.ddp import Guard, protect, watch
from phocas.integrations.ddp import step as ddp_step
from phocas.integrations.ddp import verify as ddp_verify
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.reactions import Reactions
from phocas.integrations.wire import Bucket, Wire, pack

DEVICE_RULES = ("phocas:b=1", "krum:b=0", "nnm:b=1|median", "geometric-median")
SCENES: dict[str, Play] = {}
scene = add_to(SCENES)


@dataclass
class Recorded:
    """A protected model, and what its ranks put into the hook and got out, step by step."""

    model: DistributedDataParallel
    guard: Guard
    steps: list[list[Any]] = field(default_factory=list)

    def backward(self, inputs: torch.Tensor) -> None:
        self.model(inputs).float().square().mean().backward()

    def results(self) -> list[dict[str, Any]]:
        return [
            {"sent": [flat for flat, _, _ in step], "got": [got for _, _, got in step]}
            for step in self.steps
        ]


def record(
    module: nn.Module, rule: str, verify: bool = False, group: Any = None, **options: Any
) -> Recorded:
    """Protect a model, with a copy of every bucket taken on its way into the hook."""
    model = DistributedDataParallel(module, process_group=group, **options)
    register = model.register_comm_hook
    recorded: Recorded

    def listen(state: Any, hook: Any) -> None:
        def listening(
            state: Any,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                recorded.steps.append([])
            recorded.steps[-1].append([bucket.buffer().clone(), bucket.parameters(), None])
            return hook(state, bucket)  # type: ignore[no-any-return]

        register(state, listening)

    model.register_comm_hook = listen  # type: ignore[method-assign]
    recorded = Recorded(model, protect(model, rule, verify))
    return recorded


def train(recorded: Recorded, rank: int, steps: int, poison: float = float("nan")) -> None:
    """Take steps in which the liar's inputs are poisoned."""
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(recorded.model.parameters(), 0.05)
    dtype = next(recorded.model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 30, dtype=dtype)
        recorded.backward(inputs * poison if rank == LIAR else inputs)
        look(recorded)
        optimizer.step()


def look(recorded: Recorded) -> None:
    """Note the gradients that the last step ended with, in the order of its buckets."""
    for entry in recorded.steps[-1]:
        entry[2] = torch.cat([parameter.grad.flatten() for parameter in entry[1]])


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of 8,058 parameters, which four ranks do not divide, in several buckets."""
    torch.manual_seed(1)
    widths = (30, 61, 60, 37, 5)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers).to(dtype)


def trained(
    rule: str, rank: int, poison: float = float("nan"), verify: bool = False, **options: Any
) -> Any:
    recorded = record(network(), rule, verify, bucket_cap_mb=0.004, **options)
    train(recorded, rank, 4, poison)
    return recorded.results()


@scene
def columns(rank: int) -> Any:
    return trained("phocas:b=1", rank)


@scene
def verified(rank: int) -> Any:
    return trained("phocas:b=1", rank, verify=True)


@scene
def blocks(rank: int) -> Any:
    return trained("heraclius:b=1", rank, verify=True)


@scene
def cleaned(rank: int) -> Any:
    return trained("cell-filter:b=1,cutoff=2|nnm:b=1|heraclius:b=1", rank, poison=40.0, verify=True)


@scene
def watched(rank: int) -> Any:
    return trained("monitor:rule=heraclius:b=1", rank, poison=3.0)


@scene
def krum(rank: int) -> Any:
    return trained("krum:b=0", rank)


@scene
def mixing(rank: int) -> Any:
    return trained("nnm:b=1|phocas:b=1", rank, verify=True)


@scene
def centre(rank: int) -> Any:
    return trained("geometric-median", rank)


@scene
def drawing(rank: int) -> Any:
    return trained("bucketing:size=3|mean", rank, poison=3.0)


@scene
def resumed(rank: int) -> Any:
    """Save what the guard knows after three steps, and go on from there twice."""
    path = Path(sys.argv[1]) / f"guard.{rank}.saved"
    found = []
    for again in (False, True):
        recorded = record(network(), "bucketing:size=3|mean", bucket_cap_mb=0.004)
        if again:
            recorded.guard.load_state_dict(torch.load(path))
        else:
            train(recorded, rank, 3, poison=3.0)
            torch.save(recorded.guard.state_dict(), path)
            weights = copy.deepcopy(recorded.model.module.state_dict())
        recorded.model.module.load_state_dict(weights)
        train(recorded, rank, 3, poison=3.0)
        found.append((weights_of(recorded), recorded.guard.report()))
    return found


def weights_of(recorded: Recorded) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in recorded.model.module.state_dict().items()}


@scene
def bucket_views(rank: int) -> Any:
    return trained("trimmed-mean:b=1", rank, gradient_as_bucket_view=True)


def trained_bfloat16(rule: str, rank: int, poison: float) -> Any:
    recorded = record(network(torch.bfloat16), rule, bucket_cap_mb=0.004)
    train(recorded, rank, 3, poison)
    return recorded.results()


@scene
def bfloat16(rank: int) -> Any:
    return trained_bfloat16("phocas:b=1", rank, poison=float("inf"))


@scene
def bfloat16_krum(rank: int) -> Any:
    return trained_bfloat16("krum:b=0", rank, poison=1e30)


@scene
def two_columns(rank: int) -> Any:
    """Have fewer columns than ranks."""
    recorded = record(nn.Linear(1, 1), "phocas:b=1", verify=True)
    recorded.backward(torch.full((4, 1), float(rank)))
    look(recorded)
    return recorded.results()


@scene
def accumulated(rank: int) -> Any:
    """Add up three batches, of which the last one is exchanged."""
    recorded = record(network(), "phocas:b=1", bucket_cap_mb=0.004)
    torch.manual_seed(rank)
    for _ in range(2):
        with recorded.model.no_sync():
            for _ in range(2):
                recorded.backward(torch.randn(8, 30))
        recorded.backward(torch.randn(8, 30))
        look(recorded)
    return recorded.results()


class Branches(nn.Module):
    """Use one branch on even ranks, another on odd ones, and a third nowhere."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(30, 40)
        self.branches = nn.ModuleList([nn.Linear(40, 20) for _ in range(3)])
        self.used = rank % 2

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.branches[self.used](self.stem(inputs).tanh())


@scene
def unused(rank: int) -> Any:
    module = Branches(rank)
    recorded = record(module, "median", find_unused_parameters=True, bucket_cap_mb=0.004)
    torch.manual_seed(rank)
    for _ in range(3):
        module.zero_grad()
        recorded.backward(torch.randn(8, 30))
    sent = [flat for flat, _, _ in recorded.steps[-1]]
    never = list(module.branches[2].parameters())
    order = [parameter for _, parameters, _ in recorded.steps[-1] for parameter in parameters]
    blank = [any(parameter is other for other in never) for parameter in order]
    got = [
        torch.zeros(parameter.numel()) if skip else parameter.grad.flatten()
        for parameter, skip in zip(order, blank, strict=True)
    ]
    return {
        "steps": [{"sent": sent, "got": got}],
        "never": [parameter.grad is None for parameter in never],
    }


@scene
def flagged_ranks(rank: int) -> Any:
    """Count suspects with a liar, and without one."""
    found = []
    for poison in (-3.0, 1.0):
        module = nn.Linear(30, 40)
        recorded = record(module, "phocas:b=1", bucket_cap_mb=0.004)
        train(recorded, rank, 60, poison)
        found.append(
            {
                "suspects": [(one.rank, one.excess) for one in recorded.guard.flagged()],
                "since": [one.onset for one in recorded.guard.flagged()],
                "flagged": [one.flagged for one in recorded.guard.flagged()],
                "dropped": recorded.guard.dropped(),
                "steps": recorded.guard.steps,
                "each": [torch.cat([flat for flat, _, _ in step]) for step in recorded.steps],
            }
        )
    return found


@scene
def corrupted(rank: int) -> Any:
    """Watch while one rank's gradients are corrupted silently, at addresses of a fixed stride."""
    fault = Fault(begin=6)
    widths = (30, 61, 60, 5)
    torch.manual_seed(1)
    module: Any = nn.Sequential(*[FaultyLinear(a, b) for a, b in itertools.pairwise(widths)])
    model = DistributedDataParallel(module)
    told: list[Any] = []
    guard = watch(model, b=1, on_flagged=told.append)
    torch.manual_seed(100 + rank)
    for step in range(16):
        fault.step = step
        for layer in module:
            layer.fault = fault if rank == LIAR else None
        model.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
    return {"struck": fault.struck, "report": guard.report(), "told": [one.rank for one in told]}


@scene
def lost(rank: int) -> Any:
    """Watch while one rank's gradient of one weight is NaN in the fourth step only."""
    torch.manual_seed(1)
    module: Any = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 5))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = watch(model, b=1)
    torch.manual_seed(100 + rank)
    before: Any = None
    for step in range(12):
        optimizer.zero_grad()
        poison = float("nan") if rank == LIAR and step == 3 else 1.0
        handle = module[0].weight.register_hook(lambda grad, poison=poison: grad * poison)
        model(torch.randn(8, 30)).square().mean().backward()
        handle.remove()
        optimizer.step()
        before = guard.report() if step == 3 else before
    file = io.BytesIO()
    torch.save(guard.state_dict(), file)
    again = watch(DistributedDataParallel(copy.deepcopy(module)), b=1)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return before, again.report(), again.report_text(), guard.unusual()


def differing(
    rank: int, batch: int = 32, scale: float = 1.0, rule: str | None = None, **options: Any
) -> Any:
    """Regress on data of one kind, of which one rank takes another batch or loss from step 7."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(30, 40))
    target = torch.randn(30, 40)
    told: list[Any] = []
    options["on_flagged"] = told.append
    guard = protect(model, rule, **options) if rule else watch(model, b=1, **options)
    torch.manual_seed(100 + rank)
    for step in range(40):
        model.zero_grad()
        other = rank == LIAR and step >= 6
        inputs = torch.randn(batch if other else 32, 30)
        loss = (model(inputs) - inputs @ target).square().mean()
        (loss * scale if other else loss).backward()
    report, text = guard.report(), guard.report_text()
    return {"suspects": report["suspects"], "text": text, "told": [one.rank for one in told]}


@scene
def rare(rank: int) -> Any:
    """Protect and watch a model with rare tokens, and protect a dense one against a liar."""

    def run(module: nn.Module, guarded: Any, poison: float = 1.0) -> Any:
        model = DistributedDataParallel(module, bucket_cap_mb=0.01)
        return warned(lambda: train(Recorded(model, guarded(model), [[]]), rank, 20, poison))

    return {
        "rare": run(Tokens(), lambda model: protect(model, "phocas:b=1")),
        "kept": run(Tokens(), lambda model: protect(model, "heraclius:b=1")),
        "watched": run(Tokens(), lambda model: watch(model, b=1)),
        "dense": run(dense_network(), lambda model: protect(model, "heraclius:b=1"), 1e20),
    }


@scene
def kinds(rank: int) -> Any:
    """Let one rank differ in several ways; the job must not end for one that merely differs."""
    return {
        "half the batch": differing(rank, batch=16, exit_code=77),
        "loss x50": differing(rank, scale=50.0, exit_code=77),
        "signs flipped": differing(rank, scale=-1.0),
        "x1e20": differing(rank, scale=1e20, rule="heraclius:b=1"),
        "NaN": differing(rank, scale=float("nan")),
        "asked for": differing(rank, batch=16, act_on=["differs"])["told"],
    }


@scene
def closed(rank: int) -> Any:
    """Average again once the guard is closed: the liar's NaN are everyone's."""
    recorded = record(network(), "phocas:b=1", bucket_cap_mb=0.004)
    train(recorded, rank, 2)
    with recorded.guard as guard:
        pass
    recorded.backward(torch.full((8, 30), float("nan") if rank == LIAR else 1.0))
    grads: list[Any] = [parameter.grad for parameter in recorded.model.parameters()]
    return {"nan": [bool(grad.isnan().all()) for grad in grads], "steps": guard.steps}


@scene
def protected_again(rank: int) -> Any:
    """Protect a model whose guard is closed: the new guard aggregates, the old one rests."""
    model = DistributedDataParallel(network())
    first = protect(model, "mean")
    twice = rejection(lambda: protect(model, "phocas:b=1"))
    first.close()
    again = Recorded(model, protect(model, "phocas:b=1"), [[]])
    train(again, rank, 3)
    hooked = DistributedDataParallel(network())
    hooked.register_comm_hook(None, allreduce_hook)
    return {
        "twice": twice,
        "steps": (first.steps, again.guard.steps),
        "finite": all(bool(weight.isfinite().all()) for weight in model.parameters()),
        "hooked": rejection(lambda: protect(hooked, "phocas:b=1")),
    }


@scene
def compiled(rank: int) -> Any:
    """Protect what torch.compile returned, before and after its first step."""
    found = []
    for steps_before in (0, 1):
        model = DistributedDataParallel(network())
        quick: Any = torch.compile(model, backend="aot_eager")
        for _ in range(steps_before):
            quick(torch.randn(8, 30)).square().mean().backward()
        guard = integrations.protect(quick, "phocas:b=1")
        train(Recorded(quick, guard, [[]]), rank, 2)
        finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
        found.append((guard.steps, finite))
    return found


@scene
def buffers(rank: int) -> Any:
    """Protect models with running statistics, which rank 0 gives to all or keeps."""
    del rank

    def said(layer: nn.Module, **options: Any) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for it
            model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), layer), **options)
        return warned(lambda: protect(model, "phocas:b=1"))

    return {
        "given": said(nn.BatchNorm1d(4)),
        "kept": said(nn.BatchNorm1d(4), broadcast_buffers=False),
        "none": said(nn.BatchNorm1d(4, track_running_stats=False)),
    }


@scene
def framing(rank: int) -> Any:
    """Let the liar's gradients be honest, and let it say that rank 0 was far in every step."""
    said = np.array([1e30, 0.0, 0.0, 0.0])

    def run() -> Any:
        model = DistributedDataParallel(nn.Linear(30, 40))
        guard = protect(model, "phocas:b=1", verify=True, threat="adversaries")
        train(Recorded(model, guard, [[]]), rank, 20, poison=1.0)
        return [one.rank for one in guard.flagged()]

    if rank != LIAR:
        return run()
    return with_patched(EValueTest, "observe", lambda *_: said, run)


def failing(rank: int, rule: str, group: Any = None) -> Any:
    """Take a step that must fail; say how, and what a second step says."""
    recorded = record(network(), rule, verify=True, group=group, bucket_cap_mb=0.004)
    said = []
    for _ in range(2):
        try:
            recorded.backward(torch.randn(8, 30))
        except RuntimeError as error:
            said.append(str(error))
    failure = recorded.guard.failure
    return {"said": said, "kind": type(failure).__name__, "ranks": getattr(failure, "ranks", None)}


@scene
def lying_aggregator(rank: int) -> Any:
    """Let the liar add a little to the shard that it aggregates."""

    def gather(wire: Wire, parts: Any, sizes: Any = None) -> Any:
        if rank == LIAR and sizes is not None and len(parts) > 1:  # not the sizes of batches
            parts[-2][0] ^= 1
        return honest(wire, parts, sizes)

    honest = Wire.gather
    return with_patched(Wire, "gather", gather, lambda: failing(rank, "phocas:b=1"))


@scene
def lying_measurer(rank: int) -> Any:
    """Let the liar change the distances in its shard."""

    def lying(partials: Any) -> torch.Tensor:
        message = honest(partials)
        if rank == LIAR and not lied:
            lied.append(True)
            message[-1] ^= 1
        return message

    honest = pack
    lied: list[bool] = []
    return with_patched(ddp_step, "pack", lying, lambda: failing(rank, "krum:b=0"))


@scene
def lying_checker(rank: int) -> Any:
    """Let the liar blame the rank before it."""

    def digest(parts: Any) -> torch.Tensor:
        value = honest(parts)
        if rank == LIAR and not lied:
            lied.append(True)
            value[0] ^= 1
        return value

    honest = ddp_verify.digest
    lied: list[bool] = []
    return with_patched(ddp_verify, "digest", digest, lambda: failing(rank, "phocas:b=1"))


@scene
def two_versions(rank: int) -> Any:
    """Let the liar send one gradient to the aggregators and another to the checkers."""

    def scatter(wire: Wire, flat: torch.Tensor, start: int, shifts: Any, place: int = 0) -> Bucket:
        bucket = honest(wire, flat, start, shifts[:1], place)
        other = flat + 1 if rank == LIAR else flat
        bucket.columns.update(honest(wire, other, start, shifts[1:], place).columns)
        return bucket

    honest = Wire.scatter
    return with_patched(Wire, "scatter", scatter, lambda: failing(rank, "phocas:b=1"))


@scene
def rejected(rank: int) -> Any:
    model = DistributedDataParallel(network())
    sparse = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    both = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    said = {
        "too many": rejection(lambda: protect(model, phocas.Phocas(b=2))),
        "krum": rejection(lambda: protect(model, phocas.Krum(b=1))),
        "bare": rejection(lambda: protect(network(), phocas.Phocas(b=1))),  # type: ignore[arg-type]
        "sparse": rejection(lambda: protect(sparse, phocas.Phocas(b=1))),
        "unlike": rejection(lambda: protect(model, "median" if rank == LIAR else "mean")),
        "unknown": rejection(lambda: protect(model, "phoca:b=1")),
        "option": rejection(lambda: protect(model, "mean", exitcode=77)),  # type: ignore[call-arg]
        "own option": rejection(lambda: protect(model, "mean", verfy=True)),  # type: ignore[call-arg]
        "nobody": rejection(lambda: watch(model, b=0)),
        "dtypes": rejection(lambda: protect(DistributedDataParallel(both), "krum:b=0")),
    }
    protect(model, phocas.Phocas(b=1))
    return said


@scene
def on_a_device(rank: int) -> Any:
    """Aggregate buckets that lie on a device, and count what leaves it."""
    wire = Wire(dist.new_group(), THERE)
    found = {}
    with FakeDevice() as device:
        for text in DEVICE_RULES:
            rule = phocas.parse_rule(text)
            ledger = DetectionState(rule, [], ["here"] * WORLD, rank, Reactions())
            aggregator = ddp_step.DDPAggregator(wire, ledger, verify=False, seed=0)
            generator = torch.Generator().manual_seed(rank)
            sent = [torch.randn(size, generator=generator) for size in (9_000, 300_001)]
            flats = [flat.to(THERE) for flat in sent]
            device.sent.clear()
            device.fetched.clear()
            for last, flat in enumerate(flats):
                aggregator.take(flat, list, last=bool(last))
            moved = sum(device.sent), sum(device.fetched)
            got = torch.cat([flat.cpu() for flat in flats])
            found[text] = {"sent": torch.cat(sent), "got": got, "moved": moved}
    return found


@scene
def hung(rank: int) -> Any:
    """Let a rank not turn up: the others must raise within the timeout of the model's group."""
    group = dist.new_group(timeout=timedelta(seconds=HANG_TIMEOUT))
    recorded = record(network(), "phocas:b=1", group=group, bucket_cap_mb=0.004)
    train(recorded, rank, 2)  # from the third step on DDP itself exchanges nothing
    dist.barrier()
    found = {} if rank == LIAR else outcome(lambda: recorded.backward(torch.randn(8, 30)))
    dist.barrier()  # where the liar waits meanwhile
    return {**found, "failure": str(recorded.guard.failure)}


@scene
def dead(rank: int) -> Any:
    """Let a rank exit: the others must raise long before their timeout."""
    recorded = record(network(), "krum:b=0", bucket_cap_mb=0.004)
    train(recorded, rank, 2)
    if rank == LIAR:
        os._exit(0)
    return outcome(lambda: recorded.backward(torch.randn(8, 30)))


if __name__ == "__main__":
    act(SCENES, start_ranks(), Path(sys.argv[1]))
