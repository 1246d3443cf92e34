"""Runs of SGD on problems with known constants, against the bounds of Theorems 3 and 4.

Both problems have normal noise of total variance V on every honest gradient. In every round the
last q of m workers send values that push each coordinate away from the optimum as far as they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from phocas.rules import Phocas, TrimmedMean
from phocas.specs import count, one_of
from phocas.theory.bounds import delta_phocas, delta_trimmed_mean
from phocas.theory.convergence import (
    contraction,
    distance_bound,
    gradient_bound,
    largest_step_smooth,
    printed_error_floor,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[np.float64]
Rule = Literal["trimmed-mean", "phocas"]
RULES: tuple[Rule, ...] = ("trimmed-mean", "phocas")
DIMENSIONS = 10
REPEATS = 100
VARIANCE = 1.0
"""V, the expected squared distance of an honest gradient from the true one."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The measured quantity of a theorem after every round, and its bounds.

    Attributes:
        theorem: 3 or 4.
        rule: name of the rule.
        step: step size.
        measured: mean over the repeats, after 0, 1, 2, ... rounds (Theorem 4: from 1).
        bound: the bound; of Theorem 3 the corrected one.
        printed: the bound as printed, if it differs.
    """

    theorem: int
    rule: Rule
    step: float
    measured: Array
    bound: Array
    printed: Array | None = None

    @property
    def holds(self) -> bool:
        """Return whether the measured quantity is under the bound after every round."""
        return bool(np.all(self.measured <= self.bound * (1 + 1e-9)))

    @property
    def printed_holds(self) -> bool:
        """Return whether the measured quantity is under the printed bound after every round."""
        printed = self.bound if self.printed is None else self.printed
        return bool(np.all(self.measured <= printed * (1 + 1e-9)))


def strongly_convex(
    rule: Rule, m: int = 20, q: int = 6, *, step: float = 0.02, rounds: int = 500, seed: int = 0
) -> Trajectory:
    """Run on ``F = sum of curvature x^2 / 2`` with curvatures from 1 to 4 (Theorem 3).

    Args:
        rule: ``trimmed-mean`` or ``phocas``, with b = q.
        m: number of workers.
        q: number of Byzantine workers.
        step: step size, at most 2 / (1 + 4).
        rounds: number of rounds.
        seed: seed of the noise.

    >>> strongly_convex("phocas", rounds=50).holds
    True
    """
    mu, smooth = 1.0, 4.0
    curvature = np.linspace(mu, smooth, DIMENSIONS)
    delta = _delta(rule, m, q)
    shrunk = contraction(mu, smooth, step)
    points = _run(rule, m, q, lambda x: curvature * x, 10.0, step, rounds, seed)
    measured = np.array([float(np.linalg.norm(x, axis=1).mean()) for x in points])
    bound = [
        distance_bound(t, measured[0], mu=mu, smooth=smooth, step=step, delta=delta)
        for t in range(rounds + 1)
    ]
    printed = shrunk ** np.arange(rounds + 1) * measured[0]
    printed += printed_error_floor(mu, smooth, step, delta)
    return Trajectory(3, rule, step, measured, np.array(bound), printed)


def smooth_problem(
    rule: Rule, m: int = 20, q: int = 6, *, rounds: int = 500, seed: int = 0
) -> Trajectory:
    """Run on ``F = sum of x^2 / (1 + x^2)``, which is not convex, with the step 1/L (Theorem 4).

    Args:
        rule: ``trimmed-mean`` or ``phocas``, with b = q.
        m: number of workers.
        q: number of Byzantine workers.
        rounds: number of rounds.
        seed: seed of the noise.

    >>> smooth_problem("trimmed-mean", rounds=50).holds
    True
    """
    smooth, start = 2.0, 1.5
    step = largest_step_smooth(smooth)
    delta = _delta(rule, m, q)

    def gradient(x: Array) -> Array:
        return np.asarray(2 * x / (1 + x**2) ** 2)

    points = _run(rule, m, q, gradient, start, step, rounds, seed)
    squares = [float(np.square(gradient(x)).sum(axis=1).mean()) for x in points[:-1]]
    gap = DIMENSIONS * start**2 / (1 + start**2)
    times = range(1, rounds + 1)
    bound = [gradient_bound(t, gap, smooth=smooth, step=step, delta=delta) for t in times]
    measured = np.cumsum(squares) / np.arange(1, rounds + 1)
    return Trajectory(4, rule, step, measured, np.array(bound))


def _delta(rule: Rule, m: int, q: int) -> float:
    one_of("a trajectory", "rule", rule, RULES)
    bound = delta_trimmed_mean if rule == "trimmed-mean" else delta_phocas
    return VARIANCE * bound(m, q, q)


def _run(
    rule: Rule,
    m: int,
    q: int,
    gradient: Callable[[Array], Array],
    start: float,
    step: float,
    rounds: int,
    seed: int,
) -> list[Array]:
    """Return the parameters of all repeats before the first and after every round."""
    count("a trajectory", "rounds", rounds, minimum=1)
    aggregate = TrimmedMean(q) if rule == "trimmed-mean" else Phocas(q)
    rng = np.random.default_rng(seed)
    deviation = np.sqrt(VARIANCE / DIMENSIONS)
    x = np.full((REPEATS, DIMENSIONS), start)
    points = [x]
    for _ in range(rounds):
        true = gradient(x)
        rows = true + deviation * rng.normal(size=(m, *x.shape))
        rows[m - q :] = np.where(x > 0, rows.min(axis=0), rows.max(axis=0))
        value = np.asarray(aggregate(rows.reshape(m, -1)), np.float64)
        x = x - step * value.reshape(x.shape)
        points.append(x)
    return points
