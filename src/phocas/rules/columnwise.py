"""Rules that reduce each column on its own: they survive b wrong values in every column."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from phocas.kernels import PLAIN_MEAN, Window
from phocas.rules.algebra import UNMIXED, Decision
from phocas.rules.base import Rule
from phocas.specs import count, normalise


class ColumnRule(Rule):
    """A rule that is a window of each column and nothing else."""

    columnwise = True

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column are averaged."""

    def check(self, m: int) -> None:
        """Refuse no rows at all."""
        if m < 1:
            raise ValueError(f"{type(self).__name__} needs at least 1 row: got {m}")

    def decide(self, matrix: Any, rng: np.random.Generator | None = None) -> Decision:
        """Return the window: there is nothing to ask and nothing to mix."""
        del rng
        return Decision(UNMIXED, self.window(matrix.m))

    def expected(self, m: int) -> float:
        """Return the share of values outside the window."""
        return 1 - self.window(m).kept(m) / m


@dataclass(frozen=True)
class Mean(ColumnRule):
    """Average everything: no wrong value is survived.

    Breakdown: one wrong value in a column. NaN and inf pass into the result.

    >>> import numpy as np
    >>> Mean()(np.array([[1.0], [2.0], [900.0]]))
    array([301.])
    """

    name: ClassVar[str] = "mean"

    def window(self, m: int) -> Window:
        """Return everything."""
        del m
        return PLAIN_MEAN


@dataclass(frozen=True)
class Median(ColumnRule):
    """Take the middle value of each column, or the mean of the two middle values.

    Breakdown: survives fewer than m/2 wrong values a column. NaN counts as +inf.

    >>> import numpy as np
    >>> Median()(np.array([[1.0], [2.0], [900.0]]))
    array([2.])
    """

    name: ClassVar[str] = "median"

    def window(self, m: int) -> Window:
        """Return the middle one or two."""
        return Window(trim=(m - 1) // 2)


@dataclass(frozen=True)
class TrimmingRule(ColumnRule):
    """A column rule that is told to survive b wrong values a column."""

    b: int

    def __post_init__(self) -> None:
        """Check that b is a count."""
        normalise(self, b=count(type(self).__name__, "b", self.b))

    def check(self, m: int) -> None:
        """Refuse 2b >= m: the wrong values could be the majority."""
        super().check(m)
        if 2 * self.b >= m:
            raise ValueError(
                f"{type(self).__name__} needs 2b < m: got b={self.b} with m={m} workers,"
                f" the largest b is {(m - 1) // 2}"
            )


@dataclass(frozen=True)
class TrimmedMean(TrimmingRule):
    """Cut the b smallest and b largest values of each column and average the rest.

    Trmean_b = (u_(b+1) + ... + u_(m-b)) / (m - 2b), u sorted (Definition 7 of the paper).

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.

    >>> import numpy as np
    >>> TrimmedMean(b=1)(np.array([[1.0], [2.0], [4.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "trimmed-mean"
    aliases: ClassVar[tuple[str, ...]] = ("trmean",)

    def window(self, m: int) -> Window:
        """Return the middle m - 2b."""
        del m
        return Window(trim=self.b)


@dataclass(frozen=True)
class Phocas(TrimmingRule):
    """Average the m - b values of each column nearest to its b-trimmed mean.

    Phocas_b = mean of the m - b nearest to Trmean_b (Definition 8 of the paper). Of two values at
    the same distance the smaller is nearer.

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.

    >>> import numpy as np
    >>> Phocas(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "phocas"

    def window(self, m: int) -> Window:
        """Return the m - b nearest to the trimmed mean."""
        del m
        return Window(trim=self.b, drop=self.b or None)


@dataclass(frozen=True)
class MeaMed(TrimmingRule):
    """Average the m - b values of each column nearest to its median.

    Breakdown: survives b wrong values a column, 2b < m. NaN counts as +inf.

    Reference: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD" (2018).

    >>> import numpy as np
    >>> MeaMed(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "meamed"

    def window(self, m: int) -> Window:
        """Return the m - b nearest to the median."""
        return Window(trim=(m - 1) // 2, drop=self.b) if self.b else Window()
