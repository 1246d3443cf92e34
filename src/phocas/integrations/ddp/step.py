"""One step of training, bucket by bucket: columns in, the same aggregate out on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.integrations.ddp.verify import agree
from phocas.integrations.guard import Ledger
from phocas.integrations.wire import Bucket, Wire, as_bytes, pack, read
from phocas.integrations.witness import Segment, testimony_bytes, within
from phocas.rules import Evaluation, Explanation
from phocas.rules.measures import Partial
from phocas.seeds import Stream, generator


class Aggregator:
    """The rule over the buckets of each step, and what it says of each rank.

    Every rank bets on who is far from whom in the columns that it aggregates, and looks where wrong
    values lie. It tells the others what these bets have won and what it has found, before the
    result of the last bucket. Up to b of them may lie about it.

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
        self.forms: dict[tuple[int, torch.dtype, int], _Form] = {}
        self.evaluation = self._evaluation()
        self._begin()

    def _evaluation(self) -> Evaluation:
        rng = generator(Stream.RULE, self.seed, self.witness.step)
        # Blocks of columns are those of a shard, unless rows are cleaned: nothing is exchanged.
        return Evaluation(self.rule, self.wire.m, rng, whole_blocks=False)

    def _begin(self) -> None:
        self.waiting: list[Bucket] = []
        self.measured: dict[int, list[Partial]] = {}
        self.columns = 0
        self.lost = np.zeros((self.wire.m, self.wire.m))

    def take(
        self, flat: torch.Tensor, segments: Callable[[], Sequence[Segment]], *, last: bool
    ) -> list[torch.Tensor]:
        """Take a bucket; return the buckets that now hold the aggregate, in the order taken."""
        if not self.columns:
            self.ledger.receive()
            self.ledger.react()
        if not self.columns and not self.rule.columnwise:  # which ask nothing and draw nothing
            self.evaluation = self._evaluation()
        bucket = self.wire.scatter(flat, self.columns, self.shifts, place=len(self.waiting))
        self._see(bucket, segments)
        if last:
            self.witness.bet()
        self.columns += flat.numel()
        if self.evaluation.request is None:
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
        """Let the witness look at the shards that are held here; only the own one is bet on."""
        for shard, rows in bucket.columns.items():
            begin, end = bucket.bounds[shard]
            if shard == self.wire.rank:
                here = partial(_within, segments, begin, end)
                self.witness.see(rows, here, bucket.start + begin)
            elif self.witness.awake and end > begin:
                self.witness.look(rows, within(segments(), begin, end))

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
            told = zip(self.wire.ranks, messages, strict=True)
            self.evaluation.answer(read(rank, message) for rank, message in told)
        for bucket in self.waiting:
            self._finish(bucket, last=bucket is self.waiting[-1])
        return [bucket.flat for bucket in self.waiting]

    def _finish(self, bucket: Bucket, *, last: bool) -> None:
        """Aggregate the own shard of a bucket, and put everyone's in the place of its values."""
        m = self.wire.m
        before = testimony_bytes(m) if last else 0
        form = self._form(bucket, before + 8 * m)

        def compute(shard: int, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            start = bucket.start + bucket.bounds[shard][0]
            if self.rule.columnwise:
                result = form.explain(self.evaluation, shard, columns[0])
            else:
                result = self.evaluation.explain(self._held(columns[0]), start)
            lost = torch.from_numpy(result.dropped * bucket.width(shard))
            return [as_bytes(lost), as_bytes(result.value)]

        aside = [self.witness.testimony()] if last else []
        form.read(agree(self.wire, [bucket], compute, form.sizes, aside), bucket.flat.dtype)
        numbers = form.numbers()
        torch.cat(form.values, out=bucket.flat)
        self.lost += numbers[:, before // 8 :]
        if last:
            self.ledger.hear(numbers[:, : before // 8], self.lost, self.columns)
            self.witness.end()
            self.ledger.instruct(self.witness)
            self.ledger.send()
            self.ledger.react()

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
    """Where in the messages of all ranks the numbers and the values of their shards are.

    It is worked out once for buckets of one size: as long as messages come in the same tensors.
    """

    def __init__(self, head: int, sizes: Sequence[int]) -> None:
        self.head, self.sizes = head, sizes
        self.standing: dict[int, tuple[torch.Tensor, Callable[[], Explanation]]] = {}
        self.messages: Sequence[torch.Tensor] = ()
        self.heads: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def explain(self, evaluation: Evaluation, shard: int, columns: torch.Tensor) -> Explanation:
        """Aggregate a shard by a column rule; the rows of a shard come in the same memory."""
        if shard not in self.standing or self.standing[shard][0] is not columns:
            self.standing[shard] = (columns, evaluation.standing(columns, 0))
        return self.standing[shard][1]()

    def read(self, messages: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        if messages is self.messages:
            return
        self.messages = messages
        self.heads = [message[: self.head].view(torch.float64) for message in messages]
        self.values = [message[self.head :].view(dtype) for message in messages]

    def numbers(self) -> NDArray[np.float64]:
        """Return the numbers before the values, a row for each rank."""
        return np.asarray(torch.stack(self.heads).cpu().numpy())
