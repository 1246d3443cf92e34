"""The trainer's view of the server shards: calls that survive the death of a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from phocas.engines import EngineError
from phocas.engines.faults import Fault
from phocas.engines.ray.session import the_ray

_ATTEMPTS = 5  # restorations of one server in one call, before the run gives up
_GRACE = 1.0  # seconds to read an answer that is there, when the deadline is over


class ServerLostError(EngineError):
    """A server died or hung again and again."""


class Result(NamedTuple):
    """The two results of a call, where they are and what they are."""

    references: list[Any]
    values: list[Any]


class Servers:
    """All server shards. A call that one of them does not live to answer is made again.

    The calls of a phase are kept: a restored server (``restore(number)`` makes it, from its last
    checkpoint) goes through them once more, and so comes to the same answer.
    """

    def __init__(
        self,
        actors: list[Any],
        restore: Callable[[int], Any],
        faults_of: Callable[[int, int], list[Fault]],
        *,
        deadline: float,
    ) -> None:
        self.actors = actors
        self.news: list[str] = []
        self._restore = restore
        self._faults_of = faults_of
        self._deadline = deadline
        self._calls: list[tuple[str, Sequence[tuple[Any, ...]]]] = []
        self._ray = the_ray()

    def begin(self) -> None:
        """Forget the calls of the last phase."""
        self._calls = []

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        round: int | None = None,
        *,
        again: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Result]:
        """Call a method of every server and return its two results, with their references.

        With a round (from 0), the faults of the script strike the servers in it. A server that has
        to be restored is called with the arguments ``again``, if they differ.
        """
        self._calls.append((method, again or arguments))
        waiting = [
            self._remote(number, method, arguments[number], self._faults(round, number))
            for number in range(len(self.actors))
        ]
        return [result or self._again(i) for i, result in enumerate(self._results(waiting))]

    def _results(self, waiting: list[list[Any]]) -> list[Result | None]:
        """Wait for the answers of all servers together, until one deadline for all of them.

        Nothing is restored before the last answer is in or late: a restoration takes long, and
        would use up the time of servers that are well but have not been heard yet.
        """
        until = time.monotonic() + self._deadline
        every = [reference for references in waiting for reference in references]
        try:
            values = iter(self._ray.get(every, timeout=self._deadline))
            return [
                Result(references, [next(values) for _ in references]) for references in waiting
            ]
        except self._ray.exceptions.RayError:  # of one of them; the others are waited for
            left = max(0.0, until - time.monotonic())
        self._ray.wait(every, num_returns=len(every), timeout=left)
        return [self._result(i, references, until) for i, references in enumerate(waiting)]

    def _faults(self, round: int | None, number: int) -> list[Fault] | None:
        return None if round is None else self._faults_of(round + 1, number)

    def _remote(
        self, number: int, method: str, arguments: tuple[Any, ...], faults: list[Fault] | None
    ) -> list[Any]:
        call = getattr(self.actors[number], method).options(num_returns=2)
        extra = (faults or [],) if method == "aggregate" else ()
        references: list[Any] = call.remote(*arguments, *extra)
        return references

    def _result(self, number: int, references: list[Any], until: float) -> Result | None:
        """Wait for an answer; None says that the server did not live to give it."""
        try:
            left = max(_GRACE, until - time.monotonic())
            values = self._ray.get(references, timeout=left)
        except self._ray.exceptions.GetTimeoutError:
            self.news.append(
                f"server {number} did not answer for {self._deadline:.0f} s: restored from its"
                " checkpoint"
            )
            return None
        except (
            self._ray.exceptions.RayActorError,
            self._ray.exceptions.ObjectLostError,
        ):
            self.news.append(f"server {number} died: restored from its checkpoint")
            return None
        return Result(references, values)

    def _again(self, number: int) -> Result:
        for _ in range(_ATTEMPTS):
            self._ray.kill(self.actors[number])
            self.actors[number] = self._restore(number)
            until = time.monotonic() + self._deadline
            result = None
            for method, arguments in self._calls:
                references = self._remote(number, method, arguments[number], None)
                result = self._result(number, references, until)
                if result is None:
                    break
            if result is not None:
                return result
        raise ServerLostError(
            f"server {number} was lost {_ATTEMPTS + 1} times in one round: {self.news[-1]}",
            {f"server {number}": self.news[-1]},
        )
