"""What the ranks of test_replay do: ``python replay_ranks.py FOLDER [SCENE...]``.

One rank is flagged for a fault that persists or strikes once, or for its data. Results are as
scenes.py says.
"""

import copy
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.integrations.scenes import LIAR, Play, act, rejection, scene, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from phocas import integrations
from phocas.integrations import ddp, fsdp

SCENES: dict[str, Play] = {}
add = scene(SCENES)
BEGIN, STEPS = 6, 10


class Hooked(nn.Linear):
    """A layer with a function of its weight's gradient, which FSDP2's parameters cannot have."""

    hook: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view_as(self.weight)
        if self.hook is not None and weight.requires_grad:
            weight.register_hook(self.hook)  # type: ignore[no-untyped-call]  # torch has it so
        return functional.linear(inputs, weight, self.bias)


class Network(nn.Module):
    """A network whose gradient depends on its inputs, its weights, its statistics and chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(12, 15), nn.BatchNorm1d(15), nn.Dropout(0.2))
        self.head = Hooked(15, 3)

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> Any:
        return self.head(self.body(inputs)) * scale


class WithLoss(Network):
    """A network that returns its loss and what the loss is made of, in a dictionary."""

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> Any:
        logits = super().forward(inputs, scale)
        return {"logits": logits, "loss": logits.square().mean(), "name": "text"}


class Box:
    """An object that torch knows nothing of."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Boxed(Network):
    """A network that takes or returns an object."""

    out = True

    def forward(self, inputs: Any, scale: float = 1.0) -> Any:
        if isinstance(inputs, Box):
            inputs = inputs.value
        output = super().forward(inputs, scale)
        return Box(output) if self.out else output


class Once(Network):
    """A network that cannot compute a batch twice in a row on one rank."""

    rank = 0
    last: Any = None

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> Any:
        if self.rank == LIAR and self.last is not None and inputs.equal(self.last):
            raise MemoryError("no room for a second pass")
        self.last = inputs
        return super().forward(inputs, scale)


class Unlike(Network):
    """A network that computes something else every second time, on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.times = rank, 0

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> Any:
        self.times += 1
        return super().forward(inputs, scale * (1 + self.times % 2 * (1 + self.rank)))


def plain(model: Any, inputs: Any) -> Any:
    return model(inputs, scale=0.5).square().mean()


Loss = Callable[[Any, Any], Any]


class Run:
    """The training of one rank, in which rank 2 is wrong."""

    def __init__(
        self,
        rank: int,
        module: nn.Module | None = None,
        rule: str = "heraclius:b=1",
        options: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        self.rank, self.step = rank, 0
        self.module: Any = module or Network()
        self.model: Any = self.wrapped(**given)
        self.told: list[Any] = []
        self.guard = integrations.protect(
            self.model,
            rule,
            on_flagged=self.told.append,
            **({"confirm": "replay"} if options is None else options),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        torch.manual_seed(100 + rank)
        self.strikes = 0

    def wrapped(self, **given: Any) -> Any:
        return DistributedDataParallel(self.module, **({"bucket_cap_mb": 0.0005} | given))

    def corrupt(self, times: int = 1 << 30, value: float = 1e20) -> None:
        """Let the gradient of the head's weight be wrong from step 7 on, so many times."""

        def wrong(gradient: torch.Tensor) -> torch.Tensor:
            if self.rank != LIAR or self.step < BEGIN or self.strikes >= times:
                return gradient
            self.strikes += 1
            gradient = gradient.clone()
            gradient.view(-1)[4] = value
            return gradient

        self.module.head.hook = wrong

    def train(
        self,
        poison: float = 1.0,
        loss: Loss = plain,
        backward: Callable[[Any], None] | None = None,
        steps: int = STEPS,
    ) -> None:
        for self.step in range(steps):
            self.optimizer.zero_grad()
            inputs = torch.randn(8, 12)
            if self.rank == LIAR and self.step >= BEGIN:
                inputs[0, 0] *= poison
            if backward is None:
                loss(self.model, inputs).backward()
            else:
                backward(inputs)
            self.optimizer.step()

    def result(self) -> dict[str, Any]:
        found = {one["rank"]: one["confirmation"] for one in self.guard.report()["suspects"]}
        return {
            "found": found,
            "told": [(one.rank, one.confirmation) for one in self.told],
            "text": self.guard.report_text(),
            "steps": self.guard.steps,
        }


