"""The scale of the whole gradient, which the tail of Heraclius needs, at ranks that hold shards."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.integrations.wire import as_bytes
from phocas.rules import ShardedAggregation

STEPS = 16
"""The steps from one measurement of all ranks to the next."""


class TailScale:
    """The sum of the squared radii of all columns, as the ranks last measured it together.

    Heraclius adds outliers up to a limit that is proportional to the root of this sum. A shard with
    nothing but rare features has radii of zero, and would keep none of them. So every rank measures
    its columns in one step of 16, and sends the sum to the others. Up to b ranks may send anything:
    the result is m times the (b+1)-th largest sum, which is at most m times the sum of some honest
    rank.

    Args:
        m: the number of ranks.
        b: the largest number of faulty ranks.
    """

    def __init__(self, m: int, b: int) -> None:
        self.m, self.b = m, b
        self.known = 0.0
        """The sum of the squared radii, 0 if it is not known."""
        self._own = np.full(1, np.nan)

    def measure(self, step: int, aggregation: ShardedAggregation, columns: torch.Tensor) -> None:
        """Add the squared radii of some columns of this rank, in one step of 16."""
        aggregation.squares = self.known
        if step % STEPS == 0:
            self._own[0] = np.nansum(self._own) + aggregation.squared_radii(columns)

    def report(self) -> torch.Tensor:
        """Return this rank's sum as bytes, NaN if it was not measured; reset the sum."""
        own, self._own = self._own, np.full(1, np.nan)
        return as_bytes(torch.from_numpy(own))

    def hear(self, sums: NDArray[np.float64]) -> None:
        """Set the result from the sums of all ranks; values that are not finite count as 0."""
        told = np.where(np.isfinite(sums), np.maximum(sums, 0), 0)
        if told.any():
            self.known = float(self.m * np.sort(told)[::-1][min(self.b, self.m - 1)])
