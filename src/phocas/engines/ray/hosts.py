"""The worker processes of a Ray cluster: requests, deadlines and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from phocas.engines import EngineError
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.worker import NoJobError, Source, WorkerReply

OnMissing = Literal["wait", "stop"]

_PAUSE = 0.2  # seconds before a failed process gets another request


class MissingRowsError(EngineError):
    """Raised if more rows are missing than the rule tolerates and ``on_missing`` is ``stop``."""


@dataclass(eq=False)
class Host:
    """One worker process, with the workers ``first`` to ``last`` - 1."""

    actor: Any
    first: int
    last: int
    asked: tuple[int, list[Any], float] | None = None
    """The round, the references and the time of the request that is not answered yet."""
    ready: bool = False
    """Whether the process has its job, as far as the trainer knows."""
    failure: str = ""
    """The kind of its failure, as long as it sends no row: ``dead``, ``late``, ``raised``."""
    reason: str = ""
    """The reason for it, in a sentence."""

    @property
    def workers(self) -> range:
        """The workers of the process."""
        return range(self.first, self.last)

    def report_failure(self, news: list[str], kind: str, reason: str) -> None:
        """Report a failure once, not in every round until the process is back."""
        self.reason = reason
        if self.failure != kind:
            self.failure = kind
            news.append(f"{self} {reason}")

    def note_answer(self, news: list[str]) -> None:
        """Note that the process answered."""
        self.ready = True
        if self.failure:
            self.failure = ""
            news.append(f"{self} is back")

    def note_error(self, error: BaseException, news: list[str]) -> bool:
        """Note an error instead of an answer; return False if the process only lacks its job."""
        exceptions = the_ray().exceptions
        if isinstance(error, exceptions.RayActorError):
            self.ready = False
            self.report_failure(news, "dead", "died, and is started again")
        elif isinstance(error, exceptions.RayTaskError):
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, NoJobError):  # it died between two requests, and was restarted
                self.ready = False
                return False
            self.failure = ""  # report each of its exceptions
            self.report_failure(
                news, "raised", f"raised {type(cause).__name__}: {first_line(cause)}"
            )
        else:
            self.report_failure(
                news, "lost", f"sent an answer that was lost: {type(error).__name__}"
            )
        return True

    def __str__(self) -> str:
        if len(self.workers) == 1:
            return f"worker {self.first}"
        return f"the process of workers {self.first} to {self.last - 1}"


@dataclass(eq=False)
class RoundResults:
    """The rows and reports of one round, as they arrive."""

    round: int
    began: float
    sources: dict[Host, Source] = field(default_factory=dict)
    reports: dict[Host, WorkerReply] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose values could not be used, and why."""

    def missing(self, hosts: list[Host]) -> set[int]:
        """Return the workers without a row."""
        return {worker for host in hosts if host not in self.sources for worker in host.workers}


class Hosts:
    """All worker processes: request rows, wait until the deadline, and restart hung processes.

    Args:
        hosts: the processes.
        ask: makes the remote call for the rows of a process in a round.
        allowed: the number of rows that may be missing.
        deadline: seconds after which a row is late.
        on_missing: what to do if more rows are missing: ``wait`` or ``stop``.
        wait_seconds: the longest wait for missing rows before the run stops.
    """

    def __init__(
        self,
        hosts: list[Host],
        ask: Callable[[Host, int], list[Any]],
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
        self._ray = the_ray()

    def begin(self, round: int) -> RoundResults:
        """Request rows from every process that is idle."""
        gathered = RoundResults(round, time.monotonic())
        self._replace_hung(gathered)
        for host in self.hosts:
            if host.asked is None:
                self._request(host, gathered)
        return gathered

    def collect(self, gathered: RoundResults) -> None:
        """Wait until all rows are there, or until the deadline if few enough are missing."""
        self._await(gathered, gathered.began + self.deadline)
        if len(gathered.missing(self.hosts)) > self.allowed:
            self._insist(gathered)
        for host in self.hosts:
            if host not in gathered.sources and host.asked is not None:
                since = time.monotonic() - host.asked[2]
                host.report_failure(gathered.news, "late", f"is late: no row after {since:.1f} s")

    def discard(self, gathered: RoundResults, workers: set[int]) -> None:
        """Discard the rows of these workers' processes, so that they are requested again."""
        for host in self.hosts:
            if workers.intersection(host.workers):
                gathered.sources.pop(host, None)
                gathered.reports.pop(host, None)

    def check_missing(self, gathered: RoundResults, missing: set[int]) -> None:
        """Raise MissingRowsError if ``on_missing`` is ``stop``, or the wait took too long."""
        waited = time.monotonic() - gathered.began
        if self.on_missing == "wait" and waited < self.wait_seconds:
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
        host.asked = gathered.round, self._ask(host, gathered.round), time.monotonic()

    def _await(self, gathered: RoundResults, until: float) -> None:
        """Receive answers until a deadline; after an answer to an older request, request again."""
        while True:
            pending = {host.asked[1][-1]: host for host in self.hosts if host.asked is not None}
            current = [
                host for host in pending.values() if host.asked and host.asked[0] == gathered.round
            ]
            left = until - time.monotonic()
            if not current or left <= 0:
                return
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=left)
            for reference in ready:
                self._receive(pending[reference], reference, gathered)

    def _receive(self, host: Host, reference: Any, gathered: RoundResults) -> None:
        if host.asked is None:
            return
        asked, references, _ = host.asked
        host.asked = None
        try:
            report = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if not host.note_error(error, gathered.news):
                self._request(host, gathered)
            return
        if asked != gathered.round:
            self._request(host, gathered)
        elif isinstance(report, WorkerReply):
            gathered.sources[host] = host.first, host.last, references[:-1]
            gathered.reports[host] = report
            host.note_answer(gathered.news)

    def _insist(self, gathered: RoundResults) -> None:
        """Request missing rows again until few enough are missing, or until the run must stop."""
        while True:
            missing = gathered.missing(self.hosts)
            if len(missing) <= self.allowed:
                return
            self.check_missing(gathered, missing)
            time.sleep(_PAUSE)
            for host in self.hosts:
                if host not in gathered.sources and host.asked is None:
                    self._request(host, gathered)
            self._replace_hung(gathered)
            self._await_any(gathered)

    def _await_any(self, gathered: RoundResults) -> None:
        pending = {host.asked[1][-1]: host for host in self.hosts if host.asked is not None}
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=self.deadline)
        for reference in ready:
            self._receive(pending[reference], reference, gathered)

    def _replace_hung(self, gathered: RoundResults) -> None:
        """Kill processes that have not answered for three deadlines; Ray restarts them."""
        for host in self.hosts:
            if host.asked is not None and time.monotonic() - host.asked[2] > 3 * self.deadline:
                gathered.news.append(f"{host} did not answer for three deadlines: started again")
                self._ray.kill(host.actor, no_restart=False)
                host.asked, host.ready = None, False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]
