"""Kardam: Damaskinos et al., *Asynchronous Byzantine Machine Learning*, ICML 2018.

Its authors' template is github.com/LPD-EPFL/kardam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.rules import Rule
from phocas.settings import nonnegative
from phocas.specs import count, normalise

_PIECE = 1 << 15  # values: a few such pieces fit a cache of 1 MB


@dataclass(frozen=True)
class Kardam(Policy):
    """Kardam: accept a row if it changed no faster than rows do, from nobody who sends too many.

    Worker p's row and its last one, g and g', with the parameters x and x' they were computed at,
    give its rate of change:

        K_p = |g - g'| / |x - x'|

    The row is accepted if K_p is at most the (m - b)/m quantile of the workers' latest, and if
    among 2b + 1 rows accepted in a row no b workers have sent more than b (the frequency filter).
    Needs m > 3b. Steps are damped by exp(-damping staleness).

    Left open is what is done with a worker's first row, which has none to be compared to: here it
    is only remembered. Nor is it said what K is of parameters that have not moved: here such rows
    are judged by how much they changed, among each other. A sign that is always flipped changes as
    fast as an honest row, and is accepted.

    The authors' template is another filter: it compares a row with the last one accepted from
    anybody, against two thirds of the workers' largest of 25 coefficients, accepts any row after m
    were refused, has no frequency filter, and damps with 0.2.

    Args:
        b: how many workers may lie, 3b < m.
        damping: how much less a stale row counts.

    >>> from phocas import Mean
    >>> Kardam(b=7).check(20, Mean())
    Traceback (most recent call last):
        ...
    ValueError: kardam needs m > 3b: got b=7 with m=20 workers, the largest b is 6
    """

    name = "kardam"
    needs_given = True

    b: int
    damping: float = 0.0

    def __post_init__(self) -> None:
        normalise(
            self,
            b=count("kardam", "b", self.b),
            damping=nonnegative("kardam", "damping", self.damping),
        )

    def check(self, m: int, rule: Rule) -> None:
        """Ask for m > 3b."""
        super().check(m, rule)
        if m <= 3 * self.b:
            raise ValueError(
                f"kardam needs m > 3b: got b={self.b} with m={m} workers, the largest b is"
                f" {(m - 1) // 3}"
            )

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state that has seen nobody."""
        del lr
        return _Kardam(self, m, rows.new_zeros(m, d))


class _Kardam(State):
    def __init__(self, policy: Kardam, m: int, like: torch.Tensor) -> None:
        self.policy = policy
        self.rows = like
        self.places = torch.zeros_like(like)
        self.seen = torch.zeros(m, dtype=torch.bool)
        self.rates = torch.full((m,), math.nan, dtype=torch.float64)
        self.changes = self.rates.clone()
        self.recent = torch.full((2 * policy.b,), -1, dtype=torch.int64)

    def receive(self, arrival: Arrival) -> Verdict:
        i = arrival.worker
        assert arrival.given is not None
        first = not self.seen[i]
        moved = _replace(self.places[i], arrival.given)
        changed = _replace(self.rows[i], arrival.row)
        self.seen[i] = True
        refused = Verdict(None, (i,), accepted=False)
        if first:
            return refused
        latest = self.rates if moved else self.changes
        rate = changed / moved if moved else changed
        latest[i] = math.inf if math.isnan(rate) else rate
        b = self.policy.b
        known = np.sort(latest[~latest.isnan()].numpy())
        # Until all are known, b of those who are may lie: the (known - b)-th is the limit.
        enough = len(known) > 2 * b
        if not (enough and rate <= known[len(known) - b - 1] < math.inf and self._frequent(i)):
            return refused
        if b:
            self.recent[:-1] = self.recent[1:].clone()
            self.recent[-1] = i
        return Verdict(arrival.row, (i,), factor=math.exp(-self.policy.damping * arrival.staleness))

    def _frequent(self, worker: int) -> bool:
        """Say whether the b who sent most of the last 2b + 1, this one included, sent at most b."""
        b = self.policy.b
        lately = [each for each in self.recent.tolist() if each >= 0] + [worker]
        counts = np.sort(np.bincount(lately))[::-1]
        return not b or int(counts[:b].sum()) <= b

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "places", "seen", "rates", "changes", "recent")
        return {name: getattr(self, name) for name in names}


def _replace(old: torch.Tensor, new: torch.Tensor) -> float:
    """Put a vector in another's place, piece by piece in a cache, and return how far it moved."""
    moved = 0.0
    for before, after in zip(torch.split(old, _PIECE), torch.split(new, _PIECE), strict=True):
        moved = math.hypot(moved, float(torch.linalg.vector_norm(after - before)))
        before.copy_(after)
    return moved