def trained(run: Run, **changes: Any) -> dict[str, Any]:
    run.train(**changes)
    return run.result()


@add
def persistent(rank: int) -> Any:
    run = Run(rank)
    run.corrupt()
    return {**trained(run), "strikes": run.strikes}


@add
def noise(rank: int) -> Any:
    """Be flagged by distances, for wrong values of a plausible size."""
    run = Run(rank)
    if rank == LIAR:
        weight = run.module.body[0].weight
        weight.register_hook(lambda grad: -10 * grad)
    run.train(steps=30)
    return run.result()


@add
def transient(rank: int) -> Any:
    run = Run(rank)
    run.corrupt(times=1)
    return {**trained(run), "strikes": run.strikes}


@add
def data(rank: int) -> Any:
    return trained(Run(rank, nn.Sequential(nn.Linear(12, 5), Network2())), poison=1e20, loss=bare)


def bare(model: Any, inputs: Any) -> Any:
    return model(inputs).mean()


class Network2(nn.Linear):
    """A layer without normalisation, which a huge input reaches."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(5, 3)


def kinds(rank: int, make: Callable[[], Run], loss: Loss, **changes: Any) -> Any:
    """Be wrong always, once, and by data, in one kind of loop."""
    found = {}
    for name, times in {"persistent": 1 << 30, "transient": 1}.items():
        run = make()
        run.corrupt(times)
        found[name] = trained(run, loss=loss, **changes)
    return found


@add
def with_loss(rank: int) -> Any:
    """Return the loss beside the logits that it is made of."""
    return kinds(rank, lambda: Run(rank, WithLoss()), lambda model, inputs: model(inputs)["loss"])


@add
def views(rank: int) -> Any:
    """Let gradients be views of buckets, in two passes of one step."""
    return kinds(
        rank,
        lambda: Run(rank, gradient_as_bucket_view=True),
        lambda model, inputs: (model(inputs) * model(inputs + 1)).mean(),
    )


@add
def autocast(rank: int) -> Any:
    def loss(model: Any, inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs).float().square().mean()

    return kinds(rank, lambda: Run(rank), loss)


@add
def accumulated(rank: int) -> Any:
    found = {}
    for name, times in {"persistent": 1 << 30, "transient": 1}.items():
        run = Run(rank)
        run.corrupt(times)

        def backward(inputs: Any, run: Run = run) -> None:
            with run.model.no_sync():
                plain(run.model, inputs + 1).backward()
            plain(run.model, inputs).backward()

        found[name] = trained(run, backward=backward)
    return found


@add
def weights(rank: int) -> Any:
    """Let a weight be huge on one rank after the step before."""
    run = Run(rank)
    run.train(steps=BEGIN)
    if rank == LIAR:
        with torch.no_grad():
            run.module.head.weight[0, 1] = 1e25
    run.train(steps=1)
    return run.result()


@add
def nan_under_watch(rank: int) -> Any:
    """Let one NaN ruin the weights, so that the rank is flagged in the step after."""
    run = Run(rank, rule="monitor:rule=heraclius:b=1")
    run.corrupt(times=1, value=float("nan"))
    return trained(run)


@add
def gone(rank: int) -> Any:
    """Be flagged where the micro-batch cannot be kept, sent or computed again."""
    found = {}

    def boxed(run: Run) -> Run:
        run.module.out = False
        return run

    def once(run: Run) -> Run:
        run.module.rank = rank
        return run

    cases: dict[str, tuple[Run, Loss]] = {
        "output": (Run(rank, Boxed()), lambda model, inputs: model(inputs).value.mean()),
        "input": (boxed(Run(rank, Boxed())), lambda model, inputs: model(Box(inputs)).mean()),
        "fails": (once(Run(rank, Once())), plain),
        "penalty": (
            Run(rank),
            lambda model, inputs: plain(model, inputs) + model.module.head.weight.square().sum(),
        ),
    }
    for name, (run, loss) in cases.items():
        run.corrupt(times=1)
        found[name] = trained(run, loss=loss)
    return found


@add
def undisturbed(rank: int) -> Any:
    """Train with and without a replay, with a fault that has no state."""
    found = []
    for options in ({"confirm": "replay"}, {}):
        run = Run(rank, options=options)
        run.corrupt()
        run.train()
        gradients = [parameter.grad.clone() for parameter in run.module.parameters()]
        state = copy.deepcopy(run.module.state_dict()), run.optimizer.state_dict(), gradients
        found.append((state, torch.get_rng_state(), len(run.told)))
    return found


@add
def closed(rank: int) -> Any:
    run = Run(rank)
    run.train(steps=2)
    run.guard.close()
    module = run.module
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    run.train(steps=1)
    state = run.guard.state_dict()
    again = ddp.protect(run.model, "heraclius:b=1", confirm="replay")
    again.load_state_dict(state)
    run.train(steps=1)
    return hooks, again.steps


@add
def rejected(rank: int) -> Any:
    model = DistributedDataParallel(Network())
    return {
        "unknown": rejection(lambda: ddp.watch(model, b=1, confirm="again")),  # type: ignore[arg-type]
        "threat": rejection(lambda: ddp.watch(model, b=1, confirm="replay", threat="adversaries")),
        "unlike": rejection(
            lambda: ddp.watch(model, b=1, confirm="replay" if rank == LIAR else None)
        ),
    }


class ShardedRun(Run):
    """The same training with FSDP2, in two units."""

    def wrapped(self, **given: Any) -> Any:
        fully_shard(next(self.module.children()), **given)
        return fully_shard(self.module, **given)


@add
def sharded(rank: int) -> Any:
    """Be wrong always, once, and by data, in several kinds of loops."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make(module: Callable[[], nn.Module] = Network, **given: Any) -> Callable[[], Run]:
        return lambda: ShardedRun(rank, module(), **given)

    def smooth() -> nn.Module:
        module = Network()
        module.body[1] = nn.Tanh()  # BatchNorm has no mixed precision
        return module

    def twice(model: Any, inputs: Any) -> Any:
        return (model(inputs) * model(inputs + 1)).mean()

    poisoned = ShardedRun(rank, nn.Sequential(nn.Linear(12, 5), Network2()))
    return {
        "plain": kinds(rank, make(), plain),
        "replicas": kinds(rank, make(mesh=hybrid), plain),
        "mixed": kinds(rank, make(smooth, mp_policy=half, reshard_after_forward=False), plain),
        "loss": kinds(rank, make(WithLoss), lambda model, inputs: model(inputs)["loss"]),
        "twice": kinds(rank, make(), twice),
        "data": trained(poisoned, poison=1e20, loss=bare),
    }


