"""The server of asynchronous training, for the local and the Ray engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from phocas.attacks import RowAttack
from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.engines.asynchronous.zeno import ZenoState
from phocas.rules import Mean
from phocas.seeds import Stream, generator
from phocas.training.cluster import Gathered
from phocas.training.gradients import Looped
from phocas.training.pool import DeterministicPool, kernel_threads, one_torch_thread
from phocas.training.server import Aggregate, ParameterServer

if TYPE_CHECKING:
    from phocas.training.server import Action
    from phocas.training.task import Task
    from phocas.training.trainer import Clock


class AsynchronousServer:
    """The parameters, the rows of the workers, and the update policy.

    The policy decides, row by row, whether to step along a row, to reject it, or to wait for more
    rows. An engine calls :meth:`give` when a worker gets the parameters. When a row arrives, the
    engine writes the row into ``rows`` and calls :meth:`take`, which returns True when the policy
    ends the round.

    Args:
        task: the task.
        policy: the policy.
        max_staleness: the number of steps after which a row is rejected.
    """

    def __init__(self, task: Task, policy: Policy, max_staleness: int) -> None:
        m = task.num_workers
        policy.check(m, task.rule)
        self.task = task
        self.max_staleness = max_staleness
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
        self.gradients = task.differentiate(self.server.parameters, DeterministicPool(task.threads))
        _check_buffers(self.gradients)
        d = self.server.parameters.size
        like = self.server.rows
        self.state_of_policy: State = policy.begin(m, d, like, task.lr)
        self.rows = self.server.parameters.rows(m).zero_()
        """The last row of each worker."""
        self.losses = np.zeros(m)
        self.version = 0
        """The number of steps so far."""
        self.arrivals = 0
        self.taken = np.zeros(m, np.int64)
        """The version of the parameters that each worker has."""
        self._lies = like.new_empty(m, d) if task.attack is not None else None
        self._given = like.new_zeros(m, d) if policy.needs_given else None
        self._validation = _validation(task, policy)
        self._verdict: Verdict | None = None

    def begin(self, clock: Clock) -> None:
        """Begin a round: reset the metrics; ``clock`` times the phases."""
        self.news: list[str] = []
        self.staleness = self.refused = self.touched = 0
        self.clock = clock

    def give(self, worker: int) -> None:
        """Record that a worker gets the current parameters."""
        self.taken[worker] = self.version
        if self._given is not None:
            self._given[worker] = self.server.vector

    def take(self, worker: int) -> bool:
        """Pass the row of a worker to the update policy.

        A row that is staler than ``max_staleness`` is dropped.

        Returns:
            Whether the policy ends the round with this row: it updates the parameters or skips the
            update. False if the policy needs more rows.

        Raises:
            SilenceError: too few workers answer. Training can continue when more of them do.
        """
        self.staleness = self.version - int(self.taken[worker])
        self.arrivals += 1
        if self.staleness > self.max_staleness:
            self.refused += 1
            return False
        row, cells = self._sent(worker)
        self.touched += cells
        self.clock.stop("attack")
        self._renew()
        self.clock.stop("gradients")
        given = None if self._given is None else self._given[worker]
        with one_torch_thread():  # the last bits of a norm depend on the number of threads
            arrival = Arrival(worker, row, self.staleness, given)
            self._verdict = self.state_of_policy.receive(arrival)
        self.news += self.state_of_policy.news
        return self._verdict is not None

    def _sent(self, worker: int) -> tuple[torch.Tensor, int]:
        """Return the row that a worker sends, and the number of its cells that the attack changed.

        An attack knows the last rows of all workers.
        """
        attack = self.task.attack
        if attack is None or self._lies is None:
            return self.rows[worker], 0
        if isinstance(attack, RowAttack) and attack.who == "fixed" and worker >= attack.q:
            return self.rows[worker], 0
        self._lies.copy_(self.rows)
        rng = self.task.attack_rng(self.arrivals)
        with kernel_threads(self.task.threads):
            touched = attack.corrupt(self._lies, rng=rng, round=self.version)
        return self._lies[worker], touched.of_row(worker)

    def _renew(self) -> None:
        """Compute the server's own gradient, if the policy needs a new gradient."""
        state = self.state_of_policy
        if self._validation is None or not isinstance(state, ZenoState) or not state.due:
            return
        inputs, targets = self._validation
        self.gradients(inputs, targets, state.own[None], self.task.seed, self.version)
        state.renewed()

    def gathered(self, round: int, now: float) -> Gathered:
        """Return the aggregate that the policy decided on.

        Args:
            round: the number of the round.
            now: the time of the engine's clock.
        """
        verdict = self._verdict
        assert verdict is not None
        aggregate = self._aggregate(verdict, round)
        self.clock.stop("aggregate")
        workers = np.array(verdict.workers)
        return Gathered(
            aggregate,
            self.losses[workers],
            None,
            self.touched,
            news=tuple(self.news),
            participants=workers,
            virtual_seconds=now,
            staleness=self.staleness,
            refused=self.refused,
        )

    def _aggregate(self, verdict: Verdict, round: int) -> Aggregate:
        if verdict.rows:
            with kernel_threads(self.task.threads):
                whole = self.server.aggregate(rng=self.task.rule_rng(round), by_server=False)
            dropped = whole.dropped[list(verdict.rows)]
            shares = whole.by_server[:, list(verdict.rows)]
            return Aggregate(whole.value, dropped, whole.expected, shares)
        value = self.rows[verdict.workers[0]] if verdict.along is None else verdict.along
        shares = np.full((self.task.num_servers, 1), 0.0 if verdict.accepted else 1.0)
        return Aggregate(value, shares[0], 0.0, shares)

    def steps(self, aggregate: Aggregate) -> bool:
        """Return True if :meth:`update` will change the parameters."""
        accepted = self._verdict is not None and self._verdict.accepted
        return accepted and self.server.verdict(aggregate) == "applied"

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along the aggregate, if the policy accepted it."""
        assert self._verdict is not None
        if not self._verdict.accepted:
            return "skipped"
        self.version += self.steps(aggregate)
        return self.server.update(aggregate, factor * self._verdict.factor)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the server and of the policy, for a checkpoint."""
        kept = {
            "rows": self.rows,
            "losses": torch.from_numpy(self.losses),
            "taken": torch.from_numpy(self.taken),
            "counts": torch.tensor([self.version, self.arrivals]),
        }
        if self._given is not None:
            kept["given"] = self._given
        said = self.state_of_policy.tensors()
        return kept | {f"policy.{name}": tensor for name, tensor in said.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self.rows.copy_(state["rows"])
        np.copyto(self.losses, state["losses"].numpy())
        np.copyto(self.taken, state["taken"].numpy())
        self.version, self.arrivals = state["counts"].tolist()
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

    def close(self) -> None:
        """End the threads."""
        self.gradients.pool.close()


def _check_buffers(gradients: object) -> None:
    if isinstance(gradients, Looped) and gradients.serial:
        raise ValueError(
            "asynchronous training needs a model whose rows do not disturb each other: this one"
            " changes its buffers (batch norm) or draws random numbers of its own"
        )


def _validation(task: Task, policy: Policy) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Draw the server's validation samples; raise ValueError if test samples are among them."""
    number = getattr(policy, "validation", None)
    if number is None:
        return None
    rng = generator(Stream.VALIDATION, task.seed)
    free = task.samples.free
    if number > len(free):
        raise ValueError(
            f"{policy.name} needs validation <= the training samples: got {number} of {len(free)}"
        )
    chosen = np.sort(free[rng.choice(len(free), number, replace=False)])[None]
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
