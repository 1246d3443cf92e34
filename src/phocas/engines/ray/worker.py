"""The worker processes of a Ray cluster.

A process reads the parameters from the servers and sends each of them its slices of the rows: in
shared memory on the same node, else over TCP. It sends the trainer a short report. None of its
answers passes through Ray, because Ray would unpickle them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

import phocas
from phocas.data import DataError
from phocas.engines.ray.serving import Route
from phocas.engines.ray.session import check_version, node_address, node_id, the_ray
from phocas.engines.ray.shared import Place, SharedMemory
from phocas.engines.ray.values import Values, array_of, tensor_of
from phocas.engines.ray.wire import Address, FrameError, Header, Kind, Lifeline, Link, dtype_name
from phocas.training.local_steps import local_steps
from phocas.training.parameters import FlatParameters
from phocas.training.pool import DeterministicPool
from phocas.training.task import Task


class NoJobError(LookupError):
    """A restarted process was asked for a row before it was given its job."""


class UnreachedError(ConnectionError):
    """A server did not answer a worker process."""


@dataclass(frozen=True, eq=False)
class WorkerJob:
    """The job of the workers, the same for all of them."""

    task: Task
    """The task, without what only the trainer needs."""
    bounds: list[slice]
    """The columns of each server."""
    patience: float = 10.0
    """Seconds to wait for a server that does not answer."""
    place: Place | None = None
    """Shared memory of the trainer for rows and parameters, if there is any."""
    version: str = phocas.__version__
    """The trainer's version of phocas."""


@dataclass(frozen=True, eq=False)
class Request:
    """A request for the rows of a round."""

    serial: int
    """The number of the request."""
    round: int
    """The number of the round, from 0."""
    history: int
    """The number of times that a checkpoint was restored; rows computed before are not reused."""
    factor: float
    """The factor of the learning rate, for local steps."""
    buffers: Mapping[str, npt.NDArray[Any]] | None
    """The model's buffers, if workers change them."""
    routes: Sequence[Route]
    """The routes to the servers."""
    again: bool
    """Whether to send all rows once more, if they were sent already."""


@dataclass(frozen=True, eq=False)
class WorkerReply:
    """The report that a process sends with its rows."""

    losses: Values
    """The loss of each worker's batch."""
    buffers: list[list[npt.NDArray[Any]]]
    """For each worker, the buffers that its model changed; empty if there are none."""
    seconds: float
    """The time that the process took to compute the rows."""

    def content(self) -> tuple[str, bytes]:
        """Return the type of the losses, and the report as bytes."""
        changed = [np.ascontiguousarray(each).tobytes() for own in self.buffers for each in own]
        parts = [np.float64(self.seconds).tobytes(), self.losses.tobytes(), *changed]
        return dtype_name(self.losses), b"".join(parts)


class Senders:
    """The connections of a worker process to the servers.

    Args:
        first: the first worker of the process.
        last: the last worker + 1.
        token: the token of the process.
        patience: seconds to wait for a server that does not answer.
    """

    def __init__(self, first: int, last: int, token: bytes, patience: float) -> None:
        self.first, self.last = first, last
        self._token = token
        self._patience = patience
        self._node = node_id()
        self._links: dict[tuple[str, int], Link] = {}
        self._memory: dict[Route, SharedMemory | None] = {}

    def _link(self, route: Route) -> Link:
        at = route.host, route.port
        link = self._links.get(at)
        if link is not None and not link.alive:
            link.close()
            link = None
        if link is None:
            link = self._links[at] = Link(Address(*at, self._token), self._patience)
        return link

    def _lost(self, route: Route, error: Exception) -> UnreachedError:
        link = self._links.pop((route.host, route.port), None)
        if link is not None:
            link.close()
        at = f"{route.host}:{route.port}"
        return UnreachedError(f"did not reach server {route.number} at {at}: {error!r}")

    def memory(self, route: Route) -> SharedMemory | None:
        """Return the memory that a server shares with this process, if it is on this node."""
        if route not in self._memory:
            kept = self._memory.items()
            self._memory = {each: found for each, found in kept if each.number != route.number}
            place = route.place if route.node == self._node else None
            self._memory[route] = None if place is None else place.find(self.first, self.last)
        return self._memory[route]

    def pull(self, round: int, routes: Sequence[Route], parts: Sequence[Values]) -> None:
        """Read the parameters of all servers into the parts of a vector."""
        far = []
        for route, part in zip(routes, parts, strict=True):
            memory = self.memory(route)
            if memory is None:
                far.append((route, part))
            else:
                np.copyto(part, memory.parameters[round % len(memory.parameters)])
        asked = []
        try:
            for route, _ in far:
                asked.append(route)
                self._link(route).send(Header(Kind.PULL, round, server=route.number))
            for route, part in far:
                self._links[route.host, route.port].receive_into(Kind.PARAMETERS, part, round)
        except (OSError, FrameError) as error:
            failed = self._lost(route, error)
            for other in asked:  # their answers must not be taken for those of the next round
                self._lost(other, error)
            raise failed from error

    def push(self, round: int, route: Route, slices: Sequence[Values]) -> None:
        """Send the slices of all workers of this process to a server."""
        memory = self.memory(route)
        near = []
        try:
            link = self._link(route)
            for worker, values in zip(range(self.first, self.last), slices, strict=True):
                header = Header(Kind.ROW, round, worker, route.number, dtype_name(values))
                room = None if memory is None else memory.rows[worker - self.first]
                if room is not None and (room.shape, room.dtype) == (values.shape, values.dtype):
                    np.copyto(room, values)
                    near.append(replace(header, kind=Kind.IN_PLACE).pack())
                else:
                    link.send(header, np.ascontiguousarray(values))
            link.send_packed(b"".join(near))
        except OSError as error:
            raise self._lost(route, error) from error