@add
def sharded_noise(rank: int) -> Any:
    """Be flagged by distances, for wrong values of a plausible size."""
    run = ShardedRun(rank)
    run.module.head.hook = (lambda grad: -10 * grad) if rank == LIAR else None
    return trained(run, steps=30)


@add
def sharded_accumulated(rank: int) -> Any:
    found = {}
    for name, times in {"persistent": 1 << 30, "transient": 1}.items():
        run = ShardedRun(rank)
        run.corrupt(times)

        def backward(inputs: Any, run: Run = run) -> None:
            for last in (False, True):
                run.model.set_requires_gradient_sync(last)
                plain(run.model, inputs + last).backward()

        found[name] = trained(run, backward=backward)
    return found


@add
def sharded_gone(rank: int) -> Any:
    """Be flagged where the micro-batch cannot be kept, sent or reproduced."""

    boxed = Boxed()
    boxed.out = False
    cases: dict[str, tuple[nn.Module, Loss]] = {
        "output": (Boxed(), lambda model, inputs: model(inputs).value.mean()),
        "input": (boxed, lambda model, inputs: model(Box(inputs)).mean()),
        "unlike": (Unlike(rank), plain),
    }
    found = {}
    for name, (module, loss) in cases.items():
        run = ShardedRun(rank, module)
        run.corrupt(times=1)
        found[name] = trained(run, loss=loss)
    return found


