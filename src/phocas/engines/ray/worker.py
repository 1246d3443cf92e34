"""The worker processes of a Ray cluster.

Rows travel as slices. A process returns one list of slices for each server. The slices are views of
the process's matrix: Ray copies them into its object store once, and a server reads them there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from phocas.engines.ray.session import the_ray
from phocas.engines.ray.shared import Place
from phocas.engines.ray.values import Values, array_of, tensor_of
from phocas.training.local_steps import local_steps
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool
from phocas.training.task import Task

Source = tuple[int, int, list[Any]]
"""The first worker, the last worker + 1, and for each server a reference to their slices."""

_PIECE = 1 << 20  # bytes; Ray copies larger arrays with six new threads: 34 ms of CPU instead of 22


class NoJobError(LookupError):
    """A restarted process was asked for a row before it was given its job."""


@dataclass(frozen=True, eq=False)
class WorkerJob:
    """The job of the workers, the same for all of them."""

    task: Task
    """The task, without what only the trainer needs."""
    bounds: list[slice]
    """The columns of each server."""
    place: Place | None = None
    """Shared memory for rows and parameters, if there is any."""


@dataclass(frozen=True, eq=False)
class WorkerReply:
    """The metrics that a process sends with its rows."""

    losses: Values
    """The loss of each worker's batch."""
    buffers: list[dict[str, npt.NDArray[Any]]]
    """For each worker, the buffers that its model changed; empty if there are none."""
    seconds: float
    """The time that the process took to compute the rows."""
    in_place: bool = False
    """Whether the row is in shared memory."""


class Workers:
    """The workers ``first`` to ``last`` - 1, in one process."""

    def __init__(self, job: WorkerJob, first: int, last: int) -> None:
        self.job = job
        self.first, self.last = first, last
        torch.set_num_threads(1)
        self.flat = FlatParameters(job.task.model)
        self.compute = job.task.differentiate(self.flat, DeterministicPool(1))
        local = job.task.local
        self.steps = None if local is None else local_steps(self.compute, local)
        self.memory = None if job.place is None else job.place.find(first, last)
        self.rows = (
            self.flat.rows(last - first).zero_()
            if self.memory is None
            else tensor_of(self.memory.rows)
        )
        self.velocity = torch.zeros_like(self.rows) if job.task.worker_momentum else None
        self._last: tuple[int, WorkerReply] | None = None
        self._serial = -1  # the serial number of the parameters that are loaded

    def gradients(
        self,
        round: int,
        factor: float,
        buffers: Mapping[str, npt.NDArray[Any]] | None,
        *parameters: Values,
    ) -> tuple[Any, ...]:
        """Compute all rows of a round; return the slices for each server, then a report."""
        if self.velocity is not None and self._last is not None and self._last[0] == round:
            # Asked again for the same round: the gradient must not enter the momentum twice.
            return *self._slices(), self._last[1]
        start = time.perf_counter()
        vector = array_of(self.flat.vector)
        for bounds, values in zip(self.job.bounds, parameters, strict=True):
            vector[bounds] = values
        losses, changed = self.compute_rows(round, factor, buffers)
        if self.velocity is not None:
            task = self.job.task
            self.velocity.mul_(task.worker_momentum).add_(self.rows, alpha=task.momentum_gain)
            self.rows.copy_(self.velocity)
        report = WorkerReply(losses, changed, time.perf_counter() - start)
        self._last = round, report
        return *self._slices(), report

    def row(
        self, worker: int, step: int, serial: int, parameters: Sequence[Values] | int
    ) -> tuple[list[list[Values]], WorkerReply]:
        """Compute one row of one worker; return its slices and a report.

        Args:
            worker: the worker.
            step: the number of the worker's row.
            serial: the serial number of the parameters.
            parameters: the parameters in pieces, or their slot in shared memory.

        Returns:
            The slices are empty if the row is in shared memory.
        """
        start = time.perf_counter()
        if serial != self._serial:
            array_of(self.flat.vector)[:] = self._given(parameters)
            self._serial = serial
        task = self.job.task
        i = worker - self.first
        row = self.rows[i]
        inputs, targets = task.batches(step, worker, worker + 1)
        losses = self.compute(inputs, targets, row[None], task.seed, step, worker)
        if self.velocity is not None:
            velocity, beta = self.velocity[i], task.worker_momentum
            row.copy_(velocity.mul_(beta).add_(row, alpha=task.momentum_gain))
        in_place = self.memory is not None
        report = WorkerReply(losses.numpy(), [], time.perf_counter() - start, in_place)
        return [] if in_place else [cut(values) for values in self._send(worker)], report

    def _given(self, parameters: Sequence[Values] | int) -> Values:
        if not isinstance(parameters, int):
            return join(parameters)
        assert self.memory is not None  # only processes that use it are sent a slot
        found: Values = self.memory.parameters[parameters]
        return found

    def compute_rows(
        self, round: int, factor: float, buffers: Mapping[str, npt.NDArray[Any]] | None
    ) -> tuple[Values, list[dict[str, npt.NDArray[Any]]]]:
        """Write gradients, or updates of local steps, into ``rows``; return losses and buffers."""
        task, first, last = self.job.task, self.first, self.last
        own = dict(task.model.named_buffers())
        for name, values in (buffers or {}).items():
            own[name].copy_(tensor_of(np.array(values)).view(own[name].dtype))
        if self.steps is None:
            inputs, targets = task.batches(round, first, last)
            losses = self.compute(inputs, targets, self.rows, task.seed, round, first)
        else:

            def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
                return task.batches(round, first, last, step=step)

            losses = self.steps(draw, self.rows, task.seed, round, factor, first)
        if buffers is None:
            return losses.numpy(), []
        left = (self.steps or self.compute).left
        return losses.numpy(), [
            {name: array_of(buffer) for name, buffer in each.items()} for each in left
        ]

    def _slices(self) -> list[list[Any]]:
        sent = [self._send(worker) for worker in range(self.first, self.last)]
        return [[cut(values) for values in part] for part in zip(*sent, strict=True)]

    def _send(self, worker: int) -> list[Values]:
        """Return the slice of a worker's row for each server."""
        row = array_of(self.rows[worker - self.first])
        return [row[bounds] for bounds in self.job.bounds]


