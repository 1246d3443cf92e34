"""How many values of a column are implausible, by several measures of how far is too far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REACHES = (4.0, 8.0, 16.0, 64.0, 1024.0)
"""How far is too far, in spreads."""

GROSS = 64.0
"""So far from the others is nobody's gradient; at 16 spreads some honest values are."""


@dataclass(frozen=True, slots=True)
class Count:
    """The values of some columns in one round that are beyond a reach."""

    reach: float
    most: int
    """The largest number of them in one column."""
    rows: int
    """The number of workers with at least one."""
    share: float
    """Their share of all values."""


def census(values: npt.ArrayLike) -> tuple[Count, ...]:
    """Count what is beyond each reach in some columns, (m, columns) or (m, runs, width).

    The centre of a column is the median, and its spread the distance from there to the nearer half
    of the values, or the root mean square of that over all columns if it is more: less than half of
    the workers cannot bend either. Sparse columns need the latter, whose nearer half is often all
    zeros; it also makes columns of small layers hard to please, so that these are lower bounds. NaN
    and inf are beyond every reach. Where all columns are so sparse, nothing else is.

    >>> values = np.random.default_rng(0).normal(size=(9, 64))
    >>> values[:2, 5] = np.inf, -300
    >>> [(each.reach, each.most, each.rows) for each in census(values) if each.reach > 8]
    [(16.0, 2, 2), (64.0, 2, 2), (1024.0, 1, 1)]
    """
    rows = np.asarray(values, np.float64)
    columns = np.ascontiguousarray(rows.reshape(len(rows), -1).T)
    m = len(rows)
    b = (m - 1) // 2
    wrong = ~np.isfinite(columns)
    with np.errstate(all="ignore"):
        ordered = np.sort(np.where(np.isnan(columns), np.inf, columns), axis=1)
        apart = np.abs(columns - ordered[:, b : m - b].mean(axis=1, keepdims=True))
        apart[np.isnan(apart)] = np.inf
        radius = np.partition(apart, m - 1 - b, axis=1)[:, m - 1 - b]
        known = radius[np.isfinite(radius)]
        usual = np.sqrt(np.square(known).mean()) if known.any() else np.inf
        spread = np.maximum(radius, usual)[:, None]
        found = []
        for reach in REACHES:
            beyond = wrong | (apart > reach * spread)
            most = int(beyond.sum(axis=1).max(initial=0))
            share = float(beyond.mean()) if beyond.size else 0.0
            found.append(Count(reach, most, int(beyond.any(axis=0).sum()), share))
    return tuple(found)
