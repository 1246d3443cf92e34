"""Windows over weighted rows; the mass of some values is their total weight.

Weights are integers whose total is so small that any sum of weights and of halves of weights is
exact in single precision. So exactly the given mass is cut, in whatever order weights are added.
With rounding, a share of 1e-8 of a Byzantine value of 1e38 would remain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_TOTAL = 1 << 22
"""Largest total of units for which halves are also exact in single precision."""
SCALE = 0.5
"""Scale of distances with which none between finite values overflows."""


@dataclass(frozen=True, slots=True)
class Masses:
    """The part of a column's total weight (mass) that is averaged: a :class:`Window` of weights.

    The mass ``trim`` is cut from each end of the sorted column. With ``drop``, the mean of the rest
    is only a centre: the mass ``drop`` that is farthest from the centre is dropped, and all other
    mass is averaged. ``cutoff`` has the same meaning as in a window.
    """

    trim: float
    drop: float | None = None
    cutoff: float = 0.0

    def kept(self, total: float) -> float:
        """Return how much of a total mass is averaged."""
        return total - 2 * self.trim if self.drop is None else total - self.drop


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """The weights of rows, in integer units of at most ``LARGEST_TOTAL``, and what is cut."""

    units: NDArray[np.int64]
    masses: Masses


@dataclass(frozen=True, slots=True)
class Sure:
    """Numbers of values that are cut, dropped or kept in every column, whatever the values are.

    Attributes:
        cut: values that are cut completely from either end of the sorted column.
        outer: values at either end that may lose mass; the innermost of them never loses all.
        dropped: values farthest from the centre that are dropped completely.
        kept: values nearest to the centre that lose nothing; the next one does not lose all.
    """

    cut: int
    outer: int
    dropped: int = 0
    kept: int = 0

    @staticmethod
    def of(weighing: Weighing) -> Sure:
        """Return the numbers for these weights, from the heaviest and from the lightest rows."""
        units, trim, drop = np.sort(weighing.units), weighing.masses.trim, weighing.masses.drop
        lightest, heaviest = np.cumsum(units), np.cumsum(units[::-1])
        cut = int(np.count_nonzero(heaviest <= trim))
        outer = 1 + int(np.count_nonzero(lightest <= max(trim, drop or 0.0)))
        if not drop:
            return Sure(cut, outer)
        dropped = int(np.count_nonzero(heaviest <= drop))
        return Sure(cut, outer, dropped, int(np.count_nonzero(heaviest < heaviest[-1] - drop)))

    def inner(self, m: int) -> range:
        """Return the positions in the sorted column that lose nothing."""
        return range(self.outer, m - self.outer)
