"""The most harmful values of q Byzantine workers in one column, for a known rule.

The optimum is computed, not searched. Let the h = m - q honest values of a column be x_1 <= ... <=
x_h, and let the Byzantine values push the result upwards. (Pushing downwards is the same with all
signs reversed.)

The mean, the median and the trimmed mean grow with each value, so all Byzantine values at infinity
are optimal.

Phocas and MeaMed average the m - b values nearest to a centre c, which grows with each value. A
Byzantine value that is dropped does most harm at infinity: c and the window of kept values can only
rise. Byzantine values that are kept do most harm at one common value: raising all of them to the
highest raises c, so honest values below are dropped first. So the optimum is j Byzantine values at
one value v and q - j at infinity, for some j. The result grows with v as long as the j values are
kept.

The remaining unknown is the highest v at which the j values are kept. Let n be the number of honest
values above v. The j values are kept as long as the (b - q + j - n)-th smallest honest value is
farther from c than v is. Between two honest values, c is linear in v. ``highest_kept`` solves this
condition for every column at once.
"""

from __future__ import annotations

import numpy as np

from phocas.kernels import BLOCK_COLUMNS, Window


def edge_of_cutoff(honest: np.ndarray, q: int, window: Window) -> np.ndarray:
    """Return, for each column, the highest value at which q Byzantine values keep full weight.

    A window with a cutoff always keeps some values. The Byzantine values lie outside of them, so
    they move neither its centre nor its radius. Their effect is their weight times their distance,
    which is largest at the cutoff. This holds if they do the same in all columns of a block.

    Args:
        honest: the honest values, sorted along axis 0, (h, d), from the first column of the matrix.
        q: number of Byzantine values, at most as many as the window survives.
        window: a window that drops some values and has a cutoff.
    """
    h, d = honest.shape
    m = h + q
    centre = honest[window.trim : m - window.trim].mean(axis=0)
    apart = np.sort(np.abs(honest - centre), axis=0)
    radius = apart[m - (window.drop or 0) - 1]
    starts = np.arange(0, d, BLOCK_COLUMNS)
    widths = np.diff(starts, append=d)
    block = np.sqrt(np.add.reduceat(radius**2, starts) / widths)
    return np.asarray(centre + window.cutoff * np.maximum(radius, np.repeat(block, widths)))


def highest_kept(
    honest: np.ndarray, *, q: int, together: int, dropped: int, trimmed: int
) -> np.ndarray:
    """Return the highest value that Byzantine workers can send without being dropped, by column.

    The rule drops the values farthest from a trimmed mean. ``together`` Byzantine workers send the
    returned value. The others send infinity, so that the rule drops these instead.

    Args:
        honest: the honest values, sorted along axis 0, (h, d).
        q: number of Byzantine values in a column.
        together: how many of them share the returned value, at least 1.
        dropped: number of values that the rule drops, b; at least q.
        trimmed: number of values trimmed on each side to find the centre; at least ``dropped``.
    """
    h, d = honest.shape
    m, j = h + q, together
    below = np.zeros((h + 1, d))
    np.cumsum(honest, axis=0, out=below[1:])
    window = m - 2 * trimmed
    best = np.full(d, -np.inf)
    for above in range(h):
        under = h - above
        in_window = max(0, min(under + j, m - trimmed) - max(under, trimmed))
        first, last = min(trimmed, under), min(under, m - trimmed)
        total = below[max(last, first)] - below[first]
        first, last = max(under, trimmed - j), min(h, m - trimmed - j)
        total = total + (below[max(last, first)] - below[first])
        low = honest[under - 1]
        high = honest[under] if above else np.full(d, np.inf)
        competitor = dropped - q + j - above
        if competitor < 1:
            kept = high
        else:
            # Kept while v - c(v) <= c(v) - competitor, where c(v) = (total + in_window v) / window.
            slope = 1 - 2 * in_window / window
            limit = 2 * total / window - honest[competitor - 1]
            at_high = np.where(np.isinf(high), np.inf, slope * high)
            kept = np.where(at_high <= limit, high, -np.inf)
            if slope > 0:
                kept = np.where((at_high > limit) & (slope * low <= limit), limit / slope, kept)
        best = np.maximum(best, kept)
    return best
