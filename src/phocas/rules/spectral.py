"""Rules that look for the direction in which the rows vary most: CAF, SMEA and DnC.

The direction is an eigenvector of the d x d covariance of the rows. The covariance has the same
nonzero eigenvalues as an m x m matrix of inner products, which follows from the squared distances
between the rows. So these rules measure the distances and never build a d x d matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.rules.algebra import Floats, Mix, Planning, chosen, heaviest, lost, select, weighing
from phocas.rules.base import Bounded
from phocas.rules.centres import WeighingRule
from phocas.rules.guarantee import Tolerance
from phocas.rules.selection import RowRule

MOST_SETS = 5_000  # sets that SMEA compares, which takes about 0.02 s
FAR = 100  # median distances beyond which DnC drops a row before it looks for the direction
STEPS = 12  # more steps take longer than they save of the exact comparison
EXACT = 32  # sets that are compared exactly at a time


def _present(squared: Floats, weights: Floats, kept: float) -> NDArray[np.intp]:
    """Return the rows at finite distance from rows whose total weight is at least ``kept``.

    These are the rows without NaN and inf, if the weight of the others is small enough.
    """
    return np.flatnonzero(np.isfinite(squared) @ weights >= kept)


def _products(squared: Floats, shares: Floats) -> Floats:
    """Return the m x m inner products of the centred rows.

    The centre is the weighted mean of the rows. The products follow from the squared distances.

    Args:
        squared: the squared distances between the rows, (m, m).
        shares: the weight of each row; the weights add up to 1.
    """
    towards = squared @ shares
    return np.asarray(-0.5 * (squared - towards[:, None] - towards + shares @ towards))


def _main_direction(squared: Floats, weights: Floats) -> tuple[float, Floats]:
    """Return the largest variance of weighted rows in any direction, and each row's part of it.

    The variance is the largest eigenvalue of the weighted covariance. A row's part is the square
    of its distance from the mean in that direction, times a common factor.
    """
    scale = float(squared.max())  # squares of products of distances would overflow
    if scale == 0:
        return 0.0, np.zeros(len(squared))
    shares = weights / weights.sum()
    products = _products(squared / scale, shares)
    root = np.sqrt(shares)
    values, vectors = np.linalg.eigh(root[:, None] * products * root)
    return float(values[-1]) * scale, np.square(products @ (root * vectors[:, -1]))


@dataclass(frozen=True)
class CAF(Bounded, WeighingRule):
    """Lower the weights of rows that are far out in the direction of the largest variance.

        w_i <- w_i (1 - t_i / max t),  t_i = <x_i - mean_w, v>^2,  until w_1 + ... + w_m <= m - 2b

    v is the first eigenvector of the weighted covariance, and w starts at 1. The result is the
    weighted mean of the step whose largest eigenvalue is smallest. The name means covariance-bound
    agnostic filter.

    Breakdown: tolerates b Byzantine rows, 2b < m; one Byzantine value in every row breaks it. A
    row with NaN or inf has weight zero.

    Reference: Allouah, Guerraoui, Stephan, "Towards trustworthy federated learning with untrusted
    participants" (2025), with an exact eigenvector instead of power iterations.

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> CAF(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]])).round(2)
    array([3.01])
    """

    name: ClassVar[str] = "caf"
    weighable = True

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of b Byzantine rows."""
        self.check(m)
        return Tolerance(rows=self.b)

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the step with the smallest eigenvalue (docs/theory.md)."""
        if q > self.tolerates(m).rows:
            return None
        honest, more = m - q, m - 2 * q
        later = 2 * honest**2 / more * (1 / (m - 2 * self.b) - 1 / m)
        return math.sqrt(2 * honest * q) / more + math.sqrt(q / more) + math.sqrt(later)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the weights of the rows from the distances between them."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Compute the weights of the rows, which start at the weights of the workers."""
        del rng
        each = np.ones(m, np.int64) if units is None else units

        def choose(squared: Floats) -> tuple[Floats | None, bool]:
            return self._filtered(squared, each), bool(np.isfinite(squared).all())

        weights = yield from chosen(choose)
        if weights is None:
            return lost(m)
        mix = weighing(weights / weights.sum())
        return mix if units is None else Mix(weights[None, :] / weights.sum(), fair=1 / m)

    def _filtered(self, squared: Floats, each: NDArray[np.int64]) -> Floats | None:
        """Return the weights of the rows; None if more than b rows have NaN or inf."""
        total, byzantine = int(each.sum()), heaviest(each, self.b)
        finite = _present(squared, each.astype(np.float64), total - byzantine)
        pairs = np.ix_(finite, finite)
        if each[finite].sum() < total - byzantine or not np.isfinite(squared[pairs]).all():
            return None
        weights = np.zeros(len(each))
        weights[finite] = each[finite]
        smallest, best = math.inf, weights
        while True:
            used = np.flatnonzero(weights)
            variance, parts = _main_direction(squared[np.ix_(used, used)], weights[used])
            if variance < smallest:
                smallest, best = variance, weights.copy()
            if not parts.any():
                return best
            weights[used] *= 1 - parts / parts.max()
            if not weights.sum() > total - 2 * byzantine:
                return best


