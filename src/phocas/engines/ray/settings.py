"""Settings of the ray engine, checked before a process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from phocas.engines.asynchronous.settings import AsynchronousSettings
from phocas.engines.faults import FaultScript
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.hosts import OnMissing
from phocas.engines.ray.injection import FaultyAsynchronousRayCluster, FaultyRayCluster
from phocas.engines.ray.placement import check_resources
from phocas.settings import Conflict, at_least, setting, word
from phocas.specs import positive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phocas.settings import Spelling
    from phocas.training.task import Task, TaskSettings

_NO_DEVICE = (
    "the ray engine computes on the processors of its hosts: got {}={}; leave it out, or use the"
    " local engine"
)


def _script(_: str, __: str, value: FaultScript | str | Sequence[str]) -> FaultScript:
    return FaultScript.of(value)


@dataclass(frozen=True)
class RaySettings(AsynchronousSettings):
    """Settings of the processes of the ray engine.

    ``faults`` may be a script, its text, or its lines: see :mod:`phocas.engines.faults`.

    >>> RaySettings(deadline=5.0).deadline
    5.0
    """

    owner = "the ray engine"

    address: str | None = setting(
        None, "Address of a Ray head node, host:port or auto; by default a local Ray.", place=True
    )
    processes: int | None = setting(
        None,
        "Number of processes for the workers; by default one per core, or more until the loss of"
        " one is tolerated.",
        at_least(1),
        place=True,
    )
    failure_domain: str = setting(
        "process",
        "Largest part whose loss must be tolerated: process, node, or a label of nodes like rack.",
        place=True,
    )
    worker_resources: Mapping[str, Any] = setting(
        {},
        "Resources that Ray reserves for each worker process: num_cpus, num_gpus, memory,"
        " resources, label_selector.",
        check_resources,
        place=True,
    )
    server_resources: Mapping[str, Any] = setting(
        {},
        "Resources that Ray reserves for each server process, by the same names.",
        check_resources,
        place=True,
    )
    deadline: float = setting(
        60.0, "Seconds after which a worker is late and its row becomes NaN.", positive, place=True
    )
    server_deadline: float = setting(
        120.0, "Seconds after which a silent server is restored.", positive, place=True
    )
    on_missing: OnMissing = setting(
        "wait",
        "If more rows are missing than allowed: wait for them, or stop the run.",
        word(*get_args(OnMissing)),
    )
    missing: int | None = setting(
        None,
        "Number of rows that may be missing in a round; by default what the rule tolerates.",
        at_least(0),
    )
    wait_seconds: float = setting(
        600.0, "Longest wait for missing rows, in seconds.", positive, place=True
    )
    faults: FaultScript | str | Sequence[str] = setting(
        [], "Script of faults to inject, one per line.", _script
    )

    def conflicts(self, task: TaskSettings, say: Spelling = str) -> Iterator[Conflict]:
        """Yield the settings that are impossible together; no module of the user is imported."""
        yield from super().conflicts(task, say)
        if task.device is not None and str(task.device) != "cpu":
            yield Conflict("device", _NO_DEVICE.format(say("device"), task.device))
        if str(task.exclude) != "never":
            text = f"{say('exclude')} is for the local engine: leave it out, or set engine = local"
            yield Conflict("exclude", text)
        if self.on_missing == "stop" and self.wait_seconds != RaySettings.wait_seconds:
            text = f"{say('wait_seconds')} has no effect if {say('on_missing')} is stop"
            yield Conflict("wait_seconds", text)
        try:
            FaultScript.of(self.faults).check(task.num_workers, task.num_servers)
        except ValueError as error:
            yield Conflict("faults", str(error))

    def build(self, task: Task) -> RayCluster | AsynchronousRayCluster:
        """Connect to Ray, and start the workers and servers of a task there."""
        if task.device.type != "cpu":  # a model that is there already
            raise ValueError(_NO_DEVICE.format("device", task.device))
        policy, script = self.policy(), FaultScript.of(self.faults)
        if policy is None:
            return FaultyRayCluster(task, self, script) if script.faults else RayCluster(task, self)
        if script.faults:
            return FaultyAsynchronousRayCluster(task, policy, self, script)
        return AsynchronousRayCluster(task, policy, self)
