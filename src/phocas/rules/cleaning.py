"""Cleaning: the step that survives wrong cells, so that what follows may survive wrong rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phocas.kernels import Window
from phocas.rules.base import PreAggregator, Told
from phocas.rules.heraclius import LARGEST_REACH
from phocas.rules.promise import Tolerance, cleaned_spreads
from phocas.specs import normalise, number


@dataclass(frozen=True)
class Cleaning(Told, PreAggregator):
    """Replace implausible values by their column's trimmed mean; put out rows that are mostly such.

    With T the b-trimmed mean of a column and r the distance from T to its (m-b)-th nearest value,
    the spread s is r, or the root mean square of r over the column's block of 1024 if that is more.
    A value u is implausible, and becomes T, if

        |u - T| > r  and  |u - T| > reach s.

    A row of which more than half is implausible is out, as if it were of NaN; no more rows than
    what follows survives, the worst first, so that no rule is lost to it.

    Rules that go by the distances between rows survive liars who adapt, and one wrong cell makes
    any row a liar; this is for them. It must come first: after a mix, a wrong cell is in every row.

    Breakdown: b wrong values a column, 2b < m, whatever follows. After it no value of a column is
    farther than max(r, reach s) from T, wrong or not, so the result is not far either, as long as
    what follows stays near to rows that are near one another (clipping does not: no promise). NaN
    counts as +inf, which is implausible.
    Honest values that only few workers have are replaced too (docs/choosing.md#limits).

    Args:
        b: how many wrong values in every column it has to survive, 2b < m.
        reach: beyond how many spreads a value is implausible.

    >>> import numpy as np
    >>> from phocas import NNM, Krum, TrimmedMean
    >>> rows = np.add.outer(np.arange(9.0), np.arange(4.0))
    >>> rows[[0, 1, 2, 3], [0, 1, 2, 3]] = 1e9  # four rows, of which each has one wrong cell
    >>> rows[8] = np.nan
    >>> (NNM(b=2) | TrimmedMean(b=2))(rows).round(1)
    array([4.00000000e+00, 1.42857148e+08, 1.42857148e+08, 1.42857149e+08])
    >>> (Cleaning(b=2) | NNM(b=2) | TrimmedMean(b=2))(rows).round(1)
    array([3.9, 5.2, 6. , 6.9])
    """

    reach: float = 8.0
    name: ClassVar[str] = "cleaning"
    outermost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check b and the reach."""
        super().__post_init__()
        reach = number("Cleaning", "reach", self.reach)
        if not 0 < reach <= LARGEST_REACH:
            raise ValueError(f"Cleaning needs 0 < reach <= {LARGEST_REACH:g}: got reach={reach:g}")
        normalise(self, reach=reach)

    def plausible(self, m: int) -> Window | None:
        """Return the window around the trimmed mean; without a b nothing is implausible."""
        del m
        return Window(trim=self.b, drop=self.b, reach=self.reach / 2) if self.b else None

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return b in rows and in values: what is left of the wrong ones is near, whatever it is.

        What follows is not asked how many wrong rows it survives, but to stay near rows that are
        near one another.
        """
        del m
        return Tolerance(rows=self.b, values=self.b) if self.b else following

    def spreads(self, m: int, q: int, following: float) -> float | None:
        """Bound the distance of what follows, which sees no value that is far from the others."""
        window = self.plausible(m)
        return following if window is None else cleaned_spreads(window, m, q, following)
