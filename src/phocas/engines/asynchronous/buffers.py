"""BASGD: Yang and Li, *Buffered Asynchronous SGD for Byzantine Learning*, JMLR 24 (2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.rules import Rule
from phocas.specs import count, normalise

SILENT = 20
"""A worker is silent if so many times m rows have come from others since its last one."""


class SilenceError(RuntimeError):
    """Too few workers answer for training to go on; what the last one sent is kept."""


@dataclass(frozen=True)
class Buffered(Policy):
    """Worker i feeds buffer i mod B with a running mean; the rule reduces the B rows when all are.

    At most q buffers are touched by q liars, so the rule must survive q wrong rows of B.

    A worker that has been silent while 20 m rows came is not waited for: if a buffer has none but
    silent workers, those who answer are dealt out over the buffers anew, and all buffers are
    emptied, so that no liar reaches two of them between two steps. (The paper reassigns after a
    time of waiting and leaves open how long, and what becomes of half-filled buffers.)

    Args:
        buffers: B, at most as many as there are workers.

    >>> from phocas import Phocas
    >>> Buffered(buffers=10).check(20, Phocas(b=5))
    Traceback (most recent call last):
        ...
    ValueError: Phocas needs 2b < m: got b=5 with m=10 ... (the rows are the 10 buffers)
    """

    name = "buffered"
    uses_rule = True

    buffers: int

    def __post_init__(self) -> None:
        normalise(self, buffers=count("buffered", "buffers", self.buffers, 1))

    def num_rows(self) -> int:
        """Return B."""
        return self.buffers

    def check(self, m: int, rule: Rule) -> None:
        """Ask for B <= m, and for a rule that B rows are enough for."""
        if self.buffers > m:
            raise ValueError(
                f"buffered needs a worker for each buffer: got buffers={self.buffers} with m={m}"
                f" workers, the largest number of buffers is {m}"
            )
        try:
            rule.check(self.buffers)
        except ValueError as error:
            raise ValueError(f"{error} (the rows are the {self.buffers} buffers)") from None

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return empty buffers."""
        del d, lr
        return _Buffers(m, rows)


class _Buffers(State):
    def __init__(self, m: int, rows: torch.Tensor) -> None:
        self.m = m
        self.rows = rows.zero_()
        self.counts = torch.zeros(len(rows), dtype=torch.int64)
        self.owner = torch.arange(m) % len(rows)
        self.last = torch.zeros(m, dtype=torch.int64)
        self.fed = torch.zeros(m, dtype=torch.bool)
        self.arrivals = torch.zeros((), dtype=torch.int64)

    def receive(self, arrival: Arrival) -> Verdict | None:
        self.news = ()
        if self.counts.all():  # they were reduced after the last row
            self._empty()
        self.arrivals += 1
        self.last[arrival.worker] = self.arrivals
        buffer = int(self.owner[arrival.worker])
        self.counts[buffer] += 1
        # A value that is not finite stays so in the mean: the rule is to see it.
        self.rows[buffer].lerp_(arrival.row, 1 / int(self.counts[buffer]))
        self.fed[arrival.worker] = True
        if self.counts.all():
            workers = torch.nonzero(self.fed).flatten().tolist()
            return Verdict(None, tuple(workers), tuple(self.owner[workers].tolist()))
        self._deal()
        return None

    def _deal(self) -> None:
        """Deal those who answer over the buffers, if there is a buffer that nobody feeds."""
        answers = self.arrivals - self.last <= SILENT * self.m
        fed = torch.zeros(len(self.rows), dtype=torch.bool)
        fed[self.owner[answers]] = True
        if fed.all():
            return
        there = torch.nonzero(answers).flatten()
        if len(there) < len(self.rows):
            raise SilenceError(
                f"only {len(there)} of {self.m} workers answer, too few for {len(self.rows)}"
                " buffers: use fewer of them"
            )
        silent = torch.nonzero(~answers).flatten().tolist()
        self.owner[there] = torch.arange(len(there)) % len(self.rows)
        self._empty()
        names = ", ".join(map(str, silent))
        self.news = (f"workers {names} are silent: the others were dealt over the buffers anew",)

    def _empty(self) -> None:
        self.counts.zero_()
        self.rows.zero_()
        self.fed.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "counts", "owner", "last", "fed", "arrivals")
        return {name: getattr(self, name) for name in names}
