"""One step of training, bucket by bucket: columns in, the same aggregate out on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from phocas.integrations.ddp.verify import agree
from phocas.integrations.ddp.wire import Bucket, Wire, as_bytes, pack, unpack
from phocas.rules import Evaluation, Rule
from phocas.rules.bets import Bets
from phocas.rules.measures import Partial
from phocas.rules.sampling import Sample, products, views
from phocas.rules.suspicion import Suspicion
from phocas.seeds import Stream, generator


class Aggregator:
    """The rule over the buckets of each step, and what it says of each rank.

    Every rank bets on who is far from whom in the columns that it aggregates, and tells the others
    what these bets have won, before the result of every bucket. Up to b of them may lie about it.

    A column rule finishes each bucket when it comes. A rule that measures whole rows measures each
    bucket when it comes, and finishes them all when the last one is in: a step's gradient is its
    buckets one after the other.
    """

    def __init__(
        self, wire: Wire, rule: Rule, suspicion: Suspicion, *, verify: bool, seed: int
    ) -> None:
        self.wire = wire
        self.rule = rule
        self.suspicion = suspicion
        self.shifts = (0, 1) if verify else (0,)
        self.seed = seed
        self.bets = Bets(wire.m, suspicion.b)
        self.odds = np.zeros(wire.m)
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
        self.products = np.zeros((self.wire.m, self.wire.m))
        self.said = np.zeros((self.wire.m, self.wire.m))

    def take(self, flat: torch.Tensor, *, last: bool) -> list[torch.Tensor]:
        """Take a bucket; return the buckets that now hold the aggregate, in the order taken."""
        bucket = self.wire.scatter(flat, self.columns, self.shifts, place=len(self.waiting))
        self._compare(bucket, last=last)
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
            self.suspicion.judge(self.said, liars=self.suspicion.b)
            self.suspicion.update(self.dropped / max(1, self.columns))
            self.step += 1
            self._begin()
        return done

    def _compare(self, bucket: Bucket, *, last: bool) -> None:
        """Add up the products of ranks in the own shard; bet on them when the step is complete."""
        rows = bucket.columns[self.wire.rank]
        place = (self.seed, self.step, bucket.start + bucket.bounds[self.wire.rank][0])
        if rows.shape[1]:
            sample = Sample.draw(rows.shape[1], generator(Stream.SAMPLE, *place))
            here = torch.from_numpy(sample.columns(0, rows.shape[1])).to(rows.device)
            self.products += products(rows[:, here].double().cpu().numpy())
        if last:
            self.odds = self.bets.observe(views(self.products))

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
            self.evaluation.answer(_read(rank, message) for rank, message in enumerate(messages))
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
        sizes = [16 * m + item * bucket.width(shard) for shard in range(m)]
        aside = [as_bytes(torch.from_numpy(self.odds))]
        messages = agree(self.wire, [bucket], compute, sizes, aside)
        for shard, (message, (begin, end)) in enumerate(zip(messages, bucket.bounds, strict=True)):
            numbers = message[: 16 * m].view(torch.float64).cpu().numpy()
            self.said[shard] = numbers[:m]
            self.dropped += numbers[m:]
            bucket.flat[begin:end] = message[16 * m :].view(bucket.flat.dtype)


def _read(rank: int, message: torch.Tensor) -> Partial:
    try:
        return unpack(message)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
