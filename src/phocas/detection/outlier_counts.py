"""Counts of outliers in columns, by several cutoffs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CUTOFFS = (4.0, 8.0, 16.0, 64.0, 1024.0)
"""The cutoffs, in standard deviations."""

GROSS = 64.0
"""Values beyond this cutoff are no gradients; beyond 16 deviations some honest values are."""


@dataclass(frozen=True, slots=True)
class OutlierCount:
    """The outliers in some columns of one round."""

    cutoff: float
    """The cutoff: how many deviations from the centre a value may be."""
    most: int
    """The largest number of them in one column."""
    rows: int
    """The number of workers with at least one."""
    share: float
    """Their share of all values."""


def count_outliers(values: npt.ArrayLike) -> tuple[OutlierCount, ...]:
    """Count the values beyond each cutoff in some columns, (m, columns) or (m, runs, width).

    The centre of a column is the median. The deviation of a column is the larger of two numbers:
    the distance from the centre within which half of the values are, and the root mean square of
    this distance over all columns. Fewer than half of the workers cannot change either of them
    arbitrarily. Sparse columns need the second number, because half of their values are often zero.
    The second number is too large for columns of layers with small gradients, so counts are lower
    bounds. NaN and inf are beyond every cutoff. If the deviation is zero because all columns are
    sparse, only NaN and inf are beyond the cutoffs.

    >>> values = np.random.default_rng(0).normal(size=(9, 64))
    >>> values[:2, 5] = np.inf, -300
    >>> [(each.cutoff, each.most, each.rows) for each in count_outliers(values) if each.cutoff > 8]
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
        deviation = np.maximum(radius, usual)[:, None]
        found = []
        for cutoff in CUTOFFS:
            beyond = wrong | (apart > cutoff * deviation)
            most = int(beyond.sum(axis=1).max(initial=0))
            share = float(beyond.mean()) if beyond.size else 0.0
            found.append(OutlierCount(cutoff, most, int(beyond.any(axis=0).sum()), share))
    return tuple(found)
