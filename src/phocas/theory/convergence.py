"""The paper's two convergence theorems as functions of a rule's bound Delta.

Theorem 3 is for a ``mu``-strongly convex and ``smooth``-smooth loss, Theorem 4 for any smooth loss.
``delta`` is the whole bound of the rule, for example Delta_1 times V. As printed, the error floor
of Theorem 3 has the step as a factor, which the sum of its geometric series does not have.
:func:`error_floor` returns the correct sum. :func:`printed_error_floor` exists to show the mistake.
"""

from __future__ import annotations

import math

from phocas.specs import count, positive


def largest_step_convex(mu: float, smooth: float) -> float:
    """Return the largest step size of Theorem 3, ``2 / (mu + L)``.

    Args:
        mu: strong convexity of F.
        smooth: L, the smoothness of F.

    >>> largest_step_convex(mu=1.0, smooth=3.0)
    0.5
    """
    mu, smooth = _curvatures(mu, smooth)
    return 2 / (mu + smooth)


def contraction(mu: float, smooth: float, step: float) -> float:
    """Return Theorem 3's contraction factor per round, ``1 - step mu L / (mu + L)``.

    Args:
        mu: strong convexity of F.
        smooth: L, the smoothness of F.
        step: the step size.

    >>> contraction(mu=1.0, smooth=3.0, step=0.4)
    0.7
    """
    mu, smooth = _curvatures(mu, smooth)
    step = _allowed("Theorem 3", step, largest_step_convex(mu, smooth), "2 / (mu + L)")
    return 1 - step * mu * smooth / (mu + smooth)


def error_floor(mu: float, smooth: float, delta: float) -> float:
    """Return the limit of the distance bound, ``(mu + L) / (mu L) sqrt(Delta)``, for any step size.

    Args:
        mu: strong convexity of F.
        smooth: L, the smoothness of F.
        delta: Delta V, the error bound of the rule times the variance V.

    >>> error_floor(mu=1.0, smooth=1.0, delta=4.0)
    4.0
    """
    mu, smooth = _curvatures(mu, smooth)
    return (mu + smooth) / (mu * smooth) * math.sqrt(_error("Theorem 3", delta))


def printed_error_floor(mu: float, smooth: float, step: float, delta: float) -> float:
    """Return the error floor as Theorem 3 prints it, times the step; it is wrong for small steps.

    Args:
        mu: strong convexity of F.
        smooth: L, the smoothness of F.
        step: the step size.
        delta: Delta V, the error bound of the rule times the variance V.

    >>> printed_error_floor(mu=1.0, smooth=1.0, step=0.25, delta=4.0)
    1.0
    """
    return step * error_floor(mu, smooth, delta)


def distance_bound(
    rounds: int, start: float, *, mu: float, smooth: float, step: float, delta: float
) -> float:
    """Return a bound on ``E ||x^T - x*||`` after T rounds (Theorem 3, corrected).

    ``rho^T start + (1 - rho^T) (mu + L) / (mu L) sqrt(Delta)``, with rho the contraction factor and
    ``start = ||x^0 - x*||``.

    Args:
        rounds: T, the number of rounds.
        start: distance of the first point from the optimum.
        mu: strong convexity of F.
        smooth: L, the smoothness of F.
        step: the step size.
        delta: Delta V, the error bound of the rule times the variance V.

    >>> distance_bound(0, 5.0, mu=1.0, smooth=1.0, step=0.5, delta=4.0)
    5.0
    """
    shrunk = contraction(mu, smooth, step) ** count("Theorem 3", "rounds", rounds)
    return shrunk * _error("Theorem 3", start) + (1 - shrunk) * error_floor(mu, smooth, delta)


def largest_step_smooth(smooth: float) -> float:
    """Return the largest step size of Theorem 4, ``1 / L``.

    Args:
        smooth: L, the smoothness of F.

    >>> largest_step_smooth(4.0)
    0.25
    """
    return 1 / positive("Theorem 4", "L", smooth)


def gradient_bound(rounds: int, gap: float, *, smooth: float, step: float, delta: float) -> float:
    """Return a bound on the mean of ``E ||grad F(x^t)||^2`` over T rounds (Theorem 4).

    ``2 gap / (step T) + Delta``, with ``gap = F(x^0) - F(x*)``. The first term falls as 1/T, not
    linearly as the paper's text says.

    Args:
        rounds: T, the number of rounds.
        gap: difference between F at the start and its minimum.
        smooth: L, the smoothness of F.
        step: the step size.
        delta: Delta V, the error bound of the rule times the variance V.

    >>> gradient_bound(10, 5.0, smooth=2.0, step=0.5, delta=3.0)
    5.0
    """
    step = _allowed("Theorem 4", step, largest_step_smooth(smooth), "1 / L")
    rounds = count("Theorem 4", "rounds", rounds, minimum=1)
    return 2 * _error("Theorem 4", gap) / (step * rounds) + _error("Theorem 4", delta)


def _curvatures(mu: float, smooth: float) -> tuple[float, float]:
    mu, smooth = positive("Theorem 3", "mu", mu), positive("Theorem 3", "L", smooth)
    if mu > smooth:
        raise ValueError(f"Theorem 3 needs mu <= L: got mu={mu} with L={smooth}")
    return mu, smooth


def _allowed(owner: str, step: float, limit: float, formula: str) -> float:
    step = positive(owner, "step", step)
    if step > limit:
        raise ValueError(
            f"{owner} needs step <= {formula}: got step={step}, the largest step is {limit}"
        )
    return step


def _error(owner: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{owner} needs a finite number >= 0: got {value!r}")
    return float(value)
