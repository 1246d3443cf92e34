"""Rules that choose whole rows by their geometry: they survive b wrong rows, not b wrong cells."""

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
from phocas.rules.base import Rule, Told
from phocas.rules.cliques import smallest_diameter
from phocas.rules.promise import Tolerance, survived, window_spreads
from phocas.specs import count, normalise


def krum_scores(squared: Floats, b: int, *, at_least: int = 0) -> Floats:
    """Return each row's sum of squared distances to its m - b - 2 nearest other rows."""
    neighbours = max(len(squared) - b - 2, at_least)
    # A row's distance to itself is zero and so comes first.
    nearest = np.sort(squared, axis=1)[:, 1 : 1 + neighbours]
    return np.asarray(nearest.sum(axis=1), np.float64)


def _best_scores(m: int, b: int, number: int) -> Planning:
    """Choose so many rows with the best Krum scores; of equal scores, the smaller index first."""

    def choose(squared: Floats) -> tuple[Mix, bool]:
        scores = krum_scores(squared, b)
        best = np.sort(np.argsort(scores, kind="stable")[:number])
        return (Mix(select(m, best)), True) if np.isfinite(scores[best]).all() else (lost(m), False)

    return (yield from chosen(choose))


def _near_rows(m: int, b: int, q: int) -> int:
    """Return how many of the rows that a Krum score counts for a liar are honest at least."""
    return m - b - q - 1


@dataclass(frozen=True)
class RowRule(Told, Rule):
    """A rule that is told to survive b wrong rows and averages those that it chooses.

    >>> from phocas import MDA
    >>> MDA(b=2).tolerates(7)
    Tolerance(rows=2, values=0)
    """

    def window(self, m: int) -> Window:
        """Return all of the chosen rows' values."""
        del m
        return Window()

    def tolerates(self, m: int) -> Tolerance:
        """Return b rows; one wrong value in every row would leave none to choose."""
        self.check(m)
        return Tolerance(rows=self.b)


class KrumRule(RowRule):
    """A rule that compares rows by their Krum scores.

    With S the sum of the squared distances of the h honest rows from their mean, honest scores add
    up to at most 2 h S. A liar with a score of s has ``_near_rows`` honest rows within s in all,
    whose mean is within sqrt(S / near) of the honest mean.
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

    Breakdown: survives b wrong rows, 2b + 2 < m; one wrong value in every row breaks it. A row with
    NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al., "Machine learning with adversaries" (2017); Definition 3 of the
    paper.

    Args:
        b: how many wrong rows it has to survive, 2b + 2 < m.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 1.0], [1.1, 0.9], [0.9, 1.2], [1.0, 1.1], [900.0, 900.0]])
    >>> Krum(b=1)(rows)
    array([1. , 1.1])
    """

    name: ClassVar[str] = "krum"
    weighable = True

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the chosen row: an honest one, or one whose score is no more than 2 S."""
        if q > self.tolerates(m).rows:
            return None
        liar = (1 + math.sqrt(2)) / math.sqrt(_near_rows(m, self.b, q)) if q else 0.0
        return math.sqrt(m - q) * max(1.0, liar)

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Delta_0 of the paper's first lemma for b wrong rows; fewer are a special case."""
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
    """Average the ``select`` rows with the best Krum scores; m - b of them unless told otherwise.

        MultiKrum_b = mean of the select rows x_i with the smallest s_i,
        s_i = sum of |x_i - x_j|^2 over the m - b - 2 nearest j

    Breakdown: survives b wrong rows, 2b + 2 < m; one wrong value in every row breaks it. A row with
    NaN or inf is at infinite distance from all others.

    Reference: Blanchard et al. (2017). Scores are computed once.

    Args:
        b: how many wrong rows it has to survive, 2b + 2 < m.
        select: how many rows are averaged, at most m - b.

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
        """Return how many rows are averaged."""
        return m - self.b if self.select is None else self.select

    def check(self, m: int) -> None:
        """Refuse 2b + 2 >= m, and more rows than can be honest."""
        super().check(m)
        if self.chosen(m) > m - self.b:
            raise ValueError(
                f"MultiKrum needs select <= m - b: got select={self.select} with b={self.b} and"
                f" m={m} workers, the largest select is {m - self.b}"
            )

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the mean of the chosen, whose scores add up to at most 2 S for each of them."""
        if q > self.tolerates(m).rows:
            return None
        chosen = self.chosen(m)
        liars, near = min(q, chosen), _near_rows(m, self.b, q)
        pull = math.sqrt(2 * liars / (chosen * near)) + liars / (chosen * math.sqrt(near))
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

    Breakdown: survives b wrong rows, 4b + 3 <= m. A row with NaN or inf is at infinite distance
    from all others.

    Reference: El Mhamdi et al., "The hidden vulnerability of distributed learning in Byzantium"
    (2018). Towards the end of the choice at least one neighbour is counted.

    Args:
        b: how many wrong rows it has to survive, 4b + 3 <= m.

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
        """Return what the window survives, whichever rows are chosen: at least b."""
        self.check(m)
        most = survived(self.window(m))
        return Tolerance(rows=most, values=most)

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the distance by the window's numbers, with all liars among the chosen."""
        if q > self.tolerates(m).rows:
            return None
        return window_spreads(self.window(m), m - 2 * self.b, q, honest=m - q)

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

    Of several such sets the first in lexicographic order is taken. Minimum-diameter averaging.

    Breakdown: survives b wrong rows, 2b < m. A row with NaN or inf is at infinite distance from all
    others. The search is exponential in b at worst; b up to about 20 takes milliseconds.

    Reference: El Mhamdi et al., "Genuinely distributed Byzantine machine learning" (2020).

    Args:
        b: how many wrong rows it has to survive, 2b < m.

    >>> import numpy as np
    >>> MDA(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "mda"
    weighable = True

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the mean of the set: its liars are within the honest diameter of all its rows.

        That is at most sqrt(2h) spreads, and one of the m - b - q honest rows of the set is within
        sqrt(h / (m - b - q)) spreads of the honest mean.
        """
        if q > self.tolerates(m).rows:
            return None
        honest, size = m - q, m - self.b
        liar = math.sqrt(2 * honest) + math.sqrt(honest / (size - q))
        return (q * liar + math.sqrt(size * honest)) / size

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the set with the smallest diameter."""
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

    Of rows that are as long, those with the smaller index are taken: rows that were clipped before
    all have the radius as their norm.

    Breakdown: what b wrong rows add is no longer than an honest row, 2b < m; it bounds the norm,
    not the direction. A row with NaN or inf has infinite norm.

    Reference: Gupta, Liu, Vaidya, "Byzantine fault-tolerant distributed machine learning using
    SGD and comparative gradient elimination" (2020), as a mean instead of a sum.

    Args:
        b: how many rows are left out, 2b < m.

    >>> import numpy as np
    >>> CGE(b=1)(np.array([[1.0], [2.0], [6.0], [-900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "cge"
    weighable = True

    def tolerates(self, m: int) -> Tolerance:
        """Return nothing: a liar no longer than an honest row may point anywhere."""
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