class Workers:
    """The workers ``first`` to ``last`` - 1, in one process."""

    def __init__(self, job: WorkerJob, first: int, last: int) -> None:
        try:
            self.job = replace(job, task=job.task.load_parts(first, last))
        except DataError as error:
            raise DataError(f"on node {node_address()}, {error}") from error
        job = self.job
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
        self._last: tuple[tuple[int, int], WorkerReply] | None = None
        self._delivered: set[Route] = set()  # the servers that have the rows of the last round
        self._serial = -1  # the serial number of the parameters that are loaded

    def gradients(self, request: Request, senders: Senders) -> WorkerReply:
        """Compute all rows of a round, send them to the servers, and return a report.

        Rows that were requested before are not computed again: the gradient must not enter the
        momentum twice. They are sent to servers that do not have them yet.
        """
        key = request.history, request.round
        if self._last is None or self._last[0] != key:
            self._last, self._delivered = None, set()
            start = time.perf_counter()
            vector = array_of(self.flat.vector)
            parts = [vector[bounds] for bounds in self.job.bounds]
            senders.pull(request.round, request.routes, parts)
            losses, changed = self.compute_rows(request.round, request.factor, request.buffers)
            if self.velocity is not None:
                task = self.job.task
                self.velocity.mul_(task.worker_momentum).add_(self.rows, alpha=task.momentum_gain)
                self.rows.copy_(self.velocity)
            self._last = key, WorkerReply(losses, changed, time.perf_counter() - start)
        elif request.again:
            self._delivered = set()
        sent = [self._send(worker) for worker in range(self.first, self.last)]
        for route, slices in zip(request.routes, zip(*sent, strict=True), strict=True):
            if route not in self._delivered:
                senders.push(request.round, route, slices)
                self._delivered.add(route)
        return self._last[1]

    def row(
        self, worker: int, step: int, serial: int, parameters: Values | int
    ) -> tuple[Values | None, WorkerReply]:
        """Compute one row of one worker; return it and a report.

        Args:
            worker: the worker.
            step: the number of the worker's row.
            serial: the serial number of the parameters.
            parameters: the parameters, or their slot in shared memory.

        Returns:
            None instead of the row if it is in shared memory.
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
        report = WorkerReply(losses.numpy(), [], time.perf_counter() - start)
        return None if self.memory is not None else self._send(worker)[0], report

    def _given(self, parameters: Values | int) -> Values:
        if not isinstance(parameters, int):
            return parameters
        assert self.memory is not None  # only processes that use it are sent a slot
        found: Values = self.memory.parameters[parameters]
        return found

    def compute_rows(
        self, round: int, factor: float, buffers: Mapping[str, npt.NDArray[Any]] | None
    ) -> tuple[Values, list[list[npt.NDArray[Any]]]]:
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
        return losses.numpy(), [[array_of(each[name]).copy() for name in own] for each in left]

    def _send(self, worker: int) -> list[Values]:
        """Return the slice of a worker's row for each server."""
        row = array_of(self.rows[worker - self.first])
        return [row[bounds] for bounds in self.job.bounds]


