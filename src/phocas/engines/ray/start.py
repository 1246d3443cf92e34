"""Start the worker processes of a Ray cluster, and read and restore their momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phocas.engines import EngineError
from phocas.engines.ray.hosts import Host, first_line
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.values import array_of
from phocas.engines.ray.worker import WorkerProcess
from phocas.sharding import shard_bounds
from phocas.training.gradients import Looped, Vectorised
from phocas.training.gradients.base import WorkerGradients
from phocas.training.gradients.merged import MergedBatchGradients

OPTIONS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
LEAST_STORE = 256 << 20
_START_SECONDS = 300.0


def start_hosts(num_workers: int, processes: int, process_class: type[WorkerProcess]) -> list[Host]:
    """Start worker processes that share the workers evenly."""
    # Ray restarts dead workers by itself; it does not repeat the calls that died with them.
    actor = the_ray().remote(**OPTIONS, max_restarts=-1)(process_class)
    return [
        Host(actor.remote(first, last), first, last)
        for first, last in shard_bounds(num_workers, min(num_workers, processes))
    ]


def await_start(hosts: Sequence[Host], job: Any, others: Mapping[str, Any] | None = None) -> None:
    """Wait until every process has started; raise EngineError if one fails.

    Args:
        hosts: the worker processes.
        job: a reference to their job.
        others: further references to wait for, by name.
    """
    ray = the_ray()
    begun = {str(host): host.actor.prepare.remote([job]) for host in hosts} | dict(others or {})
    try:
        ray.get(list(begun.values()), timeout=_START_SECONDS)
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"not all of {len(hosts)} worker processes and {len(begun) - len(hosts)} servers"
            f" started: {error}",
            _failures(begun),
        ) from error
    for host in hosts:
        host.ready = True


def _failures(begun: Mapping[str, Any]) -> dict[str, str]:
    """Return why each process did not start, in one line."""
    ray = the_ray()
    failures = {}
    for name, reference in begun.items():
        try:
            ray.get(reference, timeout=0)
        except ray.exceptions.RayError as error:
            failures[name] = first_line(getattr(error, "cause", None) or error)
    return failures


def path_of(gradients: WorkerGradients) -> str:
    """Return the name of the trainer's gradient path, so that all workers use the same path."""
    names = {MergedBatchGradients: "merged", Vectorised: "vectorised", Looped: "looped"}
    return names[type(gradients)]


def get_momentum(
    hosts: Sequence[Host], job: Any, like: torch.Tensor, seconds: float
) -> torch.Tensor:
    """Return the momentum of all workers, in the shape of their rows.

    The momentum of a worker that does not answer is zero, as after a restart.
    """
    ray = the_ray()
    velocity = torch.zeros_like(like)
    asked = {host.actor.momentum.remote([job]): host for host in hosts}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
    for reference in ready:
        host = asked[reference]
        try:
            array_of(velocity)[host.first : host.last] = ray.get(reference)
        except ray.exceptions.RayError:
            continue
    return velocity


def set_momentum(hosts: Sequence[Host], job: Any, velocity: torch.Tensor) -> None:
    """Restore the momentum of all workers."""
    values = array_of(velocity)
    the_ray().get(
        [host.actor.set_momentum.remote([job], values[host.first : host.last]) for host in hosts]
    )
