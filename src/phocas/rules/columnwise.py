"""Rules that reduce each column on its own: they survive b wrong values in every column."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import PLAIN_MEAN, Masses, Window
from phocas.rules.algebra import UNMIXED, Decision, Matrix, heaviest
from phocas.rules.base import Rule, Told
from phocas.rules.promise import (
    Tolerance,
    nearest_delta,
    survived,
    trimmed_mean_delta,
    window_spreads,
)


class ColumnRule(Rule):
    """A rule that is a window of each column and nothing else; its window says what it survives.

    >>> from phocas import Median
    >>> Median().window(5), Median().tolerates(5).values
    (Window(trim=2, drop=None, plain=False, reach=0.0, watched=False), 2)
    """

    columnwise = True

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column are averaged."""

    def tolerates(self, m: int) -> Tolerance:
        """Return what the window survives: in every column, so in whole rows as well."""
        self.check(m)
        most = survived(self.window(m))
        return Tolerance(rows=most, values=most)

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the distance from the honest mean by the window's numbers."""
        if q > self.tolerates(m).values:
            return None
        return window_spreads(self.window(m), m, q, honest=m - q)

    def decide(self, matrix: Matrix, rng: np.random.Generator | None = None) -> Decision:
        """Return the window: there is nothing to ask and nothing to mix."""
        del rng
        return Decision(UNMIXED, self.window(matrix.m))

    def expected(self, m: int) -> float:
        """Return the share of values outside the window."""
        return 1 - self.window(m).kept(m) / m


@dataclass(frozen=True)
class Mean(ColumnRule):
    """Average everything: no wrong value is survived.

        Mean = (u_1 + ... + u_m) / m

    Breakdown: one wrong value in a column. NaN and inf pass into the result.

    >>> import numpy as np
    >>> Mean()(np.array([[1.0], [2.0], [900.0]]))
    array([301.])
    """

    name: ClassVar[str] = "mean"
    weighable = True

    def window(self, m: int) -> Window:
        """Return everything."""
        del m
        return PLAIN_MEAN

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return 0: a wrong value is one too many."""
        del m
        return 0

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the variance of a mean of m, if nothing is wrong."""
        del adaptive
        return None if q else 1 / m


@dataclass(frozen=True)
class Median(ColumnRule):
    """Take the middle value of each column, or the mean of the two middle values.

        Median = (u_(floor((m+1)/2)) + u_(ceil((m+1)/2))) / 2,  u sorted

    Breakdown: survives fewer than m/2 wrong values a column. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    >>> import numpy as np
    >>> Median()(np.array([[1.0], [2.0], [900.0]]))
    array([2.])
    """

    name: ClassVar[str] = "median"
    weighable = True
    least_liars: ClassVar[int] = 1

    def window(self, m: int) -> Window:
        """Return the middle one or two."""
        return Window(trim=(m - 1) // 2)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the unit in the middle: half of it each way where two values meet."""
        return Masses(trim=_middle(units))

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return that of the trimmed mean with the largest b, which the median is."""
        return TrimmedMean(self.largest_b(m)).bound(m, q, adaptive=adaptive)


def _middle(units: NDArray[np.int64]) -> float:
    """Return what is cut from each end if one unit is left."""
    return (int(units.sum()) - 1) / 2


@dataclass(frozen=True)
class TrimmingRule(Told, ColumnRule):
    """A column rule that is told to survive b wrong values a column.

    >>> from phocas import Phocas, TrimmedMean
    >>> TrimmedMean(b=2).window(7).trim, Phocas(b=2).window(7).drop
    (2, 2)
    """

    def heaviest(self, units: NDArray[np.int64]) -> int:
        """Return the mass of the b heaviest workers."""
        return heaviest(units, self.b)


@dataclass(frozen=True)
class TrimmedMean(TrimmingRule):
    """Cut the b smallest and b largest values of each column and average the rest.

        Trmean_b = (u_(b+1) + ... + u_(m-b)) / (m - 2b),  u sorted

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Definition 7 of the paper.

    Args:
        b: how many wrong values in every column it has to survive, 2b < m.

    >>> import numpy as np
    >>> TrimmedMean(b=1)(np.array([[1.0], [2.0], [4.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "trimmed-mean"
    aliases: ClassVar[tuple[str, ...]] = ("trmean",)

    weighable = True

    def window(self, m: int) -> Window:
        """Return the middle m - 2b."""
        del m
        return Window(trim=self.b)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Cut the mass of the b heaviest from each end."""
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

    Of two values at the same distance the smaller is nearer.

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Definition 8 of the paper.

    Args:
        b: how many wrong values in every column it has to survive, 2b < m.

    >>> import numpy as np
    >>> Phocas(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "phocas"
    weighable = True

    def window(self, m: int) -> Window:
        """Return the m - b nearest to the trimmed mean."""
        del m
        return Window(trim=self.b, drop=self.b or None)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Leave out the mass of the b heaviest that is farthest from the trimmed mean."""
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

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.
    Honest values that only few workers have are dropped too (docs/choosing.md#limits).

    Reference: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD" (2018).

    Args:
        b: how many wrong values in every column it has to survive, 2b < m.

    >>> import numpy as np
    >>> MeaMed(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "meamed"
    weighable = True

    def window(self, m: int) -> Window:
        """Return the m - b nearest to the median."""
        return Window(trim=(m - 1) // 2, drop=self.b) if self.b else Window()

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Leave out the mass of the b heaviest that is farthest from the median."""
        if not self.b:
            return Masses(trim=0.0)
        return Masses(trim=_middle(units), drop=self.heaviest(units))

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Theorem 2's bound with the median's in the trimmed mean's place."""
        centre = Median().bound(m, q, adaptive=adaptive)
        if centre is None or q > self.tolerates(m).values:
            return None
        return nearest_delta(m, q, centre, adaptive=adaptive)
