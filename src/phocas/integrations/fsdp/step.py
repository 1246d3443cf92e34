"""The aggregation of one training step under FSDP2, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phocas.detection.observer import Segment, report_bytes, within
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.fsdp.exchange import Arrived
from phocas.integrations.wire import Wire, as_bytes, pack, read
from phocas.rules import Explanation, ShardedAggregation
from phocas.seeds import Stream, generator


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP2 reduces together, with their columns in the shard of this rank."""

    name: str
    number: int
    segments: tuple[Segment, ...]
    width: int


class FSDPAggregator:
    """Aggregation of the units of each step, and detection in the columns of this rank.

    Units are reduced one after the other in the backward pass, each when its gradients are ready.
    After the last unit, every rank sends its report to the others. This small exchange completes in
    the next step.
    """

    def __init__(self, wire: Wire, state: DetectionState, *, shards: int, seed: int) -> None:
        self.wire, self.state, self.shards, self.seed = wire, state, shards, seed
        self.rule = state.rule
        self.observer = state.observer(seed)
        self.aggregation = ShardedAggregation(self.rule, wire.m, whole_blocks=False)
        self.pending: _PendingReports | None = None
        self.said_twice = self.said_partial = False
        self._begin()

    @property
    def step(self) -> int:
        """Return the number of steps taken."""
        return self.observer.step

    def _begin(self) -> None:
        self.dropped = np.zeros(self.wire.m)
        self.columns = 0
        self.excluded: list[int] = []

    def reduce(self, unit: Unit, arrived: Arrived) -> Any:
        """Aggregate the rows of this rank's columns of a unit."""
        if self.columns == 0:
            self.catch_up()
            self.state.react()
            self.excluded = self.state.excluded()
        # Only the autograd engine knows which unit is the last one.
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        engine.queue_callback(partial(self.end, self.step))
        rows = arrived.rows
        whole = arrived.width == unit.width
        segments = within(unit.segments, *arrived.own) if whole else ()
        self.observer.see(rows, segments, unit.number)
        self.state.exclude(rows, self.excluded)
        result = self._explain(unit, arrived)
        result.dropped[self.excluded] = 1.0
        self.dropped += result.dropped * rows.shape[1]
        self.columns += arrived.width
        return result.value

    def _explain(self, unit: Unit, arrived: Arrived) -> Explanation:
        rows = arrived.rows
        if self.rule.columnwise:
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

    def end(self, step: int) -> None:
        """Send this rank's report of the step, unless the report has been sent."""
        if step != self.step:
            return
        self.observer.bet()
        dropped = as_bytes(torch.from_numpy(self.dropped))
        parts = [self.observer.report(), self.state.scale.report(), dropped]
        self.pending = _PendingReports.send(self.wire, parts, self.columns * self.shards)
        self.state.send()
        self.observer.end()
        self._begin()

    def catch_up(self) -> None:
        """Receive the reports of the last step."""
        self.state.receive()
        if self.pending is None:
            return
        sent, self.pending = self.pending, None
        messages = sent.wait(self.wire.m)
        before = report_bytes(self.wire.m) // 8
        self.state.scale.hear(messages[:, before])
        self.state.hear(messages[:, :before], messages[:, before + 1 :], sent.columns)
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
