"""What every rule of the tables promises, whatever it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.helpers import (
    Doubles,
    averages,
    bits,
    doubles,
    examples,
    hostile_values,
    pipelines,
    stored,
    strongest,
)

import phocas
from phocas import PRE_AGGREGATORS, RULES, FLTrust, Pipeline, Rule
from phocas.rules.reference import _CHOICES, _REFERENCED, _RULES, _STAGES

M = 11
COLUMN_RULES = [rule for rule in examples(M) if rule.columnwise]
ROW_RULES = [rule for rule in examples(M) if not rule.columnwise]
SEEDS = st.integers(0, 2**32 - 1)
# Clipping and smoothing measure in absolute lengths, others in lengths from the origin.
FREE = [
    rule
    for rule in examples(M) + pipelines(M)
    if not any(name in str(rule) for name in ("clipping", "smoothing"))
]
ORIGIN = ("cge", "signguard", "flame", "foolsgold")
MOVING = [rule for rule in FREE if not any(name in str(rule) for name in ORIGIN)]


def test_examples_are_complete() -> None:
    """A new class needs a twin, and examples if b does not say all."""
    assert set(RULES.values()) == set(_RULES) | set(_CHOICES) | set(_REFERENCED)
    assert set(PRE_AGGREGATORS.values()) == set(_STAGES)
    for m in (3, 7, M):
        assert {type(rule) for rule in examples(m)} == set(RULES.values()) - {FLTrust}
        for rule in examples(m) + pipelines(m):
            rule.check(m)
    names = {type(stage) for rule in pipelines(M) for stage in getattr(rule, "stages", ())}
    assert names == set(PRE_AGGREGATORS.values())


def rows_with_byzantine(seed: int, rule: Rule, d: int = 37) -> Doubles:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(M, d))
    last: Any = rule.rule if isinstance(rule, Pipeline) else rule
    told = int(getattr(last, "b", 1))
    if rng.integers(2) and told and not averages(rule):
        rows[rng.integers(M)] = rng.choice(hostile_values()[:7])
    return rows


@pytest.mark.parametrize("rule", COLUMN_RULES, ids=str)
@given(seed=SEEDS)
def test_column_rules_do_not_see_the_order_of_rows(rule: Rule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_with_byzantine(seed, rule).astype(np.float32)
    for column in rows.T[:20]:
        rng.shuffle(column)  # wrong values in another row of each column
    shuffled = rows[rng.permutation(M)]
    got, wanted = doubles(rule(shuffled)), doubles(rule(rows))
    if averages(rule) or not getattr(rule, "b", 1):
        # A sum of everything is taken in the order of rows.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(rows).max())
    else:
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    told, other = rule.explain(rows).dropped, rule.explain(shuffled).dropped
    np.testing.assert_allclose(np.sort(told), np.sort(other), atol=1.5 / 37)


# Two rows that are nearest to one another have the same score for Bulyan once it counts but one
# neighbour, and many sets may have MDA's smallest diameter: there the order decides. MoNNA trusts
# a worker by its index. NNM makes rows that tie: rules of directions then have none to prefer.
DIRECTIONS = ("caf", "smea", "dnc", "foolsgold")
UNORDERED = [
    rule
    for rule in ROW_RULES + pipelines(M)
    if not any(name in str(rule) for name in ("bucketing", "bulyan", "mda", "monna"))
    and not ("nnm" in str(rule) and any(name in str(rule) for name in DIRECTIONS))
]


@pytest.mark.parametrize("rule", UNORDERED, ids=str)
@given(seed=SEEDS)
def test_row_rules_do_not_see_the_order_of_rows(rule: Rule, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(M)
    rows = rows_with_byzantine(seed, rule)
    np.testing.assert_allclose(rule(rows[order]), rule(rows), rtol=0, atol=2e-5)
    told, other = rule.explain(rows), rule.explain(rows[order])
    np.testing.assert_allclose(told.dropped[order], other.dropped, atol=1.5 / 37)


@pytest.mark.parametrize("b", [1, 3, 5])
@given(seed=SEEDS)
def test_mda_does_not_see_the_order_of_rows_if_one_set_is_best(b: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(M, 37))
    rows[:b] += 50 * np.arange(1, b + 1)[:, None]
    shuffled = rows[rng.permutation(M)]
    np.testing.assert_allclose(phocas.MDA(b)(shuffled), rows[b:].mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("rule", MOVING, ids=str)
@given(seed=SEEDS)
def test_rules_move_with_the_rows(rule: Rule, seed: int) -> None:
    rows = rows_with_byzantine(seed, rule)
    shift = np.random.default_rng(seed + 1).normal(size=rows.shape[1]) * 8
    with np.errstate(invalid="ignore"):
        moved, expected = rule(rows + shift), rule(rows) + shift
    if not np.allclose(moved, expected, rtol=0, atol=2e-4):
        assume(not rounding_decides(rule, rows))
    np.testing.assert_allclose(moved, expected, rtol=0, atol=2e-4)


def rounding_decides(rule: Rule, rows: Any) -> bool:
    """Return whether the last digits of rows change the result much.

    NNM makes rows that tie exactly: any rounding then decides which of them Bulyan or CAF takes.
    """
    rng, result = np.random.default_rng(0), rule(rows)
    return any(
        not np.allclose(rule(rows + nudge), result, rtol=0, atol=1e-4, equal_nan=True)
        for scale in (1e-9, 1e-12, 1e-14)
        for nudge in rng.normal(size=(16, *rows.shape)) * scale
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", COLUMN_RULES, ids=str)
@given(seed=SEEDS, power=st.integers(-60, 20))
def test_column_rules_scale_exactly(rule: Rule, dtype: str, seed: int, power: int) -> None:
    rows = stored(rows_with_byzantine(seed, rule), dtype)
    rows[np.abs(rows) > 1e19] = np.inf
    factor = rows.dtype.type(2.0**power)
    assert bits(rule(rows * factor)) == bits(rule(rows) * factor)


@pytest.mark.parametrize("rule", FREE, ids=str)
@given(seed=SEEDS, power=st.integers(-25, 25))
def test_rules_scale(rule: Rule, seed: int, power: int) -> None:
    rows = rows_with_byzantine(seed, rule).astype(np.float32)
    rows[np.abs(rows) > 1e19] = np.nan
    factor = np.float32(2.0**power)
    got, wanted = doubles(rule(rows * factor)), doubles(rule(rows)) * float(factor)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * float(factor))


@pytest.mark.parametrize("rule", COLUMN_RULES, ids=str)
@given(seed=SEEDS)
def test_column_rules_are_odd(rule: Rule, seed: int) -> None:
    """Without ties, what is done to the smallest is done to the largest."""
    rows = np.random.default_rng(seed).normal(size=(M, 37))
    np.testing.assert_allclose(rule(-rows), -rule(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [r for r in FREE if r != phocas.Mean()], ids=str)
def test_rules_keep_what_everyone_says(rule: Rule) -> None:
    row = np.array([0.1, -3e38, 3e38, 1.4e-45, 0.0, 7.7, 1e-30], np.float32)
    rows = np.tile(row, (M, 1))
    if averages(rule):
        np.testing.assert_allclose(rule(rows), row, rtol=1e-6, atol=2e-44)
    else:
        np.testing.assert_array_equal(rule(rows), row)


@pytest.mark.parametrize("rule", strongest(M) + pipelines(M), ids=str)
def test_same_input_same_bits(rule: Rule) -> None:
    rows = rows_with_byzantine(3, rule, 5000).astype(np.float32)
    assert len({bits(rule(rows)) for _ in range(5)}) == 1


def test_randomness_is_explicit() -> None:
    rows = np.random.default_rng(0).normal(size=(M, 30))
    rule = phocas.Bucketing(size=3) | phocas.Median()
    drawn = [bits(rule(rows, rng=np.random.default_rng(seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert bits(rule(rows)) == bits(rule(rows))
    told = rule.explain(rows, rng=np.random.default_rng(1))
    assert bits(told.value) == drawn[0]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 20])
def test_rules_hold_up_to_their_limit(m: int) -> None:
    for rule in examples(m):
        rule.check(m)
        assert np.isfinite(rule(np.random.default_rng(m).normal(size=(m, 5)))).all()
        if isinstance(rule, phocas.Bounded) and rule in strongest(m):
            with pytest.raises(ValueError, match=f"the largest b is {rule.b}"):
                type(rule)(rule.b + 1).check(m)


def test_a_seed_is_as_good_as_a_generator() -> None:
    rows = np.random.default_rng(0).normal(size=(M, 30))
    rule = phocas.Bucketing(size=3) | phocas.Median()
    assert bits(rule(rows, rng=7)) == bits(rule(rows, rng=np.random.default_rng(7)))
    for wrong in (-1, 0.5, "7", True):
        with pytest.raises(TypeError, match="rng must be a NumPy generator, a seed >= 0 or None"):
            rule(rows, rng=wrong)  # type: ignore[arg-type]
