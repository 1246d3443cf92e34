"""Asynchronous training on a Ray cluster: each worker sends a row when it has computed one.

The trainer's process is the server. A worker process computes the rows of several workers. The
server keeps two requests at each worker process. A request is for one row of one worker, at the
parameters of the time of the request. So a worker process computes a row while the server reads
the previous row.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from phocas.engines.asynchronous.buffers import SilenceError
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.server import AsynchronousServer
from phocas.engines.ray.desk import Desk, Event, Host
from phocas.engines.ray.hosts import MissingRowsError
from phocas.engines.ray.mailbox import Mailbox
from phocas.engines.ray.placement import Demand, Domains
from phocas.engines.ray.session import Session, node_address
from phocas.engines.ray.shared import Offer
from phocas.engines.ray.start import (
    LEAST_STORE,
    await_start,
    get_momentum,
    path_of,
    set_momentum,
    start_hosts,
)
from phocas.engines.ray.values import array_of, tensor_of
from phocas.engines.ray.wire import Kind
from phocas.engines.ray.worker import WorkerJob, WorkerProcess
from phocas.machine import available_cores
from phocas.sharding import shard_bounds
from phocas.training.cluster import Gathered, Wanted
from phocas.training.server import Aggregate

if TYPE_CHECKING:
    from phocas.engines.ray.settings import RaySettings
    from phocas.training.server import Action
    from phocas.training.task import Task
    from phocas.training.trainer import Clock

_REQUESTS = 2  # at a process at a time
_PAUSE = 0.2  # seconds before a failed process gets another request
_LOOK = 0.5  # seconds between checks for late processes


@dataclass(frozen=True, eq=False)
class RowRequest:
    """A request for one row of one worker."""

    host: Host
    worker: int
    slot: int | None
    """The slot of the parameters in shared memory; None if they were sent."""


class AsynchronousRayCluster:
    """A cluster in which a round ends when the update policy takes a step or rejects a row."""

    same_rows = False
    process_class: ClassVar[type[WorkerProcess]] = WorkerProcess

    def __init__(self, task: Task, policy: Policy, settings: RaySettings) -> None:
        _check(settings)
        self.task = task
        self.async_server = AsynchronousServer(task, policy, settings.max_staleness)
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.async_server.close)
        self.kind = f"AsynchronousRayCluster {policy} {settings.max_staleness}"
        self.server = self.async_server.server
        self.gradients = self.async_server.gradients
        self.deadline = settings.deadline
        self.wait_seconds = settings.wait_seconds
        self.compute_seconds = 0.0
        """The seconds in which worker processes computed all rows received so far."""
        self.now = 0.0
        """The seconds of training so far, without evaluations."""
        self._steps = np.zeros(task.num_workers, np.int64)  # rows requested of each worker
        self._parameters: Any = None  # a reference to the current ones, if they were put
        self._slot: int | None = None  # the slot of the current ones in shared memory
        self._serial = 0
        cores = task.threads or available_cores()
        processes = min(task.num_workers, settings.processes or cores)
        vectors = (2 * _REQUESTS * processes + 2) * self.server.vector.nbytes
        try:
            self.session = Session(
                settings.address,
                cores=cores,
                store_bytes=max(LEAST_STORE, 2 * vectors + task.samples.nbytes),
            )
            self._closing.callback(self.session.close)
            demand = Demand("worker", "worker_resources", settings.worker_resources)
            self._start(settings.processes or self.session.cores, demand)
        except BaseException:
            self.close()
            raise

    def _start(self, processes: int, demand: Demand) -> None:
        self._ray = self.session.ray
        m = self.task.num_workers
        slots = _REQUESTS * min(m, processes) + 1
        self._offer = Offer.if_possible(array_of(self.server.vector), slots, m)
        self._copies = self._offer is None or self.task.attack is not None
        if self._offer is not None:
            self._closing.callback(self._offer.close)
        if self._offer is not None and not self._copies:
            # An attack reads the last rows of all workers. Without one, no row needs a copy.
            self.async_server.rows = tensor_of(self._offer.memory.rows)
        d = self.server.parameters.size
        self._rows = (  # where rows arrive
            array_of(self.server.parameters.rows(m))
            if self._offer is None
            else self._offer.memory.rows
        )
        self._near: set[Host] = set()  # processes that use the shared memory
        self.job = self._ray.put(  # keep the reference: a restarted worker reads it again
            WorkerJob(
                self.task.for_worker(path_of(self.gradients)),
                bounds=[slice(0, d)],
                place=None if self._offer is None else self._offer.place,
            )
        )
        self._desk = Desk([], array_of(self.server.vector), rows=self._rows)
        self.mailbox = Mailbox(node_address(), {}, self._desk)
        self._closing.callback(self.mailbox.close)
        bounds = shard_bounds(m, min(m, processes))
        nodes = Domains("process").spread([1] * len(bounds), m, demand)
        self.hosts = start_hosts(
            bounds, nodes, self.process_class, self.mailbox, self._desk, demand
        )
        for host in self.hosts:
            self._closing.callback(self._kill, host.actor)
        await_start(self.hosts, self._desk, self.job)
        self._forget_requests()

    def _forget_requests(self) -> None:
        self.pending: dict[int, RowRequest] = {}
        self._events: deque[Event] = deque()
        self._problems: dict[int, str] = {}  # why the row of a worker cannot be used
        self._idle = {host: deque(host.workers) for host in self.hosts}
        self._left = time.monotonic()
        self._came = self._left  # the time of the last usable row
        self._heard = dict.fromkeys(self.hosts, self._left)
        self._rested = dict.fromkeys(self.hosts, self._left)  # the earliest time of a request

    # -- a round -----------------------------------------------------------------------------------

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Receive rows until the policy takes a step or rejects a row."""
        del wanted
        self.async_server.begin(clock)
        begun = time.monotonic()
        pause = begun - self._left  # no answer was read in this time
        self._heard = {host: heard + pause for host, heard in self._heard.items()}
        decided = waits = False
        while not decided:
            request, event = self._next(round, begun)
            clock.stop("gradients")
            if self._read(request, event):
                try:
                    decided = self.async_server.take(request.worker)
                except SilenceError as error:
                    self._wait_for_workers(str(error), begun, reported=waits)
                    waits = True
        self._left = time.monotonic()
        self.now += self._left - begun
        return self.async_server.gathered(round, self.now)

    def _wait_for_workers(self, silence: str, begun: float, *, reported: bool) -> None:
        """Wait for restarted processes if too few workers answer; report it once a round."""
        if time.monotonic() - begun > self.wait_seconds:
            raise MissingRowsError(silence, self._failures())
        if not reported:
            self.async_server.news.append(f"{silence}; waiting for the others")

    def _failures(self) -> dict[str, str]:
        return {str(host): host.reason or "answers" for host in self.hosts}

    def _next(self, round: int, begun: float) -> tuple[RowRequest, Event]:
        """Keep all processes busy, and return the request that is answered first."""
        while True:
            self._ask()
            if not self._events:
                self._events.extend(self._desk.wait(_LOOK))
            self._watch()
            waited = time.monotonic() - max(begun, self._came)
            if waited > self.wait_seconds:
                raise MissingRowsError(
                    f"round {round + 1} needs a row, and none came for {waited:.1f} s",
                    self._failures(),
                )
            if self._events:
                event = self._events.popleft()
                request = self._answered(event)
                if request is not None:
                    return request, event

    def _answered(self, event: Event) -> RowRequest | None:
        """Return the request that an event answers; note the event if it answers none."""
        host, news = event.host, self.async_server.news
        if event.kind == Kind.ROW and event.header is not None:
            self._problems[event.header.worker] = event.text
        elif isinstance(event.kind, str):
            host.note_event(event, news)
            if event.kind != "rejected":
                self._near.discard(host)
                self._give_up(host)
                self._rested[host] = time.monotonic() + _PAUSE
        elif event.header is not None:
            return self.pending.pop(event.header.worker, None)
        return None

    def _give_up(self, host: Host) -> None:
        """Forget the unanswered requests at a process; late answers to them are ignored."""
        given = [serial for serial, each in self.pending.items() if each.host is host]
        for serial in given:
            self._idle[host].append(self.pending.pop(serial).worker)

    def _ask(self) -> None:
        now = time.monotonic()
        for host, idle in self._idle.items():
            if now < self._rested[host] or not host.connected:
                continue
            while idle and len(host.workers) - len(idle) < _REQUESTS:
                if len(host.workers) == len(idle):
                    self._heard[host] = now
                self._request(host, idle.popleft())

    def _request(self, host: Host, worker: int) -> None:
        near = host.ready and host in self._near
        host.requests += 1
        serial = host.requests * len(self.hosts) + self.hosts.index(host)
        host.actor.row.options(num_returns=0).remote(
            [] if host.ready else [self.job],
            serial,
            worker,
            int(self._steps[worker]),
            self._serial,
            self._shared() if near else self._sent(),
        )
        self._steps[worker] += 1
        self._problems.pop(worker, None)
        self.async_server.give(worker)
        self.pending[serial] = RowRequest(host, worker, self._slot if near else None)

    def _sent(self) -> Any:
        """Return a Ray reference to the current parameters, stored once for all requests."""
        if self._parameters is None:
            self._parameters = self._ray.put(array_of(self.server.vector))
        return self._parameters

    def _shared(self) -> int:
        """Return the slot of the current parameters in shared memory; copy them if necessary."""
        assert self._offer is not None
        if self._slot is None:
            vectors = self._offer.memory.parameters
            used = {request.slot for request in self.pending.values()}
            self._slot = next(slot for slot in range(len(vectors)) if slot not in used)
            np.copyto(vectors[self._slot], array_of(self.server.vector))
        return self._slot

    def _parameters_change(self) -> None:
        """Drop the references to the parameters, because they change."""
        self._parameters = self._slot = None
        self._serial += 1

    def _read(self, request: RowRequest, event: Event) -> bool:
        """Read an answer; return False if it has no usable row."""
        host, worker, news = request.host, request.worker, self.async_server.news
        self._idle[host].append(worker)
        self._heard[host] = time.monotonic()
        if event.reply is None or event.header is None:
            self._near.discard(host)
            host.note_event(event, news)
            if event.kind != Kind.NO_JOB:
                self._rested[host] = self._heard[host] + _PAUSE
            return False
        host.note_answer(news)
        if event.header.server:
            self._near.add(host)
        else:
            self._near.discard(host)
        if worker in self._problems:
            news.append(f"worker {worker} {self._problems.pop(worker)}")
            return False
        if self._copies:
            np.copyto(array_of(self.async_server.rows[worker]), self._rows[worker])
        self.async_server.losses[worker] = event.reply.losses[0]
        self.compute_seconds += event.reply.seconds
        self._came = self._heard[host]
        return True

    def _watch(self) -> None:
        """Report late processes, and kill those silent for three deadlines: Ray restarts them."""
        news = self.async_server.news
        for host, idle in self._idle.items():
            silent = time.monotonic() - self._heard[host]
            if len(idle) == len(host.workers) or silent <= self.deadline:
                continue
            if silent <= 3 * self.deadline:
                host.report_failure(news, "late", f"is late: no row after {silent:.1f} s")
                continue
            news.append(f"{host} did not answer for three deadlines: started again")
            self._ray.kill(host.actor, no_restart=False)
            host.ready = host.connected = False
            self._give_up(host)

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along the aggregate; later requests are for the new parameters."""
        begun = time.monotonic()
        if self.async_server.steps(aggregate):
            self._parameters_change()
        action = self.async_server.update(aggregate, factor)
        self._left = time.monotonic()
        self.now += self._left - begun
        return action

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the server and of the workers; rows in flight are requested again."""
        kept = {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "steps": torch.from_numpy(self._steps),
        }
        if self.task.worker_momentum:
            like = self.async_server.rows
            kept["velocity"] = get_momentum(self.hosts, self._desk, self.job, like, self.deadline)
        return kept | self.async_server.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a checkpoint; the trainer has restored the parameters already."""
        self.async_server.load_state(state)
        self.now = float(state["now"])
        np.copyto(self._steps, state["steps"].numpy())
        self._parameters_change()
        self._forget_requests()
        if "velocity" in state:
            set_momentum(self.hosts, self._desk, self.job, state["velocity"])

    def close(self) -> None:
        """Kill the actors, and shut Ray down if this cluster started it."""
        self._closing.close()

    def _kill(self, actor: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(actor)


def _check(settings: RaySettings) -> None:
    if settings.failure_domain != "process":
        raise ValueError(
            "with asynchronous training the trainer's process is the server, which is lost with its"
            f" node: got failure_domain={settings.failure_domain}; leave it out"
        )
    if settings.server_resources:
        raise ValueError(
            "with asynchronous training the trainer's process is the server, for which Ray reserves"
            " nothing: leave server_resources out"
        )
    if settings.missing is not None or settings.on_missing != "wait":
        raise ValueError(
            "missing and on_missing are for synchronous rounds: asynchronous training has no rounds"
            " to wait for, and max_staleness limits how late a row may be"
        )
