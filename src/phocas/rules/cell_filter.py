"""CellFilter: a pre-aggregation that tolerates Byzantine cells, for rules that compare rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from phocas.deprecation import former_parameters
from phocas.kernels import Window
from phocas.rules.base import Bounded, PreAggregator
from phocas.rules.guarantee import Tolerance, cleaned_spreads
from phocas.rules.heraclius import LARGEST_CUTOFF
from phocas.specs import normalise, number


@former_parameters(reach="cutoff")
@dataclass(frozen=True)
class CellFilter(Bounded, PreAggregator):
    """Replace outlying values by their column's trimmed mean, and exclude rows of mostly outliers.

    T is the b-trimmed mean of a column, and r the distance from T to its (m-b)-th nearest value.
    The scale s is the larger of r and the root mean square of r over the column's block of 1024
    columns. A value u is an outlier, and is replaced by T, if

        |u - T| > r  and  |u - T| > cutoff s.

    A row with more than half of its values replaced is excluded: it becomes a row of NaN. The rows
    with the most outliers are excluded first, and at most as many as the following rule tolerates.

    Rules that compare whole rows, such as Krum or NNM, resist adaptive attackers, but one Byzantine
    cell makes a whole row Byzantine. The filter removes such cells. It must be the first step:
    after a mix, a Byzantine cell affects every row.

    Breakdown: tolerates b Byzantine values per column, 2b < m, with any following rule that has an
    error bound (clipping has none). After the filter, every value of a column is within
    max(r, cutoff s) of T, so the error of the result is bounded. NaN counts as +inf, which is an
    outlier.
    Honest values that only few workers have are replaced too (docs/choosing.md#limits).

    Args:
        b: the number of Byzantine values per column that the filter tolerates, 2b < m.
        cutoff: the distance from T, in units of s, beyond which a value is an outlier.

    >>> import numpy as np
    >>> from phocas import NNM, Krum, TrimmedMean
    >>> rows = np.add.outer(np.arange(9.0), np.arange(4.0))
    >>> rows[[0, 1, 2, 3], [0, 1, 2, 3]] = 1e9  # one Byzantine cell in each of four rows
    >>> rows[8] = np.nan
    >>> (NNM(b=2) | TrimmedMean(b=2))(rows).round(1)
    array([4.00000000e+00, 1.42857148e+08, 1.42857148e+08, 1.42857149e+08])
    >>> (CellFilter(b=2) | NNM(b=2) | TrimmedMean(b=2))(rows).round(1)
    array([3.9, 5.2, 6. , 6.9])
    """

    cutoff: float = 8.0
    name: ClassVar[str] = "cell-filter"
    former_name: ClassVar[str] = "cleaning"
    former_fields: ClassVar[Mapping[str, str]] = {"reach": "cutoff"}
    outermost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check b and the cutoff."""
        super().__post_init__()
        cutoff = number("CellFilter", "cutoff", self.cutoff)
        if not 0 < cutoff <= LARGEST_CUTOFF:
            raise ValueError(
                f"CellFilter needs 0 < cutoff <= {LARGEST_CUTOFF:g}: got cutoff={cutoff:g}"
            )
        normalise(self, cutoff=cutoff)

    def filter_window(self, m: int) -> Window | None:
        """Return the window around the trimmed mean; None if b is 0: nothing is replaced."""
        del m
        return Window(trim=self.b, drop=self.b, cutoff=self.cutoff / 2) if self.b else None

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return b in rows and in values, whatever the following steps tolerate.

        No filtered value is far from its column's centre, so the following steps only have to stay
        near rows that are near one another.
        """
        del m
        return Tolerance(rows=self.b, values=self.b) if self.b else following

    def error_bound(self, m: int, q: int, following: float) -> float | None:
        """Bound the error of the pipeline: no filtered value is far from its column's centre."""
        window = self.filter_window(m)
        return following if window is None else cleaned_spreads(window, m, q, following)
