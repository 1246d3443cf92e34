"""The interface between the trainer and the engines: an engine builds a cluster for a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phocas.detection.comparison import Comparison, Sample
    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.server import Action, Aggregate, ParameterServer
    from phocas.training.task import Task
    from phocas.training.trainer import Clock


@dataclass(frozen=True, eq=False)
class Gathered:
    """The aggregate of one round, and the metrics of computing it."""

    aggregate: Aggregate
    """The aggregate."""
    losses: npt.NDArray[np.floating]
    """The mean loss of each worker's batch, as an honest worker computes it."""
    honest_distance: float | None
    """The distance of the aggregate from the mean of the uncorrupted gradients, if known."""
    touched: int
    """The number of cells that the attack changed."""
    missing: tuple[int, ...] = ()
    """Workers whose row was late or unusable; each counts as a row of NaN."""
    news: tuple[str, ...] = ()
    """Descriptions of failures of processes and messages."""
    sampled: tuple[npt.NDArray[np.float64], ...] = ()
    """The values of the sampled columns, as the servers received them."""
    compared: Comparison | None = None
    """Instead of ``sampled``, the comparison of the rows by an engine whose servers are elsewhere.

    If such an engine gives neither, the round cannot be observed.
    """
    picture: npt.NDArray[np.float64] | None = None
    """The values of the columns of the picture, if there is one."""
    participants: npt.NDArray[np.int64] | None = None
    """The client of each entry of ``aggregate.dropped``, if not all clients take part."""
    virtual_seconds: float | None = None
    """The time of the virtual clock, if there is one."""
    staleness: int | None = None
    """With asynchronous training, how many steps old the parameters of the last row are."""
    refused: int = 0
    """The number of rows that were rejected because they were too stale."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The clients of a round, and the metrics that the trainer wants besides the aggregate."""

    by_server: bool
    """Whether to return the dropped shares of each server."""
    honest: bool
    """Whether to return the distance from the mean of uncorrupted gradients."""
    samples: Sequence[Sample]
    """The columns in which to compare the rows: of this round and, with momentum, of the next."""
    picture: Sample | None = None
    """The columns whose values to return."""
    excluded: tuple[int, ...] = ()
    """Clients that must not take part."""
    outliers: bool = False
    """Whether a comparison by servers counts outliers."""


class Cluster(Protocol):
    """The workers and servers of a task, as the trainer sees them."""

    gradients: WorkerGradients
    """The computation of gradients in this process, which evaluation uses too."""
    kind: str
    """A name that a checkpoint must match besides the task."""
    same_rows: bool
    """Whether detection applies: each row is that of a known worker in a known round.

    With clients it applies only if each is compared with its own past.
    """

    @property
    def server(self) -> ParameterServer:
        """The trainer's copy of the parameters, and the policy for aggregates that are not finite.

        An engine whose servers are elsewhere fetches the parameters here. Such an engine has its
        own ``recent_direction`` too.
        """

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Run a round up to the aggregate.

        Args:
            round: the number of the round, from 0.
            clock: the clock of the round; a cluster calls ``stop`` at the end of each phase.
            wanted: the metrics to compute.
        """

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Take an optimizer step along the aggregate, unless the policy forbids it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the workers, for a checkpoint."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""

    def close(self) -> None:
        """End the threads and processes."""


class Engine(Protocol):
    """An engine and its settings: it decides where and how the rounds of a task run."""

    def build(self, task: Task) -> Cluster:
        """Start the workers and servers of a task."""


ENGINES = ("local", "ray")


def find_engine(engine: Engine | str) -> Engine:
    """Return an engine: the given one, or the one with this name and its default settings.

    This is the one place where training imports from a layer above: ``pyproject.toml`` lists it as
    an exception of the layers. The imports are here, because engines import this module.

    >>> type(find_engine("local")).__name__
    'LocalSettings'
    """
    if engine == "local":
        from phocas.engines.local import LocalSettings  # noqa: PLC0415

        return LocalSettings()
    if engine == "ray":
        from phocas.engines.ray import RaySettings  # noqa: PLC0415

        return RaySettings()
    if not isinstance(engine, str):
        if not hasattr(engine, "build"):
            raise TypeError(f"an engine is a name or has build(task): got {engine!r}")
        return engine
    raise ValueError(unknown("engine", engine, ENGINES))