class WorkerProcess:
    """The actor of some workers. It gets its job by :meth:`prepare`, or with the first request.

    The job is not an argument of the constructor: the trainer owns it, and Ray warns about
    restartable actors that depend on an object which may be lost by the time of a restart.
    """

    workers_class: ClassVar[type[Workers]] = Workers

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._workers: Workers | None = None

    def _at_work(self, job: Sequence[Any]) -> Workers:
        if self._workers is None:
            if not job:
                raise NoJobError(f"workers {self.first} to {self.last - 1} were started again")
            self._workers = self.workers_class(the_ray().get(job[0]), self.first, self.last)
        return self._workers

    def prepare(self, job: Sequence[Any]) -> None:
        """Load the job.

        ``job`` is a list with a reference to the job, because Ray would replace a bare reference by
        its value.
        """
        self._at_work(job)

    def gradients(self, job: Sequence[Any], *question: Any) -> tuple[Any, ...]:
        """Return the result of :meth:`Workers.gradients`.

        If the process already has its job, ``job`` is an empty list: every reference in a call
        costs a message to the owner of the reference.
        """
        return self._at_work(job).gradients(*question)

    def row(self, job: Sequence[Any], *question: Any) -> tuple[Any, WorkerReply]:
        """Return the result of :meth:`Workers.row`."""
        return self._at_work(job).row(*question)

    def momentum(self, job: Sequence[Any]) -> Values | None:
        """Return the momentum of the workers, for a checkpoint."""
        velocity = self._at_work(job).velocity
        return None if velocity is None else array_of(velocity)

    def set_momentum(self, job: Sequence[Any], values: Values) -> None:
        """Restore the momentum of a checkpoint."""
        velocity = self._at_work(job).velocity
        if velocity is not None:
            velocity.copy_(tensor_of(np.array(values)))

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


def cut(row: Values) -> list[Values]:
    """Cut a vector into pieces that are small enough for Ray to copy in the calling thread.

    >>> [len(piece) for piece in cut(np.zeros(300_000, np.float32))]
    [262144, 37856]
    """
    step = _PIECE // row.itemsize
    return [row[start : start + step] for start in range(0, max(1, len(row)), step)]


def join(pieces: Sequence[Values]) -> Values:
    """Join the pieces of a vector, without a copy if they are adjacent in memory, as with Ray.

    >>> row = np.arange(300_000, dtype=np.float32)
    >>> np.shares_memory(join(cut(row)), row), np.array_equal(join(cut(row)), row)
    (True, True)
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    ends = [piece.ctypes.data + piece.nbytes for piece in pieces]
    begins = [piece.ctypes.data for piece in pieces]
    whole = all(piece.flags.c_contiguous and piece.dtype == first.dtype for piece in pieces)
    if not whole or begins[1:] != ends[:-1]:
        return np.concatenate(pieces)
    length = sum(map(len, pieces))
    return np.lib.stride_tricks.as_strided(first, (length,), writeable=False)
