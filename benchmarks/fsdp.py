# ruff: noqa: INP001 - a script, not a package
"""Time a step of FSDP2 by each rule against plain FSDP2, and the evidence by itself, in one run.

    python benchmarks/fsdp.py [--world-size 4] [--turns 15]

Ways take turns, a few steps each, so that a slow moment of the machine hits all of them. Sockets
are on loopback.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import phocas
from phocas.integrations import fsdp
from phocas.integrations.witness import Witness

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from fsdp_language_model import BATCH, CHARACTERS, CONTEXT, Transformer

STEPS = 3  # of one way in one turn

WAYS = {
    "plain FSDP2": None,
    "mean": "mean",
    "heraclius": "heraclius:b=1",
    "phocas": "phocas:b=1",
    "watch": "watch:rule=heraclius:b=1",
}


def blocks() -> nn.Module:
    """Return eight blocks of 512 x 512."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])


def transformer() -> nn.Module:
    """Return the model of examples/fsdp_language_model.py."""
    return Transformer()


def parts(model: nn.Module) -> list[nn.Module]:
    """Return what is sharded by itself."""
    return list(model.layers if isinstance(model, Transformer) else model.children())


MODELS = {
    "blocks": (blocks, lambda: torch.randn(32, 512)),
    "transformer": (transformer, lambda: torch.randint(CHARACTERS, (BATCH, CONTEXT))),
}


class Watch:
    """The processor time that witnesses take, in one process."""

    spent = 0.0

    @classmethod
    def on(cls, name: str) -> None:
        """Time a method of witnesses."""
        method = getattr(Witness, name)

        def timed(*arguments: object) -> object:
            begin = time.thread_time()
            try:
                return method(*arguments)
            finally:
                cls.spent += time.thread_time() - begin

        setattr(Witness, name, timed)


def main() -> None:
    """Print a table of step times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (arguments, f"file://{folder}/meet"), arguments.world_size)  # type: ignore[no-untyped-call]


def _rank(rank: int, arguments: argparse.Namespace, meet: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    for method in ("see", "bet", "testimony"):
        Watch.on(method)
    dist.init_process_group("gloo", meet, rank=rank, world_size=arguments.world_size)
    for name in arguments.models:
        make, batch = MODELS[name]
        torch.manual_seed(rank)
        inputs = batch()
        ways = {}
        for way in dict.fromkeys(["plain FSDP2", *arguments.ways]):
            model = make()
            for part in parts(model):
                fully_shard(part)
            fully_shard(model)
            if (rule := WAYS[way]) is not None:
                fsdp.protect(model, rule)
            ways[way] = model
        times: dict[str, list[float]] = {way: [] for way in ways}
        evidence: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.turns + 1):
            for way, model in ways.items():
                Watch.spent = 0.0
                taken = _turn(model, inputs)
                if turn:  # the first one compiles kernels
                    times[way].append(taken)
                    evidence[way].append(Watch.spent / STEPS * 1e3)
        if rank == 0:
            _print(name, sum(p.numel() for p in model.parameters()), times, evidence)
    dist.destroy_process_group()


def _turn(model: nn.Module, inputs: torch.Tensor) -> float:
    """Return the milliseconds of a step; everyone begins together."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - begin) / STEPS * 1e3


def _print(
    name: str, d: int, times: dict[str, list[float]], evidence: dict[str, list[float]]
) -> None:
    print(f"{name}, d = {d:,}, {dist.get_world_size()} ranks on {os.cpu_count()} cores")
    best = min(times["plain FSDP2"])
    middle = statistics.median(times["plain FSDP2"])
    for way, values in times.items():
        print(
            f"  {way:<12} {min(values):7.1f} ms best ({min(values) / best:.2f}x)"
            f" {statistics.median(values):7.1f} ms median"
            f" ({statistics.median(values) / middle:.2f}x),"
            f" evidence {min(evidence[way]):.2f} ms"
        )


if __name__ == "__main__":
    main()
