"""The guarantees of rules: what they tolerate, and the constants of their error bounds.

The constants are proved for every set of honest values, not on average. Let h = m - q values of a
column be honest, with mean x and standard deviation s, s^2 being the mean of their squared
distances from x. Then the mean of any k honest values is within s sqrt(h / k) of x (inequality of
Cauchy and Schwarz).

- A window that cuts t >= q values from each end: the i-th smallest of all values is at most the
  i-th smallest honest value. So the mean of the values left is at most the mean of the m - t - q
  largest honest values.
- A window that then keeps the m - r values nearest to that mean c, r >= q: the mean square of their
  distances from c is no larger than that of the honest values. So their mean is within s + |c - x|
  of c.
- A window that adds the other values, with a weight that falls to zero at twice the cutoff: see
  :func:`stretch`.

For rows, the squares add up over the columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Masses, Window

ASSUMED = 2.0
"""The error bound of a rule that declares none, in standard deviations (RMS) of honest rows."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The numbers of Byzantine rows and of Byzantine values per column that a rule tolerates.

    A rule *tolerates* q of them if the error of its result is bounded, whatever their values (also
    NaN and inf) and wherever they are. The error is the distance from the mean of the honest rows
    or values. The bound is ``rule.error_bound(m, q)`` standard deviations (RMS) of the honest rows
    or values, which does not depend on the Byzantine values. A rule that bounds only the norm of
    its result tolerates (0, 0).

    Attributes:
        rows: the number of Byzantine rows that the rule tolerates.
        values: the number of Byzantine values per column that the rule tolerates; in each column
            they may be from other workers.

    >>> from phocas import Krum, Phocas
    >>> Phocas(b=2).tolerates(7), Krum(b=2).tolerates(7)
    (Tolerance(rows=2, values=2), Tolerance(rows=2, values=0))
    """

    rows: int = 0
    values: int = 0


def survived(window: Window) -> int:
    """Return how many Byzantine values per column a window tolerates with a bounded error."""
    return window.trim if window.drop is None else min(window.trim, window.drop)


def window_spreads(window: Window, n: int, q: int, honest: int, tail: float = 0.0) -> float:
    """Bound the error of a window of n values, q of them Byzantine.

    The other n - q values are among ``honest`` honest values, whose standard deviation is the unit.
    ``tail`` is the factor of the limit of the window's tail.
    """
    centre = math.sqrt(honest / (n - window.trim - q))
    if window.drop is None:
        return centre
    return centre + stretch(window, n, q, tail) * (math.sqrt(honest / (n - q)) + centre)


def cleaned_spreads(window: Window, m: int, q: int, following: float) -> float:
    """Bound the error of a pipeline that starts with a cell filter.

    ``following`` is the error bound of the steps after the filter. Take c, r, s and S from
    :func:`stretch`. After the filter, every value of a column is within max(r, 2 cutoff s) of its
    centre c. The squares of these distances add up over the columns to at most
    L^2 = max(1, 2 cutoff)^2 S^2 2 (m - q) / (b - q + 1). So every row that is not excluded is
    within L of c. If the mean of these rows is at distance a from c and their standard deviation is
    e, then a^2 + e^2 <= L^2, and the result is within a + following e of c.
    """
    centre = window_spreads(Window(trim=window.trim), m, q, honest=m - q)
    around = math.hypot(1, centre)  # S: the mean of the honest values is within ``centre`` of c
    ratio = 2 * (m - q) / (survived(window) - q + 1)
    limit = max(1.0, 2 * window.cutoff) * around * math.sqrt(ratio)
    return centre + math.hypot(1, following) * limit


def mass_spreads(masses: Masses, units: NDArray[np.int64], wrong: int) -> float:
    """Bound the error of a window of weighted values, with ``wrong`` the Byzantine weight.

    The proofs above hold with weights in place of counts, with one exception. A window with a
    cutoff needs a lower bound on the weight of the honest values that are at least as far as the
    radius. This bound is the larger of two numbers: the smallest weight of a worker, and the
    dropped weight less the Byzantine weight.
    """
    total = float(units.sum())
    centre = math.sqrt((total - wrong) / (total - masses.trim - wrong))
    if masses.drop is None:
        return centre
    if not masses.cutoff:
        return 1 + 2 * centre
    farther = max(masses.drop - wrong, float(units.min()))
    near = total - masses.drop
    spread = math.sqrt(2 * (total - wrong) / farther)
    return centre + _stretch(masses.drop, masses.cutoff, near, spread, total, wrong) * (1 + centre)


def stretch(window: Window, n: int, q: int, tail: float = 0.0) -> float:
    """Bound the distance between the mean of a window of n values and the centre c.

    The unit is S, the root mean square distance of the honest values from c, over all columns. The
    bound is 1 for a window without a cutoff: the n - b values nearest to c. With a cutoff, let r be
    the radius of this window in a column, s^2 the larger of r^2 and its mean over a block, and
    h = cutoff s. At least b - q + 1 honest values are no nearer than r. So the mean of r^2 is at
    most S^2 (n - q) / (b - q + 1), and the mean of s^2 at most twice as much. The result is the
    smaller of two bounds (docs/theory.md):

    - The b other values have the weight w = 2 - D/h at the distance D. They move the mean by at
      most b w (2 - w) h / (n - b + b w), which is largest at the w in the code.
    - Honest values that are kept contribute at most S sqrt((n - q) / (n - b)). The q Byzantine
      values contribute at most q max(r, h) / (n - b).

    A tail adds to that. Each of the n tails is at most as long as the limit, ``tail`` times the
    root of the sum of r^2 over the columns, and at least n - b values of a column are not lost. So
    the tails add at most tail n / (n - b) sqrt((n - q) / (b - q + 1)), wherever the Byzantine
    values are.
    """
    b = window.drop
    if not b or not window.cutoff:
        return 1.0
    found = _stretch(b, window.cutoff, n - b, math.sqrt(2 * (n - q) / (b - q + 1)), n, q)
    return found + tail * n / (n - b) * math.sqrt((n - q) / (b - q + 1))


def _stretch(b: float, cutoff: float, near: float, spread: float, n: float, q: float) -> float:
    w = (math.sqrt(near * (near + 2 * b)) - near) / b
    others = b * w * (2 - w) / (near + b * w)
    wrong = q / near * max(1.0, cutoff)
    return min(1 + others * cutoff * spread, math.sqrt((n - q) / near) + wrong * spread)


def trimmed_mean_delta(m: int, q: int, b: int, *, adaptive: bool) -> float:
    """Return Delta_1 of Theorem 1, the error bound of the trimmed mean in units of the variance.

    With ``adaptive``, the bound is for an adaptive attacker (docs/theory.md).
    """
    if adaptive:
        return min(m, 2 * (b + q + 1)) / (m - b - q)
    return 2 * (b + 1) * (m - q) / (m - b - q) ** 2


def nearest_delta(m: int, q: int, centre: float, *, adaptive: bool) -> float:
    """Return Delta_2 of Theorem 2 for the mean of the values nearest to a centre.

    The paper proves the theorem for the trimmed mean as the centre. The proof uses only its error
    bound, so the theorem holds for other centres, such as the median, as well.

    Args:
        m: the number of values.
        q: the number of Byzantine values.
        centre: the error bound of the centre, in units of the variance.
        adaptive: whether the bound is for an adaptive attacker.
    """
    if adaptive:
        return (math.sqrt(m / (m - q)) + 2 * math.sqrt(centre)) ** 2
    return 4 + 6 * centre


def reaching_delta(
    window: Window, m: int, q: int, centre: float, *, adaptive: bool, tail: float = 0.0
) -> float:
    """Return Delta_3, the error bound of a window with a cutoff (docs/theory.md).

    ``centre`` is the error bound of its centre. Both are in units of the variance.
    """
    own = math.sqrt(m / (m - q)) if adaptive else 1.0
    root = math.sqrt(centre)
    return (root + stretch(window, m, q, tail) * (own + root)) ** 2