@dataclass(frozen=True)
class SMEA(RowRule):
    """Average the m - b rows whose largest variance in any direction is smallest.

        SMEA_b = mean of S,  S = argmin of the largest eigenvalue of Cov(S) over sets of m - b rows

    The name means smallest maximum eigenvalue averaging. If several sets have the smallest
    eigenvalue, the first in lexicographic order is taken.

    Breakdown: tolerates b Byzantine rows, 2b < m. A row with NaN or inf is in no set. The rule
    compares all sets of m - b rows, and so rejects a b with more than 5,000 of them: 20 workers
    allow b = 4. CAF has no such limit.

    Reference: Allouah et al., "On the privacy-robustness-utility trilemma in distributed learning"
    (2023).

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> SMEA(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "smea"
    condition = f"2b < m and at most {MOST_SETS} sets of m - b rows"
    weighable = True

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return the largest b with 2b < m and at most ``MOST_SETS`` sets of m - b rows."""
        half = (m - 1) // 2
        return next((b - 1 for b in range(1, half + 1) if math.comb(m, b) > MOST_SETS), half)

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the mean of the chosen set.

        The set has at least m - b - q of the h honest rows. Let a be their mean, and
        c = sqrt(b / (m - b - q)). The distance of a from the mean of the set is at most c times the
        largest standard deviation of the set in any direction. The distance of a from the honest
        mean is at most c times that of the honest rows. The variance of the set is at most that of
        m - b honest rows, which is at most h / (m - b) times that of all honest rows.
        """
        if q > self.tolerates(m).rows:
            return None
        size = m - self.b
        return math.sqrt(self.b / (size - q)) * (1 + math.sqrt((m - q) / size))

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the set of rows with the smallest eigenvalue."""
        del rng
        size = m - self.b

        def choose(squared: Floats) -> tuple[Mix, bool]:
            finite = _present(squared, np.ones(m), size)
            pairs = squared[np.ix_(finite, finite)]
            if len(finite) < size or not np.isfinite(pairs).all():
                return lost(m), False
            return Mix(select(m, finite[_smallest_eigenvalue(pairs, size)])), True

        return (yield from chosen(choose))


