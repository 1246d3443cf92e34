"""What runs in a worker process of a Ray cluster.

Rows travel as slices: a process returns one list for each server, of views of its own matrix that
Ray copies into the object store once; a server reads them where they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phocas.engines.faults import Fault, RowFault, strike
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.shared import Place
from phocas.engines.ray.values import Values, array_of, numbers, stored, tensor_of
from phocas.training.lanes import Lanes
from phocas.training.local_steps import local_steps
from phocas.training.parameters import FlatParameters
from phocas.training.task import Task

Source = tuple[int, int, list[Any]]
"""The workers first to last - 1, and a reference for each server to the list of their slices."""

_PIECE = 1 << 20  # bytes; Ray copies what is larger with six new threads: 34 ms of CPU, not 22


class NoJobError(LookupError):
    """A process that was started again is asked for a row, and has not been told its job."""


@dataclass(frozen=True, eq=False)
class WorkerJob:
    """All that workers need to know, the same for each of them."""

    task: Task
    bounds: list[slice]
    """The columns of each server."""
    keeps_rows: bool
    """Whether a script will want what was sent the round before."""
    place: Place | None = None
    """Where rows may be left, and parameters found, without Ray."""


@dataclass(frozen=True, eq=False)
class Report:
    """What comes with the rows of a process."""

    losses: Values
    buffers: list[dict[str, npt.NDArray[Any]]]
    """For each worker, the buffers that its model changed; empty if there are none."""
    seconds: float
    in_place: bool = False
    """Whether the row lies in shared memory."""


class WorkerProcess:
    """The actor: it learns its job from :meth:`prepare`, or with the first question it is asked.

    The job is not an argument of the constructor. It is an object that the trainer owns, and Ray
    warns about actors that can be started again but depend on an object which may be lost by then.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._workers: Workers | None = None

    def _at_work(self, job: Sequence[Any]) -> Workers:
        if self._workers is None:
            if not job:
                raise NoJobError(f"workers {self.first} to {self.last - 1} were started again")
            self._workers = Workers(the_ray().get(job[0]), self.first, self.last)
        return self._workers

    def prepare(self, job: Sequence[Any]) -> None:
        """Get ready. The job is a reference within a list: Ray would replace a bare one itself."""
        self._at_work(job)

    def gradients(self, job: Sequence[Any], *question: Any) -> tuple[Any, ...]:
        """Answer as :meth:`Workers.gradients` does.

        A process that knows its job is asked with an empty list, since every reference that is sent
        along costs a message to its owner, in every round.
        """
        return self._at_work(job).gradients(*question)

    def row(self, job: Sequence[Any], *question: Any) -> tuple[Any, Report]:
        """Answer as :meth:`Workers.row` does."""
        return self._at_work(job).row(*question)

    def momentum(self, job: Sequence[Any]) -> Values | None:
        """Return the velocities, for a checkpoint."""
        velocity = self._at_work(job).velocity
        return None if velocity is None else array_of(velocity)

    def set_momentum(self, job: Sequence[Any], values: Values) -> None:
        """Go on from a checkpoint."""
        velocity = self._at_work(job).velocity
        if velocity is not None:
            velocity.copy_(tensor_of(np.array(values)))

    def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()