class WorkerProcess:
    """The actor of some workers. It gets its job by :meth:`prepare`, or with the first request.

    The job is not an argument of the constructor: the trainer owns it, and Ray warns about
    restartable actors that depend on an object which may be lost by the time of a restart.

    No method returns a value: the process reports to the trainer's mailbox.

    Args:
        first: the first worker of the process.
        last: the last worker + 1.
        trainer: the trainer's mailbox, with the token of this process.
    """

    workers_class: ClassVar[type[Workers]] = Workers

    def __init__(self, first: int, last: int, trainer: Address) -> None:
        self.first, self.last = first, last
        self._token = trainer.token
        self._lifeline = Lifeline(trainer)
        self._workers: Workers | None = None
        self._senders: Senders | None = None

    def _at_work(self, job: Sequence[Any]) -> Workers:
        if self._workers is None:
            if not job:
                raise NoJobError
            found = the_ray().get(job[0])
            check_version(found.version)
            made = self.workers_class(found, self.first, self.last)
            self._senders = Senders(self.first, self.last, self._token, made.job.patience)
            self._workers = made
        return self._workers

    @contextmanager
    def _reporting(self, serial: int = 0) -> Iterator[None]:
        """Report the errors of a block to the trainer, as text."""
        try:
            yield
        except NoJobError:
            self._lifeline.send(Header(Kind.NO_JOB, worker=serial))
        except UnreachedError as error:
            self._lifeline.send(Header(Kind.UNREACHED, worker=serial), str(error).encode()[:1000])
        except Exception as error:  # noqa: BLE001 - the trainer gets any error
            text = (str(error).strip().splitlines() or [""])[0][:200]
            text = f"raised {type(error).__name__}: {text}"
            self._lifeline.send(Header(Kind.FAILURE, worker=serial), text.encode()[:1000])

    def prepare(self, job: Sequence[Any]) -> None:
        """Load the job.

        ``job`` is a list with a reference to the job, because Ray would replace a bare reference by
        its value.
        """
        with self._reporting():
            self._at_work(job)
            self._lifeline.send(Header(Kind.READY))

    def gradients(self, job: Sequence[Any], request: Request) -> None:
        """Send the rows of a round to the servers, and a report to the trainer.

        If the process already has its job, ``job`` is an empty list: every reference in a call
        costs a message to the owner of the reference.
        """
        with self._reporting(request.serial):
            workers = self._at_work(job)
            assert self._senders is not None
            dtype, content = workers.gradients(request, self._senders).content()
            header = Header(Kind.REPORT, request.round, request.serial, dtype=dtype)
            self._lifeline.send(header, content)

    def row(self, job: Sequence[Any], serial: int, worker: int, *question: Any) -> None:
        """Send one row of one worker to the trainer, and a report."""
        with self._reporting(serial):
            row, report = self._at_work(job).row(worker, *question)
            if row is not None:
                header = Header(Kind.ROW, serial, worker, dtype=dtype_name(row))
                self._lifeline.send(header, np.ascontiguousarray(row))
            dtype, content = report.content()
            near = int(row is None)
            self._lifeline.send(Header(Kind.REPORT, worker, serial, near, dtype), content)

    def momentum(self, job: Sequence[Any]) -> None:
        """Send the momentum of the workers to the trainer, for a checkpoint."""
        with self._reporting():
            velocity = self._at_work(job).velocity
            if velocity is not None:
                for worker, values in enumerate(array_of(velocity), self.first):
                    header = Header(Kind.MOMENTUM, 0, worker, dtype=dtype_name(values))
                    self._lifeline.send(header, np.ascontiguousarray(values))
            self._lifeline.send(Header(Kind.READY))

    def set_momentum(self, job: Sequence[Any], values: Values) -> None:
        """Restore the momentum of a checkpoint."""
        with self._reporting():
            velocity = self._at_work(job).velocity
            if velocity is not None:
                velocity.copy_(tensor_of(np.array(values)))
            self._lifeline.send(Header(Kind.READY))

    def pid(self) -> int:
        """Return the process id, for tests."""
        return os.getpid()