@add
def sharded_weights(rank: int) -> Any:
    """Let a weight be huge in one replica after the step before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = ShardedRun(rank, mesh=mesh)
    (group,) = run.module._get_fsdp_state()._fsdp_param_groups
    group._reduce_scatter_comm.aggregator.replay.hosts = ["a", "a", "b", "b"]
    run.corrupt(times=1)
    run.train(steps=BEGIN)
    if rank == LIAR:
        with torch.no_grad():
            run.module.head.weight.to_local()[0, 1] += 0.1
    return trained(run)


@add
def sharded_undisturbed(rank: int) -> Any:
    """Train with and without a replay, with a fault that has no state and hooks of the user."""
    found = []
    for options in ({"confirm": "replay"}, {}):
        run = ShardedRun(rank, options=options)
        run.corrupt()
        reduced: list[Any] = []
        run.module.head.weight.register_post_accumulate_grad_hook(reduced.append)
        run.train()
        parameters = list(run.module.parameters())
        kept = [
            *(each.grad.to_local().clone() for each in parameters),
            *(each.to_local().detach().clone() for each in parameters),
            *(each.clone() for each in run.module.buffers()),
        ]
        found.append((kept, torch.get_rng_state(), len(run.told), len(reduced)))
    return found


@add
def sharded_closed(rank: int) -> Any:
    run = ShardedRun(rank)
    run.train(steps=2)
    before = len(run.module._forward_hooks) + len(run.module._forward_pre_hooks)
    run.guard.close()
    after = len(run.module._forward_hooks) + len(run.module._forward_pre_hooks)
    run.train(steps=1)
    return before - after


@add
def sharded_rejected(rank: int) -> Any:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows = init_device_mesh("cpu", (4,))
    bare = nn.Sequential(nn.Linear(3, 3))
    fully_shard(bare[0], mesh=rows)
    two: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(two[0], mesh=pairs["b"])
    fully_shard(two, mesh=rows)
    whole: Any = fully_shard(nn.Linear(3, 3), mesh=rows)
    replay: Any = {"confirm": "replay"}
    return {
        "bare": rejection(lambda: fsdp.watch(bare, b=1, **replay)),
        "meshes": rejection(lambda: fsdp.protect(two, "mean", **replay)),
        "threat": rejection(lambda: fsdp.watch(whole, b=1, threat="adversaries", **replay)),
        "unlike": rejection(lambda: fsdp.watch(whole, b=1, **(replay if rank == LIAR else {}))),
    }


SEEDS = 20


def seeds(rank: int) -> Any:
    """Set bit 30 of one value of a random parameter on a random rank, always and once."""
    found = []
    for seed, lasting in itertools.product(range(SEEDS), (True, False)):
        rng = torch.Generator().manual_seed(seed)
        who, which = (int(torch.randint(n, (1,), generator=rng)) for n in (4, 6))
        run = Run(rank)
        name, parameter = list(run.module.named_parameters())[which]
        place = int(torch.randint(parameter.numel(), (1,), generator=rng))
        struck: list[int] = []

        def wrong(
            gradient: torch.Tensor,
            run: Run = run,
            place: int = place,
            struck: list[int] = struck,
            lasting: bool = lasting,
            who: int = who,
        ) -> torch.Tensor:
            if run.rank != who or run.step < BEGIN or (struck and not lasting):
                return gradient
            struck.append(run.step)
            gradient = gradient.clone()
            one = gradient.view(-1)[place : place + 1]
            one += 1e-4 * (one == 0)
            one.view(torch.int32).bitwise_or_(1 << 30)
            return gradient

        parameter.register_hook(wrong)
        run.train(steps=STEPS)
        found.append((who, name, lasting, run.result()["found"]))
    return found


SLOW: dict[str, Play] = {"seeds": seeds}

if __name__ == "__main__":
    chosen = {name: (SCENES | SLOW)[name] for name in sys.argv[2:] or SCENES}
    act(chosen, start_ranks(), Path(sys.argv[1]))
