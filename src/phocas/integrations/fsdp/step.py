"""The aggregation of one training step under FSDP2, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phocas.detection.observer import report_bytes, within
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.fsdp.exchange import Arrived, Unit
from phocas.integrations.fsdp.replay import ShardedReplay
from phocas.integrations.wire import Wire, as_bytes, pack, read
from phocas.rules import Explanation, ShardedAggregation
from phocas.seeds import Stream, generator


class ModelStep:
    """One training step of a model, over all of its meshes.

    A step begins when its first unit is reduced. It ends at the end of the backward pass: only the
    autograd engine knows which unit is the last. Pipeline schedules reduce gradients after their
    backward passes. Then a step ends when all units were reduced, or before one is reduced again.

    Attributes:
        aggregators: the aggregation on each mesh. All of them count every step, even if their mesh
            has no gradients in it, so that the groups of a job have the same number of steps.
        units: the numbers of all units with gradients.
        react: reacts to the evidence of the step before.
        averaged: torch's parameter groups that are averaged because of ``small_groups="average"``.
        speaks: whether this rank warns for all ranks of the job.
    """

    def __init__(self, averaged: Sequence[Any] = (), *, speaks: bool = True) -> None:
        self.aggregators: list[FSDPAggregator] = []
        self.units: set[int] = set()
        self.averaged, self.speaks = averaged, speaks
        self.said_twice = self.said_partial = False
        self.react: Callable[[], None] = lambda: None
        self.reduced: set[int] = set()

    def catch_up(self) -> None:
        """Receive the reports of the last step."""
        for each in self.aggregators:
            each.catch_up()

    def enter(self, unit: Unit) -> None:
        """Begin the step if this unit is the first one."""
        backward = in_backward()
        if not backward and unit.number in self.reduced:
            self.end()
        if not self.reduced:
            self.catch_up()
            for each in self.aggregators:
                each.state.compare_replicas()
            self.react()
            for each in self.aggregators:
                each.begin()
        self.reduced.add(unit.number)
        if backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)  # noqa: SLF001

    def leave(self) -> None:
        """End the step if all units were reduced outside of a backward pass."""
        if self.reduced >= self.units and not in_backward():
            self.end()

    def end(self) -> None:
        """Send the reports of this rank, unless they have been sent."""
        if self.reduced:
            self.reduced.clear()
            for each in self.aggregators:
                each.end()
                each.confirm()


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, or what was queued for its end."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - as torch's FSDP2 does


class FSDPAggregator:
    """Aggregation of the units of one mesh, and detection in the columns of this rank.

    Units are reduced one after the other in the backward pass, each when its gradients are ready.
    After the last unit, every rank sends its report to the others. This small exchange completes in
    the next step.
    """

    def __init__(
        self,
        wire: Wire,
        state: DetectionState,
        *,
        shards: int,
        seed: int,
        together: ModelStep | None = None,
        replay: ShardedReplay | None = None,
    ) -> None:
        self.wire, self.state, self.shards, self.seed = wire, state, shards, seed
        self.together = together or ModelStep()
        self.together.aggregators.append(self)
        self.rule, self.replay = state.rule, replay
        self.observer = state.observer(seed)
        self.aggregation = ShardedAggregation(self.rule, wire.m, whole_blocks=False)
        self.pending: _PendingReports | None = None
        self.excluded: list[int] = []
        self._begin()

    @property
    def step(self) -> int:
        """Return the number of steps taken."""
        return self.observer.step

    def _begin(self) -> None:
        self.dropped = np.zeros(self.wire.m)
        self.columns = 0

    def begin(self) -> None:
        """Begin a step: exclude the ranks that are flagged by now, and exchange batch sizes."""
        self.excluded = self.state.excluded()
        if self.observer.awake and self.state.sizes.used is not False:
            self.observer.sizes = self.state.sizes.exchange(self.wire)

    def reduce(self, unit: Unit, arrived: Arrived) -> Any:
        """Aggregate the rows of this rank's columns of a unit."""
        self.together.enter(unit)
        rows = arrived.rows
        whole = arrived.width == unit.width
        segments = within(unit.segments, *arrived.own) if whole else ()
        self.observer.see(rows, segments, unit.number)
        self.state.exclude(rows, self.excluded)
        average = self.state.average(rows, self.excluded)
        result = self._explain(unit, arrived) if average is None else average
        result.dropped[self.excluded] = 1.0
        self.dropped += result.dropped * rows.shape[1]
        self.columns += arrived.width
        return result.value

    def _explain(self, unit: Unit, arrived: Arrived) -> Explanation:
        rows = arrived.rows
        if self.rule.columnwise:
            if self.state.scale is not None:
                self.state.scale.measure(self.step, self.aggregation, rows)
            return self.aggregation.explain(rows, 0)
        rng = generator(Stream.RULE, self.seed, self.step, unit.number)
        aggregation = ShardedAggregation(self.rule, self.wire.m, rng, whole_blocks=False)
        host = rows.cpu()
        while aggregation.request is not None:
            measured = aggregation.partial(host, arrived.start)
            messages = self.wire.gather([pack([measured])])
            told = zip(self.wire.ranks, messages, strict=True)
            aggregation.answer(read(rank, message) for rank, message in told)
        return aggregation.explain(host, arrived.start)

    def end(self) -> None:
        """Send this rank's report of the step."""
        if self.columns:
            self.observer.bet()
        dropped = as_bytes(torch.from_numpy(self.dropped))
        scale = [] if self.state.scale is None else [self.state.scale.report()]
        parts = [self.observer.report(), *scale, dropped]
        self.pending = _PendingReports.send(self.wire, parts, self.columns * self.shards)
        self.state.send()
        self.observer.end()
        self._begin()

    def confirm(self) -> None:
        """Replay the micro-batch of each rank that this step has flagged, if that is wanted."""
        if self.replay is not None:
            self.catch_up()
            self.state.confirm(self.replay)

    def catch_up(self) -> None:
        """Receive the reports of the last step."""
        self.state.receive()
        if self.pending is None:
            return
        sent, self.pending = self.pending, None
        messages = sent.wait(self.wire.m)
        before = report_bytes(self.wire.m) // 8
        if self.state.scale is not None:
            self.state.scale.hear(messages[:, before])
        self.state.hear(messages[:, :before], messages[:, -self.wire.m :], sent.columns)
        self.observer.follow(self.state.detector)


@dataclass(frozen=True, slots=True)
class _PendingReports:
    """The reports of a step that have been sent, and the step's number of columns."""

    arrived: torch.Tensor
    work: dist.Work
    columns: int

    @classmethod
    def send(cls, wire: Wire, parts: Sequence[torch.Tensor], columns: int) -> _PendingReports:
        own = torch.cat([part.to(wire.device) for part in parts])
        arrived = own.new_empty(wire.m * own.numel())
        return cls(arrived, wire.gather_later(arrived, own), columns)

    def wait(self, m: int) -> np.ndarray:
        """Return the reported numbers of all ranks, (m, numbers)."""
        self.work.wait()
        return np.asarray(self.arrived.view(torch.float64).cpu().numpy().reshape(m, -1))
