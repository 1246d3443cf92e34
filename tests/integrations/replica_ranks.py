"""What the ranks of test_replicas do: ``python replica_ranks.py FOLDER`` runs every scene.

Weights or the state of an optimizer change on some ranks after a step. Results are as scenes.py
says.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.integrations.scenes import LIAR, Play, act, rejection, scene, start_ranks, warned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phocas.integrations import ddp, fsdp

SCENES: dict[str, Play] = {}
add = scene(SCENES)
EVERY = 4


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 15), nn.BatchNorm1d(15), nn.Dropout(), nn.Linear(15, 3), nn.Linear(3, 1)
    )


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flip a bit of one value in place."""
    tensor.detach().view(-1)[1:2].view(torch.int32).bitwise_xor_(1 << bit)


class Run:
    """The training of one rank with a guard that compares weights every fourth step."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.module: Any = network()
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.told: list[Any] = []
        if "optimizer" in options:
            options["optimizer"] = self.optimizer
        self.guard = ddp.watch(
            self.model, b=1, digest_every=EVERY, on_flagged=self.told.append, **options
        )
        torch.manual_seed(100 + rank)

    def train(self, steps: int, after: Callable[[], None] | None = None) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 12)).square().mean().backward()
            self.optimizer.step()
            if after is not None and step == 0:
                after()

    def result(self) -> dict[str, Any]:
        return {
            "told": [(one.rank, one.kind, one.onset) for one in self.told],
            "report": self.guard.report(),
            "text": self.guard.report_text(),
            "said": [str(one) for one in self.guard.flagged()],
        }


@add
def honest(rank: int) -> Any:
    run = Run(rank, optimizer=True)
    run.train(3 * EVERY)
    return run.result()


@add
def weight(rank: int) -> Any:
    """Flip a bit of a weight on one rank after the optimizer's step 5; keep a state, resume it."""
    run = Run(rank)
    run.train(4)
    run.train(6, lambda: flip(run.module[3].weight) if rank == LIAR else None)
    found = run.result()
    again = Run(rank)
    again.guard.load_state_dict(run.guard.state_dict())
    again.train(1)
    resumed = again.result()
    again.train(4, lambda: flip(again.module[0].weight) if rank == LIAR else None)
    return {**found, "resumed": resumed, "once more": again.result()}


@add
def state(rank: int) -> Any:
    """Flip a bit of Adam's second moment on one rank, where it is compared and where it is not."""
    found = {}
    for name, options in {"compared": {"optimizer": True}, "not": {}}.items():
        run = Run(rank, **options)
        run.train(EVERY - 2)

        def strike(run: Run = run) -> None:
            if rank == LIAR:
                flip(run.optimizer.state[run.module[3].bias]["exp_avg_sq"], bit=0)

        run.train(2, strike)
        found[name] = run.result()
    return found


@add
def two_against_two(rank: int) -> Any:
    run = Run(rank)
    run.train(EVERY)
    strike = partial(flip, run.module[3].weight) if rank > 1 else None
    said = warned(lambda: run.train(EVERY, strike))
    more = warned(lambda: run.train(EVERY))
    return {**run.result(), "warned": said + more}


@add
def rejected(rank: int) -> Any:
    model = DistributedDataParallel(nn.Linear(3, 3))
    plain = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "negative": rejection(lambda: ddp.watch(model, b=1, digest_every=-1)),
        "type": rejection(lambda: ddp.watch(model, b=1, optimizer="sgd")),  # type: ignore[arg-type]
        "unlike": rejection(lambda: ddp.watch(model, b=1, digest_every=7 if rank == LIAR else 8)),
        "on some": rejection(
            lambda: ddp.watch(model, b=1, optimizer=plain if rank == LIAR else None)
        ),
    }


@add
def sharded(rank: int) -> Any:
    """Let two replicas differ, of which either may be the wrong one; try a mesh without any."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    guard = fsdp.watch(model, b=1, digest_every=EVERY, optimizer=optimizer)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().mean().backward()
            optimizer.step()

    train(2 * EVERY)
    before = guard.report()["split"]
    if rank == LIAR:
        flip(model[3].weight.to_local())
    said = warned(lambda: train(EVERY + 1))
    flat: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (4,)))
    return {
        "before": before,
        "report": guard.report(),
        "warned": said,
        "number": rejection(lambda: fsdp.watch(flat, b=1, digest_every=EVERY)),
        "optimizer": rejection(
            lambda: fsdp.watch(flat, b=1, optimizer=torch.optim.SGD(flat.parameters()))
        ),
        "zero": fsdp.watch(flat, b=1, digest_every=0).flagged(),
    }


if __name__ == "__main__":
    act(SCENES, start_ranks(), Path(sys.argv[1]))
