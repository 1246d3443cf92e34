"""BASGD: Yang and Li, *Buffered Asynchronous SGD for Byzantine Learning*, JMLR 24 (2023)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.rules import Rule
from phocas.settings import at_least
from phocas.specs import checks

SILENT = 20
"""A worker is silent if SILENT times m rows have arrived since its last one."""


class SilenceError(RuntimeError):
    """Raised if too few workers answer to fill all buffers; the last row is kept."""


@dataclass(frozen=True)
class Buffered(Policy):
    """Buffered asynchronous SGD: the rule aggregates B buffers, each a mean of workers' rows.

    Buffer i mod B has the mean of the rows of worker i since the last step. The rule aggregates the
    B buffers when none is empty. Byzantine workers change at most one buffer each, so the rule must
    tolerate q wrong rows among B.

    A worker is silent if 20 m rows have arrived since its last one. If all workers of a buffer are
    silent, the others are assigned to the buffers anew. All buffers are then emptied, so that no
    Byzantine worker changes two of them between two steps. (The paper reassigns after a timeout. It
    leaves open how long that is, and what happens to half-filled buffers.)

    Args:
        buffers: B, at most the number of workers.

    >>> from phocas import Phocas
    >>> Buffered(buffers=10).check(20, Phocas(b=5))
    Traceback (most recent call last):
        ...
    ValueError: Phocas needs 2b < m: got b=5 with m=10 ... (the rows are the 10 buffers)
    """

    name = "buffered"
    uses_rule = True

    buffers: int = field(metadata=checks(at_least(1)))

    def num_rows(self) -> int:
        """Return the number of buffers B, which are the rows that the rule aggregates."""
        return self.buffers

    def check(self, m: int, rule: Rule) -> None:
        """Raise ValueError unless B <= m and the rule works with B rows."""
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
        """Return the state of the policy with empty buffers."""
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
        if self.counts.all():  # they were aggregated after the last row
            self._empty()
        self.arrivals += 1
        self.last[arrival.worker] = self.arrivals
        buffer = int(self.owner[arrival.worker])
        self.counts[buffer] += 1
        # A value that is not finite stays so in the mean: the rule handles it.
        self.rows[buffer].lerp_(arrival.row, 1 / int(self.counts[buffer]))
        self.fed[arrival.worker] = True
        if self.counts.all():
            workers = torch.nonzero(self.fed).flatten().tolist()
            return Verdict(None, tuple(workers), tuple(self.owner[workers].tolist()))
        self._reassign()
        return None

    def _reassign(self) -> None:
        """If all workers of a buffer are silent, distribute the other workers over all buffers."""
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
        self.news = (f"workers {names} are silent: the others were assigned to the buffers anew",)

    def _empty(self) -> None:
        self.counts.zero_()
        self.rows.zero_()
        self.fed.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "counts", "owner", "last", "fed", "arrivals")
        return {name: getattr(self, name) for name in names}
