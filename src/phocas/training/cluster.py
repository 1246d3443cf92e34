"""Where the rows of a round come from: m workers and s servers, here all in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from phocas.attacks import attack_rng
from phocas.data import batch_indices
from phocas.seeds import Stream, generator
from phocas.specs import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phocas.attacks import Attack
    from phocas.data import Assignment
    from phocas.rules.sampling import Sample
    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.samples import Samples
    from phocas.training.server import Action, Aggregate, ParameterServer


@dataclass(frozen=True, eq=False)
class Gathered:
    """The aggregate of one round and what was seen on the way."""

    aggregate: Aggregate
    losses: npt.NDArray[np.floating]
    """The mean loss of each worker's batch, as an honest worker computes it."""
    honest_distance: float | None
    """From the aggregate to the mean of the gradients before anything was corrupted, if known."""
    touched: int
    """The number of cells that the attack changed."""
    seconds: dict[str, float]
    missing: tuple[int, ...] = ()
    """Workers whose row did not come in time, or came in no usable form: a row of NaN each."""
    news: tuple[str, ...] = ()
    """What went wrong with processes and messages, in words."""
    sampled: tuple[npt.NDArray[np.float64], ...] = ()
    """The values of the columns that were asked for, as the servers received them."""


class Cluster(Protocol):
    """What a trainer needs of the workers and servers, wherever they run."""

    def gather(
        self,
        round: int,  # noqa: A002
        *,
        by_server: bool,
        honest: bool,
        samples: Sequence[Sample] = (),
    ) -> Gathered:
        """Run a round (from 0) up to the aggregate; ``honest`` asks for the distance too."""

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Take an optimiser step along the aggregate, unless the policy forbids it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep of the workers."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""

    def close(self) -> None:
        """Let go of threads and processes."""


class LocalCluster:
    """All workers batched in this process; their rows are the server's own matrix, never copied."""

    def __init__(
        self,
        server: ParameterServer,
        gradients: WorkerGradients,
        samples: Samples,
        assignment: Assignment,
        *,
        batch_size: int,
        seed: int,
        attack: Attack | None = None,
        momentum: float = 0.0,
    ) -> None:
        self.server = server
        self.gradients = gradients
        self.samples = samples
        self.assignment = assignment
        self.batch_size = count("LocalCluster", "batch_size", batch_size, minimum=1)
        self.seed = seed
        self.attack = attack
        if not 0 <= momentum < 1:
            raise ValueError(f"worker momentum must be at least 0 and less than 1: got {momentum}")
        self.momentum = momentum
        m, d = server.rows.shape
        if attack is not None:
            dtype = str(server.rows.dtype).removeprefix("torch.")
            attack.check(m, d, dtype, server.num_servers)
        self._velocity = torch.zeros_like(server.rows) if momentum else None
        needs_previous = attack is not None and attack.needs_previous
        self._previous = torch.zeros_like(server.rows) if needs_previous else None
        self._has_previous = False

    def gather(
        self,
        round: int,  # noqa: A002
        *,
        by_server: bool,
        honest: bool,
        samples: Sequence[Sample] = (),
    ) -> Gathered:
        """Draw the batches, compute the rows, let the attack at them, and reduce them."""
        clock = Clock()
        indices = batch_indices(
            self.assignment, self.server.num_workers, self.batch_size, self.seed, round
        )
        inputs, targets = self.samples.draw(indices)
        if self.attack is not None and self.samples.num_classes:
            self.attack.corrupt_labels(
                targets.numpy(),
                self.samples.num_classes,
                rng=attack_rng(self.seed, round),
                round=round,
            )
        clock.stop("data")

        rows = self.server.rows
        losses = self.gradients(inputs, targets, rows, self.seed, round).numpy()
        if self._velocity is not None:
            self._velocity.mul_(self.momentum).add_(rows, alpha=1 - self.momentum)
            rows.copy_(self._velocity)
        clock.stop("gradients")

        mean = rows.mean(0) if honest else None
        clock.stop("metrics")
        touched = self._corrupt(rows, round)
        clock.stop("attack")

        rng = rule_rng(self.seed, round)
        aggregate = self.server.aggregate(rng=rng, by_server=by_server)
        clock.stop("aggregate")

        sampled = tuple(sample.take(rows.numpy()) for sample in samples)
        distance = None if mean is None else float(torch.dist(aggregate.value, mean))
        clock.stop("metrics")
        return Gathered(aggregate, losses, distance, touched, clock.seconds, sampled=sampled)

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Let the server step."""
        return self.server.update(aggregate, factor)

    def _corrupt(self, rows: torch.Tensor, round: int) -> int:  # noqa: A002
        if self.attack is None:
            return 0
        if self._previous is None:
            rng = attack_rng(self.seed, round)
            return self.attack.corrupt(rows.numpy(), rng=rng, round=round).count
        own = rows.clone()
        touched = self.attack.corrupt(
            rows.numpy(),
            rng=attack_rng(self.seed, round),
            round=round,
            previous=self._previous.numpy() if self._has_previous else None,
        )
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


def rule_rng(seed: int, round: int) -> np.random.Generator:  # noqa: A002
    """Return the randomness of a rule in one round, for every server the same."""
    return generator(Stream.RULE, seed, round)


class Clock:
    """Times of the phases of a round, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        """Give the time since the last phase to this one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
