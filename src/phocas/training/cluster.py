"""The seam between the loop and where its rounds run: an engine makes a cluster from a task."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phocas.rules.sampling import Sample
    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.server import Action, Aggregate, ParameterServer
    from phocas.training.task import Task


@dataclass(frozen=True, eq=False)
class Gathered:
    """The aggregate of one round and what was seen on the way."""

    aggregate: Aggregate
    losses: npt.NDArray[np.floating]
    """The mean loss of each worker's batch, as an honest worker computes it."""
    honest_distance: float | None
    """From the aggregate to the mean of the gradients before anything was corrupted, if known."""
    touched: int
    """The number of cells that the attack changed."""
    seconds: dict[str, float]
    missing: tuple[int, ...] = ()
    """Workers whose row did not come in time, or came in no usable form: a row of NaN each."""
    news: tuple[str, ...] = ()
    """What went wrong with processes and messages, in words."""
    sampled: tuple[npt.NDArray[np.float64], ...] = ()
    """The values of the columns that were asked for, as the servers received them."""
    participants: npt.NDArray[np.int64] | None = None
    """Which client each entry of ``aggregate.dropped`` is of, where not all take part."""
    virtual_seconds: float | None = None
    """What a virtual clock shows, where there is one."""
    staleness: int | None = None
    """How many steps behind the last row was, where nobody waits."""
    refused: int = 0
    """Rows that were too stale to be used."""


class Cluster(Protocol):
    """What a trainer needs of the workers and servers, wherever they run."""

    server: ParameterServer
    """The parameters as they are published, and the policy for what is not finite."""
    gradients: WorkerGradients
    """How a worker differentiates the model, with the threads of this process."""
    kind: str
    """What a checkpoint must agree with besides the task."""
    same_rows: bool
    """Whether row i is worker i's in every round, so that workers can be compared over rounds."""

    def gather(
        self, round: int, *, by_server: bool, honest: bool, samples: Sequence[Sample] = ()
    ) -> Gathered:
        """Run a round (from 0) up to the aggregate; ``honest`` asks for the distance too."""

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Take an optimiser step along the aggregate, unless the policy forbids it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep of the workers."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""

    def close(self) -> None:
        """Let go of threads and processes."""


class Engine(Protocol):
    """Settings that know what they build: where and how the rounds of a task run."""

    def build(self, task: Task) -> Cluster:
        """Start the workers and servers of a task."""


# Engines lie above training, so they are found by name, and loaded when a trainer needs one.
ENGINES = {
    "local": "phocas.engines.local:LocalSettings",
    "ray": "phocas.engines.ray:RaySettings",
}


def find_engine(engine: Engine | str) -> Engine:
    """Return an engine, or the one of a name with its default settings.

    >>> type(find_engine("local")).__name__
    'LocalSettings'
    """
    if not isinstance(engine, str):
        if not hasattr(engine, "build"):
            raise TypeError(f"an engine is a name or has build(task): got {engine!r}")
        return engine
    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, ENGINES))
    module, _, name = ENGINES[engine].partition(":")
    found: Engine = getattr(importlib.import_module(module), name)()
    return found


class Clock:
    """Times of the phases of a round, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        """Give the time since the last phase to this one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
