"""Fault injection: clusters whose processes fail as a script says.

The engine builds these clusters if the settings have a script of faults. The base classes contain
no code for faults. The trainer keeps the faults, because processes die. It sends them with
:meth:`inject` directly before the call in which they strike: Ray executes the calls of an actor in
their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phocas.engines.faults import Fault, FaultScript, RowFault, strike
from phocas.engines.ray.asynchronous import AsynchronousRayCluster
from phocas.engines.ray.cluster import RayCluster
from phocas.engines.ray.serving import ServerProcess
from phocas.engines.ray.values import Values, numbers, stored
from phocas.engines.ray.worker import Request, WorkerJob, WorkerProcess, WorkerReply, Workers

if TYPE_CHECKING:
    from phocas.engines.asynchronous.policy import Policy
    from phocas.engines.ray.desk import Host
    from phocas.engines.ray.settings import RaySettings
    from phocas.training.cluster import Gathered, Wanted
    from phocas.training.task import Task
    from phocas.training.trainer import Clock


class FaultyServerProcess(ServerProcess):
    """A server process in which faults strike when it aggregates."""

    faults: Sequence[Fault] = ()

    def inject(self, faults: Sequence[Fault]) -> None:
        """Let faults strike with the next call of :meth:`aggregate`."""
        self.faults = faults

    def aggregate(self, *arguments: Any) -> Any:
        """Apply the injected faults to this process, then aggregate."""
        faults, self.faults = self.faults, ()
        strike(faults)
        return super().aggregate(*arguments)


class FaultyWorkers(Workers):
    """Workers that send rows changed by faults."""

    def __init__(self, job: WorkerJob, first: int, last: int) -> None:
        super().__init__(job, first, last)
        self.faults: Sequence[Fault] = ()
        """The faults of the current request."""
        self._sent: dict[int, list[Values]] = {}  # the last slices of each worker

    def row(self, worker: int, *request: Any) -> tuple[Values | None, WorkerReply]:
        """Compute a row as :meth:`Workers.row` does, changed by the faults of the worker.

        Shared memory contains the unchanged row, so a changed row is sent.
        """
        row, report = super().row(worker, *request)
        if row is None:
            sent = self._send(worker)
            if self._row_faults(worker):
                return sent[0], report
        return row, report

    def _row_faults(self, worker: int) -> list[RowFault]:
        return [
            fault for fault in self.faults if isinstance(fault, RowFault) and fault.worker == worker
        ]

    def _send(self, worker: int) -> list[Values]:
        """Return the slices that a worker sends, changed by its faults."""
        sent = super()._send(worker)
        for fault in self._row_faults(worker):
            past = self._sent.get(worker)
            sent = [
                _change(fault, values, None if past is None else past[number], bounds.start)
                for number, (values, bounds) in enumerate(zip(sent, self.job.bounds, strict=True))
            ]
        self._sent[worker] = [values.copy() for values in sent]
        return sent


def _change(fault: RowFault, own: Values, past: Values | None, start: int) -> Values:
    """Return the values that a fault sends instead of a slice that begins at column ``start``."""
    given = numbers(own)
    sent: Values = fault.change(given, None if past is None else numbers(past), start)
    return stored(sent, own) if sent.dtype == given.dtype else sent


class FaultyWorkerProcess(WorkerProcess):
    """A worker process in which faults strike when it computes rows."""

    workers_class = FaultyWorkers
    faults: Sequence[Fault] = ()

    def inject(self, faults: Sequence[Fault]) -> None:
        """Let faults strike with the next request for rows."""
        self.faults = faults

    def gradients(self, job: Sequence[Any], request: Request) -> None:
        """Apply the injected faults to this process, then compute the rows of a round."""
        with self._reporting(request.serial):
            self._strike(job)
            super().gradients(job, request)

    def row(self, job: Sequence[Any], serial: int, *question: Any) -> None:
        """Apply the injected faults to this process, then compute one row."""
        with self._reporting(serial):
            self._strike(job)
            super().row(job, serial, *question)

    def _strike(self, job: Sequence[Any]) -> None:
        workers = self._at_work(job)  # without a job, the faults wait for the next request
        assert isinstance(workers, FaultyWorkers)
        workers.faults, self.faults = self.faults, ()
        strike(workers.faults)


def _inject(actor: Any, faults: Sequence[Fault]) -> None:
    if faults:
        actor.inject.options(num_returns=0).remote(faults)


class FaultyRayCluster(RayCluster):
    """Synchronous rounds in which the faults of a script strike."""

    server_class = FaultyServerProcess
    process_class = FaultyWorkerProcess

    def __init__(self, task: Task, settings: RaySettings, script: FaultScript) -> None:
        script.check(task.num_workers, task.num_servers)
        self.script = script
        super().__init__(task, settings)

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Send the servers their faults of the round, then run the round."""
        for number, owner in enumerate(self.servers.owners):
            _inject(owner.actor, self.script.take(round + 1, server=number))
        return super().gather(round, clock, wanted)

    def _ask(self, host: Host, round: int) -> None:
        _inject(host.actor, self.script.take(round + 1, workers=host.workers))
        super()._ask(host, round)


class FaultyAsynchronousRayCluster(AsynchronousRayCluster):
    """Asynchronous training in which the faults of a script strike."""

    process_class = FaultyWorkerProcess

    def __init__(
        self, task: Task, policy: Policy, settings: RaySettings, script: FaultScript
    ) -> None:
        script.check(task.num_workers, task.num_servers)
        for fault in script.faults:
            if fault.server is not None:
                raise ValueError(
                    f"with asynchronous training the trainer's process is the server: got {fault}"
                )
        self.script = script
        super().__init__(task, policy, settings)

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Run a round; its faults, and those of earlier rounds, strike with its requests."""
        self._round = round
        return super().gather(round, clock, wanted)

    def _request(self, host: Host, worker: int) -> None:
        _inject(host.actor, self.script.take(self._round + 1, workers=[worker], late=True))
        super()._request(host, worker)
