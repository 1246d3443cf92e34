"""Reference implementations of MoNNA and the rules of ``spectral``, ``signguard``, ``directions``.

They are in plain NumPy and float64: slow and simple. :mod:`phocas.rules.reference` calls them.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from phocas.rules.directions import FLAME, FoolsGold
from phocas.rules.selection import MoNNA
from phocas.rules.signguard import SignGuard
from phocas.rules.spectral import CAF, SMEA, DnC

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


def dnc(rule: DnC, rows: Matrix) -> list[int]:
    """Drop far rows, then choose those nearest to the mean in the first direction."""
    rows, size = np.asarray(rows), len(rows) - rule.b
    median = np.array([np.sort(_lengths(rows - row))[len(rows) // 2] for row in rows])
    limit = 100 * np.sort(median)[size - 1]
    near = [i for i in _finite(rows) if median[i] <= limit]
    if len(near) < size:
        return []
    inside = rows[near]
    _, direction = _first_direction(inside, np.ones(len(near)))
    parts = ((inside - inside.mean(axis=0)) @ direction) ** 2
    return sorted(near[k] for k in np.argsort(parts, kind="stable")[:size])


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
    """Return the largest cluster of a mean shift: points that end at the same place.

    Each point is moved to the mean of the points near it, again and again, until it stays.
    """
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


# -- directions -----------------------------------------------------------------------------------


def _apart(rows: Matrix) -> Matrix:
    """Return the squared distances between the rows at length 1; rounding counts as zero."""
    lengths = [np.sqrt(np.sum(row**2)) for row in rows]
    units = [row / size if size else row for row, size in zip(rows, lengths, strict=True)]
    apart = np.array([[np.sum((a - b) ** 2) for b in units] for a in units])
    zero = np.array(lengths) == 0
    return np.where(zero[:, None] != zero, 2.0, np.where(apart <= 1e-12, 0, apart))


def flame(_: FLAME, rows: Matrix) -> Matrix:
    """Join the groups of the two nearest rows, until a group has more than half of all rows."""
    finite = _finite(rows)
    apart = _apart(np.asarray(rows)[finite])
    group = list(range(len(finite)))
    last = np.inf
    pairs = [(apart[i, j], i, j) for i in group for j in range(i)]
    for distance, i, j in sorted(pairs):
        if distance > last:
            break
        if group[i] != group[j]:
            group = [group[i] if each == group[j] else each for each in group]
        if group.count(group[i]) > len(rows) // 2:
            last = distance
    members = [k for k in range(len(group)) if group.count(group[k]) > len(rows) // 2]
    return _clipped_mean(rows, [finite[k] for k in members]) if members else _nothing(rows)


def foolsgold(rule: FoolsGold, rows: Matrix) -> Matrix:
    """Weight the rows by how much the most similar other row differs."""
    finite = _finite(rows)
    if not finite:
        return _nothing(rows)
    inside = np.asarray(rows)[finite]
    apart = _apart(inside)
    n = len(inside)
    similar = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j and inside[i].any():
                similar[i, j] = max(0.0, 1 - apart[i, j] / 2)
    most = similar.max(axis=1)
    for i in range(n):
        for j in range(n):
            if most[j] > most[i]:
                similar[i, j] *= most[i] / most[j]
    different = 1 - similar.max(axis=1)
    if different.max() <= 1e-12:
        return np.asarray(inside.mean(axis=0))
    share = different / different.max()
    weights = np.clip(rule.confidence * (np.log(share / (1 - share)) + 0.5), 0, 1)
    return np.asarray(weights @ inside / weights.sum())
