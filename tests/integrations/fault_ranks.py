"""What the ranks of test_faults do: ``python fault_ranks.py FOLDER SCENE...``.

One rank's gradients are wrong in one place, or from a late step on. Results are as scenes.py says.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tests.integrations.scenes import LIAR, Play, act, rejection, start_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from phocas import integrations

LATE = 500
RATE = 0.02  # of a model that still learns after so many steps
NAMES = ["0.0.weight", "1.0.weight", "2.0.weight"]

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def noise(grad: torch.Tensor) -> torch.Tensor:
    """Add noise of the size of the gradient's own standard deviation."""
    return grad + grad.std() * torch.randn_like(grad)


def flipped(grad: torch.Tensor) -> torch.Tensor:
    return -grad


def times_four(grad: torch.Tensor) -> torch.Tensor:
    return 4 * grad


def nan(grad: torch.Tensor) -> torch.Tensor:
    return grad * float("nan")


def nan_row(grad: torch.Tensor) -> torch.Tensor:
    wrong = grad.clone()
    wrong[7 % len(wrong)] = float("nan")
    return wrong


def bit_30(grad: torch.Tensor) -> torch.Tensor:
    """Set the highest bit of the exponent at one address, of a value that is not zero."""
    wrong = grad.clone()
    flat = wrong.view(-1)
    flat[45] = torch.where(flat[45] == 0, torch.tensor(1e-4), flat[45])
    flat.view(torch.int32)[45] |= 1 << 30
    return wrong


@dataclass
class Fault:
    """A wrong gradient of some parameters, in some steps."""

    change: Change
    where: tuple[int, ...] = (0, 1, 2)
    begin: int = 0
    every: int = 1
    step: int = 0
    struck: set[int] = field(default_factory=set)

    def apply(self, layer: int, grad: torch.Tensor) -> torch.Tensor:
        if layer not in self.where or self.step < self.begin:
            return grad
        if (self.step - self.begin) % self.every != self.every - 1:
            return grad
        self.struck.add(self.step)
        return self.change(grad)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, fault: Fault, layer: int) -> torch.Tensor:
        ctx.fault, ctx.layer = fault, layer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.fault.apply(ctx.layer, grad), None, None


class Layer(nn.Linear):
    """A linear layer whose gradients pass a fault."""

    fault: Fault | None = None
    number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fault is None:
            return functional.linear(inputs, self.weight, self.bias)
        weight, bias = (
            _Wrong.apply(each, self.fault, self.number)  # type: ignore[no-untyped-call]
            for each in (self.weight, self.bias)
        )
        return functional.linear(inputs, weight, bias)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    widths = (32, 64, 64, 16)
    layers = [Layer(a, b) for a, b in itertools.pairwise(widths)]
    for number, layer in enumerate(layers):
        layer.number = number
    return nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in layers])