class Workers:
    """The workers first to last - 1, in one process."""

    def __init__(self, job: WorkerJob, first: int, last: int) -> None:
        self.job = job
        self.first, self.last = first, last
        torch.set_num_threads(1)
        self.flat = FlatParameters(job.task.model)
        self.compute = job.task.differentiate(self.flat, Lanes(1))
        local = job.task.local
        self.steps = None if local is None else local_steps(self.compute, local)
        self.memory = None if job.place is None else job.place.find(first, last)
        self.rows = (
            self.flat.rows(last - first).zero_()
            if self.memory is None
            else tensor_of(self.memory.rows)
        )
        self.velocity = torch.zeros_like(self.rows) if job.task.worker_momentum else None
        self._sent: dict[int, list[Values]] = {}
        """What each worker sent last, if a script will want it: others write to shared rows."""
        self._last: tuple[int, Report] | None = None
        self._serial = -1  # of the parameters that are here

    def gradients(
        self,
        round: int,
        factor: float,
        buffers: Mapping[str, npt.NDArray[Any]] | None,
        faults: Sequence[Fault],
        *parameters: Values,
    ) -> tuple[Any, ...]:
        """Take the model and return the slices of the rows for each server, then a report."""
        strike(faults)
        if self.velocity is not None and self._last is not None and self._last[0] == round:
            # Asked again for the same round: to add the gradient to the momentum twice is wrong.
            return *self._slices(faults), self._last[1]
        start = time.perf_counter()
        vector = array_of(self.flat.vector)
        for bounds, values in zip(self.job.bounds, parameters, strict=True):
            vector[bounds] = values
        losses, changed = self.compute_rows(round, factor, buffers)
        if self.velocity is not None:
            beta = self.job.task.worker_momentum
            self.velocity.mul_(beta).add_(self.rows, alpha=1 - beta)
            self.rows.copy_(self.velocity)
        report = Report(losses, changed, time.perf_counter() - start)
        self._last = round, report
        return *self._slices(faults), report

    def row(
        self,
        worker: int,
        step: int,
        serial: int,
        faults: Sequence[Fault],
        parameters: Sequence[Values] | int,
    ) -> tuple[list[list[Values]], Report]:
        """Return one worker's row number ``step``, alone in a list as others are, and a report.

        The parameters are cut, or the number of those in shared memory, and told apart by their
        serial number. The list is empty if the row is in shared memory.
        """
        strike(faults)
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
            row.copy_(velocity.mul_(beta).add_(row, alpha=1 - beta))
        (sent,) = self._send(worker, faults)
        changed = any(isinstance(fault, RowFault) for fault in faults)
        in_place = self.memory is not None and not changed
        report = Report(losses.numpy(), [], time.perf_counter() - start, in_place)
        return [] if in_place else [cut(sent)], report

    def _given(self, parameters: Sequence[Values] | int) -> Values:
        if not isinstance(parameters, int):
            return join(parameters)
        assert self.memory is not None  # who never left a row there is sent parameters
        found: Values = self.memory.parameters[parameters]
        return found

    def compute_rows(
        self, round: int, factor: float, buffers: Mapping[str, npt.NDArray[Any]] | None
    ) -> tuple[Values, list[dict[str, npt.NDArray[Any]]]]:
        """Write gradients into ``rows``, or how far local steps came; return losses and buffers."""
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

    def _slices(self, faults: Sequence[Fault]) -> list[list[Any]]:
        sent = [self._send(worker, faults) for worker in range(self.first, self.last)]
        return [[cut(values) for values in part] for part in zip(*sent, strict=True)]

    def _send(self, worker: int, faults: Sequence[Fault]) -> list[Values]:
        """Return what a worker sends to each server in the place of the row that it computed."""
        row = array_of(self.rows[worker - self.first])
        sent = [row[bounds] for bounds in self.job.bounds]
        for fault in faults:
            if isinstance(fault, RowFault) and fault.worker == worker:
                for k, bounds in enumerate(self.job.bounds):
                    past = self._sent[worker][k] if worker in self._sent else None
                    sent[k] = _changed(fault, sent[k], past, bounds.start)
        if self.job.keeps_rows:
            self._sent[worker] = [values.copy() for values in sent]
        return sent


def _changed(fault: RowFault, own: Values, past: Values | None, start: int) -> Values:
    """Return what a fault makes of values that begin at a column."""
    given = numbers(own)
    sent: Values = fault.change(given, None if past is None else numbers(past), start)
    return stored(sent, own) if sent.dtype == given.dtype else sent


def cut(row: Values) -> list[Values]:
    """Cut a vector into pieces that Ray copies in the thread it is called from.

    >>> [len(piece) for piece in cut(np.zeros(300_000, np.float32))]
    [262144, 37856]
    """
    step = _PIECE // row.itemsize
    return [row[start : start + step] for start in range(0, max(1, len(row)), step)]


def join(pieces: Sequence[Values]) -> Values:
    """Return a vector that was cut, in place where its pieces lie side by side, as Ray puts them.

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
