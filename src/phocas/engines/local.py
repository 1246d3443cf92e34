"""The local engine: all workers and servers in this process, the workers' gradients batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phocas.settings import Settings
from phocas.training.cluster import Clock, Gathered
from phocas.training.lanes import Lanes, kernel_threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phocas.rules.sampling import Sample
    from phocas.training.server import Action, Aggregate
    from phocas.training.task import Task


@dataclass(frozen=True)
class LocalSettings(Settings):
    """The local engine, which has nothing to set."""

    def build(self, task: Task) -> LocalCluster:
        """Put all workers and servers of a task into this process."""
        return LocalCluster(task)


class LocalCluster:
    """All workers batched in this process; their rows are the server's own matrix, never copied."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.server = task.serve(task.model)
        # A device has threads of its own.
        lanes = Lanes(task.threads if task.device.type == "cpu" else 1)
        self.gradients = task.differentiate(self.server.parameters, lanes)
        rows = self.server.rows
        self._velocity = torch.zeros_like(rows) if task.worker_momentum else None
        needs_previous = task.attack is not None and task.attack.needs_previous
        self._previous = torch.zeros_like(rows, device="cpu") if needs_previous else None
        self._has_previous = False

    def gather(
        self, round: int, *, by_server: bool, honest: bool, samples: Sequence[Sample] = ()
    ) -> Gathered:
        """Draw the batches, compute the rows, let the attack at them, and reduce them."""
        task, clock = self.task, Clock()
        inputs, targets = task.batches(round)
        clock.stop("data")

        rows = self.server.rows
        losses = self.gradients(inputs, targets, rows, task.seed, round)
        if self._velocity is not None:
            beta = task.worker_momentum
            self._velocity.mul_(beta).add_(rows, alpha=1 - beta)
            rows.copy_(self._velocity)
        clock.stop("gradients")

        mean = rows.mean(0) if honest else None
        clock.stop("metrics")
        with kernel_threads(task.threads):
            touched = self._corrupt(rows, round)
            clock.stop("attack")

            aggregate = self.server.aggregate(rng=task.rule_rng(round), by_server=by_server)
            clock.stop("aggregate")

        sampled = tuple(sample.take(rows) for sample in samples)
        distance = None if mean is None else float(torch.dist(aggregate.value, mean))
        clock.stop("metrics")
        told = losses.cpu().numpy()
        return Gathered(aggregate, told, distance, touched, clock.seconds, sampled=sampled)

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Let the server step."""
        return self.server.update(aggregate, factor)

    def _corrupt(self, rows: torch.Tensor, round: int) -> int:
        attack = self.task.attack
        if attack is None:
            return 0
        rng = self.task.attack_rng(round)
        seen = rows.cpu()  # where attacks are computed; no copy if the rows are there
        own = None if self._previous is None else seen.clone()
        previous = self._previous if self._has_previous else None
        touched = attack.corrupt(seen, rng=rng, round=round, previous=previous)
        if seen is not rows:
            rows.copy_(seen)
        if own is not None:
            self._previous, self._has_previous = own, True
        return touched.count

    def state(self) -> dict[str, torch.Tensor]:
        """Return the workers' momentum and last rows, where there are any."""
        state = {}
        if self._velocity is not None:
            state["velocity"] = self._velocity
        if self._previous is not None and self._has_previous:
            state["previous"] = self._previous
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])
        if self._previous is not None and "previous" in state:
            self._previous.copy_(state["previous"])
            self._has_previous = True

    def close(self) -> None:
        """End the threads."""
        self.gradients.lanes.close()
