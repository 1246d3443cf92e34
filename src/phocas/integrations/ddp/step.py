"""One step of training, bucket by bucket: columns in, the same aggregate out on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.integrations.ddp.verify import agree
from phocas.integrations.guard import Ledger
from phocas.integrations.wire import Bucket, Wire, as_bytes, pack, read
from phocas.integrations.witness import Segment, heard, testimony_bytes, within
from phocas.rules import Evaluation
from phocas.rules.measures import Partial
from phocas.seeds import Stream, generator


class Aggregator:
    """The rule over the buckets of each step, and what it says of each rank.

    Every rank bets on who is far from whom in the columns that it aggregates, and looks where wrong
    values lie. It tells the others what these bets have won and what it has found, before the
    result of every bucket. Up to b of them may lie about it.

    A column rule finishes each bucket when it comes. A rule that measures whole rows measures each
    bucket when it comes, and finishes them all when the last one is in: a step's gradient is its
    buckets one after the other.
    """

    def __init__(self, wire: Wire, ledger: Ledger, *, verify: bool, seed: int) -> None:
        self.wire = wire
        self.rule = ledger.rule
        self.ledger = ledger
        self.witness = ledger.witness(seed)
        self.shifts = (0, 1) if verify else (0,)
        self.seed = seed
        self.step = 0
        self._begin()

    def _begin(self) -> None:
        rng = generator(Stream.RULE, self.seed, self.step)
        # Blocks of columns are those of a shard, unless rows are cleaned: nothing is exchanged.
        self.evaluation = Evaluation(self.rule, self.wire.m, rng, whole_blocks=False)
        self.waiting: list[Bucket] = []
        self.measured: dict[int, list[Partial]] = {}
        self.columns = 0
        self.dropped = np.zeros(self.wire.m)
        self.said: list[NDArray[np.float64]] = []

    def take(
        self, flat: torch.Tensor, segments: Sequence[Segment], *, last: bool
    ) -> list[torch.Tensor]:
        """Take a bucket; return the buckets that now hold the aggregate, in the order taken."""
        bucket = self.wire.scatter(flat, self.columns, self.shifts, place=len(self.waiting))
        self._see(bucket, segments)
        if last:
            self.witness.bet()
        self.columns += flat.numel()
        if self.evaluation.request is None:
            self._finish(bucket)
            done = [flat]
        else:
            self.waiting.append(bucket)
            for shard, columns in bucket.columns.items():
                self.measured.setdefault(shard, []).append(self._measure(shard, bucket, columns))
            done = self._decide() if last else []
        if last:
            self._hear()
            self.step += 1
            self._begin()
        return done

    def _hear(self) -> None:
        told = [heard(numbers, self.wire.m) for numbers in self.said]
        self.ledger.hear(
            np.array([odds for odds, _ in told]),
            [findings for _, findings in told],
            self.dropped / max(1, self.columns),
        )
        self.witness.attention = self.ledger.attention()
        self.witness.end()

    def _see(self, bucket: Bucket, segments: Sequence[Segment]) -> None:
        """Let the witness look at the shards that are held here; only the own one is bet on."""
        for shard, rows in bucket.columns.items():
            begin, end = bucket.bounds[shard]
            here = within(segments, begin, end)
            if shard == self.wire.rank:
                self.witness.see(rows, here, bucket.start + begin)
            else:
                self.witness.look(rows, here)

    def _measure(self, shard: int, bucket: Bucket, columns: torch.Tensor) -> Partial:
        return self.evaluation.partial(self._held(columns), bucket.start + bucket.bounds[shard][0])

    def _held(self, columns: torch.Tensor) -> torch.Tensor:
        """Return columns where the rule can work on a shard of them."""
        return columns.cpu() if self.evaluation.cleans else columns

    def _decide(self) -> list[torch.Tensor]:
        """Answer what the rule asks about whole rows, then finish all buckets."""

        def compute(shard: int, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            # What was measured while the buckets came is not measured again.
            known = self.measured.pop(shard, None)
            if known is None:
                known = [
                    self._measure(shard, bucket, part)
                    for bucket, part in zip(self.waiting, columns, strict=True)
                ]
            return [pack(known)]

        while self.evaluation.request is not None:
            messages = agree(self.wire, self.waiting, compute)
            self.evaluation.answer(read(rank, message) for rank, message in enumerate(messages))
        for bucket in self.waiting:
            self._finish(bucket)
        return [bucket.flat for bucket in self.waiting]

    def _finish(self, bucket: Bucket) -> None:
        """Aggregate the own shard of a bucket, and put everyone's in the place of its values."""

        def compute(shard: int, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            start = bucket.start + bucket.bounds[shard][0]
            result = self.evaluation.explain(self._held(columns[0]), start)
            lost = torch.from_numpy(result.dropped * bucket.width(shard))
            return [as_bytes(lost), as_bytes(result.value)]

        m = self.wire.m
        item = bucket.flat.element_size()
        before = testimony_bytes(m)
        sizes = [before + 8 * m + item * bucket.width(shard) for shard in range(m)]
        aside = [as_bytes(self.witness.testimony())]
        messages = agree(self.wire, [bucket], compute, sizes, aside)
        self.said = [message[:before].view(torch.float64).cpu().numpy() for message in messages]
        for message, (begin, end) in zip(messages, bucket.bounds, strict=True):
            self.dropped += message[before : before + 8 * m].view(torch.float64).cpu().numpy()
            bucket.flat[begin:end] = message[before + 8 * m :].view(bucket.flat.dtype)
