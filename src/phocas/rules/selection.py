"""Rules that choose whole rows by their geometry: they survive b wrong rows, not b wrong cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Floats,
    Mix,
    Planning,
    lost,
    measured_distances,
    measured_norms,
    select,
)
from phocas.rules.base import Rule
from phocas.rules.cliques import smallest_diameter
from phocas.specs import count, normalise


def krum_scores(squared: Floats, b: int, *, at_least: int = 0) -> Floats:
    """Return each row's sum of squared distances to its m - b - 2 nearest other rows."""
    neighbours = max(len(squared) - b - 2, at_least)
    # A row's distance to itself is zero and so comes first.
    nearest = np.sort(squared, axis=1)[:, 1 : 1 + neighbours]
    return np.asarray(nearest.sum(axis=1), np.float64)


@dataclass(frozen=True)
class RowRule(Rule):
    """A rule that is told to survive b wrong rows and averages those that it chooses."""

    b: int

    def __post_init__(self) -> None:
        """Check that b is a count."""
        normalise(self, b=count(type(self).__name__, "b", self.b))

    def window(self, m: int) -> Window:
        """Return all of the chosen rows' values."""
        del m
        return Window()

    def _check(self, m: int, needed: int, condition: str, largest: int) -> None:
        if m < needed:
            advice = f"the largest b is {largest}" if largest >= 0 else "no b is small enough"
            raise ValueError(
                f"{type(self).__name__} needs {condition}: got b={self.b} with m={m} workers,"
                f" {advice}"
            )


