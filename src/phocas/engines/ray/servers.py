"""All server processes of a cluster: calls, losses, and the copies that take over."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import phocas
from phocas.engines import EngineError
from phocas.engines.ray.placement import NoRoomError
from phocas.engines.ray.serving import COPY_SECONDS, Route
from phocas.engines.ray.session import first_line, the_ray
from phocas.engines.ray.shard import ShardJob, State
from phocas.engines.ray.wire import BEAT_SECONDS, TOKEN_BYTES, Address

_POLL = 0.25  # seconds between looks for lost processes
_START_SECONDS = 300.0
_RESUME = "run the same command again, which resumes from the last checkpoint"


class ServerLostError(EngineError):
    """A server was lost together with its copy."""


class ServersMovedError(Exception):
    """Servers have moved to other processes, which lack the rows of the current round."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"servers {numbers} have moved")
        self.numbers = tuple(numbers)


@dataclass(eq=False)
class Process:
    """A server process, as the trainer knows it."""

    actor: Any
    token: bytes
    node: str
    address: Address | None = None
    starting: list[Any] = field(default_factory=list)
    """A reference to its first answer, until it has started."""


class Servers:
    """The servers, each in a process of its own, and a copy of each in another process.

    If a process is lost, the copies of its servers take over at once. A new process is started, and
    takes servers and copies when it is ready. Rounds continue meanwhile if two processes are left.
    If one is left, :meth:`tend` waits for the new process.

    Args:
        jobs: the job of each server.
        start: starts an actor, given a node and the token of the process.
        place: returns the node for one more process, given the nodes of all others, nodes to
            avoid, and the number of all processes; raises NoRoomError if there is no room.
        domain: returns the part of the cluster with which a node fails.
        silent: returns how long a process has been silent, given its token; None if it is dead.
        deadline: seconds after which a server that does not answer a call is lost.
        silence: seconds without a sign of life after which a process is lost.
    """

    def __init__(
        self,
        jobs: Sequence[ShardJob],
        start: Callable[[str, bytes], Any],
        place: Callable[[Sequence[str], AbstractSet[str], int], str],
        domain: Callable[[str], str],
        silent: Callable[[bytes], float | None],
        *,
        deadline: float,
        silence: float,
    ) -> None:
        self.jobs = jobs
        self.news: list[str] = []
        self._start_actor = start
        self._place = place
        self._domain = domain
        self._silent = silent
        self._deadline = deadline
        self._silence = silence
        self._ray = the_ray()
        self.routes: list[Route] = []
        self._coming: list[Process] = []
        self.processes: list[Process] = []
        # One server needs a second process too, for its copy.
        self._number = max(2, len(jobs))
        self._unfit: set[str] = set()  # nodes on which processes did not start
        self._start_missing()
        self.processes, self._coming = self._coming, []
        self.owners: list[Process] = self.processes[: len(jobs)]
        self.copies: list[Process | None] = [None] * len(jobs)

    def _start_missing(self, away: AbstractSet[str] = frozenset()) -> None:
        """Start the processes that are missing; raise NoRoomError if nodes have no room.

        Args:
            away: nodes that may be lost.
        """
        while len(self.processes) + len(self._coming) < self._number:
            used = [process.node for process in (*self.processes, *self._coming)]
            self._coming.append(self._start(self._place(used, away, self._number)))

    def _start(self, node: str) -> Process:
        token = secrets.token_bytes(TOKEN_BYTES)
        actor = self._start_actor(node, token)
        return Process(actor, token, node, starting=[actor.where.remote(phocas.__version__)])

    def serve(self, states: Sequence[State]) -> None:
        """Wait for the processes, and give each server its state."""
        answers = self._ray.get(
            [process.starting[0] for process in self.processes], timeout=_START_SECONDS
        )
        for process, (address, node) in zip(self.processes, answers, strict=True):
            process.address, process.node, process.starting = address, node, []
        self.routes = self._ray.get(
            [
                owner.actor.serve.remote(number, self.jobs[number], states[number])
                for number, owner in enumerate(self.owners)
            ]
        )
        self._copy_missing()

    def starting(self) -> dict[str, Any]:
        """Return references to the first answers of processes, by their names."""
        return {f"server {i}": process.starting[0] for i, process in enumerate(self.processes)}

    # -- calls -------------------------------------------------------------------------------------

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every server with its number and its arguments; return the results.

        Raises:
            ServersMovedError: some servers are in other processes now.
        """
        return self._collect(
            [
                (owner, getattr(owner.actor, method).remote(number, *arguments[number]))
                for number, owner in enumerate(self.owners)
            ]
        )

    def call_first(self, method: str, *arguments: Any) -> Any:
        """Call a method of server 0; return the result, or None if servers move meanwhile."""
        owner = self.owners[0]
        try:
            return self._collect([(owner, getattr(owner.actor, method).remote(0, *arguments))])[0]
        except ServersMovedError:
            return None

    def step(self, round: int, factor: float | None) -> None:
        """Let all servers and copies step; if a server is lost, its copy steps and takes over."""
        while True:
            tasks: dict[Process, list[int]] = {}
            for number, owner in enumerate(self.owners):
                tasks.setdefault(owner, []).append(number)
                copy = self.copies[number]
                if copy is not None:
                    tasks.setdefault(copy, []).append(number)
            try:
                self._collect(
                    [
                        (process, process.actor.step.remote(numbers, round, factor))
                        for process, numbers in tasks.items()
                    ]
                )
            except ServersMovedError:
                continue  # a step that was taken is not taken again
            else:
                return

    def load(self, states: Sequence[State]) -> None:
        """Restore all servers and copies; raise EngineError if servers move in every attempt."""
        attempts = len(self.processes) + 1
        for _ in range(attempts):
            pairs = [*enumerate(self.owners), *enumerate(self.copies)]
            try:
                self._collect(
                    [
                        (process, process.actor.load.remote(number, states[number]))
                        for number, process in pairs
                        if process is not None
                    ]
                )
            except ServersMovedError:
                continue
            else:
                return
        raise EngineError(
            f"server processes were lost in each of {attempts} attempts to restore the state of"
            f" the servers; {_RESUME}"
        )

    def copy_address(self, number: int) -> Address | None:
        """Return the address of the process with the copy of a server."""
        copy = self.copies[number]
        return None if copy is None else copy.address

    def drop_copies(self, numbers: Sequence[int]) -> None:
        """Forget copies that did not get an aggregate; :meth:`tend` makes new ones."""
        for number in numbers:
            self.copies[number] = None

    def _collect(self, asked: Sequence[tuple[Process, Any]]) -> list[Any]:
        """Wait for all answers; raise ServersMovedError if a process is lost in the meantime."""
        until = time.monotonic() + self._deadline
        references = [reference for _, reference in asked]
        while True:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=_POLL)
            if len(ready) == len(references):
                break
            answered = set(ready)
            late = time.monotonic() > until
            self.check(
                {process for process, reference in asked if late and reference not in answered}
            )
        results, dead, trouble = [], {}, None
        for process, reference in asked:
            try:
                results.append(self._ray.get(reference, timeout=self._deadline))
            except self._ray.exceptions.RayActorError:
                dead[process] = "died"
            except (
                self._ray.exceptions.ObjectLostError,
                self._ray.exceptions.GetTimeoutError,
            ) as error:  # a server did not get the measurement of another one
                trouble = error
        if dead:
            self._lose({each: why for each, why in dead.items() if each in self.processes})
        until = time.monotonic() + 2 * self._silence
        while trouble is not None:  # until the other server is found to be lost
            self.check()
            if time.monotonic() > until:
                raise trouble
            time.sleep(_POLL)
        return results

    # -- losses ------------------------------------------------------------------------------------

    def _is_lost(self, process: Process) -> str | None:
        silent = self._silent(process.token)
        if silent is None:
            return "died"
        if silent > self._silence:
            return f"gave no sign of life for {silent:.1f} s"
        return None

    def check(self, hung: AbstractSet[Process] = frozenset()) -> None:
        """Raise ServersMovedError if processes are lost, after their copies have taken over.

        Args:
            hung: processes that do not answer a call, and so are lost too.
        """
        lost = {process: reason for process in self.processes if (reason := self._is_lost(process))}
        lost |= dict.fromkeys(hung - lost.keys(), f"did not answer for {self._deadline:.0f} s")
        if lost:
            self._lose(lost)

    def _lose(self, lost: dict[Process, str]) -> None:
        moved = []
        for process in lost:
            self._ray.kill(process.actor)
            self.processes.remove(process)
        for number, owner in enumerate(self.owners):
            copy = self.copies[number]
            if copy in lost:
                self.copies[number] = copy = None
            if owner not in lost:
                continue
            told = f"server {number} {lost[owner]}"
            if copy is None:
                raise ServerLostError(
                    f"{told}, and it has no copy; {_RESUME}", {f"server {number}": told}
                )
            self.routes[number] = self._take_over(number, copy)
            self.owners[number], self.copies[number] = copy, None
            self.news.append(f"{told}: its copy takes over")
            moved.append(number)
        with contextlib.suppress(NoRoomError):  # until a node comes back
            self._start_missing({process.node for process, why in lost.items() if why != "died"})
        raise ServersMovedError(moved)

    def tend(self) -> None:
        """Use processes that have started, and make the copies that are missing.

        If only one process is left, no other process can hold the copies, and its loss would end
        the run. Then this method waits for a new process, at most for the deadline of a server, and
        reports that it has waited.
        """
        if len(self.processes) < 2 and self._coming:
            starting = [process.starting[0] for process in self._coming]
            begun = time.monotonic()
            came, _ = self._ray.wait(starting, timeout=self._deadline)
            waited = time.monotonic() - begun
            found = "" if came else ", and none has started"
            self.news.append(
                f"waited {waited:.1f} s for a process that holds copies of servers{found}"
            )
        for process in list(self._coming):
            ready, _ = self._ray.wait(process.starting, timeout=0)
            if not ready:
                continue
            self._coming.remove(process)
            try:
                process.address, process.node = self._ray.get(process.starting[0])
            except self._ray.exceptions.RayError as error:  # another one is started below
                self._unfit.add(process.node)
                self.news.append(f"a server process did not start: {first_line(error)}")
                continue
            self.processes.append(process)
        for process in self.processes:
            if process not in self.owners and self._answers(process):
                self._move_to(process)
        with contextlib.suppress(NoRoomError):
            self._start_missing(self._unfit)
        self._copy_missing()

    def _move_to(self, process: Process) -> None:
        """Move a server to a process without one, if another process has several."""
        for number, owner in enumerate(self.owners):
            if self.owners.count(owner) > 1 and self._copy(number, process):
                self.routes[number] = self._take_over(number, process)
                keep = self.copies[number] is None
                owner.actor.hand_over.remote(number, keep=keep)
                if keep:
                    self.copies[number] = owner
                self.owners[number] = process
                self.news.append(f"server {number} has a process of its own again")
                return

    def _take_over(self, number: int, process: Process) -> Route:
        """Make the copy in a process the server."""
        try:
            found: Route = self._ray.get(
                process.actor.take_over.remote(number), timeout=self._deadline
            )
        except self._ray.exceptions.RayError as error:
            told = f"server {number} and its copy were lost: {type(error).__name__}"
            raise ServerLostError(f"{told}; {_RESUME}", {f"server {number}": told}) from error
        return found

    def _answers(self, process: Process) -> bool:
        """Return whether a process has lately given a sign of life."""
        return (self._silent(process.token) or 0.0) < 3 * BEAT_SECONDS

    def _copy_missing(self) -> None:
        for number, owner in enumerate(self.owners):
            others = [each for each in self.processes if each is not owner and self._answers(each)]
            if self.copies[number] is None and others:
                best = min(
                    others,
                    key=lambda each: (
                        self._domain(each.node) == self._domain(owner.node),
                        self.copies.count(each),
                    ),
                )
                self.copies[number] = best if self._copy(number, best) else None

    def _copy(self, number: int, process: Process) -> bool:
        """Make a copy of a server in a process; return False if one of the two does not answer."""
        job = self.jobs[number]
        state = self.owners[number].actor.state.remote(number)
        try:
            self._ray.get(process.actor.copy.remote(number, job, [state]), timeout=COPY_SECONDS)
        except self._ray.exceptions.RayError:
            return False
        return True
