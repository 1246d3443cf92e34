"""The trainer's view of an aggregate and a direction on servers, and the checks of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from phocas.detection.comparison import RecentDirection
from phocas.engines.ray.shard import Answer, check_optimizer
from phocas.training.gradients import Looped
from phocas.training.server import Aggregate, ParameterServer

if TYPE_CHECKING:
    from phocas.engines.ray.settings import RaySettings
    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.task import Task


@dataclass(frozen=True, eq=False)
class DistributedAggregate(Aggregate):
    """An aggregate whose values stay on the servers; ``value`` is empty."""

    norm: float = 0.0
    finite: bool = True
    honest_distance: float | None = None
    """The distance to the mean of the rows before the attack, if it was requested."""

    @classmethod
    def of(cls, answers: Sequence[Answer], bounds: Sequence[slice]) -> Self:
        """Return the aggregate, given the answers of all servers and their columns."""
        shares = np.stack([np.asarray(answer.dropped) for answer in answers])
        widths = np.array([part.stop - part.start for part in bounds])
        known = [answer.distance for answer in answers if answer.distance is not None]
        return cls(
            torch.empty(0),
            widths @ shares / widths.sum(),
            answers[0].expected,
            shares,
            math.sqrt(sum(answer.squares for answer in answers)),
            all(answer.finite for answer in answers),
            math.sqrt(sum(known)) if len(known) == len(answers) else None,
        )


class DistributedDirection(RecentDirection):
    """The recent direction of a model whose parameters are on the servers, which use it there.

    Args:
        get: returns vectors of the servers' state, given their names.
        load: sets vectors of the servers' state.
    """

    def __init__(
        self,
        get: Callable[..., dict[str, torch.Tensor]],
        load: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        self._get, self._load = get, load

    def advance(self, rounds_done: int) -> None:
        """Do nothing: the servers take the snapshots."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint."""
        return self._get("older", "newer")

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self._load(state)


def check_task(task: Task, server: ParameterServer, settings: RaySettings) -> int:
    """Check the settings before any process starts; return how many rows may be missing."""
    m, s = task.num_workers, task.num_servers
    if s > 1 and task.attack is not None and not task.attack.sharded:
        raise ValueError(
            f"{task.attack} looks at all columns, and a server holds only its own: run it on"
            " the local engine, or with one server"
        )
    if task.attack is not None and task.attack.needs_memory:
        raise ValueError(
            f"{task.attack} keeps what it has seen in earlier rounds, which a server does not: run"
            " it on the local engine"
        )
    check_optimizer(server)
    most = task.rule.tolerates(m).rows
    if settings.missing is None:
        return most
    if settings.missing > most:
        raise ValueError(
            f"{task.rule} with m={m} workers tolerates at most {most} missing rows:"
            f" got missing={settings.missing}"
        )
    return settings.missing


def changes_buffers(gradients: WorkerGradients) -> bool:
    """Return True if workers change the buffers of the model, as with batch norm."""
    has_some = next(gradients.model.buffers(), None) is not None
    return isinstance(gradients, Looped) and gradients.serial and has_some