@dataclass(frozen=True)
class Krum(RowRule):
    """Return the row with the smallest sum of squared distances to its m - b - 2 nearest rows.

    Breakdown: survives b wrong rows, 2b + 2 < m; one wrong value in every row breaks it. A row with
    NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al., "Machine learning with adversaries" (2017); Definition 3 of the
    paper.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 1.0], [1.1, 0.9], [0.9, 1.2], [1.0, 1.1], [900.0, 900.0]])
    >>> Krum(b=1)(rows)
    array([1. , 1.1])
    """

    name: ClassVar[str] = "krum"

    def check(self, m: int) -> None:
        """Refuse 2b + 2 >= m."""
        self._check(m, 2 * self.b + 3, "2b + 2 < m", (m - 3) // 2)

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return 1 - 1 / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose one row."""
        del rng
        scores = krum_scores((yield from measured_distances())[0], self.b)
        best = int(np.argmin(scores))
        return Mix(select(m, np.array([best]))) if np.isfinite(scores[best]) else lost(m)


@dataclass(frozen=True)
class MultiKrum(RowRule):
    """Average the ``select`` rows with the best Krum scores; m - b of them unless told otherwise.

    Breakdown: survives b wrong rows, 2b + 2 < m; one wrong value in every row breaks it. A row with
    NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al. (2017). Scores are computed once.

    >>> import numpy as np
    >>> rows = np.array([[1.0], [1.5], [2.0], [1.5], [900.0]])
    >>> MultiKrum(b=1)(rows)
    array([1.5])
    """

    select: int | None = None
    name: ClassVar[str] = "multi-krum"

    def __post_init__(self) -> None:
        """Check that b and select are counts."""
        super().__post_init__()
        if self.select is not None:
            normalise(self, select=count("MultiKrum", "select", self.select, minimum=1))

    def chosen(self, m: int) -> int:
        """Return how many rows are averaged."""
        return m - self.b if self.select is None else self.select

    def check(self, m: int) -> None:
        """Refuse 2b + 2 >= m, and more rows than can be honest."""
        self._check(m, 2 * self.b + 3, "2b + 2 < m", (m - 3) // 2)
        if self.chosen(m) > m - self.b:
            raise ValueError(
                f"MultiKrum needs select <= m - b: got select={self.select} with b={self.b} and"
                f" m={m} workers, the largest select is {m - self.b}"
            )

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return 1 - self.chosen(m) / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows with the best scores."""
        del rng
        scores = krum_scores((yield from measured_distances())[0], self.b)
        best = np.sort(np.argsort(scores, kind="stable")[: self.chosen(m)])
        return Mix(select(m, best)) if np.all(np.isfinite(scores[best])) else lost(m)


@dataclass(frozen=True)
class Bulyan(RowRule):
    """Choose m - 2b rows by repeated Krum, then average the m - 4b values nearest the median.

    Breakdown: survives b wrong rows, 4b + 3 <= m. A row with NaN or inf is at infinite distance
    from all others.

    Reference: El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium"
    (2018). Towards the end of the choice at least one neighbour is counted.

    >>> import numpy as np
    >>> Bulyan(b=1)(np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "bulyan"

    def check(self, m: int) -> None:
        """Refuse 4b + 3 > m."""
        self._check(m, 4 * self.b + 3, "4b + 3 <= m", (m - 3) // 4)

    def window(self, m: int) -> Window:
        """Return, of the m - 2b chosen, all but the 2b farthest from their median."""
        chosen = m - 2 * self.b
        return Window(trim=(chosen - 1) // 2, drop=2 * self.b) if self.b else Window()

    def expected(self, m: int) -> float:
        """Return the share of values that are not among the last m - 4b."""
        return 4 * self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose rows one by one, each time the best of those that are left."""
        del rng
        squared, _ = yield from measured_distances()
        left = np.arange(m)
        chosen: list[int] = []
        for _ in range(m - 2 * self.b):
            scores = krum_scores(squared[np.ix_(left, left)], self.b, at_least=1)
            best = int(np.argmin(scores))
            chosen.append(int(left[best]))
            left = np.delete(left, best)
        return Mix(select(m, np.sort(np.array(chosen))))


@dataclass(frozen=True)
class MDA(RowRule):
    """Average the m - b rows whose largest distance from one another is smallest.

    Of several such sets the first in lexicographic order is taken. Minimum-diameter averaging.

    Breakdown: survives b wrong rows, 2b < m. A row with NaN or inf is at infinite distance from all
    others. The search is exponential in b at worst; b up to about 20 takes milliseconds.

    Reference: El Mhamdi et al., "Genuinely distributed Byzantine machine learning" (2020).

    >>> import numpy as np
    >>> MDA(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "mda"

    def check(self, m: int) -> None:
        """Refuse 2b >= m."""
        self._check(m, 2 * self.b + 1, "2b < m", (m - 1) // 2)

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the set with the smallest diameter."""
        del rng
        squared, _ = yield from measured_distances()
        members = smallest_diameter(squared, m - self.b)
        chosen: NDArray[np.intp] = np.array(members, np.intp)
        finite = np.all(np.isfinite(squared[np.ix_(chosen, chosen)]))
        return Mix(select(m, chosen)) if finite else lost(m)


@dataclass(frozen=True)
class CGE(RowRule):
    """Average the m - b rows with the smallest norms: comparative gradient elimination.

    Breakdown: what b wrong rows add is no longer than an honest row, 2b < m; it bounds the norm,
    not the direction. A row with NaN or inf has infinite norm.

    Reference: Gupta, Liu, Vaidya, "Byzantine fault-tolerant distributed machine learning using
    SGD and comparative gradient elimination" (2020), as a mean instead of a sum.

    >>> import numpy as np
    >>> CGE(b=1)(np.array([[1.0], [2.0], [6.0], [-900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "cge"

    def check(self, m: int) -> None:
        """Refuse 2b >= m."""
        self._check(m, 2 * self.b + 1, "2b < m", (m - 1) // 2)

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the shortest rows."""
        del rng
        squared = yield from measured_norms(rank=m - self.b - 1)
        best = np.sort(np.argsort(squared, kind="stable")[: m - self.b])
        return Mix(select(m, best)) if np.all(np.isfinite(squared[best])) else lost(m)
