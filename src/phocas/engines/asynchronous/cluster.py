"""Workers that nobody waits for, in this process: events in the order of a virtual clock.

A worker takes the parameters as they are, computes for as long as its speed says, and its row comes
back when the server has stepped a few times. A gradient is computed when it is first needed, with
those of all other workers that took the same parameters: before the row comes, and before the
parameters change. So no old parameters are kept, and what happens depends on the seed alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from phocas.attacks import RowAttack
from phocas.engines import EngineError
from phocas.engines.asynchronous.policies import (
    Arrival,
    Policy,
    SilenceError,
    State,
    Verdict,
    ZenoState,
)
from phocas.engines.asynchronous.speeds import Speeds
from phocas.rules import Mean
from phocas.seeds import Stream, generator
from phocas.training.cluster import Clock, Gathered
from phocas.training.gradients import Looped
from phocas.training.gradients.merged import Merged
from phocas.training.lanes import Lanes, kernel_threads
from phocas.training.server import Aggregate, ParameterServer

if TYPE_CHECKING:
    from phocas.rules.sampling import Sample
    from phocas.training.server import Action
    from phocas.training.task import Task


class AsynchronousCluster:
    """A round is one decision of the policy: a step, or a row that was turned down."""

    same_rows = False

    def __init__(self, task: Task, policy: Policy, speeds: Speeds, max_staleness: int) -> None:
        m = task.num_workers
        policy.check(m, task.rule)
        speeds.check(m)
        _check(task)
        self.task = task
        self.policy = policy
        self.speeds = speeds
        self.max_staleness = max_staleness
        self.kind = f"asynchronous {policy} {speeds} {max_staleness}"
        self.server = ParameterServer(
            task.model,
            num_workers=policy.num_rows(),
            num_servers=task.num_servers,
            rule=task.rule if policy.uses_rule else Mean(),
            optimizer=task.optimizer,
            optimizer_options=task.optimizer_options,
            lr=task.lr,
            on_nonfinite=task.on_nonfinite,
        )
        self.gradients = task.differentiate(self.server.parameters, Lanes(task.threads))
        _check_buffers(self.gradients)
        d = self.server.parameters.size
        like = self.server.rows
        self.state_of_policy: State = policy.begin(m, d, like, task.lr)
        self.rows = like.new_zeros(m, d)  # what each worker computed last
        self._lies = like.new_empty(m, d) if task.attack is not None else None
        self._given = like.new_zeros(m, d) if policy.needs_given else None
        self._validation = _validation(task, policy)
        self._merges = isinstance(self.gradients, Merged) and not any(
            isinstance(layer, nn.Dropout) and layer.p for layer in self.gradients.layers
        )
        self.now = 0.0
        self.version = 0
        self._arrivals = 0
        self._taken = np.zeros(m, np.int64)  # the version that each worker has
        self._steps = np.zeros(m, np.int64)  # how many rows each has begun
        self._ends = np.zeros(m)
        self._waiting = np.zeros(m, bool)  # whose row is yet to be computed
        self._losses = np.zeros(m)
        self._back: int | None = None  # who sent the last row, and takes parameters next
        self._events: list[tuple[float, int]] = []
        for worker in range(m):
            self._take(worker)
        self._accepted = True
        self._factor = 1.0

    def gather(
        self, round: int, *, by_server: bool, honest: bool, samples: Sequence[Sample] = ()
    ) -> Gathered:
        """Let rows come until the policy decides."""
        del by_server, honest, samples
        clock = Clock()
        news: list[str] = []
        refused = 0
        touched = 0
        while True:
            if self._back is not None:
                self._take(self._back)
                self._back = None
            self.now, worker = self._events[0]
            if math.isinf(self.now):
                raise EngineError("no worker answers any more, and nothing can be waited for")
            heapq.heappop(self._events)
            self._back = worker
            clock.stop("data")
            if self._waiting[worker]:
                self._compute(clock)
            staleness = self.version - int(self._taken[worker])
            self._arrivals += 1
            if staleness > self.max_staleness:
                refused += 1
                continue
            with kernel_threads(self.task.threads):
                row, cells = self._sent(worker)
            touched += cells
            clock.stop("attack")
            self._renew()
            clock.stop("gradients")
            given = None if self._given is None else self._given[worker]
            try:
                verdict = self.state_of_policy.receive(Arrival(worker, row, staleness, given))
            except SilenceError as error:
                raise EngineError(str(error)) from None
            news += self.state_of_policy.news
            if verdict is not None:
                break
        with kernel_threads(self.task.threads):
            aggregate = self._aggregate(verdict, round)
        clock.stop("aggregate")
        workers = np.array(verdict.workers)
        return Gathered(
            aggregate,
            self._losses[workers],
            None,
            touched,
            clock.seconds,
            news=tuple(news),
            participants=workers,
            virtual_seconds=self.now,
            staleness=staleness,
            refused=refused,
        )

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along what was decided on; who has the parameters computes before they change."""
        if not self._accepted:
            return "skipped"
        if self.server.verdict(aggregate) == "applied":
            self._compute(None)
            self.version += 1
        return self.server.update(aggregate, factor * self._factor)

    def _take(self, worker: int) -> None:
        m = self.task.num_workers
        step = int(self._steps[worker])
        self._taken[worker] = self.version
        self._ends[worker] = self.now + self.speeds.seconds(worker, m, self.task.seed, step)
        self._steps[worker] += 1
        self._waiting[worker] = True
        heapq.heappush(self._events, (float(self._ends[worker]), worker))

    def _compute(self, clock: Clock | None) -> None:
        """Compute the rows of all who have the current parameters and have not computed yet."""
        workers = np.flatnonzero(self._waiting).tolist()
        task = self.task
        drawn = []
        for worker in workers:
            step = int(self._steps[worker]) - 1
            batch = task.batches(step, worker, worker + 1)
            drawn.append(tuple(part.clone() for part in batch))
        if clock is not None:
            clock.stop("data")
        out = self.rows.new_empty(len(workers), self.rows.shape[1])
        if workers and self._merges:
            inputs, targets = (torch.cat(part) for part in zip(*drawn, strict=True))
            self._losses[workers] = self.gradients(inputs, targets, out, task.seed, 0).numpy()
        else:
            for place, (worker, (inputs, targets)) in enumerate(zip(workers, drawn, strict=True)):
                step = int(self._steps[worker]) - 1
                row = out[place : place + 1]
                loss = self.gradients(inputs, targets, row, task.seed, step, worker)
                self._losses[worker] = float(loss)
        beta = task.worker_momentum
        if beta and workers:
            out.mul_(1 - beta).add_(self.rows[workers], alpha=beta)
        self.rows[workers] = out
        if self._given is not None:
            self._given[workers] = self.server.vector
        self._waiting[workers] = False
        if clock is not None:
            clock.stop("gradients")

    def _sent(self, worker: int) -> tuple[torch.Tensor, int]:
        """Return what a worker sends, and how many cells of it are lies.

        Liars see what everyone computed last.
        """
        attack = self.task.attack
        if attack is None or self._lies is None:
            return self.rows[worker], 0
        if isinstance(attack, RowAttack) and attack.who == "fixed" and worker >= attack.q:
            return self.rows[worker], 0
        self._lies.copy_(self.rows)
        rng = self.task.attack_rng(self._arrivals)
        touched = attack.corrupt(self._lies, rng=rng, round=self.version)
        return self._lies[worker], touched.of_row(worker)

    def _renew(self) -> None:
        """Compute the server's own gradient, where the policy judges by one that is not too old."""
        state = self.state_of_policy
        if self._validation is None or not isinstance(state, ZenoState) or not state.due:
            return
        inputs, targets = self._validation
        self.gradients(inputs, targets, state.own[None], self.task.seed, self.version)
        state.renewed()

    def _aggregate(self, verdict: Verdict, round: int) -> Aggregate:
        self._accepted = verdict.accepted
        self._factor = verdict.factor
        if verdict.rows:
            whole = self.server.aggregate(rng=self.task.rule_rng(round), by_server=False)
            dropped = whole.dropped[list(verdict.rows)]
            shares = whole.by_server[:, list(verdict.rows)]
            return Aggregate(whole.value, dropped, whole.expected, shares, whole.finite)
        value = self.rows[verdict.workers[0]] if verdict.along is None else verdict.along
        dropped = np.full(1, 0.0 if verdict.accepted else 1.0)
        shares = np.broadcast_to(dropped, (self.task.num_servers, 1))
        return Aggregate(value, dropped, 0.0, shares, bool(value.isfinite().all()))

    def state(self) -> dict[str, torch.Tensor]:
        """Return who is at what, and what the policy remembers."""
        back = -1 if self._back is None else self._back
        numbers = np.array([self.version, self._arrivals, back])
        kept = {
            "rows": self.rows,
            "numbers": torch.from_numpy(numbers),
            "now": torch.tensor(self.now, dtype=torch.float64),
        }
        kept |= {name: torch.from_numpy(getattr(self, f"_{name}")) for name in _ARRAYS}
        if self._given is not None:
            kept["given"] = self._given
        said = self.state_of_policy.tensors()
        return kept | {f"policy.{name}": tensor for name, tensor in said.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.rows.copy_(state["rows"])
        self.version, self._arrivals, back = state["numbers"].tolist()
        self.now = float(state["now"])
        for name in _ARRAYS:
            np.copyto(getattr(self, f"_{name}"), state[name].numpy())
        if self._given is not None:
            self._given.copy_(state["given"])
        prefix = "policy."
        self.state_of_policy.load(
            {
                name.removeprefix(prefix): tensor
                for name, tensor in state.items()
                if name.startswith(prefix)
            }
        )
        self._back = None if back < 0 else back
        self._events = [(float(end), i) for i, end in enumerate(self._ends) if i != self._back]
        heapq.heapify(self._events)

    def close(self) -> None:
        """End the threads."""
        self.gradients.lanes.close()


_ARRAYS = ("taken", "steps", "ends", "waiting", "losses")


def _check(task: Task) -> None:
    if task.local is not None or task.clients is not None:
        raise ValueError(
            "asynchronous training sends gradients of all workers: leave local_steps and clients"
            " out"
        )
    if task.attack is not None and task.attack.needs_previous:
        raise ValueError(
            f"{task.attack.name} is what slow workers do in synchronous rounds: with asynchronous"
            " training set speeds"
        )


def _check_buffers(gradients: object) -> None:
    if isinstance(gradients, Looped) and gradients.serial:
        raise ValueError(
            "asynchronous training needs a model whose rows do not disturb each other: this one"
            " changes its buffers (batch norm) or draws random numbers of its own"
        )


def _validation(task: Task, policy: Policy) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Draw the samples that the server holds; none of those it is judged by may be among them."""
    number = getattr(policy, "validation", None)
    if number is None:
        return None
    rng = generator(Stream.VALIDATION, task.seed)
    if number > len(task.samples):
        raise ValueError(
            f"{policy.name} needs validation <= the training samples: got {number} of"
            f" {len(task.samples)}"
        )
    chosen = np.sort(rng.choice(len(task.samples), number, replace=False))[None]
    inputs, targets = (part.clone() for part in task.samples.draw(chosen))
    if task.samples.test is not None:
        held = {sample.numpy().tobytes() for sample in inputs[0]}
        judged = {
            sample.numpy().tobytes()
            for part in task.samples.test_parts(1000)
            for sample in task.samples.test_batch(part)[0]
        }
        both = len(held & judged)
        if both:
            raise ValueError(
                f"{both} of the {number} validation samples are test samples too, and would make"
                " the test too easy: take them out of the training samples"
            )
    return inputs, targets
