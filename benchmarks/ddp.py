# ruff: noqa: INP001 - a script, not a package
"""Time a step of DDP by each rule against plain DDP: the ratio of medians, in one run.

    python benchmarks/ddp.py [--world-size 4] [--turns 15]

Ways take turns, a few steps each, so that a slow moment of the machine hits all of them. Sockets
are on loopback.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import phocas
from phocas.integrations.ddp import protect

STEPS = 5  # of one way in one turn

WAYS = {
    "plain DDP": None,
    "mean": ("mean", False),
    "heraclius": ("heraclius:b=1", False),
    "watch": ("watch:rule=heraclius:b=1", False),
    "phocas": ("phocas:b=1", False),
    "phocas, verified": ("phocas:b=1", True),
    "geometric-median": ("geometric-median", False),
    "nnm|phocas": ("nnm:b=1|phocas:b=1", False),
}


def mlp() -> nn.Module:
    """Return the paper's MLP."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def cnn() -> nn.Module:
    """Return the paper's CNN, without the dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


MODELS = {"mlp": (mlp, (32, 1, 28, 28)), "cnn": (cnn, (32, 3, 32, 32))}


def main() -> None:
    """Print a table of step times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (arguments, f"file://{folder}/meet"), arguments.world_size)  # type: ignore[no-untyped-call]


def _rank(rank: int, arguments: argparse.Namespace, meet: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    dist.init_process_group("gloo", meet, rank=rank, world_size=arguments.world_size)
    for name in arguments.models:
        make, shape = MODELS[name]
        torch.manual_seed(rank)
        inputs, labels = torch.randn(shape), torch.randint(10, shape[:1])
        ways = {}
        for way, options in WAYS.items():
            model = DistributedDataParallel(make())
            if options is not None:
                protect(model, *options)
            ways[way] = model
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.turns + 1):
            for way, model in ways.items():
                taken = _turn(model, inputs, labels)
                if turn:  # the first one compiles kernels and rebuilds buckets
                    times[way].append(taken)
        if rank == 0:
            _print(name, sum(p.numel() for p in model.parameters()), times)
    dist.destroy_process_group()


def _turn(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the milliseconds of a step; everyone begins together."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return (time.perf_counter() - begin) / STEPS * 1e3


def _print(name: str, d: int, times: dict[str, list[float]]) -> None:
    print(f"{name}, d = {d:,}, {dist.get_world_size()} ranks on {os.cpu_count()} cores")
    best = min(times["plain DDP"])
    middle = statistics.median(times["plain DDP"])
    for way, values in times.items():
        print(
            f"  {way:<18} {min(values):7.1f} ms best ({min(values) / best:.2f}x)"
            f" {statistics.median(values):7.1f} ms median"
            f" ({statistics.median(values) / middle:.2f}x)"
        )


if __name__ == "__main__":
    main()
