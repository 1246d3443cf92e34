"""A small language model, the ways to shard it, and what comes of protecting it.

The scenes of fsdp_ranks.py and mesh_ranks.py use it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.scenes import with_patched
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from phocas.integrations import fsdp
from phocas.integrations.fsdp.reduce_scatter import RobustReduceScatter

NAN = float("nan")
TOKENS, WIDTH, EXPERTS = 24, 16, 4


def _gather(values: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(values: torch.Tensor, group: Any) -> torch.Tensor:
    values = values.clone()
    dist.all_reduce(values, group=group)
    own: torch.Tensor = values.chunk(group.size())[group.rank()]
    return own


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, to the experts of this rank."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather(values, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """The sum of the experts of all ranks, for the tokens of this rank."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scatter(values, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.group), None


class Experts(nn.Module):
    """Experts as two batched weights; with a mesh, each of its ranks has some of the experts."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        for name, shape in (("up", (EXPERTS, WIDTH, 8)), ("down", (EXPERTS, 8, WIDTH))):
            weight = torch.randn(shape) / 4
            if mesh is not None:
                weight = distribute_tensor(weight, mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, inputs: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in self.weights)
        if self.mesh is not None:
            inputs, gates = self._gathered(inputs), self._gathered(gates)
            gates = gates.chunk(self.mesh.size(), dim=1)[self.mesh.get_local_rank()]
        hidden = torch.einsum("td,edh->teh", inputs, up).relu()
        result = torch.einsum("te,teh,ehd->td", gates, hidden, down)
        if self.mesh is None:
            return result
        return _Scatter.apply(result, self.mesh.get_group())  # type: ignore[no-untyped-call, no-any-return]

    @property
    def weights(self) -> tuple[Any, Any]:
        return self.up, self.down

    def _gathered(self, values: torch.Tensor) -> Any:
        assert self.mesh is not None
        return _Gather.apply(values, self.mesh.get_group())  # type: ignore[no-untyped-call]


class Block(nn.Module):
    """Two layers, or a mixture of experts, around a sum with the inputs."""

    def __init__(self, experts: Experts | None, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.router = None if experts is None else nn.Linear(WIDTH, EXPERTS)
        self.experts = experts
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.recompute:
            return checkpoint(self._run, inputs, use_reentrant=False)
        return self._run(inputs)

    def _run(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        if self.router is not None and self.experts is not None:
            result = result + self.experts(result, self.router(result).softmax(dim=1))
        return result


class Model(nn.Module):
    """A model of tokens; ``tied`` shares the vectors of tokens with the head."""

    def __init__(
        self,
        *,
        experts: bool = False,
        mesh: DeviceMesh | None = None,
        tied: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            Block(Experts(mesh) if experts else None, recompute) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.float(), words.roll(1))


def sharded(model: Model, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **{**options, "shard_placement_fn": None})


def experts_on(mesh: DeviceMesh) -> Any:
    """Return the placement function that puts experts on a mesh of their own."""
    info = FSDPMeshInfo(mesh, 0)

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), info) if parameter.ndim == 3 else None

    return place


def train(model: Any, rank: int, steps: int, *, micro: int = 1, poisoned: int = -1) -> None:
    """Take steps of some micro-batches; from the second on, the loss of a poisoned rank is NaN."""
    torch.manual_seed(100 + rank)
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(free, 0.1, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        for last in range(micro - 1, -1, -1):
            if micro > 1:
                model.set_requires_gradient_sync(not last)
                model.set_is_last_backward(not last)
            loss = model(torch.randint(0, TOKENS, (16,)))
            (loss * (NAN if rank == poisoned and step else 1.0)).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of this rank."""
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def corrupting(rank: int, faulty: int, run: Callable[[], Any]) -> Any:
    """Run with NaN in what a faulty rank sends of its gradients, from the second step on."""
    reduce = RobustReduceScatter.__call__

    def corrupt(
        comm: Any, output_tensor: Any, input_tensor: Any, group: Any, op: Any, **options: Any
    ) -> None:
        if comm.aggregator.step:
            input_tensor[::3] = NAN
        reduce(comm, output_tensor, input_tensor, group, op, **options)

    return with_patched(RobustReduceScatter, "__call__", corrupt, run) if rank == faulty else run()


def trial(
    rank: int,
    faulty: int,
    build: Callable[[], Any],
    run: Callable[[Any, int, int], None] = train,
    steps: int = 7,
) -> dict[str, Any]:
    """Train a model plainly, as the mean, and protected with a rank that sends wrong gradients."""
    plain, mean, guarded = build(), build(), build()
    run(plain, rank, 2)
    fsdp.protect(mean, "mean")
    run(mean, rank, 2)
    guard = fsdp.protect(guarded, "heraclius:b=1")
    corrupting(rank, faulty, lambda: run(guarded, rank, steps))
    found = weights(guarded)
    return {
        "plain": weights(plain),
        "mean": weights(mean),
        "flagged": [one.rank for one in guard.flagged()],
        "layers": [name for one in guard.flagged() for name in one.layers],
        "steps": guard.steps,
        "finite": all(bool(each.isfinite().all()) for each in found.values()),
    }


def check_trial(results: list[Any], faulty: int, steps: int = 7) -> None:
    """Check that the mean has the weights of plain FSDP2, and that the faulty rank is flagged."""
    for result in results:
        for name, weight in result["plain"].items():
            torch.testing.assert_close(weight, result["mean"][name], rtol=0, atol=1e-6)
        assert result["flagged"] == [faulty]
        assert result["layers"]
        assert result["steps"] == steps
        assert result["finite"]
