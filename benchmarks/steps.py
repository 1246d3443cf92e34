# ruff: noqa: INP001 - a script's part, not a package
"""Start ranks, time variants in turns and print a table, for the benchmarks of DDP and FSDP2.

Variants take turns of a few steps each, so that a slow moment of the machine affects all of them.
Sockets are on loopback. A turn has eight steps. The guard collects evidence in two of them. In the
first 64 steps it collects evidence in every step, so these steps are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import phocas
from phocas.detection import Detector
from phocas.detection.observer import RankObserver

STEPS = 8  # of one variant in one turn
BATCHES = 127  # of each rank; few batches that recur would make a rank the farthest again and again
WARM = 64  # first steps, all of which are observed for evidence

Loss = Callable[[nn.Module], torch.Tensor]
Bench = Callable[[argparse.Namespace], None]


class Evidence:
    """The processor time for collecting evidence in one process."""

    spent = 0.0
    depth = 0

    @classmethod
    def on(cls, owner: type, name: str) -> None:
        """Time a method, except inside another timed method."""
        method = getattr(owner, name)

        def timed(*arguments: object) -> object:
            begin = time.thread_time()
            cls.depth += 1
            try:
                return method(*arguments)
            finally:
                cls.depth -= 1
                if not cls.depth:
                    cls.spent += time.thread_time() - begin

        setattr(owner, name, timed)


def arguments(description: str, models: list[str], ways: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warm", type=int, default=WARM, help="steps that are not counted")
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    return parser.parse_args()


def start(bench: Bench, chosen: argparse.Namespace) -> None:
    """Run a benchmark on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (bench, chosen, f"file://{folder}/meet"), chosen.world_size)  # type: ignore[no-untyped-call]


def _rank(rank: int, bench: Bench, chosen: argparse.Namespace, meet: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    for owner, methods in (
        (RankObserver, ("see", "look", "bet", "end", "follow")),
        (Detector, ("hear",)),
    ):
        for method in methods:
            Evidence.on(owner, method)
    dist.init_process_group("gloo", meet, rank=rank, world_size=chosen.world_size)
    torch.manual_seed(rank)
    bench(chosen)
    dist.destroy_process_group()


def compare(name: str, ways: dict[str, nn.Module], loss: Loss, chosen: argparse.Namespace) -> None:
    """Print the step times of all variants, with ratios to the first one."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    evidence: dict[str, list[float]] = {way: [] for way in ways}
    warm = max(1, -(-chosen.warm // STEPS))  # the first turn compiles kernels in any case
    for turn in range(warm + chosen.turns):
        for way, model in ways.items():
            Evidence.spent = 0.0
            taken = _turn(model, loss)
            if turn >= warm:
                times[way].append(taken)
                evidence[way].append(Evidence.spent / STEPS * 1e3)
    if dist.get_rank() == 0:
        d = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}, d = {d:,}, {dist.get_world_size()} ranks on {os.cpu_count()} cores")
        first = next(iter(times.values()))
        for way, values in times.items():
            middle = statistics.median(values)
            print(
                f"  {way:<18} {min(values):7.1f} ms best ({min(values) / min(first):.2f}x)"
                f" {middle:7.1f} ms median ({middle / statistics.median(first):.2f}x),"
                f" evidence {statistics.median(evidence[way]):.2f} ms"
            )


def _turn(model: nn.Module, loss: Loss) -> float:
    """Return the milliseconds of a step; all ranks begin together."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return (time.perf_counter() - begin) / STEPS * 1e3
