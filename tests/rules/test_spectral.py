"""SMEA: the set of rows that it finds, and how many sets it compares exactly."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from phocas import SMEA
from phocas.rules import spectral
from phocas.rules.algebra import Floats

INPUTS = ["alike", "flipped", "far", "many scales", "ties", "one column", "near zero", "zeros"]


def rows_of(kind: str, m: int, b: int, seed: int = 0) -> Floats:
    """Return m rows, of which the first b are Byzantine in some of the kinds."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, 300))
    if kind == "flipped":
        rows[:b] = -rows[:b].mean(axis=0)
    elif kind == "far":
        rows[:b] += 100
    elif kind == "many scales":
        rows[0] *= 1e8
        rows[1] *= 1e-8
    elif kind == "ties":
        rows = np.round(rows[:, :4])
    elif kind == "one column":
        rows = rows[:, :1]
    elif kind == "near zero":
        rows[:b] *= 1e6
        rows[b:] *= 1e-7
    elif kind == "zeros":
        rows[b:] = 0
    return rows


def variance(rows: Floats) -> float:
    """Return the largest variance of rows in any direction."""
    return float(np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)[0] ** 2)


@pytest.mark.parametrize(("m", "b"), [(3, 1), (7, 3), (9, 4), (12, 4)])
@pytest.mark.parametrize("kind", INPUTS)
def test_chosen_set_has_the_smallest_variance(kind: str, m: int, b: int) -> None:
    rows = rows_of(kind, m, b, seed=m)
    chosen = np.flatnonzero(SMEA(b).explain(rows).dropped == 0)
    assert len(chosen) == m - b
    smallest = min(variance(rows[list(each)]) for each in combinations(range(m), m - b))
    # Distances of 1e8 lose what is less than 1e-8 of it.
    assert variance(rows[chosen]) <= smallest * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("kind", ["alike", "flipped", "far"])
def test_few_of_all_sets_are_compared_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 4,845 sets of 16 of 20 rows have bounds; the eigenvalues of a few are computed."""
    compared = 0
    exact = spectral._eigenvalues

    def counted(halves: Floats, sets: NDArray[np.intp]) -> Floats:
        nonlocal compared
        compared += len(sets)
        return exact(halves, sets)

    monkeypatch.setattr(spectral, "_eigenvalues", counted)
    SMEA(b=4)(rows_of(kind, 20, 4))
    assert 0 < compared <= 1000


def test_too_many_sets_are_rejected_with_the_largest_b() -> None:
    message = "SMEA needs 2b < m and at most 5000 sets of m - b rows: got b=5 with m=20 workers"
    with pytest.raises(ValueError, match=re.escape(message)):
        SMEA(b=5).check(20)
    assert SMEA.largest_b(20) == 4