def batch(teacher: torch.Tensor, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw samples with noisy labels, so that no model learns them by heart."""
    inputs = torch.randn(size, 32)
    noisy = inputs @ teacher + 2 * torch.randn(size, 16)
    return inputs, noisy.argmax(dim=1)


@dataclass
class Run:
    """A training of one rank, with a guard."""

    engine: str
    rank: int
    options: dict[str, Any]
    rule: str | None = None
    steps: int = 0
    samples: int = 32

    def __post_init__(self) -> None:
        self.module = network()
        if self.engine == "ddp":
            self.model: Any = DistributedDataParallel(self.module)
        else:
            for block in self.module:
                fully_shard(block)
            self.model = fully_shard(self.module)
        self.guard = (
            integrations.watch(self.model, b=1, **self.options)
            if self.rule is None
            else integrations.protect(self.model, self.rule, **self.options)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)
        self.teacher = torch.randn(32, 16, generator=torch.Generator().manual_seed(7))

    def train(self, steps: int, fault: Fault | None = None, until_flagged: bool = False) -> None:
        torch.manual_seed(1000 + 10_000 * self.steps + self.rank)
        for layer in self.module.modules():
            if isinstance(layer, Layer):
                layer.fault = fault if self.rank == LIAR else None
        for _ in range(steps):
            if fault is not None:
                fault.step = self.steps
            self.optimizer.zero_grad()
            inputs, labels = batch(self.teacher, self.samples)
            loss: Any = functional.cross_entropy(self.model(inputs), labels)
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            if until_flagged and self.guard.flagged():
                break


def result(run: Run, fault: Fault) -> dict[str, Any]:
    return {
        "struck": sorted(fault.struck),
        "report": run.guard.report(),
        "text": run.guard.report_text(),
        "steps": run.steps,
    }


def local(rank: int, engine: str, rule: str | None = "heraclius:b=1", **changes: Any) -> Any:
    """Let one rank be wrong in one place, from the seventh step on."""
    run = Run(engine, rank, {}, rule)
    run.train(6)
    fault = Fault(begin=6, **changes)
    run.train(70, fault, until_flagged=True)
    return result(run, fault)


def late(rank: int, engine: str, rule: str | None = None) -> Any:
    """Train for long, and then go on with each of several faults."""
    run = Run(engine, rank, {}, rule)
    run.train(LATE)
    honest = run.guard.report()
    weights = run.model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    state = run.guard.state_dict()
    found = {"honest": honest}
    for name, change in {"noise": noise, "flipped": flipped, "x4": times_four}.items():
        again = Run(engine, rank, {}, rule)
        again.model.load_state_dict(weights)
        again.guard.load_state_dict(state)
        again.steps = LATE
        fault = Fault(change, begin=LATE)
        again.train(80, fault, until_flagged=True)
        found[name] = result(again, fault)
    return found


def reversed_tenfold(grad: torch.Tensor) -> torch.Tensor:
    return -10 * grad


def excluded(rank: int, engine: str) -> Any:
    """Train until rank 2, whose gradients are times -10, is flagged, and take one more step."""
    run = Run(engine, rank, {}, "heraclius:b=1")
    fault = Fault(reversed_tenfold)
    run.train(70, fault, until_flagged=True)
    before = [_whole(each).clone() for each in run.model.parameters()]
    run.train(1, fault)
    after = [_whole(each) for each in run.model.parameters()]
    moved = [old - new for old, new in zip(before, after, strict=True)]
    # The same step of a model of one rank, with the batch of this rank.
    alone = network()
    with torch.no_grad():
        for own, value in zip(alone.parameters(), before, strict=True):
            own.copy_(value)
    torch.manual_seed(1000 + 10_000 * (run.steps - 1) + rank)
    inputs, labels = batch(run.teacher)
    loss = functional.cross_entropy(alone(inputs), labels)
    grads = torch.autograd.grad(loss, list(alone.parameters()))
    own_step = torch.cat([RATE * each.flatten() for each in grads])
    flat = torch.cat([each.flatten() for each in moved])
    (one,) = run.guard.flagged()
    return {"flagged": one.rank, "moved": flat.tolist(), "own": own_step.tolist()}


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()


def small_batch(rank: int, engine: str, known: bool, fault: Change | None = None) -> Any:
    """Train with a quarter of the batch on rank 1, and perhaps a fault of rank 2."""
    run = Run(engine, rank, {}, "heraclius:b=1", samples=8 if rank == 1 else 32)
    if known:
        run.guard.samples(run.samples)
    wrong = None if fault is None else Fault(fault, begin=6)
    run.train(60, wrong, until_flagged=True)
    return {"report": run.guard.report(), "steps": run.steps}


def bad_samples(rank: int, engine: str) -> Any:
    """Give sizes of batches that are wrong, late or missing on rank 1."""
    found = {}
    wrong: dict[str, Any] = {"zero": 0, "negative": -4, "nan": float("nan"), "text": "many"}
    for name, number in wrong.items():
        run = Run(engine, rank, {}, "heraclius:b=1")
        run.guard.samples(number if rank == 1 else 32)
        found[name] = _raised(run)
    run = Run(engine, rank, {}, "heraclius:b=1")
    if rank != 1:
        run.guard.samples(32)
    found["missing"] = _raised(run)
    run = Run(engine, rank, {}, "heraclius:b=1")
    run.train(1)
    found["late"] = rejection(partial(run.guard.samples, 32))
    run = Run(engine, rank, {"threat": "adversaries"}, "heraclius:b=1")
    found["adversaries"] = rejection(partial(run.guard.samples, 32))
    return found


def _raised(run: Run) -> str:
    """Return the error of a step; under DDP it passes through C++, which makes it another one."""
    try:
        run.train(1)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def unobserved(rank: int, change: Change) -> Any:
    """Watch with a fault in a step that is not observed, and compare the steps before with DDP."""
    run = Run("ddp", rank, {}, None)
    run.train(70)
    plain = Run("ddp", rank, {}, None)
    plain.guard.close()
    plain.train(70)
    pairs = zip(run.model.parameters(), plain.model.parameters(), strict=True)
    apart = max(float((own - other).abs().max()) for own, other in pairs)
    while run.guard._observer.awake:  # the same on every rank
        run.train(1)
    fault = Fault(change, where=(1,), begin=run.steps)
    begin = run.steps
    run.train(3, fault, until_flagged=True)
    steps = run.guard.steps, run.steps
    return {**result(run, fault), "apart": apart, "begin": begin, "counted": steps}


def rejected(rank: int) -> Any:
    """Give an unknown threat, threats that differ, and the state of another guard."""
    model = DistributedDataParallel(network())
    state = integrations.watch(model, b=1).state_dict()
    found = {
        "unknown": rejection(
            lambda: integrations.watch(DistributedDataParallel(network()), b=1, threat="fault")
        ),
        "unlike": rejection(
            lambda: integrations.watch(
                DistributedDataParallel(network()),
                b=1,
                threat="faults" if rank else "adversaries",
            )
        ),
    }
    other = integrations.watch(DistributedDataParallel(network()), b=1, threat="adversaries")
    found["other threat"] = rejection(lambda: other.load_state_dict(state))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)))
    found["other model"] = rejection(lambda: integrations.watch(model, b=1).load_state_dict(state))
    return found


LOCAL: dict[str, dict[str, Any]] = {
    "nan_row": {"change": nan_row, "where": (1,)},
    "bit_30": {"change": bit_30, "where": (1,)},
    "bit_30_seldom": {"change": bit_30, "where": (1,), "every": 20},
    "nan_layer": {"change": nan, "where": (1,)},
    "flipped_layer": {"change": flipped, "where": (1,)},
    "noisy_layer": {"change": noise, "where": (1,)},
}
SIZES: dict[str, dict[str, Any]] = {
    "unknown_sizes": {"known": False},
    "known_sizes": {"known": True},
    "known_sizes_flipped": {"known": True, "fault": flipped},
    "known_sizes_nan": {"known": True, "fault": nan},
}
SCENES: dict[str, Play] = {
    f"{engine}_{name}": partial(local, engine=engine, **changes)
    for engine in ("ddp", "fsdp")
    for name, changes in LOCAL.items()
}
SCENES |= {
    f"{engine}_watched_{name}": partial(local, engine=engine, rule=None, **LOCAL[name])
    for engine in ("ddp", "fsdp")
    for name in ("nan_row", "bit_30")
}
SCENES |= {f"{engine}_late": partial(late, engine=engine) for engine in ("ddp", "fsdp")}
SCENES |= {f"{engine}_excluded": partial(excluded, engine=engine) for engine in ("ddp", "fsdp")}
SCENES |= {
    f"{engine}_{name}": partial(small_batch, engine=engine, **options)
    for engine in ("ddp", "fsdp")
    for name, options in SIZES.items()
}
SCENES |= {
    f"{engine}_bad_samples": partial(bad_samples, engine=engine) for engine in ("ddp", "fsdp")
}
SCENES |= {
    "unobserved_nan_row": partial(unobserved, change=nan_row),
    "unobserved_bit_30": partial(unobserved, change=bit_30),
}
SCENES["rejected"] = rejected


if __name__ == "__main__":
    chosen = {name: SCENES[name] for name in sys.argv[2:]}
    act(chosen, start_ranks(), Path(sys.argv[1]))
