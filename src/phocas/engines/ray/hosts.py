"""The trainer's view of the worker processes: who is asked, who is late, who is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from phocas.engines import EngineError
from phocas.engines.faults import Fault
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.worker import NoJobError, Report, Source

OnMissing = Literal["wait", "stop"]

_PAUSE = 0.2  # seconds before a process that failed is asked again


class MissingRowsError(EngineError):
    """More rows are missing than the rule survives, and the policy is not to wait (any longer)."""


@dataclass(eq=False)
class Host:
    """One worker process, with the workers first to last - 1."""

    actor: Any
    first: int
    last: int
    asked: tuple[int, list[Any], float] | None = None
    """The round, the references and the time of the question that is not answered yet."""
    ready: bool = False
    """Whether it knows its job, as far as we know."""
    faults: list[Fault] = field(default_factory=list)
    """What the script does to it in the question."""
    away: str = ""
    """Why no row came from there, in a word, as long as none does."""
    why: str = ""
    """The same in a sentence."""

    @property
    def workers(self) -> range:
        """The workers that live there."""
        return range(self.first, self.last)

    def misses(self, news: list[str], kind: str, why: str) -> None:
        """Say once why it has nothing to give, not in every round until it is back."""
        self.why = why
        if self.away != kind:
            self.away = kind
            news.append(f"{self} {why}")

    def answers(self, news: list[str]) -> None:
        """Take note that it is well."""
        self.ready = True
        if self.away:
            self.away = ""
            news.append(f"{self} is back")

    def fails(self, error: BaseException, news: list[str]) -> bool:
        """Take note of an error in an answer's place; False says that it only lacks its job."""
        exceptions = the_ray().exceptions
        if isinstance(error, exceptions.RayActorError):
            self.ready = False
            self.misses(news, "dead", "died, and is started again")
        elif isinstance(error, exceptions.RayTaskError):
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, NoJobError):  # it died between two questions, and is back already
                self.ready = False
                return False
            self.away = ""  # every one of its exceptions is news
            self.misses(news, "raised", f"raised {type(cause).__name__}: {first_line(cause)}")
        else:
            self.misses(news, "lost", f"sent an answer that was lost: {type(error).__name__}")
        return True

    def __str__(self) -> str:
        if len(self.workers) == 1:
            return f"worker {self.first}"
        return f"the process of workers {self.first} to {self.last - 1}"


