"""Theorems 3 and 4 compared with trajectories of real rules under real attacks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from phocas import TrimmedMean, theory
from phocas.theory import extremes

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[np.float64]


def trimmed_mean(rows: Array, b: int) -> Array:
    """Reduce the first axis of any array."""
    return np.asarray(TrimmedMean(b)(rows.reshape(len(rows), -1)).reshape(rows.shape[1:]))


def test_functions_match_hand_computed_values() -> None:
    assert theory.largest_step_convex(1, 4) == pytest.approx(0.4)
    assert theory.contraction(1, 4, 0.4) == pytest.approx(0.68)  # 1 - 0.4 * 4/5
    assert theory.error_floor(1, 4, 16) == pytest.approx(5)  # 5/4 * 4
    assert theory.printed_error_floor(1, 4, 0.4, 16) == pytest.approx(2)
    bound = theory.distance_bound(2, 10.0, mu=1, smooth=4, step=0.4, delta=16)
    assert bound == pytest.approx(0.4624 * 10 + (1 - 0.4624) * 5)
    assert theory.largest_step_smooth(8) == 0.125
    assert theory.gradient_bound(4, 3.0, smooth=8, step=0.125, delta=2) == pytest.approx(14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.contraction(1, 4, 0.41), "step <= 2 / .* got step=0.41, .* is 0.4"),
        (lambda: theory.contraction(1, 4, 0.0), "step > 0"),
        (lambda: theory.error_floor(4, 1, 1), "mu <= L: got mu=4.0 with L=1.0"),
        (lambda: theory.error_floor(0, 1, 1), "mu > 0"),
        (lambda: theory.error_floor(1, 1, -1), "finite number >= 0: got -1"),
        (lambda: theory.error_floor(1, 1, math.nan), "finite number >= 0: got nan"),
        (lambda: theory.gradient_bound(1, 1, smooth=4, step=0.3, delta=0), "largest step is 0.25"),
        (lambda: theory.gradient_bound(0, 1, smooth=4, step=0.2, delta=0), "rounds >= 1"),
    ],
)
def test_invalid_arguments_are_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_printed_theorem_3_fails_for_one_honest_worker() -> None:
    """The smallest counterexample: m=1, no attacker, F = x^2/2, normal noise, V = 1.

    x settles in a normal distribution of variance step / (2 - step), so E|x| is known.
    At step 0.01 it is 0.0566, the printed floor 0.0283 and the corrected one 2.83.
    """
    step, delta = 0.01, theory.delta_trimmed_mean(1, 0, 0)
    exact = math.sqrt(2 / math.pi * step / (2 - step))
    rng = np.random.default_rng(1)
    x = np.zeros(20_000)
    for _ in range(1000):
        x -= step * (x + rng.normal(size=x.shape))
    assert abs(np.abs(x).mean() - exact) < 4 * exact / math.sqrt(len(x))
    assert exact > 1.9 * theory.printed_error_floor(1, 1, step, delta)
    assert exact < theory.error_floor(1, 1, delta)


def quadratic(step: float, rounds: int) -> Array:
    """Return the mean distance by round for F = (x^2 + 4 y^2)/2; one of three is Byzantine."""
    rng = np.random.default_rng(2)
    repeats, curvature = 500, np.array([1.0, 4.0])
    x = np.full((repeats, 2), 20.0)
    distances = [np.linalg.norm(x, axis=1).mean()]
    for _ in range(rounds):
        honest = curvature * x + rng.normal(size=(2, repeats, 2)) / math.sqrt(2)
        # The Byzantine worker always sends the lowest value, so every step errs in the same
        # direction.
        x = x - step * trimmed_mean(np.concatenate([honest, np.full((1, repeats, 2), -1e30)]), 1)
        distances.append(np.linalg.norm(x, axis=1).mean())
    return np.array(distances)


@pytest.mark.parametrize("step", [0.02, 0.4])
def test_quadratic_stays_under_the_corrected_theorem_3(step: float) -> None:
    delta = theory.delta_trimmed_mean(3, 1, 1)
    distances = quadratic(step, rounds=600)
    bounds = [
        theory.distance_bound(t, distances[0], mu=1, smooth=4, step=step, delta=delta)
        for t in range(len(distances))
    ]
    assert np.all(distances <= np.array(bounds) + 1e-9)


def test_quadratic_under_attack_breaks_the_printed_theorem_3() -> None:
    """V = 1, Delta_1 = 8, step 0.02: the printed floor is 0.071, the trajectory stays at 0.41."""
    step, rounds = 0.02, 600
    delta = theory.delta_trimmed_mean(3, 1, 1)
    distances = quadratic(step, rounds)
    printed = theory.contraction(1, 4, step) ** rounds * distances[0]
    printed += theory.printed_error_floor(1, 4, step, delta)
    assert distances[-1] > 4 * printed


def test_non_convex_stays_under_theorem_4() -> None:
    """F = sum x^2 / (1 + x^2): L = 2, flat far out, with a Byzantine worker that pushes uphill."""
    rng = np.random.default_rng(3)
    repeats, step, sigma = 500, 0.5, 0.1
    delta = theory.delta_trimmed_mean(5, 2, 2) * 2 * sigma**2
    x = np.tile([1.5, -0.8], (repeats, 1))
    gap = float((x[0] ** 2 / (1 + x[0] ** 2)).sum())
    squares = []
    for rounds in range(1, 301):
        gradient = 2 * x / (1 + x**2) ** 2
        squares.append(np.square(gradient).sum(axis=1).mean())
        honest = gradient + sigma * rng.normal(size=(3, repeats, 2))
        lies = np.broadcast_to(-1e30 * np.sign(x), (2, repeats, 2))
        x = x - step * trimmed_mean(np.concatenate([honest, lies]), 2)
        bound = theory.gradient_bound(rounds, gap, smooth=2, step=step, delta=delta)
        assert np.mean(squares) <= bound
    assert np.mean(squares) > 0.01 * bound  # the trajectory moves, so the bound is tested


def test_attack_in_the_trajectories_is_the_worst_one() -> None:
    """The exact search also puts all Byzantine values at one of the two infinities."""
    columns = np.random.default_rng(4).normal(size=(5, 300))
    low, high = (
        trimmed_mean(np.concatenate([columns[2:], np.full((2, 300), far)]), 2)
        for far in (-np.inf, np.inf)
    )
    exact = extremes.worst_trimmed_mean(columns, 2, 2, after=False)
    np.testing.assert_allclose(exact, np.maximum(np.abs(low), np.abs(high)), rtol=1e-12)
