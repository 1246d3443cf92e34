"""What a rule promises, and the arithmetic of promises.

The constants here are proved for every set of honest values, not on average. Let h = m - q values
of a column be honest, with mean x and s^2 the mean of their squared distances from x, so that no
k of them have a mean farther from x than s sqrt(h / k) (Cauchy and Schwarz).

- Cut t >= q values from each end: the i-th of the sorted values is at most the i-th of the honest
  ones, so the mean of what is left is at most the mean of the m - t - q largest honest values.
- Keep the m - r values nearest to that mean c, r >= q: their mean square around c is no larger
  than that of the honest values, so their mean is within s + |c - x| of c.
- Let others in too, with a weight that falls to nothing at twice the reach: :func:`stretch`.

For rows, the squares add up over the columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Masses, Window

ASSUMED = 2.0
"""Honest spreads that a promise is held to if its rule declares no number of its own."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How many of m may be wrong: ``rows``, whole rows, or ``values``, in every column, anywhere.

    So many are *survived*: whatever their values, NaN and inf too, and whichever they are, the
    result stays within a constant times the honest spread of the honest mean. The honest mean is
    that of what is not wrong; the honest spread is the root mean square distance from it; the
    constant is ``rule.spreads(m, q)``, which the wrong values have no influence on. A rule that
    bounds the length of its result and not this distance promises nothing here: (0, 0).

    Attributes:
        rows: how many whole rows may be wrong.
        values: how many values in every column may be wrong, whoever sent them.

    >>> from phocas import Krum, Phocas
    >>> Phocas(b=2).tolerates(7), Krum(b=2).tolerates(7)
    (Tolerance(rows=2, values=2), Tolerance(rows=2, values=0))
    """

    rows: int = 0
    values: int = 0


def survived(window: Window) -> int:
    """Return how many wrong values of a column its window survives."""
    return window.trim if window.drop is None else min(window.trim, window.drop)


def window_spreads(window: Window, n: int, q: int, honest: int) -> float:
    """Bound a window of n values, q of them wrong, the others among the ``honest`` ones."""
    centre = math.sqrt(honest / (n - window.trim - q))
    if window.drop is None:
        return centre
    return centre + stretch(window, n, q) * (math.sqrt(honest / (n - q)) + centre)


def cleaned_spreads(window: Window, m: int, q: int, following: float) -> float:
    """Bound what follows cleaned values: no value is far from the centre c any more, wrong or not.

    With r, s and S as in :func:`stretch`, every value of a column is within max(r, 2 reach s) of
    c, whose squares add up to no more than L^2 = max(1, 2 reach)^2 S^2 2 (m - q) / (b - q + 1). So
    all rows that are not out are within L of c; if their mean is a and their spread e, then
    a^2 + e^2 <= L^2, and what follows is within a + following e of c.
    """
    centre = window_spreads(Window(trim=window.trim), m, q, honest=m - q)
    around = math.hypot(1, centre)  # S: the honest values' mean is that far from c
    ratio = 2 * (m - q) / (survived(window) - q + 1)
    limit = max(1.0, 2 * window.reach) * around * math.sqrt(ratio)
    return centre + math.hypot(1, following) * limit


def mass_spreads(masses: Masses, units: NDArray[np.int64], wrong: int) -> float:
    """Bound a window of weighted values, of which so much mass is wrong.

    The proofs above hold word for word with mass in place of values: Cauchy and Schwarz know no
    counts. Only where a reach asks how many correct values are as far as the radius, mass says no
    more than one worker's worth, that of the lightest, or the mass dropped less what is wrong.
    """
    total = float(units.sum())
    centre = math.sqrt((total - wrong) / (total - masses.trim - wrong))
    if masses.drop is None:
        return centre
    if not masses.reach:
        return 1 + 2 * centre
    farther = max(masses.drop - wrong, float(units.min()))
    near = total - masses.drop
    spread = math.sqrt(2 * (total - wrong) / farther)
    return centre + _stretch(masses.drop, masses.reach, near, spread, total, wrong) * (1 + centre)


def stretch(window: Window, n: int, q: int) -> float:
    """Bound how far what a window keeps of n values has its mean from the centre c.

    The unit is S, the root mean square distance of the correct values from c, over all columns. It
    is 1 for the n - b values nearest to c. With a reach, let r be their radius in a column, s^2
    the larger of r^2 and its mean over a block, and h = reach s. At least b - q + 1 correct values
    are no nearer than r, so the mean of r^2 is at most S^2 (n - q) / (b - q + 1), and that of s^2
    at most twice as much. Two bounds, of which the smaller is taken (docs/theory.md):

    - b others have the weight w = 2 - D/h at the distance D, and move the mean by no more than
      b w (2 - w) h / (n - b + b w), which is largest at the w below.
    - Correct values that are kept contribute S sqrt((n - q) / (n - b)), and q wrong ones, each
      within the window or weighed, no more than q max(r, h) / (n - b).
    """
    b = window.drop
    if not b or not window.reach:
        return 1.0
    return _stretch(b, window.reach, n - b, math.sqrt(2 * (n - q) / (b - q + 1)), n, q)


def _stretch(b: float, reach: float, near: float, spread: float, n: float, q: float) -> float:
    w = (math.sqrt(near * (near + 2 * b)) - near) / b
    others = b * w * (2 - w) / (near + b * w)
    wrong = q / near * max(1.0, reach)
    return min(1 + others * reach * spread, math.sqrt((n - q) / near) + wrong * spread)


def trimmed_mean_delta(m: int, q: int, b: int, *, adaptive: bool) -> float:
    """Return Delta_1 of Theorem 1, or the bound against who picks what to replace (theory.md)."""
    if adaptive:
        return min(m, 2 * (b + q + 1)) / (m - b - q)
    return 2 * (b + 1) * (m - q) / (m - b - q) ** 2


def nearest_delta(m: int, q: int, centre: float, *, adaptive: bool) -> float:
    """Return Delta_2 of Theorem 2 for the mean of the values nearest to a centre with a bound.

    The proof uses no more of the trimmed mean than its bound, so it holds for the median too.
    """
    if adaptive:
        return (math.sqrt(m / (m - q)) + 2 * math.sqrt(centre)) ** 2
    return 4 + 6 * centre


def reaching_delta(window: Window, m: int, q: int, centre: float, *, adaptive: bool) -> float:
    """Return Delta_3 for a window with a reach around a centre with a bound (docs/theory.md)."""
    own = math.sqrt(m / (m - q)) if adaptive else 1.0
    root = math.sqrt(centre)
    return (root + stretch(window, m, q) * (own + root)) ** 2
