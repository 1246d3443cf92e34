"""Lemmas 2 and 3 of the paper as properties, and what its proofs conclude from them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phocas import Phocas, TrimmedMean

Column = NDArray[np.float64]
ANY = st.floats(allow_nan=False, width=32)
CORRECT = st.floats(-1e6, 1e6, width=32) | st.integers(-2, 2).map(float)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Column, Column, int]:
    """Draw a column with at most b Byzantine values among m, its correct values, and b."""
    m = draw(st.integers(1, 24))
    b = draw(st.integers(0, math.ceil(m / 2) - 1))
    q = draw(st.integers(0, b))
    correct = draw(st.lists(CORRECT, min_size=m - q, max_size=m - q))
    wrong = draw(st.lists(ANY | st.sampled_from(correct), min_size=q, max_size=q))
    received = draw(st.permutations([*correct, *wrong]))
    return np.array(received, np.float64), np.array(correct, np.float64), b


def nearest(values: Column, centre: float) -> Column:
    """Return the distances from the centre, the nearest first."""
    return np.sort(np.abs(values - centre))


@settings(max_examples=300, deadline=None)
@given(columns())
def test_order_statistics_lie_between_those_of_correct_values(
    drawn: tuple[Column, Column, int],
) -> None:
    """Lemma 2, which the paper states for q < b; it holds for q = b too."""
    received, correct, b = drawn
    m, q = len(received), len(received) - len(correct)
    ours, theirs = np.sort(received), np.sort(correct)
    for i in range(1, m - 2 * b + 1):
        assert theirs[b - q + i - 1] <= ours[b + i - 1] <= theirs[b + i - 1]


@settings(max_examples=300, deadline=None)
@given(columns())
def test_nearest_values_are_no_farther_than_correct_ones(
    drawn: tuple[Column, Column, int],
) -> None:
    """Lemma 3: the i-th nearest of all to the trimmed mean, and the i-th nearest correct one."""
    received, correct, b = drawn
    centre = float(TrimmedMean(b)(received[:, None])[0])
    ours, theirs = nearest(received, centre), nearest(correct, centre)
    assert np.all(ours[: len(correct)] <= theirs)


@settings(max_examples=300, deadline=None)
@given(columns())
def test_rules_stay_where_the_proofs_of_theorems_1_and_2_put_them(
    drawn: tuple[Column, Column, int],
) -> None:
    received, correct, b = drawn
    m, kept = len(received), len(correct) - b
    ordered = np.sort(correct)
    centre = float(TrimmedMean(b)(received[:, None])[0])
    slack = 1e-5 * (1 + np.abs(correct).max())
    assert ordered[:kept].mean() - slack <= centre <= ordered[-kept:].mean() + slack
    value = float(Phocas(b)(received[:, None])[0])
    farthest = nearest(correct, centre)[: m - b]
    assert (value - centre) ** 2 <= np.square(farthest).mean() + slack**2 + slack
