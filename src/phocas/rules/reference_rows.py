"""Reference implementations of the rules in ``spectral`` and ``signguard``, and of MoNNA.

They are in plain NumPy and float64: slow and simple. :mod:`phocas.rules.reference` calls them.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from phocas.rules.selection import MoNNA
from phocas.rules.signguard import SignGuard
from phocas.rules.spectral import CAF, SMEA

Matrix = NDArray[np.float64]


def _finite(rows: Matrix) -> list[int]:
    """Return the rows without NaN and inf, whose squares do not overflow either."""
    return [i for i, row in enumerate(rows) if np.isfinite(np.sum(row**2))]


def _lengths(rows: Matrix) -> Matrix:
    """Return the norms of the rows; infinite for a row with NaN or inf."""
    lengths = np.sqrt(np.sum(np.asarray(rows) ** 2, axis=1))
    return np.where(np.isnan(lengths), np.inf, lengths)


def _nothing(rows: Matrix) -> Matrix:
    return np.full(rows.shape[1], np.nan)


# -- spectral --------------------------------------------------------------------------------------


def _first_direction(rows: Matrix, weights: Matrix) -> tuple[float, Matrix]:
    """Return the largest eigenvalue of the weighted covariance, and its eigenvector."""
    mean = weights @ rows / weights.sum()
    scaled = np.sqrt(weights / weights.sum())[:, None] * (rows - mean)
    _, sizes, directions = np.linalg.svd(scaled, full_matrices=False)
    return float(sizes[0] ** 2), directions[0]


def caf(rule: CAF, rows: Matrix) -> Matrix:
    """Filter by the first eigenvector of the covariance until the weight is at most m - 2b."""
    finite = _finite(rows)
    if len(finite) < len(rows) - rule.b:
        return _nothing(rows)
    inside = np.asarray(rows)[finite]
    weights = np.ones(len(finite))
    smallest, best = np.inf, weights
    while True:
        eigenvalue, direction = _first_direction(inside, weights)
        if eigenvalue < smallest:
            smallest, best = eigenvalue, weights
        mean = weights @ inside / weights.sum()
        parts = ((inside - mean) @ direction) ** 2
        parts[weights == 0] = 0
        if eigenvalue == 0 or not parts.any():
            break
        weights = np.maximum(weights * (1 - parts / parts.max()), 0)
        if not weights.sum() > len(rows) - 2 * rule.b:
            break
    return np.asarray(best @ inside / best.sum())


def smea(rule: SMEA, rows: Matrix) -> list[int]:
    """Try all sets of m - b rows."""
    size = len(rows) - rule.b
    sets = list(combinations(_finite(rows), size))
    found = [_first_direction(rows[list(each)], np.ones(size))[0] for each in sets]
    near = [each for each, size in zip(sets, found, strict=True) if size <= min(found) * (1 + 1e-9)]
    return list(near[0]) if near else []


def monna(rule: MoNNA, rows: Matrix) -> list[int]:
    """Choose the rows nearest to the trusted one."""
    distances = _lengths(rows - rows[rule.trusted])
    distances[rule.trusted] = -1
    best = np.argsort(distances, kind="stable")[: len(rows) - rule.b]
    return [int(i) for i in best] if np.isfinite(distances[best]).all() else []


# -- lengths and signs ----------------------------------------------------------------------------


def _clipped_mean(rows: Matrix, members: list[int]) -> Matrix:
    """Average some rows, each scaled down to the median length of all rows."""
    lengths = _lengths(rows)
    median = np.median(lengths)
    found = [
        row * min(1.0, median / size) if size else row
        for row, size in zip(rows, lengths, strict=True)
    ]
    return np.asarray(np.mean([found[i] for i in members], axis=0))


def signguard(rule: SignGuard, rows: Matrix) -> Matrix:
    """Choose the rows by their lengths and by the numbers of their signs."""
    lengths = _lengths(rows)
    median = np.median(lengths)
    if np.isinf(median):
        return _nothing(rows)
    finite = _finite(rows)
    counts = np.array(
        [[np.sum(rows[i] > 0), np.sum(rows[i] == 0), np.sum(rows[i] < 0)] for i in finite]
    )
    points = counts / np.maximum(counts.max(axis=0), 1)
    usual = [rule.lower * median <= length <= rule.upper * median for length in lengths]
    members = [finite[k] for k in _largest_cluster(points) if usual[finite[k]]]
    return _clipped_mean(rows, members) if members else _nothing(rows)


def _largest_cluster(points: Matrix) -> list[int]:
    """Shift every point to the mean of the points near it, until it stays, and group the ends."""
    n = len(points)

    def apart(place: Matrix) -> Matrix:
        return np.asarray(np.sqrt(np.sum((points - place) ** 2, axis=1)).round(9))

    nearest = [np.sort(apart(point))[max(1, n // 2) - 1] for point in points]
    bandwidth = float(np.mean(nearest)) * (1 + 1e-9)
    ends: list[tuple[int, Matrix]] = []
    for point in points:
        near = apart(point) <= bandwidth
        while True:
            place = points[near].mean(axis=0)
            following = apart(place) <= bandwidth
            if np.array_equal(following, near):
                break
            near = following
        ends.append((int(near.sum()), place))
    centres: list[Matrix] = []
    for _, end in sorted(ends, key=lambda each: (-each[0], *each[1].round(9))):
        if all(np.sqrt(np.sum((end - other) ** 2)).round(9) > bandwidth for other in centres):
            centres.append(end)
    distances = np.array([apart(centre) for centre in centres])
    clusters: list[list[int]] = [[] for _ in centres]
    for i in range(n):
        if distances[:, i].min() <= bandwidth:
            clusters[int(np.argmin(distances[:, i]))].append(i)
    return max(clusters, key=len)
