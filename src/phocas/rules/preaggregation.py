"""Pre-aggregations: steps before a rule that mix, bucket or clip the rows."""

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
from phocas.rules.base import Bounded, PreAggregator
from phocas.rules.guarantee import Tolerance
from phocas.specs import count, normalise, positive


@dataclass(frozen=True)
class NNM(Bounded, PreAggregator):
    """Replace each row by the mean of its m - b nearest rows, itself among them.

        x_i <- mean of the m - b rows x_j with the smallest |x_i - x_j|

    The smaller index breaks ties. Distances of float32 rows are computed in single precision, and
    in double precision if their squares overflow.

    Breakdown: tolerates b Byzantine rows, or fewer if the following rule tolerates fewer; one
    Byzantine value in every row breaks it. A row with NaN or inf is mixed into no finite row if at
    most b rows have such values.

    Reference: Allouah et al., "Fixing by mixing" (2023).

    Args:
        b: the number of Byzantine rows that the step tolerates, 2b < m.

    >>> import numpy as np
    >>> from phocas import Median
    >>> (NNM(b=1) | Median())(np.array([[1.0], [2.0], [6.0], [900.0]]))
    array([3.])
    """

    name: ClassVar[str] = "nnm"
    weighable = True

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return the tolerance of b rows, or that of the following rule if it is smaller.

        With more than b Byzantine rows, every mixed row would contain one.
        """
        del m
        return Tolerance(rows=min(self.b, following.rows))

    def error_bound(self, m: int, q: int, following: float) -> float | None:
        """Bound the error of the following rule on mixed rows, in standard deviations.

        Mixing moves honest rows by at most sqrt(2) standard deviations (root mean square): the
        m - b nearest rows of an honest row are on average no farther away than the honest rows.
        """
        del m, q
        return (1 + math.sqrt(2)) * following + math.sqrt(2)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Find the nearest rows of each row; the smaller index breaks ties."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Replace each row by the weighted mean of its nearest rows.

        These rows have the total weight of all workers without the b heaviest ones. The last of the
        nearest rows may enter with a part of its weight.
        """
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

    Breakdown: tolerates as many rows or values as the following rule does among ceil(m / size)
    rows. Each Byzantine row or value affects one bucket, so b of them affect at most b buckets.

    Reference: Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via
    bucketing" (2022).

    Args:
        size: the number of rows in a bucket; the last bucket may have fewer.

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
        """Raise ValueError if a bucket is larger than the number of rows."""
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
        """Return the tolerance of the following rule.

        At worst, each Byzantine row, or Byzantine value of a column, is in a different bucket.
        """
        del m
        return following

    def error_bound(self, m: int, q: int, following: float) -> float | None:
        """Bound the error by the variance of the means of buckets without Byzantine rows."""
        return (following + 1) * math.sqrt((m - q) / (self.rows_after(m) - q))

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Assign the rows to buckets."""
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

    Breakdown: it bounds the norm of what a Byzantine row adds. Honest rows beyond the radius are
    clipped as well, so there is no guarantee on the distance from their mean.

    Args:
        radius: the largest norm of a row.

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
        """Measure the norms of the rows and clip them to the radius."""
        del m, rng
        request = fitting_norms(self.radius)
        return clipped((yield request), request, (self.radius * request.scale) ** 2)


@dataclass(frozen=True)
class AdaptiveClipping(Bounded, PreAggregator):
    """Scale the k = floor(2 (b/m) (m - b)) longest rows down to the next longest (ARC).

        x_i <- x_i min(1, C / |x_i|),  C the (k+1)-th largest of |x_1| ... |x_m|

    Breakdown: tolerates as many rows as the following rule does, if fewer than m - k are Byzantine;
    one Byzantine value in every row breaks it. A row with NaN or inf has infinite norm and becomes
    zero.

    Reference: Allouah et al., "Adaptive gradient clipping for robust federated learning" (2025).

    Args:
        b: the number of Byzantine rows that the step tolerates, 2b < m; it determines k.

    >>> import numpy as np
    >>> from phocas import Mean
    >>> (AdaptiveClipping(b=1) | Mean())(np.array([[1.0], [2.0], [3.0], [900.0]]))
    array([2.25])
    """

    name: ClassVar[str] = "adaptive-clipping"
    aliases: ClassVar[tuple[str, ...]] = ("arc",)
    weighable = True

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return the tolerance of the following rule, limited to m - k - 1 rows.

        With at most m - k - 1 Byzantine rows, at least one honest row is not clipped, and no honest
        row is scaled down to less than the norm of the shortest honest row.
        """
        return Tolerance(rows=min(following.rows, m - 1 - self.clipped_rows(m)))

    def error_bound(self, m: int, q: int, following: float) -> float | None:
        """Bound the error: honest rows are scaled down to the shortest honest norm at most."""
        return following + math.sqrt(m - q)

    def clipped_rows(self, m: int) -> int:
        """Return the number k of rows that are scaled down."""
        return 2 * self.b * (m - self.b) // m

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Measure the norms and clip to the (k+1)-th largest."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Scale the longest rows, of total weight K, down to the norm of the next longest.

        K = floor(2 (B/T) (T - B)), with T the total weight and B that of the b heaviest workers.
        """
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
