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

from phocas.engines import EngineError
from phocas.engines.asynchronous.buffers import SilenceError
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.reception import Reception
from phocas.engines.asynchronous.speeds import Speeds
from phocas.training.cluster import Clock, Gathered
from phocas.training.gradients.merged import Merged
from phocas.training.server import Aggregate

if TYPE_CHECKING:
    from phocas.rules.sampling import Sample
    from phocas.training.server import Action
    from phocas.training.task import Task


class AsynchronousCluster:
    """A round is one decision of the policy: a step, or a row that was turned down."""

    same_rows = False

    def __init__(self, task: Task, policy: Policy, speeds: Speeds, max_staleness: int) -> None:
        m = task.num_workers
        speeds.check(m)
        self.reception = Reception(task, policy, max_staleness)
        self.task = task
        self.speeds = speeds
        self.kind = f"asynchronous {policy} {speeds} {max_staleness}"
        self.server = self.reception.server
        self.gradients = self.reception.gradients
        self._merges = isinstance(self.gradients, Merged) and not any(
            isinstance(layer, nn.Dropout) and layer.p for layer in self.gradients.layers
        )
        self.now = 0.0
        self._steps = np.zeros(m, np.int64)  # how many rows each has begun
        self._ends = np.zeros(m)
        self._waiting = np.zeros(m, bool)  # whose row is yet to be computed
        self._back: int | None = None  # who sent the last row, and takes parameters next
        self._events: list[tuple[float, int]] = []
        for worker in range(m):
            self._take(worker)

    def gather(
        self, round: int, *, by_server: bool, honest: bool, samples: Sequence[Sample] = ()
    ) -> Gathered:
        """Let rows come until the policy decides."""
        del by_server, honest, samples
        clock = self.reception.begin()
        decided = False
        while not decided:
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
            try:
                decided = self.reception.take(worker)
            except SilenceError as error:
                raise EngineError(str(error)) from None
        return self.reception.gathered(round, self.now)

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along what was decided on; who has the parameters computes before they change."""
        if self.reception.steps(aggregate):
            self._compute(None)
        return self.reception.update(aggregate, factor)

    def _take(self, worker: int) -> None:
        m = self.task.num_workers
        step = int(self._steps[worker])
        self.reception.give(worker)
        self._ends[worker] = self.now + self.speeds.seconds(worker, m, self.task.seed, step)
        self._steps[worker] += 1
        self._waiting[worker] = True
        heapq.heappush(self._events, (float(self._ends[worker]), worker))

    def _compute(self, clock: Clock | None) -> None:
        """Compute the rows of all who have the current parameters and have not computed yet."""
        workers = np.flatnonzero(self._waiting).tolist()
        task, rows, losses = self.task, self.reception.rows, self.reception.losses
        drawn = []
        for worker in workers:
            step = int(self._steps[worker]) - 1
            batch = task.batches(step, worker, worker + 1)
            drawn.append(tuple(part.clone() for part in batch))
        if clock is not None:
            clock.stop("data")
        out = rows.new_empty(len(workers), rows.shape[1])
        if workers and self._merges:
            inputs, targets = (torch.cat(part) for part in zip(*drawn, strict=True))
            losses[workers] = self.gradients(inputs, targets, out, task.seed, 0).numpy()
        else:
            for place, (worker, (inputs, targets)) in enumerate(zip(workers, drawn, strict=True)):
                step = int(self._steps[worker]) - 1
                row = out[place : place + 1]
                loss = self.gradients(inputs, targets, row, task.seed, step, worker)
                losses[worker] = float(loss)
        beta = task.worker_momentum
        if beta and workers:
            out.mul_(1 - beta).add_(rows[workers], alpha=beta)
        rows[workers] = out
        self._waiting[workers] = False
        if clock is not None:
            clock.stop("gradients")

    def state(self) -> dict[str, torch.Tensor]:
        """Return who is at what, and what the server remembers."""
        clock = {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "back": torch.tensor(-1 if self._back is None else self._back),
        }
        clock |= {name: torch.from_numpy(getattr(self, f"_{name}")) for name in _ARRAYS}
        return clock | self.reception.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.reception.load_state(state)
        self.now = float(state["now"])
        for name in _ARRAYS:
            np.copyto(getattr(self, f"_{name}"), state[name].numpy())
        back = int(state["back"])
        self._back = None if back < 0 else back
        self._events = [(float(end), i) for i, end in enumerate(self._ends) if i != self._back]
        heapq.heapify(self._events)

    def close(self) -> None:
        """End the threads."""
        self.reception.close()


_ARRAYS = ("steps", "ends", "waiting")
