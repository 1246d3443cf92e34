"""Worker processes that nobody waits for: each sends a row when it is done with it.

The trainer's process is the server. A worker process has two questions at a time, each for one row
of one of its workers at the parameters of that moment, so that it computes while an answer is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phocas.engines.asynchronous.buffers import SilenceError
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.reception import Reception
from phocas.engines.faults import FaultScript, Stale
from phocas.engines.ray.hosts import Host, MissingRowsError
from phocas.engines.ray.session import Session
from phocas.engines.ray.shard import read_rows
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
from phocas.engines.ray.worker import WorkerJob, cut
from phocas.machine import available_cores
from phocas.training.cluster import Gathered
from phocas.training.server import Aggregate

if TYPE_CHECKING:
    from phocas.engines.ray.settings import RaySettings
    from phocas.rules.sampling import Sample
    from phocas.training.server import Action
    from phocas.training.task import Task

_QUESTIONS = 2  # at a process at a time
_PAUSE = 0.2  # seconds before a process that failed is asked again
_LOOK = 0.5  # seconds between looks at those who do not answer


@dataclass(frozen=True, eq=False)
class Question:
    """A row that was asked for."""

    host: Host
    worker: int
    references: list[Any]
    """To the row and to its report."""
    slot: int | None
    """Which of the shared parameters it is asked at; None if they were sent."""


class AsynchronousRayCluster:
    """A round is one decision of the policy: a step, or a row that was turned down."""

    same_rows = False

    def __init__(self, task: Task, policy: Policy, settings: RaySettings) -> None:
        self.script = FaultScript.of(settings.faults)
        _check(task, settings, self.script)
        self.task = task
        self.reception = Reception(task, policy, settings.max_staleness)
        self.kind = f"{type(self).__name__} {policy} {settings.max_staleness}"
        self.server = self.reception.server
        self.gradients = self.reception.gradients
        self.deadline = settings.deadline
        self.wait_seconds = settings.wait_seconds
        self.compute_seconds = 0.0
        """What all rows that came took their processes."""
        self.now = 0.0
        """The seconds of training, without evaluations."""
        self._patience = settings.server_deadline / 4
        self._steps = np.zeros(task.num_workers, np.int64)  # how many rows each was asked for
        self._parameters: Any = None  # a reference to them, as long as they are the latest
        self._slot: int | None = None  # where they are in shared memory
        self._serial = 0
        cores = task.threads or available_cores()
        processes = min(task.num_workers, settings.processes or cores)
        vectors = (2 * _QUESTIONS * processes + 2) * self.server.vector.nbytes
        self.session = Session(
            settings.address,
            cores=cores,
            store_bytes=max(LEAST_STORE, 2 * vectors + task.samples.nbytes),
        )
        try:
            self._start(settings.processes or self.session.cores)
        except BaseException:
            self.session.close()
            raise

    def _start(self, processes: int) -> None:
        self._ray = self.session.ray
        m = self.task.num_workers
        slots = _QUESTIONS * min(m, processes) + 1
        self._offer = Offer.if_possible(array_of(self.server.vector), slots, m)
        self._copies = self._offer is None or self.task.attack is not None
        if self._offer is not None and not self._copies:
            # Liars look at everybody's last row. Without them each is read where it was computed.
            self.reception.rows = tensor_of(self._offer.memory.rows)
        self._near: set[Host] = set()  # who left the last row in shared memory
        self.job = self._ray.put(  # kept: a worker that is started again reads it once more
            WorkerJob(
                self.task.for_worker(path_of(self.gradients)),
                bounds=[slice(0, self.server.parameters.size)],
                keeps_rows=any(isinstance(fault, Stale) for fault in self.script.faults),
                place=None if self._offer is None else self._offer.place,
            )
        )
        self.hosts = start_hosts(m, processes)
        await_start(self.hosts, self.job)
        self._forget_questions()

    def _forget_questions(self) -> None:
        self.pending: dict[Any, Question] = {}
        self._idle = {host: deque(host.workers) for host in self.hosts}
        self._left = time.monotonic()
        self._came = self._left  # when there was a row that could be used
        self._heard = dict.fromkeys(self.hosts, self._left)
        self._rested = dict.fromkeys(self.hosts, self._left)  # when a process may be asked again

    # -- a round -----------------------------------------------------------------------------------

    def gather(
        self, round: int, *, by_server: bool, honest: bool, samples: Sequence[Sample] = ()
    ) -> Gathered:
        """Let rows come until the policy decides."""
        del by_server, honest, samples
        clock = self.reception.begin()
        begun = time.monotonic()
        away = begun - self._left  # nobody was listened to meanwhile
        self._heard = {host: heard + away for host, heard in self._heard.items()}
        decided = waits = False
        while not decided:
            question = self._next(round, begun)
            clock.stop("gradients")
            if self._read(question):
                try:
                    decided = self.reception.take(question.worker)
                except SilenceError as error:
                    self._bear(str(error), begun, told=waits)
                    waits = True
        self._left = time.monotonic()
        self.now += self._left - begun
        return self.reception.gathered(round, self.now)

    def _bear(self, silence: str, begun: float, *, told: bool) -> None:
        """Wait for processes that are started again, where too few workers answer.

        That is told once a round, not again for each worker that falls silent.
        """
        if time.monotonic() - begun > self.wait_seconds:
            raise MissingRowsError(silence, self._failures())
        if not told:
            self.reception.news.append(f"{silence}; waiting for the others")

    def _failures(self) -> dict[str, str]:
        return {str(host): host.why or "answers" for host in self.hosts}

    def _next(self, round: int, begun: float) -> Question:
        """Keep everybody busy, and return the question that was answered first."""
        while True:
            self._ask(round)
            asked = list(self.pending)
            ready, _ = self._ray.wait(asked, timeout=_LOOK) if asked else ([], None)
            self._watch()
            waited = time.monotonic() - max(begun, self._came)
            if waited > self.wait_seconds:
                raise MissingRowsError(
                    f"round {round + 1} needs a row, and none came for {waited:.1f} s",
                    self._failures(),
                )
            if ready and ready[0] in self.pending:
                return self.pending.pop(ready[0])
            if not asked:
                time.sleep(_PAUSE)

    def _ask(self, round: int) -> None:
        now = time.monotonic()
        for host, idle in self._idle.items():
            if now < self._rested[host]:
                continue
            while idle and len(host.workers) - len(idle) < _QUESTIONS:
                if len(host.workers) == len(idle):
                    self._heard[host] = now
                self._question(host, idle.popleft(), round)

    def _question(self, host: Host, worker: int, round: int) -> None:
        near = host.ready and host in self._near
        faults = self.script.take(round + 1, workers=[worker], late=True)
        references = host.actor.row.options(num_returns=2).remote(
            [] if host.ready else [self.job],
            worker,
            int(self._steps[worker]),
            self._serial,
            faults,
            self._shared() if near else self._sent(),
        )
        self._steps[worker] += 1
        self.reception.give(worker)
        slot = self._slot if near else None
        self.pending[references[-1]] = Question(host, worker, references, slot)

    def _sent(self) -> Any:
        """Return a reference to the parameters as they are now."""
        if self._parameters is None:
            self._parameters = self._ray.put(cut(array_of(self.server.vector)))
        return self._parameters

    def _shared(self) -> int:
        """Return where the parameters of now are in shared memory, where nobody reads others."""
        assert self._offer is not None
        if self._slot is None:
            vectors = self._offer.memory.parameters
            used = {question.slot for question in self.pending.values()}
            self._slot = next(slot for slot in range(len(vectors)) if slot not in used)
            np.copyto(vectors[self._slot], array_of(self.server.vector))
        return self._slot

    def _step_away(self) -> None:
        """Forget where the parameters are: they are others now."""
        self._parameters = self._slot = None
        self._serial += 1

    def _read(self, question: Question) -> bool:
        """Read an answer; False says that there is no row in it that can be used."""
        host, worker, news = question.host, question.worker, self.reception.news
        self._idle[host].append(worker)
        self._heard[host] = time.monotonic()
        try:
            report = self._ray.get(question.references[-1])
        except self._ray.exceptions.RayError as error:
            self._near.discard(host)
            if host.fails(error, news):
                self._rested[host] = self._heard[host] + _PAUSE
            return False
        host.answers(news)
        row = array_of(self.reception.rows[worker])
        if report.in_place and self._offer is not None:
            self._near.add(host)
            if self._copies:
                np.copyto(row, self._offer.memory.rows[worker])
        else:
            self._near.discard(host)
            found, problems = read_rows([(0, 1, question.references[0])], row, 1, self._patience)
            if found[0] is None:
                news.append(f"worker {worker} {problems[0]}")
                return False
            np.copyto(row, found[0])
        self.reception.losses[worker] = report.losses[0]
        self.compute_seconds += report.seconds
        self._came = self._heard[host]
        return True

    def _watch(self) -> None:
        """Say who is late, and kill who has been silent for three deadlines: Ray starts it anew."""
        news = self.reception.news
        for host, idle in self._idle.items():
            silent = time.monotonic() - self._heard[host]
            if len(idle) == len(host.workers) or silent <= self.deadline:
                continue
            if silent <= 3 * self.deadline:
                host.misses(news, "late", f"is late: no row after {silent:.1f} s")
                continue
            news.append(f"{host} did not answer for three deadlines: started again")
            self._ray.kill(host.actor, no_restart=False)
            host.ready = False
            idle.extend(each.worker for each in self.pending.values() if each.host is host)
            self.pending = {
                reference: each for reference, each in self.pending.items() if each.host is not host
            }

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along what was decided on; whoever is asked from now on gets what comes of it."""
        begun = time.monotonic()
        if self.reception.steps(aggregate):
            self._step_away()
        action = self.reception.update(aggregate, factor)
        self._left = time.monotonic()
        self.now += self._left - begun
        return action

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the server remembers; rows that are on their way are asked for once more."""
        kept = {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "steps": torch.from_numpy(self._steps),
        }
        if self.task.worker_momentum:
            like = self.reception.rows
            kept["velocity"] = get_momentum(self.hosts, self.job, like, self.deadline)
        return kept | self.reception.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint, whose parameters the trainer has already."""
        self.reception.load_state(state)
        self.now = float(state["now"])
        np.copyto(self._steps, state["steps"].numpy())
        self._step_away()
        self._forget_questions()
        if "velocity" in state:
            set_momentum(self.hosts, self.job, state["velocity"])

    def close(self) -> None:
        """End the actors, and Ray itself if it was begun for us."""
        if self._ray.is_initialized():
            for host in self.hosts:
                self._ray.kill(host.actor)
        self.session.close()
        self.reception.close()
        if self._offer is not None:
            self._offer.close()


def _check(task: Task, settings: RaySettings, script: FaultScript) -> None:
    """Refuse what cannot be before any process is started."""
    script.check(task.num_workers, task.num_servers)
    if settings.missing is not None or settings.on_missing != "wait":
        raise ValueError(
            "missing and on_missing are for rounds: with asynchronous training nobody waits, and"
            " max_staleness says what comes too late"
        )
    for fault in script.faults:
        if fault.server is not None:
            raise ValueError(
                f"with asynchronous training the trainer's process is the server: got {fault}"
            )
