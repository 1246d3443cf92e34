"""Time rounds on Ray against gradients plus one copy of the matrix through the object store.

    python benchmarks/ray_rounds.py [--processes 2] [--rounds 12] [--servers 4] [--json]

The script starts one engine on this machine for each model: the paper's CNN, and a dense model
whose gradients cost next to nothing. The cost of a round is its wall-clock time in the trainer. The
baseline is the work that cannot be avoided: the same gradients, and one ``ray.put`` of the m x d
matrix. The baseline computes gradients in the same number of processes, all at once, without
pulling parameters or sending rows; the slowest process counts. Rounds, gradients and copies take
turns. The best of each counts, and the medians are printed too.
"""

# ruff: noqa: INP001 - a script

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional

import phocas
from phocas.data import load
from phocas.engines.ray import RaySettings
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.worker import Workers
from phocas.training import Trainer
from phocas.training.models import build_model

TARGET = 1.3
_WARM = 4  # uncounted rounds, in which memory of the object store is touched for the first time


def models() -> dict[str, tuple[Any, Any]]:
    """Return models of about 2.4 million parameters, with their data."""
    pictures = load("synthetic:train=2000,test=100,side=32,channels=3")
    dense = nn.Sequential(nn.Flatten(), nn.Linear(3072, 760), nn.ReLU(), nn.Linear(760, 10))
    return {
        "cnn": (build_model("cnn", pictures.shape, 10, 0), pictures),
        "dense": (dense, pictures),
    }


class Alone:
    """A baseline process that only computes gradients of some workers."""

    def __init__(self, job: Sequence[Any], first: int, last: int) -> None:
        self.workers = Workers(the_ray().get(job[0]), first, last)

    def gradients(self, number: int) -> float:
        """Return the seconds for the gradients of a round."""
        start = time.perf_counter()
        self.workers.compute_rows(number, 1.0, None)
        return time.perf_counter() - start


def measure(name: str, model: Any, data: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Time rounds, gradients and copies in turns."""
    with Trainer(
        model,
        functional.cross_entropy,
        data,
        num_workers=options.workers,
        num_servers=options.servers,
        batch_size=16,
        rule=phocas.Phocas(b=options.workers * 2 // 5),
        lr=0.01,
        engine=RaySettings(processes=options.processes),
    ) as trainer:
        cluster = trainer.cluster
        if not isinstance(cluster, RayCluster):
            raise TypeError(f"expected the ray engine's cluster: got {type(cluster).__name__}")
        ray = cluster.session.ray
        remote = ray.remote(num_cpus=0)(Alone)
        alone = [
            remote.remote([cluster.job], host.first, host.last) for host in cluster.hosts.hosts
        ]
        d = trainer.server.parameters.size
        matrix = np.ones((options.workers, d), np.float32)
        found: dict[str, list[float]] = {"round": [], "gradients": [], "copy": []}
        phases: dict[str, list[float]] = {}
        for number in range(_WARM + options.rounds):
            start = time.perf_counter()
            done = trainer.step(detailed=False)
            found["round"].append(time.perf_counter() - start)
            found["gradients"].append(max(ray.get([one.gradients.remote(number) for one in alone])))
            start = time.perf_counter()
            reference = ray.put(matrix)
            found["copy"].append(time.perf_counter() - start)
            del reference
            done.seconds["slowest process"] = cluster.compute_seconds
            for phase, seconds in done.seconds.items():
                phases.setdefault(phase, []).append(seconds)
    best = {key: min(values[_WARM:]) for key, values in found.items()}
    median = {key: statistics.median(values[_WARM:]) for key, values in found.items()}
    return {
        "model": name,
        "d": d,
        "processes": len(cluster.hosts.hosts),
        **{f"{key}_ms": 1e3 * value for key, value in best.items()},
        "ratio": best["round"] / (best["gradients"] + best["copy"]),
        "median_ms": {key: 1e3 * value for key, value in median.items()},
        "median_ratio": median["round"] / (median["gradients"] + median["copy"]),
        "phases_ms": {phase: 1e3 * min(values[_WARM:]) for phase, values in phases.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--models", nargs="*", default=["cnn", "dense"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = models()
    results = [measure(name, *known[name], options) for name in options.models]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(
            "{model}: d={d}, {processes} worker processes: round {round_ms:.0f} ms, gradients"
            " {gradients_ms:.0f} ms, copy {copy_ms:.0f} ms, ratio {ratio:.2f}".format(**result)
            + f" (target: at most {TARGET})"
        )
        print(
            "    medians: round {round:.0f} ms, gradients {gradients:.0f} ms, copy {copy:.0f} ms,"
            " ratio ".format(**result["median_ms"])
            + f"{result['median_ratio']:.2f}"
        )
        print("   ", ", ".join(f"{key} {ms:.0f} ms" for key, ms in result["phases_ms"].items()))


if __name__ == "__main__":
    main()
