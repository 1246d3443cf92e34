"""Calls of all server shards, with retries on restored servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from phocas.engines import EngineError
from phocas.engines.ray.session import the_ray

_ATTEMPTS = 5  # restorations of one server in one call before the run fails
_GRACE = 1.0  # seconds to read an answer that is ready after the deadline


class ServerLostError(EngineError):
    """A server died or hung too many times in one call."""


class Result(NamedTuple):
    """The two results of a call to a server, as references and as values."""

    references: list[Any]
    values: list[Any]


class Servers:
    """All server shards. If a server dies or hangs, restore it and repeat its calls.

    A phase is the sequence of calls since the last :meth:`begin`. The calls of the current phase
    are kept. A restored server repeats these calls, and so gets to the same answer.

    Args:
        actors: the actors of the servers.
        restore: starts a server again from its last checkpoint, given its number.
        deadline: seconds after which a server that does not answer is restored.
    """

    def __init__(
        self,
        actors: list[Any],
        restore: Callable[[int], Any],
        *,
        deadline: float,
    ) -> None:
        self.actors = actors
        self.news: list[str] = []
        self._restore = restore
        self._deadline = deadline
        self._calls: list[tuple[str, Sequence[tuple[Any, ...]]]] = []
        self._ray = the_ray()

    def begin(self) -> None:
        """Begin a phase: drop the calls of the previous phase."""
        self._calls = []

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        again: Sequence[tuple[Any, ...]] | None = None,
    ) -> list[Result]:
        """Call a method of every server; return the two results of each, with their references.

        Args:
            method: the method.
            arguments: the arguments for each server.
            again: the arguments for servers that were restored, if they differ.
        """
        self._calls.append((method, again or arguments))
        waiting = [
            self._remote(number, method, arguments[number]) for number in range(len(self.actors))
        ]
        return [result or self._again(i) for i, result in enumerate(self._results(waiting))]

    def _results(self, waiting: list[list[Any]]) -> list[Result | None]:
        """Wait for the answers of all servers until one deadline; None stands for a lost answer.

        No server is restored before the deadline or the last answer: a restoration takes long, and
        would use up the time of the servers that have not answered yet.
        """
        until = time.monotonic() + self._deadline
        every = [reference for references in waiting for reference in references]
        try:
            values = iter(self._ray.get(every, timeout=self._deadline))
            return [
                Result(references, [next(values) for _ in references]) for references in waiting
            ]
        except self._ray.exceptions.RayError:  # from one server; wait for the others
            left = max(0.0, until - time.monotonic())
        self._ray.wait(every, num_returns=len(every), timeout=left)
        return [self._result(i, references, until) for i, references in enumerate(waiting)]

    def _remote(self, number: int, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        call = getattr(self.actors[number], method).options(num_returns=2)
        references: list[Any] = call.remote(*arguments)
        return references

    def _result(self, number: int, references: list[Any], until: float) -> Result | None:
        """Wait for the answer of one server; return None if the server died or hangs."""
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
                references = self._remote(number, method, arguments[number])
                result = self._result(number, references, until)
                if result is None:
                    break
            if result is not None:
                return result
        raise ServerLostError(
            f"server {number} was lost {_ATTEMPTS + 1} times in one round: {self.news[-1]}",
            {f"server {number}": self.news[-1]},
        )
