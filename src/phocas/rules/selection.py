"""Rules that choose whole rows by distances or norms.

These rules tolerate b Byzantine rows, but not one Byzantine value in every row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Floats,
    Mix,
    Planning,
    chosen,
    lost,
    measured_norms,
    select,
)
from phocas.rules.base import Bounded, Rule
from phocas.rules.cliques import smallest_diameter
from phocas.rules.guarantee import Tolerance, survived, window_spreads
from phocas.specs import count, normalise


def krum_scores(squared: Floats, b: int, *, at_least: int = 0) -> Floats:
    """Return each row's sum of squared distances to its m - b - 2 nearest other rows."""
    neighbours = max(len(squared) - b - 2, at_least)
    # The distance of a row to itself is zero, so it comes first and is skipped.
    nearest = np.sort(squared, axis=1)[:, 1 : 1 + neighbours]
    return np.asarray(nearest.sum(axis=1), np.float64)


def _best_scores(m: int, b: int, number: int) -> Planning:
    """Choose the ``number`` rows with the best Krum scores; the smaller index breaks ties."""

    def choose(squared: Floats) -> tuple[Mix, bool]:
        scores = krum_scores(squared, b)
        best = np.sort(np.argsort(scores, kind="stable")[:number])
        return (Mix(select(m, best)), True) if np.isfinite(scores[best]).all() else (lost(m), False)

    return (yield from chosen(choose))


def _near_rows(m: int, b: int, q: int) -> int:
    """Return the smallest number of honest rows among the neighbours in a Byzantine row's score."""
    return m - b - q - 1


@dataclass(frozen=True)
class RowRule(Bounded, Rule):
    """A rule that chooses some of the rows and averages the chosen rows.

    The rule is given b, the number of Byzantine rows that it tolerates.

    >>> from phocas import MDA
    >>> MDA(b=2).tolerates(7)
    Tolerance(rows=2, values=0)
    """

    def window(self, m: int) -> Window:
        """Return the window that averages all values of a column of the chosen rows."""
        del m
        return Window()

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of b Byzantine rows and of 0 Byzantine values per column.

        The second number is 0 because a row with one Byzantine value is a Byzantine row.
        """
        self.check(m)
        return Tolerance(rows=self.b)


class KrumRule(RowRule):
    """A rule that compares rows by their Krum scores.

    With S the sum of the squared distances of the h honest rows from their mean, honest scores add
    up to at most 2 h S. A Byzantine row with the score s has at least ``near = _near_rows(...)``
    honest rows whose squared distances to it add up to at most s. The mean of these honest rows is
    within sqrt(S / near) of the honest mean.
    """

    condition = "2b + 2 < m"

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return the largest b with 2b + 2 < m."""
        return (m - 3) // 2