@dataclass(frozen=True)
class DnC(RowRule):
    """Average the m - b rows nearest to the mean in the direction of the largest variance.

        DnC_b = mean of the m - b rows with the smallest <x_i - mean, v>^2

    v is the first eigenvector of the covariance of the rows. The name means divide and conquer. The
    smaller index breaks ties. Far rows are dropped first: the median distance of a far row to the
    other rows is 100 times the (m - b)-th smallest such distance, or more.

    Breakdown: tolerates b Byzantine rows, 2b < m. Near rows have no better guarantee than not to be
    far: two Byzantine rows on opposite sides can determine v, and hide a third one. A row with NaN
    or inf is a far row.

    Reference: Shejwalkar, Houmansadr, "Manipulating the Byzantine: optimizing model poisoning
    attacks and defenses for federated learning" (2021). The paper computes v from randomly drawn
    columns, and averages the rows that are kept in each of several draws. All columns are used
    here, so that nothing is drawn and one pass is enough. The paper does not drop far rows first,
    and has no guarantee for hidden rows. It drops c b rows, mostly with c = 1.

    Args:
        b: the number of Byzantine rows that the rule tolerates, 2b < m.

    >>> import numpy as np
    >>> DnC(b=1)(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "dnc"
    weighable = True

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the error of the mean of the chosen rows.

        The distances between the h honest rows are at most sqrt(2h) standard deviations, so the
        (m - b)-th smallest median distance is too. A Byzantine row that is not far is within FAR
        times this of an honest row, which is within sqrt(h) of the honest mean.
        """
        if q > self.tolerates(m).rows:
            return None
        honest, size = m - q, m - self.b
        byzantine = FAR * math.sqrt(2 * honest) + math.sqrt(honest)
        return (q * byzantine + math.sqrt(size * honest)) / size

    def expected(self, m: int) -> float:
        """Return the share of rows not chosen."""
        return self.b / m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows nearest to the mean in the first direction."""
        del rng
        size = m - self.b

        def choose(squared: Floats) -> tuple[Mix, bool]:
            median = np.sort(squared, axis=1)[:, m // 2]
            limit = FAR**2 * np.sort(median)[size - 1]
            near = np.flatnonzero(np.isfinite(median) & (median <= limit))
            pairs = squared[np.ix_(near, near)]
            if len(near) < size or not np.isfinite(pairs).all():
                return lost(m), False
            _, parts = _main_direction(pairs, np.ones(len(near)))
            nearest = np.argsort(parts, kind="stable")[:size]
            return Mix(select(m, np.sort(near[nearest]))), True

        return (yield from chosen(choose))


@lru_cache(maxsize=4)
def _sets(m: int, size: int) -> tuple[NDArray[np.intp], Floats]:
    """Return all sets of ``size`` of m rows: their indices, and a 1 for each row in a set."""
    indices = np.array(list(combinations(range(m), size)), np.intp)
    members = np.zeros((len(indices), m))
    np.put_along_axis(members, indices, 1.0, axis=1)
    return indices, members


def _smallest_eigenvalue(squared: Floats, size: int) -> NDArray[np.intp]:
    """Return the first set of rows that minimises the largest eigenvalue of its scatter.

    A Chebyshev iteration gives lower bounds of the largest eigenvalues of all sets. Sets with a
    bound above the eigenvalue of some set are left out.
    """
    m = len(squared)
    indices, members = _sets(m, size)
    scale = float(squared.max())
    if size == m or scale == 0:
        return np.asarray(indices[0], np.intp)
    # Vectors with the sum 0 have the same products with -1/2 of the squared distances as with the
    # inner products of rows. The distances within a set do not depend on rows far from it.
    halves = -0.5 * (squared / scale)
    left = np.arange(len(indices))
    vectors = _centred(members * np.cos(np.arange(m)), members)
    before = np.zeros_like(vectors)
    best, middle, half = math.inf, 0.0, 0.0
    for step in range(STEPS):
        inside = members[left]
        # Vectors may overflow if the eigenvalue of their set is much larger. A bound that is NaN
        # leaves no set out.
        with np.errstate(over="ignore", invalid="ignore"):
            moved = (vectors @ halves) * inside
            bounds = (moved * vectors).sum(axis=1) / np.square(vectors).sum(axis=1)
        first = int(np.nan_to_num(bounds, nan=math.inf).argmin())
        (values,) = _eigenvalues(halves, indices[left[[first]]])
        best = min(best, float(values[-1]))
        if step == 0:
            # The polynomial is small from the low to the high value, and grows fast beyond them.
            # The largest eigenvalue of no other set should be below the high value.
            low = max(0.0, float(values[1]))
            high = max(low, min(float(values[-2]), low + 0.7 * (best - low)))
            middle, half = (high + low) / 2, max((high - low) / 2, 1e-3 * best) or 1.0
        keep = ~(bounds > best * (1 + 1e-9))
        keep[first] = True  # rounding may make an eigenvalue of nearly 0 less than its bound
        left, inside, bounds = left[keep], inside[keep], bounds[keep]
        factor = 1 if step == 0 else 2
        with np.errstate(over="ignore", invalid="ignore"):
            grown = (moved[keep] - middle * vectors[keep]) * (factor / half) - before[keep]
            before, vectors = vectors[keep], _centred(grown, inside)
    return np.asarray(indices[_first_smallest(halves, indices, left, bounds)], np.intp)


def _centred(vectors: Floats, inside: Floats) -> Floats:
    """Subtract the mean of each vector within its set."""
    means = vectors.sum(axis=1, keepdims=True) / inside.sum(axis=1, keepdims=True)
    return np.asarray(vectors - inside * means)


def _first_smallest(
    halves: Floats, indices: NDArray[np.intp], left: NDArray[np.intp], bounds: Floats
) -> int:
    """Return the first of the sets ``left`` with the smallest largest eigenvalue.

    Sets with small lower ``bounds`` are compared first, so that most others need no comparison.
    """
    order = np.argsort(np.nan_to_num(bounds, nan=0.0), kind="stable")
    found = np.full(len(left), math.inf)
    for part in np.split(order, range(EXACT, len(order), EXACT)):
        if not bounds[part[0]] > found.min() * (1 + 1e-9):
            found[part] = _eigenvalues(halves, indices[left[part]])[:, -1]
    return int(left[(found <= found.min() * (1 + 1e-9)).argmax()])


def _eigenvalues(halves: Floats, sets: NDArray[np.intp]) -> Floats:
    """Return the eigenvalues of the scatter of each set, in ascending order."""
    inner = halves[sets[:, :, None], sets[:, None, :]]
    inner = inner - inner.mean(axis=1, keepdims=True)
    inner = inner - inner.mean(axis=2, keepdims=True)
    return np.asarray(np.linalg.eigvalsh(inner))
