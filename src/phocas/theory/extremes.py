"""The worst that q bad values a column can do to a rule, found by search.

A matrix holds one independent trial a column: m values around a truth of 0. An attacker who chooses
*before* seeing replaces the first q of them; one who chooses *after* seeing replaces the q that
help most. Both know every value when they decide what to put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Reduce: TypeAlias = Callable[[Array], Array]

# Just inside the tie, where the bad value is still the nearer one.
_INSIDE = 1 - 1e-9
# Of the reach, on both sides: spreads are not known before the values are placed.
_SHARES = (-1.5, -1.25, -1, -0.75, -0.5, 0.5, 0.75, 1, 1.25, 1.5)


def worst_trimmed_mean(columns: Array, q: int, b: int, *, after: bool) -> Array:
    """Return the largest error of the trimmed mean in each column, exactly.

    The trimmed mean never falls when a value rises, so all bad values go to the same infinity, and
    the values worth replacing are those at the other end.
    """
    m = len(columns)
    kept = np.sort(columns if after else columns[q:], axis=0)
    low, high = (b - q, b + q) if after else (b - q, b)
    down, up = kept[low : low + m - 2 * b], kept[high : high + m - 2 * b]
    worst: Array = np.maximum(np.abs(down.mean(axis=0)), np.abs(up.mean(axis=0)))
    return worst


def worst_error(
    rule: Reduce, centre: Reduce, columns: Array, q: int, *, after: bool, reach: float = 0.0
) -> Array:
    """Return the largest error of a column-wise rule in each column that the search finds.

    Some bad values go to one infinity, which moves the rule's ``centre``; the others sit together
    where the rule just still takes them in: at a correct value, at the mirror image of one about
    the centre, about ``reach`` times as far away as the farthest, or on a grid. After seeing, what
    is replaced are q neighbours in sorted order, the two ends being neighbours: in the middle for a
    symmetric distribution, which spreads the rest.
    """
    worst = np.zeros(columns.shape[1])
    for kept in _kept(columns, q, after=after):
        for bad in _placements(centre, kept, q, reach):
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
    centre: Reduce, kept: Array, q: int, reach: float, grid: int = 17
) -> Iterator[Array]:
    trials = kept.shape[1]
    if q == 0:
        yield np.empty((0, trials))
        return
    low, high = kept.min(axis=0), kept.max(axis=0)
    spots = [*kept, *(low + (high - low) * share for share in np.linspace(-1, 2, grid))]
    for infinity in (-np.inf, np.inf):
        middle = centre(np.concatenate([kept, np.full((q, trials), infinity)]))
        spots += list(middle + (middle - kept) * _INSIDE)
        farthest = reach * np.abs(kept - middle).max(axis=0)
        spots += [middle + share * farthest for share in _SHARES if reach]
    for infinity in (-np.inf, np.inf):
        yield np.full((q, trials), infinity)
        for far in range(q):
            lost = np.full((far, trials), infinity)
            for spot in spots:
                yield np.concatenate([lost, np.broadcast_to(spot, (q - far, trials))])


def krum(trials: Array, b: int) -> Array:
    """Return Krum's choice for each of many trials at once, an (N, m, d) array to (N, d)."""
    m = trials.shape[1]
    squares = np.square(trials[:, :, None, :] - trials[:, None, :, :]).sum(axis=3)
    nearest = np.sort(squares, axis=2)[:, :, 1 : m - b - 1]
    chosen = nearest.sum(axis=2).argmin(axis=1)
    rows: Array = trials[np.arange(len(trials)), chosen]
    return rows


def worst_krum(trials: Array, q: int, b: int, *, after: bool, grid: int = 25) -> Array:
    """Return the largest squared error of Krum in each of N trials, (N, m, d), that is found.

    All bad rows are one point, so that they vouch for each other, moved away from the truth along
    the mean of the correct rows or along the first axis. After seeing, what is replaced are the
    rows nearest to the truth, or those at one end of the first axis.
    """
    worst = np.zeros(len(trials))
    for kept in _kept_rows(trials, q, after=after):
        mean = kept.mean(axis=1)
        axis = np.zeros_like(mean)
        axis[:, 0] = 1
        reach = np.sqrt(np.square(kept).sum(axis=2).max(axis=1))[:, None]
        for direction in (mean / np.linalg.norm(mean, axis=1, keepdims=True), axis):
            for share in np.linspace(-1.5, 1.5, grid):
                bad = np.repeat((share * reach * direction)[:, None, :], q, axis=1)
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
