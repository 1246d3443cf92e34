"""What is averaged of rows that have weights, and what is known of it before values are.

Weights are whole numbers, few enough in all that any sum of them and of their halves is exact in
single precision. So what is cut is cut to the unit, in whatever order weights are added: rounded,
a share of 1e-8 of a lie of 1e38 would be left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_TOTAL = 1 << 22
"""Of so many units, halves too are exact in single precision."""
SCALE = 0.5
"""Of distances, so that none between finite values overflows."""


@dataclass(frozen=True, slots=True)
class Masses:
    """Which mass of a column is averaged, in units of weight: as :class:`Window` in values.

    ``trim`` is cut from each end of the sorted column, and with ``drop`` all but so much that is
    farthest from the mean of the rest is averaged. ``reach`` is that of a window.
    """

    trim: float
    drop: float | None = None
    reach: float = 0.0

    def kept(self, total: float) -> float:
        """Return how much of a total is averaged."""
        return total - 2 * self.trim if self.drop is None else total - self.drop


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """The weights of rows, in whole units of at most ``LARGEST_TOTAL``, and what is cut of them."""

    units: NDArray[np.int64]
    masses: Masses


@dataclass(frozen=True, slots=True)
class Sure:
    """What is known of every column whatever its values are, as counts of values.

    ``cut`` are cut from either end of the sorted column, all of each, and nothing but the ``outer``
    ones at either end loses anything, of which the innermost never lose all. All of each is lost of
    the ``dropped`` that are farthest from the centre, nothing of as many nearest as are ``kept``,
    and not all of the next.
    """

    cut: int
    outer: int
    dropped: int = 0
    kept: int = 0

    @staticmethod
    def of(weighing: Weighing) -> Sure:
        """Compare what is cut with the mass of the heaviest and of the lightest."""
        units, trim, drop = np.sort(weighing.units), weighing.masses.trim, weighing.masses.drop
        lightest, heaviest = np.cumsum(units), np.cumsum(units[::-1])
        cut = int(np.count_nonzero(heaviest <= trim))
        outer = 1 + int(np.count_nonzero(lightest <= max(trim, drop or 0.0)))
        if not drop:
            return Sure(cut, outer)
        dropped = int(np.count_nonzero(heaviest <= drop))
        return Sure(cut, outer, dropped, int(np.count_nonzero(heaviest < heaviest[-1] - drop)))

    def inner(self, m: int) -> range:
        """Return the places in the sorted column that lose nothing."""
        return range(self.outer, m - self.outer)
