"""Where q liars do most harm in one column, if the rule is known: the optimum, not a search.

Let the h = m - q honest values of a column be x_1 <= ... <= x_h, and let the liars push upwards
(downwards is the same with all signs turned).

The mean, the median and the trimmed mean grow with each value, so all liars at infinity is optimal.

Phocas and MeaMed average the m - b values nearest to a centre c, which grows with each value. A
liar who is dropped does most at infinity: c can only rise and the kept window only slide up. Liars
who are kept do most at one common value: raising the others to the highest raises c, so that
honest values below are dropped before the liars are. So the optimum is j liars at one value v and
q - j at infinity, for some j, and the result grows with v as long as the j are kept.

What remains is the highest such v. With a honest values above v, the j are kept as long as the
(b - q + j - a)-th smallest honest value is farther from c than v is, and c is linear in v between
two honest values. ``highest_kept`` solves that for every column at once.
"""

from __future__ import annotations

import numpy as np

from phocas.kernels import BLOCK_COLUMNS, Window


def edge_of_reach(honest: np.ndarray, q: int, window: Window) -> np.ndarray:
    """Return, for each column, the highest value at which q liars still count in full.

    The liars are outside of what a window with a reach keeps in any case, so that they move neither
    its centre nor its radius: they push by their weight times their distance, which is most at the
    edge of the reach. That is so if they do the same in all columns of a block.

    Args:
        honest: the honest values, sorted along axis 0, (h, d), from the first column of the matrix.
        q: the liars, at most as many as the window survives.
        window: a window that drops some values and has a reach.
    """
    h, d = honest.shape
    m = h + q
    centre = honest[window.trim : m - window.trim].mean(axis=0)
    apart = np.sort(np.abs(honest - centre), axis=0)
    radius = apart[m - (window.drop or 0) - 1]
    starts = np.arange(0, d, BLOCK_COLUMNS)
    widths = np.diff(starts, append=d)
    block = np.sqrt(np.add.reduceat(radius**2, starts) / widths)
    return np.asarray(centre + window.reach * np.maximum(radius, np.repeat(block, widths)))


def highest_kept(
    honest: np.ndarray, *, q: int, together: int, dropped: int, trimmed: int
) -> np.ndarray:
    """Return, for each column, the highest value at which ``together`` liars are still kept.

    Args:
        honest: the honest values, sorted along axis 0, (h, d).
        q: the liars; the others of them sit at infinity.
        together: how many liars share the value, at least 1.
        dropped: how many values the rule drops, b; at least q.
        trimmed: how many values are trimmed on each side to find the centre; at least ``dropped``.
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
        rival = dropped - q + j - above
        if rival < 1:
            kept = high
        else:
            # Kept while v - c(v) <= c(v) - rival, where c(v) = (total + in_window v) / window.
            slope = 1 - 2 * in_window / window
            limit = 2 * total / window - honest[rival - 1]
            at_high = np.where(np.isinf(high), np.inf, slope * high)
            kept = np.where(at_high <= limit, high, -np.inf)
            if slope > 0:
                kept = np.where((at_high > limit) & (slope * low <= limit), limit / slope, kept)
        best = np.maximum(best, kept)
    return best
