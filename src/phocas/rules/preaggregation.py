"""Steps before a rule that make its rows better: nearer to one another, fewer, or shorter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.rules.algebra import (
    Floats,
    Mix,
    Planning,
    chosen,
    clipped,
    fitting_norms,
    heaviest,
    measured_norms,
)
from phocas.rules.base import PreAggregator, Told
from phocas.rules.promise import Tolerance
from phocas.specs import count, normalise, positive


@dataclass(frozen=True)
class NNM(Told, PreAggregator):
    """Replace each row by the mean of its m - b nearest rows, itself among them.

        x_i <- mean of the m - b rows x_j with the smallest |x_i - x_j|

    Of rows that are as near, those with the smaller index are taken. Distances of float32 rows are
    computed in single precision where it can hold them, and in double precision where it cannot.

    Breakdown: b wrong rows, or fewer if what follows survives fewer; one wrong value in every row
    breaks it. A row at infinite distance is mixed into no finite row as long as at most b rows are
    bad.

    Reference: Allouah et al., "Fixing by mixing" (2023).

    Args:
        b: how many wrong rows it has to survive, 2b < m.

    >>> import numpy as np
    >>> from phocas import Median
    >>> (NNM(b=1) | Median())(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "nnm"
    weighable = True

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return b rows or what follows survives; with more, no mix would be without a liar."""
        del m
        return Tolerance(rows=min(self.b, following.rows))

    def spreads(self, m: int, q: int, following: float) -> float | None:
        """Bound how far honest rows move: by sqrt 2 spreads, in the root mean square.

        The m - b nearest rows are on average no farther than all the honest ones.
        """
        del m, q
        return (1 + math.sqrt(2)) * following + math.sqrt(2)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Find each row's neighbours; of two as near, the one with the smaller index."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Take the mass nearest to each row, all but that of the b heaviest; the last in part."""
        del rng
        each = _or_ones(units, m)
        kept = int(each.sum()) - heaviest(each, self.b)

        def choose(squared: Floats) -> tuple[tuple[NDArray[np.intp], Floats], bool]:
            squared = squared.copy()
            np.fill_diagonal(squared, -1.0)
            nearest = np.argsort(squared, axis=1, kind="stable")
            near = each[nearest]
            taken = np.clip(kept - (np.cumsum(near, axis=1) - near), 0, near)
            used = np.take_along_axis(squared, nearest, axis=1)[taken > 0]
            return (nearest, taken / kept), bool(np.isfinite(used).all())

        nearest, shares = yield from chosen(choose)
        weights = np.zeros((m, m))
        np.put_along_axis(weights, nearest, shares, axis=1)
        return Mix(weights)


@dataclass(frozen=True)
class Bucketing(PreAggregator):
    """Average the rows in buckets of ``size``, in random order if the call is given an ``rng``.

        x_k <- mean of the rows of bucket k,  k = 1 ... ceil(m / size)

    Breakdown: what follows survives of ceil(m / size) rows. A bucket with a wrong row or value in
    it is wrong there, so b wrong ones make at most b wrong buckets.

    Reference: Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via
    bucketing" (2022).

    Args:
        size: how many rows make a bucket; the last may have fewer.

    >>> import numpy as np
    >>> from phocas import Median
    >>> (Bucketing(size=2) | Median())(np.array([[1.0], [3.0], [4.0], [6.0], [9.0], [900.0]]))
    array([5.])
    """

    size: int
    name: ClassVar[str] = "bucketing"

    def __post_init__(self) -> None:
        """Check that the size is a count."""
        normalise(self, size=count("Bucketing", "size", self.size, minimum=1))

    def check(self, m: int) -> None:
        """Refuse buckets larger than all rows."""
        super().check(m)
        if self.size > m:
            raise ValueError(
                f"Bucketing needs size <= m: got size={self.size} with m={m} workers,"
                f" the largest size is {m}"
            )

    def rows_after(self, m: int) -> int:
        """Return the number of buckets."""
        return -(-m // self.size)

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return what follows survives: in the worst draw each liar has a bucket of its own.

        So has each wrong value of a column, as who shares a bucket does not depend on values.
        """
        del m
        return following

    def spreads(self, m: int, q: int, following: float) -> float | None:
        """Bound the means of the buckets without a liar: their squares add up to no more."""
        return (following + 1) * math.sqrt((m - q) / (self.rows_after(m) - q))

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Deal the rows into buckets."""
        yield from ()
        order = np.arange(m) if rng is None else rng.permutation(m)
        bucket = np.empty(m, np.intp)
        bucket[order] = np.arange(m) // self.size
        sizes = np.bincount(bucket)
        weights = np.zeros((len(sizes), m))
        weights[bucket, np.arange(m)] = 1 / sizes[bucket]
        return Mix(weights, fair=1 / sizes[bucket])


@dataclass(frozen=True)
class Clipping(PreAggregator):
    """Scale every row longer than ``radius`` down to it; a row with NaN or inf becomes zero.

        x_i <- x_i min(1, radius / |x_i|)

    Breakdown: it bounds what a liar can add. Honest rows beyond the radius are clipped as well, so
    there is no promise of staying near their mean, whatever follows.

    Args:
        radius: how long a row may be.

    >>> import numpy as np
    >>> from phocas import Mean
    >>> (Clipping(radius=3.0) | Mean())(np.array([[1.0], [2.0], [900.0]]))
    array([2.])
    """

    radius: float
    name: ClassVar[str] = "clipping"
    weighable = True

    def __post_init__(self) -> None:
        """Check the radius."""
        normalise(self, radius=positive("Clipping", "radius", self.radius))

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Measure the rows."""
        del m, rng
        request = fitting_norms(self.radius)
        return clipped((yield request), request, (self.radius * request.scale) ** 2)


@dataclass(frozen=True)
class AdaptiveClipping(Told, PreAggregator):
    """Scale the k = floor(2 (b/m) (m - b)) longest rows down to the next longest (ARC).

        x_i <- x_i min(1, C / |x_i|),  C the (k+1)-th largest of |x_1| ... |x_m|

    Breakdown: what follows survives, in rows, if fewer than m - k are wrong; one wrong value in
    every row breaks it. A row with NaN or inf has infinite length and becomes zero.

    Reference: Allouah et al., "Adaptive gradient clipping for robust federated learning" (2025).

    Args:
        b: how many wrong rows it has to survive, 2b < m; k follows from it.

    >>> import numpy as np
    >>> from phocas import Mean
    >>> (AdaptiveClipping(b=1) | Mean())(np.array([[1.0], [2.0], [3.0], [900.0]]))
    array([2.25])
    """

    name: ClassVar[str] = "adaptive-clipping"
    aliases: ClassVar[tuple[str, ...]] = ("arc",)
    weighable = True

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return the rows that what follows survives, if an honest one is among those not clipped.

        Then no honest row is clipped below the shortest honest one.
        """
        return Tolerance(rows=min(following.rows, m - 1 - self.clipped_rows(m)))

    def spreads(self, m: int, q: int, following: float) -> float | None:
        """Bound how far honest rows move: no farther than to the shortest of them."""
        return following + math.sqrt(m - q)

    def clipped_rows(self, m: int) -> int:
        """Return how many rows are scaled down."""
        return 2 * self.b * (m - self.b) // m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Measure the rows and take the longest that is left alone as the radius."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Scale the mass K = floor(2 (B/T) (T - B)) of the longest down to the next longest."""
        del rng
        each = _or_ones(units, m)
        total, mass = int(each.sum()), heaviest(each, self.b)
        clipped_mass = 2 * mass * (total - mass) // total

        def longest_left(squared: Floats) -> float:
            longest = np.argsort(-squared, kind="stable")
            place = np.searchsorted(np.cumsum(each[longest]), clipped_mass, side="right")
            return float(squared[longest[place]])

        squared, request = yield from measured_norms(longest_left)
        return clipped(squared, request, longest_left(squared))


def _or_ones(units: NDArray[np.int64] | None, m: int) -> NDArray[np.int64]:
    return np.ones(m, np.int64) if units is None else units
