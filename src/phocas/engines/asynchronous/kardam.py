"""Kardam: Damaskinos et al., *Asynchronous Byzantine Machine Learning*, ICML 2018.

Its authors' template is github.com/LPD-EPFL/kardam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.rules import Rule
from phocas.settings import nonnegative
from phocas.specs import checks, count

_PIECE = 1 << 15  # values: a few such pieces fit a cache of 1 MB


@dataclass(frozen=True)
class Kardam(Policy):
    """Kardam: filter rows by their rate of change, and workers by their frequency.

    Let g and g' be a worker's row and its row before, and x and x' the parameters at which they
    were computed. The rate of change of worker p is

        K_p = |g - g'| / |x - x'|

    A row is accepted if K_p is at most the (m - b)/m quantile of the latest rates of all workers,
    and if among the last 2b + 1 accepted rows no b workers have sent more than b (the frequency
    filter). Kardam needs m > 3b. Steps are damped by exp(-damping staleness).

    The paper leaves two cases open. A worker's first row has no predecessor: here it is stored, and
    no step is taken. If the parameters have not moved, K_p is undefined: here such rows are
    compared with each other by |g - g'|. A row whose sign is always flipped changes as fast as an
    honest row, and is accepted.

    The authors' template differs from the paper: it compares a row with the last row accepted from
    any worker, against two thirds of the largest of 25 coefficients of the workers. It accepts any
    row after m rejected ones, has no frequency filter, and damps with 0.2.

    Args:
        b: the number of Byzantine workers that are tolerated, 3b < m.
        damping: the rate at which the weight of a row decreases with its staleness.

    >>> from phocas import Mean
    >>> Kardam(b=7).check(20, Mean())
    Traceback (most recent call last):
        ...
    ValueError: kardam needs m > 3b: got b=7 with m=20 workers, the largest b is 6
    """

    name = "kardam"
    needs_given = True

    b: int = field(metadata=checks(count))
    damping: float = field(default=0.0, metadata=checks(nonnegative))

    def check(self, m: int, rule: Rule) -> None:
        """Raise ValueError unless m > 3b."""
        super().check(m, rule)
        if m <= 3 * self.b:
            raise ValueError(
                f"kardam needs m > 3b: got b={self.b} with m={m} workers, the largest b is"
                f" {(m - 1) // 3}"
            )

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return the state of the policy before the first row."""
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
        # b of the known rates may be of Byzantine workers: the (known - b)-th is the limit.
        enough = len(known) > 2 * b
        if not (enough and rate <= known[len(known) - b - 1] < math.inf and self._frequent(i)):
            return refused
        if b:
            self.recent[:-1] = self.recent[1:].clone()
            self.recent[-1] = i
        return Verdict(arrival.row, (i,), factor=math.exp(-self.policy.damping * arrival.staleness))

    def _frequent(self, worker: int) -> bool:
        """Return True if the b most frequent workers sent at most b of the last 2b + 1 rows."""
        b = self.policy.b
        lately = [each for each in self.recent.tolist() if each >= 0] + [worker]
        counts = np.sort(np.bincount(lately))[::-1]
        return not b or int(counts[:b].sum()) <= b

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("rows", "places", "seen", "rates", "changes", "recent")
        return {name: getattr(self, name) for name in names}


def _replace(old: torch.Tensor, new: torch.Tensor) -> float:
    """Overwrite a vector by another and return their distance, in pieces that fit into a cache."""
    moved = 0.0
    for before, after in zip(torch.split(old, _PIECE), torch.split(new, _PIECE), strict=True):
        moved = math.hypot(moved, float(torch.linalg.vector_norm(after - before)))
        before.copy_(after)
    return moved
