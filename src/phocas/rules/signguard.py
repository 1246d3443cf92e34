"""SignGuard, which compares the lengths and the signs of rows."""

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
    Signs,
    lost,
    measured_norms,
    shrinking,
    weighing,
)
from phocas.rules.centres import WeighingRule
from phocas.specs import normalise, positive

DIGITS = 9  # to which distances between counts of signs are rounded
MOST_SHIFTS = 300  # a mean shift takes a few steps


def clipped_mean(squared: Floats, members: NDArray[np.intp]) -> Mix:
    """Return the mix that averages some rows, each scaled down to the median length of all rows."""
    weights = np.zeros(len(squared))
    factors = shrinking(squared, float(np.median(np.sqrt(squared))))
    weights[members] = factors[members] / len(members)
    return weighing(weights)


@dataclass(frozen=True)
class SignGuard(WeighingRule):
    """Average the rows of usual length and usual signs, clipped to the median length.

        S1 = rows with lower M <= |x_i| <= upper M,  M the median of |x_1| ... |x_m|
        S2 = the largest cluster of rows by their shares of positive, zero and negative values
        SignGuard = mean over S1 and S2 of x_i min(1, M / |x_i|)

    The three shares describe a row by a point; each share is divided by the largest one among the
    rows. A mean shift that starts at every point finds the clusters. Its bandwidth is the mean
    distance of a point to the nearest half of all points.

    Breakdown: no guarantee. The result is no longer than M; a Byzantine row of usual length with
    as many positive and negative values as honest rows is accepted. A row with NaN or inf is
    dropped.

    Reference: Xu et al., "Byzantine-robust federated learning through collaborative malicious
    gradient filtering" (2022). The paper counts the signs of randomly drawn columns; all columns
    are counted here, so nothing is drawn.

    Args:
        lower: the smallest length of a row, in median lengths.
        upper: the largest length of a row, in median lengths.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0], [1.0, 1.0, -1.0], [-2.0, -2.0, -2.0]])
    >>> SignGuard()(rows).round(2)
    array([1.43, 1.36, 2.3 ])
    """

    lower: float = 0.1
    upper: float = 3.0
    name: ClassVar[str] = "signguard"

    def __post_init__(self) -> None:
        """Check that the limits are in order."""
        lower = positive("SignGuard", "lower", self.lower)
        upper = positive("SignGuard", "upper", self.upper)
        if not lower <= 1 <= upper:
            raise ValueError(
                f"SignGuard needs lower <= 1 <= upper: got lower={lower:g} and upper={upper:g}"
            )
        normalise(self, lower=lower, upper=upper)

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: there is no guarantee."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows by their lengths and by the numbers of their signs."""
        del rng
        squared, _ = yield from measured_norms(lambda each: float(np.median(each)))
        lengths = np.sqrt(squared)
        median = float(np.median(lengths))
        if not math.isfinite(median):
            return lost(m)
        present = np.flatnonzero(np.isfinite(lengths))
        counts = (yield Signs())[:, present]
        usual = (self.lower * median <= lengths) & (lengths <= self.upper * median)
        similar = present[_largest_cluster(_shares(counts))]
        members = similar[usual[similar]]
        return clipped_mean(squared, members) if len(members) else lost(m)


def _shares(counts: Floats) -> Floats:
    """Return each count of a row, divided by the largest such count of all rows."""
    largest = counts.max(axis=1)
    return np.asarray(counts.T / np.where(largest > 0, largest, 1.0))


def _largest_cluster(points: Floats) -> NDArray[np.intp]:
    """Return the largest cluster of a mean shift with a flat kernel.

    Of several, the one with the most points near its centre is taken, then the smallest centre.
    Counts of signs tie often, so distances are rounded: the order of the rows must not decide.
    """
    n = len(points)
    apart = _apart(points, points)
    bandwidth = float(np.sort(apart, axis=1)[:, max(1, n // 2) - 1].mean()) * (1 + 1e-9)
    near = apart <= bandwidth
    for _ in range(MOST_SHIFTS):
        centres = near @ points / near.sum(axis=1, keepdims=True)
        apart = _apart(centres, points)
        before, near = near, apart <= bandwidth
        if np.array_equal(before, near):
            break
    # Of centres within a bandwidth, the one with the most points near it counts.
    between = _apart(centres, centres)
    kept: list[int] = []
    for i in np.lexsort((*centres.round(DIGITS).T[::-1], -near.sum(axis=1))):
        if np.all(between[i, kept] > bandwidth):
            kept.append(int(i))
    owners = apart[kept].argmin(axis=0)
    inside = apart[kept].min(axis=0) <= bandwidth
    sizes = [np.count_nonzero((owners == k) & inside) for k in range(len(kept))]
    return np.flatnonzero((owners == int(np.argmax(sizes))) & inside)


def _apart(points: Floats, others: Floats) -> Floats:
    return np.asarray(np.linalg.norm(points[:, None] - others, axis=2).round(DIGITS))