@dataclass(frozen=True)
class Krum(KrumRule):
    """Return the row with the smallest sum of squared distances to its m - b - 2 nearest rows.

        Krum_b = x_k,  k = argmin_i s_i,  s_i = sum of |x_i - x_j|^2 over the m - b - 2 nearest j

    Breakdown: tolerates b Byzantine rows, 2b + 2 < m; one Byzantine value in every row breaks it. A
    row with NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al., "Machine learning with adversaries" (2017); Definition 3 of the
    paper.

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b + 2 < m.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 1.0], [1.1, 0.9], [0.9, 1.2], [1.0, 1.1], [900.0, 900.0]])
    >>> Krum(b=1)(rows)
    array([1. , 1.1])
    """

    name: ClassVar[str] = "krum"
    weighable = True

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the chosen row, which is honest or has a score of at most 2 S."""
        if q > self.tolerates(m).rows:
            return None
        byzantine = (1 + math.sqrt(2)) / math.sqrt(_near_rows(m, self.b, q)) if q else 0.0
        return math.sqrt(m - q) * max(1.0, byzantine)

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Delta_0 of the paper's first lemma for b Byzantine rows, which covers q <= b."""
        if q > self.tolerates(m).rows:
            return None
        b = self.b
        if adaptive:
            return m * max(1.0, (1 + math.sqrt(2)) ** 2 / (m - 2 * b - 1) if b else 0.0)
        return 6 * m - 6 * b + (4 * b * (m - b - 2) + 4 * b**2 * (m - b - 1)) / (m - 2 * b - 2)

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return 1 - 1 / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose one row."""
        del rng
        return (yield from _best_scores(m, self.b, 1))


@dataclass(frozen=True)
class MultiKrum(KrumRule):
    """Average the ``select`` rows with the best Krum scores (by default m - b rows).

        MultiKrum_b = mean of the select rows x_i with the smallest s_i,
        s_i = sum of |x_i - x_j|^2 over the m - b - 2 nearest j

    Breakdown: tolerates b Byzantine rows, 2b + 2 < m; one Byzantine value in every row breaks it. A
    row with NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al. (2017). Scores are computed once.

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b + 2 < m.
        select: the number of rows to average, at most m - b; None: m - b.

    >>> import numpy as np
    >>> rows = np.array([[1.0], [1.5], [2.0], [1.5], [900.0]])
    >>> MultiKrum(b=1)(rows)
    array([1.5])
    """

    select: int | None = None
    name: ClassVar[str] = "multi-krum"
    weighable = True

    def __post_init__(self) -> None:
        """Check that b and select are counts."""
        super().__post_init__()
        if self.select is not None:
            normalise(self, select=count("MultiKrum", "select", self.select, minimum=1))

    def chosen(self, m: int) -> int:
        """Return the number of rows to average."""
        return m - self.b if self.select is None else self.select

    def check(self, m: int) -> None:
        """Raise ValueError if 2b + 2 >= m, or if ``select`` is more than m - b."""
        super().check(m)
        if self.chosen(m) > m - self.b:
            raise ValueError(
                f"MultiKrum needs select <= m - b: got select={self.select} with b={self.b} and"
                f" m={m} workers, the largest select is {m - self.b}"
            )

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the mean of the chosen rows, whose average score is at most 2 S."""
        if q > self.tolerates(m).rows:
            return None
        chosen = self.chosen(m)
        byzantine, near = min(q, chosen), _near_rows(m, self.b, q)
        pull = math.sqrt(2 * byzantine / (chosen * near)) + byzantine / (chosen * math.sqrt(near))
        return math.sqrt(m - q) * (1 / math.sqrt(chosen) + pull)

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return 1 - self.chosen(m) / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows with the best scores."""
        del rng
        return (yield from _best_scores(m, self.b, self.chosen(m)))


@dataclass(frozen=True)
class Bulyan(RowRule):
    """Choose m - 2b rows by repeated Krum, then average the m - 4b values nearest the median.

        S = m - 2b rows, each the Krum of those that are left
        Bulyan_b = mean of the m - 4b values u of S with the smallest |u - Median(S)|

    Breakdown: tolerates b Byzantine rows, 4b + 3 <= m. A row with NaN or inf is at infinite
    distance from all others.

    Reference: El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium"
    (2018). A score counts at least one neighbour, also when few rows are left.

    Args:
        b: the number of Byzantine rows that the rule tolerates, 4b + 3 <= m.

    >>> import numpy as np
    >>> Bulyan(b=1)(np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "bulyan"
    condition = "4b + 3 <= m"

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return the largest b with 4b + 3 <= m."""
        return (m - 3) // 4

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of the window, at least b, which holds whichever rows are chosen."""
        self.check(m)
        most = survived(self.window(m))
        return Tolerance(rows=most, values=most)

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the error bound of the window for the worst case: all q Byzantine rows chosen."""
        if q > self.tolerates(m).rows:
            return None
        return window_spreads(self.window(m), m - 2 * self.b, q, honest=m - q)

    def window(self, m: int) -> Window:
        """Return the window of the m - 2b chosen values without the 2b farthest from the median."""
        chosen = m - 2 * self.b
        return Window(trim=(chosen - 1) // 2, drop=2 * self.b) if self.b else Window()

    def expected(self, m: int) -> float:
        """Return the share of values that do not enter the mean of m - 4b values."""
        return 4 * self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose rows one by one: each time the row with the best score among the rest."""
        del rng

        def choose(squared: Floats) -> tuple[list[int], bool]:
            left = np.arange(m)
            best: list[int] = []
            finite = True
            for _ in range(m - 2 * self.b):
                scores = krum_scores(squared[np.ix_(left, left)], self.b, at_least=1)
                place = int(np.argmin(scores))
                finite = finite and bool(np.isfinite(scores[place]))
                best.append(int(left[place]))
                left = np.delete(left, place)
            return best, finite

        return Mix(select(m, np.sort(np.array((yield from chosen(choose))))))


@dataclass(frozen=True)
class MDA(RowRule):
    """Average the m - b rows whose largest distance from one another is smallest.

        MDA_b = mean of S,  S = argmin of max_(i,j in S) |x_i - x_j| over sets of m - b rows

    The method is called minimum-diameter averaging. If several sets have the smallest diameter, the
    first in lexicographic order is taken.

    Breakdown: tolerates b Byzantine rows, 2b < m. A row with NaN or inf is at infinite distance
    from all others. The search is exponential in b at worst; b up to about 20 takes milliseconds.

    Reference: El Mhamdi et al., "Genuinely distributed Byzantine machine learning" (2020).

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> MDA(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "mda"
    weighable = True

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the mean of the chosen set.

        The distance of a Byzantine row in the set to every other row of the set is at most the
        diameter of the h honest rows, sqrt(2h) standard deviations. One of the m - b - q honest
        rows of the set is within sqrt(h / (m - b - q)) standard deviations of the honest mean.
        """
        if q > self.tolerates(m).rows:
            return None
        honest, size = m - q, m - self.b
        byzantine = math.sqrt(2 * honest) + math.sqrt(honest / (size - q))
        return (q * byzantine + math.sqrt(size * honest)) / size

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the set of rows with the smallest diameter."""
        del rng

        def choose(squared: Floats) -> tuple[Mix, bool]:
            members: NDArray[np.intp] = np.array(smallest_diameter(squared, m - self.b), np.intp)
            finite = bool(np.isfinite(squared[np.ix_(members, members)]).all())
            return Mix(select(m, members)) if finite else lost(m), finite

        return (yield from chosen(choose))


@dataclass(frozen=True)
class CGE(RowRule):
    """Average the m - b rows with the smallest norms: comparative gradient elimination.

        CGE_b = mean of the m - b rows x_i with the smallest |x_i|

    The smaller index breaks ties: rows that were clipped before all have the same norm.

    Breakdown: no chosen Byzantine row is longer than the longest honest row if at most b rows are
    Byzantine, 2b < m. This bounds the norm of the result, not its direction. A row with NaN or inf
    has infinite norm.

    Reference: Gupta, Liu, Vaidya, "Byzantine fault-tolerant distributed machine learning using
    SGD and comparative gradient elimination" (2020), as a mean instead of a sum.

    Args:
        b: the number of rows to drop, 2b < m.

    >>> import numpy as np
    >>> CGE(b=1)(np.array([[1.0], [2.0], [6.0], [-900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "cge"
    weighable = True

    def tolerates(self, m: int) -> Tolerance:
        """Return zero: a Byzantine row as short as an honest row may have any direction."""
        self.check(m)
        return Tolerance()

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the shortest rows."""
        del rng
        rank = m - self.b - 1
        squared, _ = yield from measured_norms(lambda each: float(np.partition(each, rank)[rank]))
        best = np.sort(np.argsort(squared, kind="stable")[: m - self.b])
        return Mix(select(m, best)) if np.all(np.isfinite(squared[best])) else lost(m)


@dataclass(frozen=True)
class MoNNA(RowRule):
    """Average the m - b rows nearest to the row of a trusted worker, itself among them.

        MoNNA_b = mean of the m - b rows x_i with the smallest |x_i - x_t|,  t the trusted worker

    The smaller index breaks ties. The name means momentum with nearest-neighbour averaging: in the
    paper every worker trusts itself and sends momentum.

    Breakdown: no guarantee if the trusted worker is Byzantine; the row of an honest one bounds the
    distances of all chosen rows from it. A row with NaN or inf is at infinite distance.

    Reference: Farhadkhani et al., "Robust collaborative learning with linear gradient overhead"
    (2023).

    Args:
        b: the number of rows to drop, 2b < m.
        trusted: the index of the trusted worker, from 0.

    >>> import numpy as np
    >>> MoNNA(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    trusted: int = 0
    name: ClassVar[str] = "monna"

    def __post_init__(self) -> None:
        """Check that b is a count, and the trusted worker an index."""
        super().__post_init__()
        normalise(self, trusted=count("MoNNA", "trusted", self.trusted))

    def check(self, m: int) -> None:
        """Raise ValueError if 2b >= m, or if there is no such worker."""
        super().check(m)
        if self.trusted >= m:
            raise ValueError(
                f"MoNNA needs trusted < m: got trusted={self.trusted} with m={m} workers, the"
                f" largest index is {m - 1}"
            )

    def tolerates(self, m: int) -> Tolerance:
        """Return zero: the trusted worker may be a Byzantine one."""
        self.check(m)
        return Tolerance()

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows nearest to the trusted one."""
        del rng

        def choose(squared: Floats) -> tuple[Mix, bool]:
            distances = squared[self.trusted].copy()
            distances[self.trusted] = -1.0
            best = np.sort(np.argsort(distances, kind="stable")[: m - self.b])
            finite = bool(np.isfinite(distances[best]).all())
            return Mix(select(m, best)) if finite else lost(m), finite

        return (yield from chosen(choose))
