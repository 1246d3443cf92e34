"""The picture of a round agrees with what the rule itself says it left out."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers import hostile_values

import phocas
from phocas import Rule
from phocas.detection.dropped_cells import dropped_cells
from phocas.rules.reference import weights

RULES: list[Rule] = [
    phocas.Mean(),
    phocas.Median(),
    phocas.TrimmedMean(b=3),
    phocas.Phocas(b=3),
    phocas.MeaMed(b=3),
    phocas.Monitor(phocas.Phocas(b=2)),
]


def matrix(m: int, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, d)).astype(np.float32)
    rows[rng.random((m, d)) < 0.05] = 0.0  # values that are equal
    # Without subnormal numbers, which are as far from a centre as zero is in single precision.
    hostile = np.array([each for each in hostile_values() if not 0 < abs(each) < 1e-30], np.float32)
    for column in range(d):
        struck = rng.choice(m, size=rng.integers(0, 3), replace=False)
        rows[struck, column] = rng.choice(hostile, size=len(struck))
    return rows


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dropped_cells_are_those_that_the_rule_counts(rule: Rule) -> None:
    rows = matrix(9, 200)
    with np.errstate(all="ignore"):
        said = rule.explain(rows).dropped
    lost = dropped_cells(rule, rows, said)
    np.testing.assert_allclose(lost.mean(axis=1), said, atol=1e-12)
    for column in (0, 7, 199):
        alone = rule.explain(rows[:, [column]]).dropped
        np.testing.assert_array_equal(lost[:, column], alone)


def test_weights_of_heraclius_are_those_of_its_twin() -> None:
    rows = matrix(11, 300).astype(np.float64)
    rule = phocas.Heraclius(b=4, cutoff=1.0)
    with np.errstate(all="ignore"):
        expected = 1 - weights(rule, rows)
    lost = dropped_cells(rule, rows, np.zeros(11))
    np.testing.assert_allclose(lost, expected, atol=1e-9)
    assert ((lost > 0) & (lost < 1)).any()


def test_rules_of_whole_rows_are_shown_by_row() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 30))
    rows[2] = 1e6
    rule = phocas.Krum(b=2)
    dropped = rule.explain(rows).dropped
    lost = dropped_cells(rule, rows[:, :5], dropped)
    assert lost.shape == (7, 5)
    np.testing.assert_array_equal(lost, np.repeat(dropped[:, None], 5, axis=1))
    assert lost[2].min() == 1


def test_nothing_is_said_where_there_is_nothing() -> None:
    rows = np.full((5, 4), np.nan)
    for rule in (phocas.Phocas(b=2), phocas.Heraclius(b=2), phocas.TrimmedMean(b=2)):
        lost = dropped_cells(rule, rows, np.ones(5))
        assert np.isfinite(lost).all()
