"""Rules that reduce each column on its own; they tolerate b Byzantine values in every column."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import PLAIN_MEAN, Masses, Window
from phocas.rules.algebra import heaviest
from phocas.rules.base import Bounded, Rule
from phocas.rules.guarantee import (
    Tolerance,
    nearest_delta,
    survived,
    trimmed_mean_delta,
    window_spreads,
)


class ColumnRule(Rule):
    """A rule that averages a window of each column; its guarantees follow from the window.

    >>> from phocas import Median
    >>> Median().window(5), Median().tolerates(5).values
    (Window(trim=2, drop=None, plain=False, cutoff=0.0), 2)
    """

    columnwise = True

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column are averaged."""

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of the window: the same number of values per column and of rows."""
        self.check(m)
        most = survived(self.window(m))
        return Tolerance(rows=most, values=most)

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the error bound of the window, in standard deviations of the honest rows."""
        if q > self.tolerates(m).values:
            return None
        return window_spreads(self.window(m), m, q, honest=m - q)

    def expected(self, m: int) -> float:
        """Return the share of a column's values that the window drops."""
        return 1 - self.window(m).kept(m) / m


@dataclass(frozen=True)
class Mean(ColumnRule):
    """Average all values: no Byzantine value is tolerated.

        Mean = (u_1 + ... + u_m) / m

    Breakdown: one Byzantine value in a column. NaN and inf enter the result.

    >>> import numpy as np
    >>> Mean()(np.array([[1.0], [2.0], [900.0]]))
    array([301.])
    """

    name: ClassVar[str] = "mean"
    weighable = True

    def window(self, m: int) -> Window:
        """Return the window that averages all m values of a column, NaN and inf included."""
        del m
        return PLAIN_MEAN

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return 0: the mean tolerates no Byzantine value."""
        del m
        return 0

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the variance of a mean of m values if none is Byzantine, else None."""
        del adaptive
        return None if q else 1 / m


@dataclass(frozen=True)
class Median(ColumnRule):
    """Take the middle value of each column, or the mean of the two middle values.

        Median = (u_(floor((m+1)/2)) + u_(ceil((m+1)/2))) / 2,  u sorted

    Breakdown: tolerates fewer than m/2 Byzantine values per column. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    >>> import numpy as np
    >>> Median()(np.array([[1.0], [2.0], [900.0]]))
    array([2.])
    """

    name: ClassVar[str] = "median"
    weighable = True
    min_byzantine: ClassVar[int] = 1

    def window(self, m: int) -> Window:
        """Return the window that averages the one or two middle values of a column."""
        return Window(trim=(m - 1) // 2)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the window that averages the middle unit of the total weight."""
        return Masses(trim=_middle(units))

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the bound of the trimmed mean with the largest b, which is the median."""
        return TrimmedMean(self.largest_b(m)).bound(m, q, adaptive=adaptive)


def _middle(units: NDArray[np.int64]) -> float:
    """Return the weight to cut from each end so that one unit is left."""
    return (int(units.sum()) - 1) / 2


@dataclass(frozen=True)
class TrimmingRule(Bounded, ColumnRule):
    """A column rule given b, the number of Byzantine values per column that it tolerates.

    >>> from phocas import Phocas, TrimmedMean
    >>> TrimmedMean(b=2).window(7).trim, Phocas(b=2).window(7).drop
    (2, 2)
    """

    def heaviest(self, units: NDArray[np.int64]) -> int:
        """Return the total weight of the b heaviest workers."""
        return heaviest(units, self.b)


@dataclass(frozen=True)
class TrimmedMean(TrimmingRule):
    """Cut the b smallest and b largest values of each column and average the rest.

        Trmean_b = (u_(b+1) + ... + u_(m-b)) / (m - 2b),  u sorted

    Breakdown: tolerates b Byzantine values per column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Definition 7 of the paper.

    Args:
        b: the number of Byzantine values per column that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> TrimmedMean(b=1)(np.array([[1.0], [2.0], [4.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "trimmed-mean"
    aliases: ClassVar[tuple[str, ...]] = ("trmean",)

    weighable = True

    def window(self, m: int) -> Window:
        """Return the window that averages the middle m - 2b values of a column."""
        del m
        return Window(trim=self.b)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the window that cuts, at each end, as much weight as the b heaviest have."""
        return Masses(trim=self.heaviest(units))

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Delta_1 of Theorem 1."""
        if q > self.tolerates(m).values:
            return None
        return trimmed_mean_delta(m, q, self.b, adaptive=adaptive)


@dataclass(frozen=True)
class Phocas(TrimmingRule):
    """Average the m - b values of each column nearest to its b-trimmed mean.

        Phocas_b = mean of the m - b values u with the smallest |u - Trmean_b|

    Of two values at the same distance, the smaller one is kept.

    Breakdown: tolerates b Byzantine values per column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Definition 8 of the paper.

    Args:
        b: the number of Byzantine values per column that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> Phocas(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "phocas"
    weighable = True

    def window(self, m: int) -> Window:
        """Return the window that averages the m - b values nearest to the trimmed mean."""
        del m
        return Window(trim=self.b, drop=self.b or None)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the window that drops as much weight as the b heaviest workers have.

        The weight farthest from the trimmed mean is dropped.
        """
        mass = self.heaviest(units)
        return Masses(trim=mass, drop=mass or None)

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Delta_2 of Theorem 2."""
        centre = TrimmedMean(self.b).bound(m, q, adaptive=adaptive)
        return None if centre is None else nearest_delta(m, q, centre, adaptive=adaptive)


@dataclass(frozen=True)
class MeaMed(TrimmingRule):
    """Average the m - b values of each column nearest to its median.

        MeaMed_b = mean of the m - b values u with the smallest |u - Median|

    Breakdown: tolerates b Byzantine values per column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD" (2018).

    Args:
        b: the number of Byzantine values per column that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> MeaMed(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "meamed"
    weighable = True

    def window(self, m: int) -> Window:
        """Return the window that averages the m - b values nearest to the median."""
        return Window(trim=(m - 1) // 2, drop=self.b) if self.b else Window()

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the window that drops as much weight as the b heaviest workers have.

        The weight farthest from the median is dropped.
        """
        if not self.b:
            return Masses(trim=0.0)
        return Masses(trim=_middle(units), drop=self.heaviest(units))

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the bound of Theorem 2 with the median in place of the trimmed mean."""
        centre = Median().bound(m, q, adaptive=adaptive)
        if centre is None or q > self.tolerates(m).values:
            return None
        return nearest_delta(m, q, centre, adaptive=adaptive)
