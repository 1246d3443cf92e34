"""The three propositions, and the conditions that their statements omit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import phocas
from phocas import theory

Array = NDArray[np.float64]


def rows(m: int, d: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(1.0, 0.3, size=(m, d))


def test_proposition_1_reverses_the_mean() -> None:
    correct, gradient = rows(7, 5), np.arange(1.0, 6.0)
    spoiled = theory.against_mean(correct, gradient)
    assert np.all((spoiled != correct).sum(axis=0) <= 1)
    np.testing.assert_allclose(phocas.Mean()(spoiled), -gradient / 7, atol=1e-12)


def test_proposition_1_exceeds_any_constant() -> None:
    """The error is (1 + 1/m) ||g||, so a large enough gradient exceeds any Delta."""
    delta = theory.delta_krum(20, 8)
    gradient = np.full(4, np.sqrt(delta))
    spoiled = theory.against_mean(gradient + rows(20, 4), gradient)
    assert np.square(spoiled.mean(axis=0) - gradient).sum() > delta


@pytest.mark.parametrize(("m", "d", "per_column"), [(5, 5, 1), (5, 9, 1), (7, 3, 3), (20, 10, 2)])
def test_proposition_2_corrupts_every_row(m: int, d: int, per_column: int) -> None:
    correct = rows(m, d)
    spoiled = theory.against_selection(correct, 1e6, per_column)
    assert np.all((spoiled != correct).sum(axis=0) <= per_column)
    assert np.all((spoiled != correct).sum(axis=1) == 1)
    assert np.all(spoiled @ np.ones(d) < -9e5)


def test_proposition_2_needs_enough_columns() -> None:
    """As printed it is false for d=1: the median of three scalars is one, and is resilient."""
    with pytest.raises(ValueError, match=r"d \* per_column >= m: got d=1 .* smallest d is 3"):
        theory.against_selection(np.ones((3, 1)))
    columns = np.random.default_rng(5).normal(size=(3, 4000))
    for lie in (-1e30, 1e30):
        columns[0] = lie
        middle = phocas.Median()(columns)
        assert np.all((columns == middle).any(axis=0))
        assert np.square(middle).mean() < theory.delta_trimmed_mean(3, 1, 1)


def test_proposition_3_krum_moves_against_the_gradient() -> None:
    for b in range(9):
        gradient, spoiled = theory.against_krum(m=20, d=30)
        assert np.all((spoiled != 1).sum(axis=0) <= 1)
        assert phocas.Krum(b)(spoiled) @ gradient == -1e20


def test_invalid_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"m x d matrix: got an array of shape \(3,\)"):
        theory.against_mean(np.ones(3), np.ones(1))
    with pytest.raises(ValueError, match="m x d matrix"):
        theory.against_selection(np.ones((0, 3)))