@dataclass(eq=False)
class Harvest:
    """What the processes gave for one round."""

    round: int
    began: float
    sources: dict[Host, Source] = field(default_factory=dict)
    reports: dict[Host, Report] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose values came, but could not be used, and why."""

    def missing(self, hosts: list[Host]) -> set[int]:
        """Return the workers without a row."""
        return {worker for host in hosts if host not in self.sources for worker in host.workers}


class Hosts:
    """All worker processes; asks them, waits for them until the deadline, and replaces the hung.

    ``ask(host, round, faults)`` makes the remote call; ``faults_of(round, workers)`` hands out the
    script.
    """

    def __init__(
        self,
        hosts: list[Host],
        ask: Callable[[Host, int, list[Fault]], list[Any]],
        faults_of: Callable[[int, range], list[Fault]],
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
        self._faults_of = faults_of
        self._ray = the_ray()

    def begin(self, round: int) -> Harvest:
        """Ask every process that is free."""
        harvest = Harvest(round, time.monotonic())
        self._replace_hung(harvest)
        for host in self.hosts:
            if host.asked is None:
                self._question(host, harvest)
        return harvest

    def collect(self, harvest: Harvest) -> None:
        """Wait until all rows are there, or the deadline is over and few enough are missing."""
        self._await(harvest, harvest.began + self.deadline)
        if len(harvest.missing(self.hosts)) > self.allowed:
            self._insist(harvest)
        for host in self.hosts:
            if host not in harvest.sources and host.asked is not None:
                since = time.monotonic() - host.asked[2]
                host.misses(harvest.news, "late", f"is late: no row after {since:.1f} s")

    def discard(self, harvest: Harvest, workers: set[int]) -> None:
        """Throw the rows of these workers' processes away, so that they are asked again."""
        for host in self.hosts:
            if workers.intersection(host.workers):
                harvest.sources.pop(host, None)
                harvest.reports.pop(host, None)

    def lack(self, harvest: Harvest, missing: set[int]) -> None:
        """Raise if the policy is not to wait for the missing, or they were waited for too long."""
        waited = time.monotonic() - harvest.began
        if self.on_missing == "wait" and waited < self.wait_seconds:
            return
        told = "; ".join(harvest.news[-5:])
        raise MissingRowsError(
            f"round {harvest.round + 1} needs all rows but {self.allowed}: {len(missing)} are"
            f" missing after {waited:.1f} s, of workers {', '.join(map(str, sorted(missing)))};"
            f" no step was taken{f' ({told})' if told else ''}",
            self._failures(harvest, missing),
        )

    def _failures(self, harvest: Harvest, missing: set[int]) -> dict[str, str]:
        away = {worker: host.why for host in self.hosts for worker in host.workers if host.away}
        known = away | harvest.problems
        return {f"worker {i}": known.get(i, "sent nothing yet") for i in sorted(missing)}

    def _question(self, host: Host, harvest: Harvest) -> None:
        host.faults = self._faults_of(harvest.round + 1, host.workers)
        self._send(host, harvest.round)

    def _send(self, host: Host, round: int) -> None:
        host.asked = round, self._ask(host, round, host.faults), time.monotonic()

    def _await(self, harvest: Harvest, until: float) -> None:
        """Take answers as they come; who answers an older question is asked anew."""
        while True:
            pending = {host.asked[1][-1]: host for host in self.hosts if host.asked is not None}
            current = [
                host for host in pending.values() if host.asked and host.asked[0] == harvest.round
            ]
            left = until - time.monotonic()
            if not current or left <= 0:
                return
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=left)
            for reference in ready:
                self._receive(pending[reference], reference, harvest)

    def _receive(self, host: Host, reference: Any, harvest: Harvest) -> None:
        if host.asked is None:
            return
        asked, references, _ = host.asked
        host.asked = None
        try:
            report = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if host.fails(error, harvest.news):
                return
            if asked == harvest.round:
                self._send(host, asked)
            else:
                self._question(host, harvest)
            return
        if asked != harvest.round:
            self._question(host, harvest)
        elif isinstance(report, Report):
            harvest.sources[host] = host.first, host.last, references[:-1]
            harvest.reports[host] = report
            host.answers(harvest.news)

    def _insist(self, harvest: Harvest) -> None:
        """Ask again for what is missing, until few enough are, or the policy says otherwise."""
        while True:
            missing = harvest.missing(self.hosts)
            if len(missing) <= self.allowed:
                return
            self.lack(harvest, missing)
            time.sleep(_PAUSE)
            for host in self.hosts:
                if host not in harvest.sources and host.asked is None:
                    self._question(host, harvest)
            self._replace_hung(harvest)
            self._await_any(harvest)

    def _await_any(self, harvest: Harvest) -> None:
        pending = {host.asked[1][-1]: host for host in self.hosts if host.asked is not None}
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=self.deadline)
        for reference in ready:
            self._receive(pending[reference], reference, harvest)

    def _replace_hung(self, harvest: Harvest) -> None:
        """Kill the processes that have been silent for three deadlines; Ray starts them again."""
        for host in self.hosts:
            if host.asked is not None and time.monotonic() - host.asked[2] > 3 * self.deadline:
                harvest.news.append(f"{host} did not answer for three deadlines: started again")
                self._ray.kill(host.actor, no_restart=False)
                host.asked, host.ready = None, False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, cut to what fits a message."""
    return (str(error).strip().splitlines() or [""])[0][:200]
