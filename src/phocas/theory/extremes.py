"""The largest error that q Byzantine values per column can cause, found by search.

Each column of a matrix is one independent trial: m values around a true value of 0. An attacker who
chooses *before* seeing the values replaces the first q of them. An attacker who chooses *after*
seeing them replaces the q most useful ones. Both know every value when they choose the
replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Reduce: TypeAlias = Callable[[Array], Array]

# Slightly closer to the centre than a tie, so that the Byzantine value counts as the nearer one.
_INSIDE = 1 - 1e-9
# Multiples of the cutoff to try: the deviations are not known before the values are placed.
_SHARES = (-1.5, -1.25, -1, -0.75, -0.5, 0.5, 0.75, 1, 1.25, 1.5)


def worst_trimmed_mean(columns: Array, q: int, b: int, *, after: bool) -> Array:
    """Return the largest error of the trimmed mean in each column, exactly.

    The trimmed mean never falls when a value rises. So all Byzantine values go to the same
    infinity, and the values to replace are those at the other end.
    """
    m = len(columns)
    kept = np.sort(columns if after else columns[q:], axis=0)
    low, high = (b - q, b + q) if after else (b - q, b)
    down, up = kept[low : low + m - 2 * b], kept[high : high + m - 2 * b]
    worst: Array = np.maximum(np.abs(down.mean(axis=0)), np.abs(up.mean(axis=0)))
    return worst


def worst_error(
    rule: Reduce, centre: Reduce, columns: Array, q: int, *, after: bool, cutoff: float = 0.0
) -> Array:
    """Search for the largest error of a column-wise rule in each column, and return it.

    Some Byzantine values go to one infinity, which moves the rule's ``centre``. The others share
    one value that the rule still accepts: an honest value, its mirror image about the centre, a
    value about ``cutoff`` times as far away as the farthest honest value, or a point of a grid. An
    attacker who chooses after seeing replaces q neighbours in sorted order, where the two ends
    count as neighbours. For a symmetric distribution these are the middle values, so that the rest
    has a larger deviation.
    """
    worst = np.zeros(columns.shape[1])
    for kept in _kept(columns, q, after=after):
        for bad in _placements(centre, kept, q, cutoff):
            np.maximum(worst, np.abs(rule(np.concatenate([kept, bad]))), out=worst)
    return worst


def _kept(columns: Array, q: int, *, after: bool) -> Iterator[Array]:
    if not after:
        yield columns[q:]
        return
    ordered = np.sort(columns, axis=0)
    for start in range(len(columns)):
        yield np.roll(ordered, -start, axis=0)[q:]


def _placements(
    centre: Reduce, kept: Array, q: int, cutoff: float, grid: int = 17
) -> Iterator[Array]:
    trials = kept.shape[1]
    if q == 0:
        yield np.empty((0, trials))
        return
    low, high = kept.min(axis=0), kept.max(axis=0)
    candidates = [*kept, *(low + (high - low) * share for share in np.linspace(-1, 2, grid))]
    for infinity in (-np.inf, np.inf):
        middle = centre(np.concatenate([kept, np.full((q, trials), infinity)]))
        candidates += list(middle + (middle - kept) * _INSIDE)
        farthest = cutoff * np.abs(kept - middle).max(axis=0)
        candidates += [middle + share * farthest for share in _SHARES if cutoff]
    for infinity in (-np.inf, np.inf):
        yield np.full((q, trials), infinity)
        for far in range(q):
            lost = np.full((far, trials), infinity)
            for candidate in candidates:
                yield np.concatenate([lost, np.broadcast_to(candidate, (q - far, trials))])


def krum(trials: Array, b: int) -> Array:
    """Return Krum's choice for each of many trials: an (N, m, d) array to (N, d)."""
    m = trials.shape[1]
    squares = np.square(trials[:, :, None, :] - trials[:, None, :, :]).sum(axis=3)
    nearest = np.sort(squares, axis=2)[:, :, 1 : m - b - 1]
    chosen = nearest.sum(axis=2).argmin(axis=1)
    rows: Array = trials[np.arange(len(trials)), chosen]
    return rows


def worst_krum(trials: Array, q: int, b: int, *, after: bool, grid: int = 25) -> Array:
    """Return the largest squared error of Krum that the search finds in each of N trials (N, m, d).

    All Byzantine rows are one point, so that they are near one another. The point is moved away
    from the truth along the mean of the honest rows or along the first axis. An attacker who
    chooses after seeing replaces the rows nearest to the truth, or those at one end of the first
    axis.
    """
    worst = np.zeros(len(trials))
    for kept in _kept_rows(trials, q, after=after):
        mean = kept.mean(axis=1)
        axis = np.zeros_like(mean)
        axis[:, 0] = 1
        cutoff = np.sqrt(np.square(kept).sum(axis=2).max(axis=1))[:, None]
        for direction in (mean / np.linalg.norm(mean, axis=1, keepdims=True), axis):
            for share in np.linspace(-1.5, 1.5, grid):
                bad = np.repeat((share * cutoff * direction)[:, None, :], q, axis=1)
                choice = krum(np.concatenate([kept, bad], axis=1), b)
                np.maximum(worst, np.square(choice).sum(axis=1), out=worst)
    return worst


def _kept_rows(trials: Array, q: int, *, after: bool) -> Iterator[Array]:
    if not after:
        yield trials[:, q:]
        return
    for key in (np.square(trials).sum(axis=2), trials[:, :, 0], -trials[:, :, 0]):
        order = np.argsort(key, axis=1)[:, q:]
        yield np.take_along_axis(trials, order[:, :, None], axis=1)
