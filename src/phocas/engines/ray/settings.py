"""How the ray engine treats its processes, checked before any is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from phocas.engines.asynchronous.settings import AsynchronousSettings
from phocas.engines.faults import FaultScript
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.hosts import OnMissing
from phocas.settings import at_least, setting, word
from phocas.specs import positive
from phocas.training.task import Task


def _script(_: str, __: str, value: FaultScript | str | Sequence[str]) -> FaultScript:
    return FaultScript.of(value)


@dataclass(frozen=True)
class RaySettings(AsynchronousSettings):
    """How a Ray engine treats its processes.

    ``faults`` may be a script, its text, or its lines: see :mod:`phocas.engines.faults`.

    >>> RaySettings(deadline=5.0).deadline
    5.0
    """

    owner = "the ray engine"

    address: str | None = setting(
        None, "auto, or host:port of a head node; none begins a Ray on this machine", place=True
    )
    processes: int | None = setting(
        None,
        "the processes that workers share; by default one a core, or more until one death is"
        " survived",
        at_least(1),
        place=True,
    )
    deadline: float = setting(
        60.0, "seconds after which a worker is late, and its row one of NaN", positive, place=True
    )
    server_deadline: float = setting(
        120.0, "seconds after which a server that does not answer is restored", positive, place=True
    )
    on_missing: OnMissing = setting(
        "wait",
        "when more rows are missing than may be: wait for them, or stop the run",
        word(*get_args(OnMissing)),
    )
    missing: int | None = setting(
        None,
        "the rows that may be missing in a round; by default what the rule survives",
        at_least(0),
    )
    wait_seconds: float = setting(
        600.0, "the longest wait for missing rows before the run stops", positive, place=True
    )
    faults: FaultScript | str | Sequence[str] = setting(
        [], "a script of what goes wrong and when, one fault a line", _script
    )

    def build(self, task: Task) -> RayCluster | AsynchronousRayCluster:
        """Connect to Ray, and start the workers and servers of a task there."""
        if task.device.type != "cpu":
            raise ValueError(
                f"the ray engine computes on the processors of its hosts: got device={task.device};"
                " leave it out, or take the local engine"
            )
        policy = self.policy()
        if policy is None:
            return RayCluster(task, self)
        return AsynchronousRayCluster(task, policy, self)
