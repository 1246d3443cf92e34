"""Time asynchronous training: the bookkeeping of the event engine, and updates on Ray.

    python benchmarks/asynchronous.py [--updates 3000] [--json]
    python benchmarks/asynchronous.py --ray [--processes 2] [--updates 60]

The event engine trains the softmax model on data of MNIST's shape with 20 workers. Bookkeeping is
the CPU time of a round without drawing batches and computing gradients. On Ray 20 workers train the
paper's CNN (d = 2.4M). The baseline is the same number of processes that only compute gradients,
all at once, without pulling parameters or sending rows. Both take turns. The best turn of each
counts.
"""

# ruff: noqa: INP001 - a script

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phocas.data import load
from phocas.engines.asynchronous.cluster import AsynchronousCluster
from phocas.engines.local import LocalSettings
from phocas.engines.ray import RaySettings
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.worker import Workers
from phocas.training import Trainer

POLICIES = {
    "mean": "mean",
    "buffered:buffers=15": "phocas:b=6",
    "zeno:validation=128": "mean",
    "kardam:b=6": "mean",
}


def events(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return updates per second of CPU time, with and without gradients."""
    engine = LocalSettings(asynchronous=policy, speeds="slow:workers=4,factor=10")
    data = load("synthetic")
    common: dict[str, Any] = {"num_workers": 20, "lr": 0.05, "threads": 1}
    with Trainer("softmax", data=data, engine=engine, rule=POLICIES[policy], **common) as trainer:
        cluster = trainer.cluster
        if not isinstance(cluster, AsynchronousCluster):
            raise TypeError(f"expected the event engine: got {type(cluster).__name__}")
        rows = timed(cluster, "_compute")
        own = timed(cluster.async_server, "_renew")
        best = {"update": float("inf"), "bookkeeping": float("inf")}
        for _ in range(options.turns):
            rows.clear()
            own.clear()
            before, arrived = time.process_time(), cluster.async_server.arrivals
            for _ in range(options.updates // options.turns):
                trainer.step(detailed=False)
            arrived = cluster.async_server.arrivals - arrived
            spent = time.process_time() - before
            best["update"] = min(best["update"], spent / arrived)
            left = spent - sum(rows) - sum(own)
            best["bookkeeping"] = min(best["bookkeeping"], left / arrived)
    return {"policy": policy, **{f"{key}s_per_cpu_second": 1 / s for key, s in best.items()}}


def timed(owner: object, name: str) -> list[float]:
    """Wrap a method so that it appends its CPU seconds to the returned list."""
    method, seconds = getattr(owner, name), []

    def timing(*arguments: Any) -> Any:
        start = time.process_time()
        found = method(*arguments)
        seconds.append(time.process_time() - start)
        return found

    setattr(owner, name, timing)
    return seconds


class Alone:
    """A baseline process that only computes gradients of some workers, one by one."""

    def __init__(self, job: Sequence[Any], first: int, last: int) -> None:
        self.workers = Workers(replace(the_ray().get(job[0]), place=None), first, last)

    def compute(self, number: int) -> int:
        """Compute the given number of gradients, and return that number."""
        workers = self.workers
        task, first = workers.job.task, workers.first
        for step in range(number):
            worker = first + step % (workers.last - first)
            inputs, targets = task.batches(step, worker, worker + 1)
            row = workers.rows[worker - first : worker - first + 1]
            workers.compute(inputs, targets, row, task.seed, step, worker)
        return number


def on_ray(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return updates per second, gradients per second of the baseline, and their ratio."""
    data = load("synthetic:train=2000,test=100,side=32,channels=3")
    engine = RaySettings(asynchronous=policy, processes=options.processes)
    common: dict[str, Any] = {"num_workers": 20, "lr": 0.01, "batch_size": options.batch}
    with Trainer("cnn", data=data, engine=engine, rule=POLICIES[policy], **common) as trainer:
        cluster = trainer.cluster
        if not isinstance(cluster, AsynchronousRayCluster):
            raise TypeError(f"expected the ray engine: got {type(cluster).__name__}")
        ray, hosts = cluster.session.ray, cluster.hosts
        remote = ray.remote(num_cpus=0)(Alone)
        alone = [remote.remote([cluster.job], host.first, host.last) for host in hosts]
        ray.get([one.compute.remote(1) for one in alone])
        rates: dict[str, list[float]] = {"updates": [], "gradients": []}
        for _ in range(options.turns):
            start, arrived = time.perf_counter(), cluster.async_server.arrivals
            while cluster.async_server.arrivals - arrived < options.updates:
                trainer.step(detailed=False)
            arrived = cluster.async_server.arrivals - arrived
            rates["updates"].append(arrived / (time.perf_counter() - start))
            ray.wait(list(cluster.pending), num_returns=len(cluster.pending))
            share = options.updates // len(alone)
            start = time.perf_counter()
            done = sum(ray.get([one.compute.remote(share) for one in alone]))
            rates["gradients"].append(done / (time.perf_counter() - start))
        d = trainer.server.parameters.size
    best = {key: max(values) for key, values in rates.items()}
    median = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "policy": policy,
        "d": d,
        "processes": len(hosts),
        **{f"{key}_per_second": value for key, value in best.items()},
        "ratio": best["updates"] / best["gradients"],
        "median_ratio": median["updates"] / median["gradients"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ray", action="store_true", help="updates on Ray, not the event engine")
    parser.add_argument(
        "--updates", type=int, default=None, help="updates in total, or in a turn on Ray"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.updates = options.updates or (60 if options.ray else 3000)
    results = [
        on_ray(policy, options) if options.ray else events(policy, options)
        for policy in options.policies
    ]
    for result in results:
        if options.json:
            print(json.dumps(result))
        else:
            rest = {key: value for key, value in result.items() if key != "policy"}
            text = ", ".join(f"{key} {value:.4g}" for key, value in rest.items())
            print(f"{result['policy']}: {text}")


if __name__ == "__main__":
    main()
