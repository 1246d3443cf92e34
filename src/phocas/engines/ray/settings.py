"""How the ray engine treats its processes, checked before any is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from phocas.engines.faults import FaultScript
from phocas.engines.ray.hosts import OnMissing
from phocas.specs import count, positive, unknown


@dataclass(frozen=True)
class RaySettings:
    """How a Ray engine treats its processes."""

    processes: int | None = None
    """Worker processes; by default one a core, or several until one death is survived."""
    deadline: float = 60.0
    """Seconds after which a worker is late, and its row one of NaN."""
    server_deadline: float = 120.0
    """Seconds after which a server that does not answer is replaced."""
    on_missing: OnMissing = "wait"
    """What to do when more rows are missing than are allowed: wait for them, or stop the run."""
    missing: int | None = None
    """The rows that may be missing in a round; by default what the rule survives."""
    wait_seconds: float = 600.0
    """How long to wait before the run stops all the same."""
    faults: FaultScript = field(default_factory=FaultScript)

    def __post_init__(self) -> None:
        for name in ("deadline", "server_deadline", "wait_seconds"):
            positive("the ray engine", name, getattr(self, name))
        for name, minimum in (("processes", 1), ("missing", 0)):
            if getattr(self, name) is not None:
                count("the ray engine", name, getattr(self, name), minimum)
        if self.on_missing not in get_args(OnMissing):
            raise ValueError(
                unknown("on_missing", self.on_missing, get_args(OnMissing), "policies")
            )
