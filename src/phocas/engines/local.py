"""The local engine: all workers and servers in this process, with batched gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from phocas.engines.asynchronous.cluster import AsynchronousCluster
from phocas.engines.asynchronous.settings import AsynchronousSettings
from phocas.engines.asynchronous.speeds import SPEEDS, Even, Speeds, VirtualRounds
from phocas.settings import Conflict, setting
from phocas.specs import positive
from phocas.training.cluster import Gathered, Wanted
from phocas.training.local_steps import local_steps
from phocas.training.pool import DeterministicPool, kernel_threads
from phocas.training.trusted import TrustedGradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from phocas.settings import Spelling
    from phocas.training.server import Action, Aggregate
    from phocas.training.task import Task, TaskSettings
    from phocas.training.trainer import Clock


@dataclass(frozen=True)
class LocalSettings(AsynchronousSettings):
    """Settings of the local engine: asynchronous training and a virtual clock.

    >>> LocalSettings()
    LocalSettings(asynchronous=None, max_staleness=1000, speeds=None, virtual_deadline=None)
    """

    owner = "the local engine"

    speeds: Speeds | str | None = setting(
        None, "Virtual clock, speed of the workers: lognormal:sigma=1, slow:workers=4, even."
    )
    virtual_deadline: float | None = setting(
        None, "Virtual seconds after which a round ends without its slow workers.", positive
    )

    def conflicts(self, task: TaskSettings, say: Spelling = str) -> Iterator[Conflict]:
        """Yield the settings that are impossible together; no module of the user is imported."""
        yield from super().conflicts(task, say)
        if self.virtual_deadline is None:
            return
        if self.asynchronous is not None:
            yield Conflict(
                "virtual_deadline",
                f"{say('virtual_deadline')} is for synchronous rounds: leave it or"
                f" {say('asynchronous')} out",
            )
        elif self.speeds is None:
            yield Conflict(
                "virtual_deadline",
                f"{say('virtual_deadline')} needs a virtual clock: set {say('speeds')} too",
            )

    def build(self, task: Task) -> LocalCluster | AsynchronousCluster:
        """Put all workers and servers of a task into this process."""
        speeds = None if self.speeds is None else SPEEDS.of(self.speeds, self.owner)
        policy = self.policy()
        task = task.load_parts()
        if policy is None:
            return LocalCluster(task, speeds, self.virtual_deadline)
        return AsynchronousCluster(task, policy, speeds or Even(), self.max_staleness)


class LocalCluster:
    """All workers in this process. Their gradients are written into the server's matrix.

    Args:
        task: the task.
        speeds: the speeds of the workers on a virtual clock, if there is one.
        deadline: virtual seconds after which a row is missing.
    """

    def __init__(
        self, task: Task, speeds: Speeds | None = None, deadline: float | None = None
    ) -> None:
        self.task = task
        self.same_rows = task.clients is None or task.worker_data == "differ"
        self.kind = type(self).__name__ + (f" {speeds} {deadline}" if speeds else "")
        steps = 1 if task.local is None else task.local.steps
        self._clock = (
            None
            if speeds is None
            else VirtualRounds(speeds, task.num_workers, task.seed, steps, deadline)
        )
        self.server = task.serve(task.model)
        # An accelerator has its own threads.
        pool = DeterministicPool(task.threads if task.device.type == "cpu" else 1)
        self.gradients = task.differentiate(self.server.parameters, pool)
        self.steps = None if task.local is None else local_steps(self.gradients, task.local)
        self.trusted = TrustedGradient.of(task, self.gradients)
        rows = self.server.rows
        self._velocity = torch.zeros_like(rows) if task.worker_momentum else None
        needs_previous = task.attack is not None and task.attack.needs_previous
        self._previous = torch.zeros_like(rows, device="cpu") if needs_previous else None
        self._has_previous = False
        self._memory: dict[str, npt.NDArray[np.floating]] = {}  # of the attack

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Draw the batches, compute the rows, apply the attack, and aggregate the rows."""
        task, rows = self.task, self.server.rows
        if self.steps is None:
            inputs, targets = task.batches(round, excluded=wanted.excluded)
            clock.stop("data")
            losses = self.gradients(inputs, targets, rows, task.seed, round)
        else:
            losses = self._step_locally(rows, round, clock, wanted.excluded)
        if self._velocity is not None:
            self._velocity.mul_(task.worker_momentum).add_(rows, alpha=task.momentum_gain)
            rows.copy_(self._velocity)
        if self.trusted is not None:
            self.trusted.provide(self.server, round)
        clock.stop("gradients")

        mean = rows.mean(0) if wanted.honest else None
        clock.stop("metrics")
        with kernel_threads(task.threads):
            touched = self._corrupt(rows, round, wanted.excluded)
            late = () if self._clock is None else self._clock.play(round)
            if late:
                rows[list(late)] = float("nan")
            clock.stop("attack")

            aggregate = self.server.aggregate(rng=task.rule_rng(round), by_server=wanted.by_server)
            clock.stop("aggregate")

        sampled = tuple(sample.take(rows) for sample in wanted.samples)
        distance = None if mean is None else float(torch.dist(aggregate.value, mean))
        clock.stop("metrics")
        return Gathered(
            aggregate,
            losses.cpu().numpy(),
            distance,
            touched,
            sampled=sampled,
            participants=task.participants(round, wanted.excluded),
            picture=None if wanted.picture is None else wanted.picture.take(rows),
            missing=late,
            virtual_seconds=None if self._clock is None else self._clock.now,
        )

    def _step_locally(
        self, rows: torch.Tensor, round: int, clock: Clock, excluded: tuple[int, ...]
    ) -> torch.Tensor:
        task = self.task
        assert self.steps is not None

        def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            clock.stop("gradients")
            drawn = task.batches(round, step=step, excluded=excluded)
            clock.stop("data")
            return drawn

        return self.steps(draw, rows, task.seed, round, float(task.schedule(round)))

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Take a step of the server's optimizer."""
        return self.server.update(aggregate, self.task.server_factor(factor))

    def _corrupt(self, rows: torch.Tensor, round: int, excluded: tuple[int, ...]) -> int:
        attack = self.task.attack_of(round, excluded)
        if attack is None:
            return 0
        rng = self.task.attack_rng(round)
        seen = rows.cpu()  # attacks run on the CPU; no copy if the rows are there
        own = None if self._previous is None else seen.clone()
        previous = self._previous if self._has_previous else None
        reference = None if self.server.reference is None else self.server.reference.cpu()
        kept: dict[str, Any] = {"memory": self._memory} if attack.needs_memory else {}
        touched = attack.corrupt(
            seen, rng=rng, round=round, previous=previous, reference=reference, **kept
        )
        if seen is not rows:
            rows.copy_(seen)
        if own is not None:
            self._previous, self._has_previous = own, True
        return touched.count

    def state(self) -> dict[str, torch.Tensor]:
        """Return the workers' momentum and last rows, and the attack's memory, if there are any."""
        state = {f"attack.{name}": torch.from_numpy(kept) for name, kept in self._memory.items()}
        if self._velocity is not None:
            state["velocity"] = self._velocity
        if self._previous is not None and self._has_previous:
            state["previous"] = self._previous
        if self._clock is not None:
            state["now"] = torch.tensor(self._clock.now, dtype=torch.float64)
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])
        if self._previous is not None and "previous" in state:
            self._previous.copy_(state["previous"])
            self._has_previous = True
        self._memory = {
            name.removeprefix("attack."): kept.numpy().copy()
            for name, kept in state.items()
            if name.startswith("attack.")
        }
        if self._clock is not None:
            self._clock.now = float(state["now"])

    def close(self) -> None:
        """End the threads."""
        self.gradients.pool.close()
