"""The aggregation of one training step under DDP, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.detection.observer import IMPLAUSIBLE, Segment, total_of, within
from phocas.integrations.ddp.replay import Replay
from phocas.integrations.ddp.verify import agree
from phocas.integrations.detection_state import DetectionState
from phocas.integrations.wire import Bucket, Wire, as_bytes, pack, read
from phocas.rules import Explanation, Monitor, ShardedAggregation
from phocas.rules.measures import Partial
from phocas.seeds import Stream, generator


class DDPAggregator:
    """Aggregation of the buckets of each step, and detection in the columns of this rank.

    Every rank tests which ranks deviate from the others in the columns that it aggregates, and
    locates their outliers. It sends its report to all ranks before the result of the last bucket.
    Detection tolerates up to b wrong reports.

    A column rule finishes each bucket when it arrives. A rule that measures whole rows measures
    each bucket when it arrives, and finishes all buckets after the last one. The gradient of a step
    is the concatenation of its buckets.

    Under ``watch`` with ``threat="faults"``, each bucket of a step that is not observed is averaged
    by one all-reduce, as without a guard. The all-reduce has one more value, by which a rank says
    that its values are not finite or far too large. If any rank says so, the bucket is exchanged as
    in an observed step.
    """

    def __init__(
        self,
        wire: Wire,
        state: DetectionState,
        *,
        verify: bool,
        seed: int,
        replay: Replay | None = None,
    ) -> None:
        self.wire, self.replay = wire, replay
        self.rule = state.rule
        self.state, self.detector = state, state.detector
        self.observer = state.observer(seed)
        self.shifts = (0, 1) if verify else (0,)
        self.seed = seed
        watches = isinstance(self.rule, Monitor) and not verify
        self.averages = watches and self.detector.threat == "faults"
        """Whether steps that are not observed are averaged by an all-reduce."""
        self.usual: dict[int, float] = {}
        """For the first column of each bucket, the usual norm of this rank's values in it."""
        self.excluded: list[int] = []
        self.forms: dict[tuple[int, torch.dtype, int], _Form] = {}
        self._new_evaluation()
        self._begin()

    def _new_evaluation(self) -> None:
        rng = generator(Stream.RULE, self.seed, self.observer.step)
        # Blocks of columns start at each shard, so that nothing is exchanged for them (except by
        # a rule that filters cells).
        self.evaluation = ShardedAggregation(self.rule, self.wire.m, rng, whole_blocks=False)
        self.measures = self.evaluation.request is not None
        """Whether the rule measures whole rows before it can finish a bucket."""

    def _begin(self) -> None:
        self.waiting: list[Bucket] = []
        self.measured: dict[int, list[Partial]] = {}
        self.columns = 0
        self.exchanges = True
        self.lost = np.zeros((self.wire.m, self.wire.m))

    def take(
        self, flat: torch.Tensor, segments: Callable[[], Sequence[Segment]], *, last: bool
    ) -> list[torch.Tensor]:
        """Process a bucket; return the buckets that now hold the aggregate, in their order."""
        if not self.columns:
            if self.state.job is not None:
                self.state.receive()
            self.state.compare_replicas()
            if self.state.changed:
                self.state.react()
            self.excluded = self.state.excluded()
            if self.observer.awake and self.state.sizes.used is not False:
                self.observer.sizes = self.state.sizes.exchange(self.wire)
            self.exchanges = self.observer.awake or not self.averages
        if self.replay is not None:
            self.replay.keep(flat, segments)
        if not self.exchanges and self._average(flat):
            self.columns += flat.numel()
            if last:
                self.detector.pass_over()
                self._end()
                self._begin()
            return [flat]
        self.exchanges = True  # the report of this step comes with the last bucket
        if self.averages and self.observer.awake:
            self._measure_usual(flat)
        if not self.columns and not self.rule.columnwise:  # column rules need no new state
            self._new_evaluation()
        bucket = self.wire.scatter(flat, self.columns, self.shifts, place=len(self.waiting))
        self._see(bucket, segments)
        for rows in bucket.columns.values():
            self.state.exclude(rows, self.excluded)
        if last:
            self.observer.bet()
        self.columns += flat.numel()
        if not self.measures:
            self._finish(bucket, last=last)
            done = [flat]
        else:
            self.waiting.append(bucket)
            for shard, columns in bucket.columns.items():
                self.measured.setdefault(shard, []).append(self._measure(shard, bucket, columns))
            done = self._decide() if last else []
        if last:
            self._begin()
        return done

    def _see(self, bucket: Bucket, segments: Callable[[], Sequence[Segment]]) -> None:
        """Pass the shards that this rank aggregates to its observer, for detection.

        With verification, this rank also holds a second shard, which the test does not use.
        """
        for shard, rows in bucket.columns.items():
            begin, end = bucket.bounds[shard]
            if shard == self.wire.rank:
                here = partial(_within, segments, begin, end)
                self.observer.see(rows, here, bucket.start + begin)
            elif self.observer.awake and end > begin:
                self.observer.look(rows, within(segments(), begin, end), bucket.start + begin)

    def _measure(self, shard: int, bucket: Bucket, columns: torch.Tensor) -> Partial:
        return self.evaluation.partial(self._held(columns), bucket.start + bucket.bounds[shard][0])

    def _held(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of a shard, moved to a device on which the rule can process them."""
        return columns.cpu() if self.evaluation.filters else columns

    def _decide(self) -> list[torch.Tensor]:
        """Answer the requests of the rule about whole rows, then finish all buckets."""

        def compute(shard: int, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            # Reuse the measurements that were made when the buckets arrived.
            known = self.measured.pop(shard, None)
            if known is None:
                known = [
                    self._measure(shard, bucket, part)
                    for bucket, part in zip(self.waiting, columns, strict=True)
                ]
            return [pack(known)]

        while self.evaluation.request is not None:
            messages = agree(self.wire, self.waiting, compute)
            told = zip(self.wire.ranks, messages, strict=True)
            self.evaluation.answer(read(rank, message) for rank, message in told)
        for bucket in self.waiting:
            self._finish(bucket, last=bucket is self.waiting[-1])
        return [bucket.flat for bucket in self.waiting]

    def _finish(self, bucket: Bucket, *, last: bool) -> None:
        """Aggregate the shard of this rank, and write the results of all ranks to the bucket."""
        m = self.wire.m
        own, scale = self.wire.rank, self.state.scale
        aside = [self.observer.report()] if last else []
        if scale is not None:
            scale.measure(self.observer.step, self.evaluation, bucket.columns[own])
            aside += [scale.report()] if last else []
        before = sum(part.numel() for part in aside)
        form = self._form(bucket, before + 8 * m)
        if len(self.shifts) == 1:
            result = self._result(bucket, form, own, [bucket.columns[own]])
            messages = self.wire.gather([*aside, *result], form.sizes)
        else:
            compute = partial(self._result, bucket, form)
            messages = agree(self.wire, [bucket], compute, form.sizes, aside)
        form.read(messages, bucket.flat.dtype)
        numbers = form.numbers()
        torch.cat(form.values, out=bucket.flat)
        self.lost += numbers[:, before // 8 :]
        if last:
            if scale is not None:
                scale.hear(numbers[:, before // 8 - 1])
            reports = numbers[:, : aside[0].numel() // 8]
            self.state.hear(reports, self.lost, self.columns)
            self._end()

    def _end(self) -> None:
        """End the step."""
        self.observer.end()
        self.observer.follow(self.detector)
        if self.state.job is not None:
            self.state.send()
        if self.replay is not None:
            self.state.confirm(self.replay)
        if self.state.changed:
            self.state.react()

    def _average(self, flat: torch.Tensor) -> bool:
        """Average a bucket over all ranks; return whether this was done.

        If the values of any rank are not finite or far too large, the bucket is left as it is. All
        ranks return the same.
        """
        size, total = flat.numel(), total_of(flat)
        limit = IMPLAUSIBLE * self.usual.get(self.columns, 0.0) * math.sqrt(size)
        absurd = not abs(total) <= (limit or math.inf) or math.isinf(total)
        values = self.wire.memory("average", size + 1, flat.dtype)
        torch.div(flat, self.wire.m, out=values[:size])
        values[size] = float(absurd)
        self.wire.add_up(values)
        if values[size].item() != 0:
            return False
        flat.copy_(values[:size])
        return True

    def _measure_usual(self, flat: torch.Tensor) -> None:
        """Raise the usual norm of a bucket to that of this step, at most tenfold."""
        length = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        before = self.usual.get(self.columns, 0.0) or length
        if math.isfinite(length):
            self.usual[self.columns] = max(before, min(length, 10 * before))

    def _result(
        self, bucket: Bucket, form: _Form, shard: int, columns: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Aggregate a shard; return as bytes the dropped values of each rank, and the aggregate."""
        result = self.state.average(columns[0], self.excluded)
        if result is None and self.rule.columnwise:
            result = form.explain(self.evaluation, shard, columns[0])
        elif result is None:
            start = bucket.start + bucket.bounds[shard][0]
            result = self.evaluation.explain(self._held(columns[0]), start)
        result.dropped[self.excluded] = 1.0
        lost = torch.from_numpy(result.dropped * bucket.width(shard))
        return [as_bytes(lost), as_bytes(result.value)]

    def _form(self, bucket: Bucket, head: int) -> _Form:
        key = (bucket.flat.numel(), bucket.flat.dtype, head)
        if key not in self.forms:
            item = bucket.flat.element_size()
            sizes = [head + item * bucket.width(shard) for shard in range(self.wire.m)]
            self.forms[key] = _Form(head, sizes)
        return self.forms[key]


def _within(segments: Callable[[], Sequence[Segment]], begin: int, end: int) -> Sequence[Segment]:
    return within(segments(), begin, end)


class _Form:
    """The layout of the messages of all ranks: a head of numbers, then the values of the shard.

    The head counts the dropped values of each rank; with the last bucket, the report of the sender
    comes before these counts. The layout is computed once for all buckets of one size, because
    their messages reuse the same tensors.
    """

    def __init__(self, head: int, sizes: Sequence[int]) -> None:
        self.head, self.sizes = head, sizes
        self.standing: dict[int, tuple[torch.Tensor, Callable[[], Explanation]]] = {}
        self.messages: Sequence[torch.Tensor] = ()
        self.heads: list[torch.Tensor] = []
        self.arrays: list[NDArray[np.float64]] = []
        """The heads in host memory, empty if they are on a device."""
        self.values: list[torch.Tensor] = []

    def explain(
        self, evaluation: ShardedAggregation, shard: int, columns: torch.Tensor
    ) -> Explanation:
        """Aggregate a shard by a column rule; rows in the same memory reuse the preparation."""
        if shard not in self.standing or self.standing[shard][0] is not columns:
            self.standing[shard] = (columns, evaluation.prepare(columns, 0))
        return self.standing[shard][1]()

    def read(self, messages: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        if messages is self.messages:
            return
        self.messages = messages
        self.heads = [message[: self.head].view(torch.float64) for message in messages]
        here = self.heads[0].device.type == "cpu"
        self.arrays = [head.numpy() for head in self.heads] if here else []
        self.values = [message[self.head :].view(dtype) for message in messages]

    def numbers(self) -> NDArray[np.float64]:
        """Return the heads as a matrix, a row for each rank."""
        return np.array(self.arrays or [head.cpu().numpy() for head in self.heads])
