"""The worker processes of a Ray cluster: requests, deadlines and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from phocas.engines import EngineError
from phocas.engines.ray.desk import Desk, Event, Host
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.wire import Kind
from phocas.engines.ray.worker import WorkerReply

OnMissing = Literal["wait", "stop"]

_PAUSE = 0.2  # seconds before a failed process gets another request
_LOOK = 0.25  # seconds between looks for lost servers


class MissingRowsError(EngineError):
    """Raised if more rows are missing than the rule tolerates and ``on_missing`` is ``stop``."""


@dataclass(eq=False)
class RoundResults:
    """The reports of one round, as they arrive."""

    round: int
    began: float
    reports: dict[Host, WorkerReply] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose values could not be used, and why."""
    unreached: dict[Host, str] = field(default_factory=dict)
    """Processes that did not reach a server, and the reasons."""

    def missing(self, hosts: list[Host]) -> set[int]:
        """Return the workers without a row."""
        return {worker for host in hosts if host not in self.reports for worker in host.workers}


class Hosts:
    """All worker processes: request rows, wait until the deadline, and restart hung processes.

    Args:
        hosts: the processes.
        ask: makes the remote call for the rows of a process in a round.
        desk: the receiver of their answers.
        look: checks for lost servers; called while waiting.
        allowed: the number of rows that may be missing.
        deadline: seconds after which a row is late.
        on_missing: what to do if more rows are missing: ``wait`` or ``stop``.
        wait_seconds: the longest wait for missing rows before the run stops.
    """

    def __init__(
        self,
        hosts: list[Host],
        ask: Callable[[Host, int], None],
        desk: Desk,
        look: Callable[[], None],
        *,
        allowed: int,
        deadline: float,
        on_missing: OnMissing,
        wait_seconds: float,
    ) -> None:
        self.hosts = hosts
        self.allowed = allowed
        self.deadline = deadline
        self.on_missing = on_missing
        self.wait_seconds = wait_seconds
        self._ask = ask
        self._desk = desk
        self._look = look
        self._ray = the_ray()

    def begin(self, round: int) -> RoundResults:
        """Request rows from every process that is idle."""
        gathered = RoundResults(round, time.monotonic())
        for event in self._desk.wait(0):
            self._receive(event, gathered)
        self._replace_hung(gathered)
        for host in self.hosts:
            if host.asked is None and host.connected:
                self._request(host, gathered)
        return gathered

    def collect(self, gathered: RoundResults) -> None:
        """Wait until all rows are there, or until the deadline if few enough are missing."""
        self._await(gathered)
        if len(gathered.missing(self.hosts)) > self.allowed:
            self._insist(gathered)
        for host in self.hosts:
            if host not in gathered.reports and host.asked is not None:
                since = time.monotonic() - host.asked[1]
                host.report_failure(gathered.news, "late", f"is late: no row after {since:.1f} s")
                host.late = gathered.round

    def send_again(self, gathered: RoundResults) -> None:
        """Request the rows of this round once more, for servers that have lost them.

        A process sends its rows only to servers that it has not sent them to.
        """
        gathered.reports.clear()
        gathered.unreached.clear()
        for host in self.hosts:
            if host.connected and (host.asked is None or host.asked[0] == gathered.round):
                asked, until = host.asked, host.until
                self._request(host, gathered)
                if asked is None:
                    host.until = time.monotonic() + self.deadline
                else:  # it is as late as it was
                    host.asked, host.until = (*asked[:2], host.requests), until

    def discard(self, gathered: RoundResults, workers: set[int]) -> set[int]:
        """Discard the rows of these workers' processes; return all workers of these processes."""
        again: set[int] = set()
        for host in self.hosts:
            if workers.intersection(host.workers):
                gathered.reports.pop(host, None)
                host.again = True
                again.update(host.workers)
        return again

    def check_missing(self, gathered: RoundResults, missing: set[int]) -> None:
        """Raise MissingRowsError if ``on_missing`` is ``stop``, or the wait took too long."""
        waited = time.monotonic() - gathered.began
        waits = self.on_missing == "wait" or gathered.unreached  # servers are replaced
        if waits and waited < self.wait_seconds:
            return
        last = "; ".join(gathered.news[-5:])
        raise MissingRowsError(
            f"round {gathered.round + 1} needs all rows but {self.allowed}: {len(missing)} are"
            f" missing after {waited:.1f} s, of workers {', '.join(map(str, sorted(missing)))};"
            f" no step was taken{f' ({last})' if last else ''}",
            self._failures(gathered, missing),
        )

    def _failures(self, gathered: RoundResults, missing: set[int]) -> dict[str, str]:
        failed = [host for host in self.hosts if host.failure]
        known = {worker: host.reason for host in failed for worker in host.workers}
        known |= gathered.problems
        return {f"worker {i}": known.get(i, "sent nothing yet") for i in sorted(missing)}

    def _request(self, host: Host, gathered: RoundResults) -> None:
        host.requests += 1
        self._ask(host, gathered.round)
        host.again = False
        host.asked = gathered.round, time.monotonic(), host.requests
        host.until = gathered.began + self.deadline

    def _await(self, gathered: RoundResults, seconds: float | None = None) -> None:
        """Receive answers until the deadline of every process that was asked in this round.

        A process that answers a request of an earlier round is asked for this round's rows.

        Args:
            gathered: the round.
            seconds: if given, return after the first events, or after this time.
        """
        begun = time.monotonic()
        while True:
            current = [
                host.until
                for host in self.hosts
                if host.asked is not None and host.asked[0] == gathered.round
            ]
            until = max(current, default=0.0) if seconds is None else begun + seconds
            left = until - time.monotonic()
            if left <= 0:
                return
            events = self._desk.wait(min(left, _LOOK))
            for event in events:
                self._receive(event, gathered)
            self._look()
            if events and seconds is not None:
                return

    def _receive(self, event: Event, gathered: RoundResults) -> None:
        host, asked = event.host, event.host.asked
        if event.kind in {"closed", "opened", "rejected"}:
            host.note_event(event, gathered.news)
            return
        if asked is None or event.header is None or event.header.worker != asked[2]:
            return  # the answer to a request that was given up
        host.asked = None
        if event.kind == Kind.REPORT and event.reply is not None:
            host.ready = True
            if asked[0] == gathered.round:
                gathered.reports[host] = event.reply
                host.note_answer(gathered.news)
                return
        elif event.kind == Kind.UNREACHED:
            gathered.unreached[host] = event.text
        else:
            host.note_event(event, gathered.news)
        if event.kind == Kind.NO_JOB or asked[0] != gathered.round:
            self._request(host, gathered)

    def _insist(self, gathered: RoundResults) -> None:
        """Request missing rows again until few enough are missing, or until the run must stop."""
        while True:
            missing = gathered.missing(self.hosts)
            if len(missing) <= self.allowed:
                return
            self.check_missing(gathered, missing)
            time.sleep(_PAUSE)
            for host in self.hosts:
                if host not in gathered.reports and host.asked is None and host.connected:
                    self._request(host, gathered)
            self._replace_hung(gathered)
            self._await(gathered, self.deadline)

    def _replace_hung(self, gathered: RoundResults) -> None:
        """Kill processes that have not answered for three deadlines; Ray restarts them."""
        for host in self.hosts:
            if host.asked is not None and time.monotonic() - host.asked[1] > 3 * self.deadline:
                gathered.news.append(f"{host} did not answer for three deadlines: started again")
                self._ray.kill(host.actor, no_restart=False)
                host.asked, host.ready, host.connected = None, False, False
