"""Asynchronous training in this process: events in the order of a virtual clock.

A worker gets the current parameters and computes for a time that depends on the worker's speed. The
worker's row arrives when the server has taken a few more steps. Gradients are computed lazily,
together for all workers with the same parameters: when the first of these rows arrives, or before
the parameters change. So no old parameters are kept, and the result depends on the seed alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from phocas.engines import EngineError
from phocas.engines.asynchronous.buffers import SilenceError
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.server import AsynchronousServer
from phocas.engines.asynchronous.speeds import Speeds
from phocas.training.cluster import Gathered, Wanted
from phocas.training.gradients.merged import MergedBatchGradients
from phocas.training.server import Aggregate

if TYPE_CHECKING:
    from phocas.training.server import Action
    from phocas.training.task import Task
    from phocas.training.trainer import Clock


class AsynchronousCluster:
    """A cluster in which a round ends when the update policy takes a step or rejects a row."""

    same_rows = False

    def __init__(self, task: Task, policy: Policy, speeds: Speeds, max_staleness: int) -> None:
        m = task.num_workers
        speeds.check(m)
        self.async_server = AsynchronousServer(task, policy, max_staleness)
        self.task = task
        self.speeds = speeds
        self.kind = f"asynchronous {policy} {speeds} {max_staleness}"
        self.server = self.async_server.server
        self.gradients = self.async_server.gradients
        self._merges = isinstance(self.gradients, MergedBatchGradients) and not any(
            isinstance(layer, nn.Dropout) and layer.p for layer in self.gradients.layers
        )
        self.now = 0.0
        self._steps = np.zeros(m, np.int64)  # the number of rows that each worker has begun
        self._ends = np.zeros(m)
        self._waiting = np.zeros(m, bool)  # workers whose row is yet to be computed
        self._back: int | None = None  # the worker that sent the last row and gets parameters next
        self._events: list[tuple[float, int]] = []
        for worker in range(m):
            self._take(worker)

    def gather(self, round: int, clock: Clock, wanted: Wanted) -> Gathered:
        """Deliver rows to the policy in the order of the virtual clock, until the round ends.

        The round ends when the policy takes a step or rejects a row.
        """
        del wanted
        self.async_server.begin(clock)
        decided = False
        while not decided:
            if self._back is not None:
                self._take(self._back)
                self._back = None
            self.now, worker = self._events[0]
            if math.isinf(self.now):
                raise EngineError("all workers are infinitely slow: no further row will arrive")
            heapq.heappop(self._events)
            self._back = worker
            clock.stop("data")
            if self._waiting[worker]:
                self._compute(clock)
            try:
                decided = self.async_server.take(worker)
            except SilenceError as error:
                raise EngineError(str(error)) from None
        return self.async_server.gathered(round, self.now)

    def update(self, aggregate: Aggregate, factor: float) -> Action:
        """Step along the aggregate; compute the pending rows before the parameters change."""
        if self.async_server.steps(aggregate):
            self._compute(None)
        return self.async_server.update(aggregate, factor)

    def _take(self, worker: int) -> None:
        m = self.task.num_workers
        step = int(self._steps[worker])
        self.async_server.give(worker)
        self._ends[worker] = self.now + self.speeds.seconds(worker, m, self.task.seed, step)
        self._steps[worker] += 1
        self._waiting[worker] = True
        heapq.heappush(self._events, (float(self._ends[worker]), worker))

    def _compute(self, clock: Clock | None) -> None:
        """Compute the pending rows of all workers: all have the current parameters."""
        workers = np.flatnonzero(self._waiting).tolist()
        task, rows, losses = self.task, self.async_server.rows, self.async_server.losses
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
            out.mul_(task.momentum_gain).add_(rows[workers], alpha=beta)
        rows[workers] = out
        self._waiting[workers] = False
        if clock is not None:
            clock.stop("gradients")

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of the clock, the workers and the server."""
        clock = {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "back": torch.tensor(-1 if self._back is None else self._back),
        }
        clock |= {name: torch.from_numpy(getattr(self, f"_{name}")) for name in _ARRAYS}
        return clock | self.async_server.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self.async_server.load_state(state)
        self.now = float(state["now"])
        for name in _ARRAYS:
            np.copyto(getattr(self, f"_{name}"), state[name].numpy())
        back = int(state["back"])
        self._back = None if back < 0 else back
        self._events = [(float(end), i) for i, end in enumerate(self._ends) if i != self._back]
        heapq.heapify(self._events)

    def close(self) -> None:
        """End the threads."""
        self.async_server.close()


_ARRAYS = ("steps", "ends", "waiting")
