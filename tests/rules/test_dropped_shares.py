"""Dropped shares: compared with a slow count; wrong rows have large shares."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers import DTYPES, Doubles, bits, doubles, examples, pipelines, stored, strongest

import phocas
from phocas import RULES, Rule

M = 11


def dropped_slowly(rule: Rule, rows: Doubles) -> Doubles:
    """Count, column by column, the values outside of what the definition averages."""
    m, d = rows.shape
    window = rule.window(m)
    counts = np.zeros(m)
    for column in rows.T:
        values = np.where(np.isnan(column), np.inf, column)
        order = np.argsort(values, kind="stable")
        kept = order[window.trim : m - window.trim]
        if window.drop:
            y = values[kept].mean()
            distance = np.abs(values[order] - y)
            kept = order[np.argsort(distance, kind="stable")[: m - window.drop]]
        counts[np.setdiff1d(np.arange(m), kept)] += 1
    return np.asarray(counts / d)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", [1, 2, 5, 11, 20, 200])
def test_column_rules_count_what_they_drop(m: int, dtype: str) -> None:
    rng = np.random.default_rng(m)
    # Distinct values, so far apart that no two are as far from any centre but by design.
    values = np.argsort(rng.random((m, 301)), axis=0) ** 2 + rng.random((m, 301)) / 8
    b = (m - 1) // 3
    for column in values.T[:200]:
        column[rng.permutation(m)[:b]] = rng.choice([np.nan, np.inf, -np.inf, 1e20, -1e20], b)
    rows = stored(values, dtype)
    rules = [phocas.Median(), phocas.TrimmedMean(b), phocas.Phocas(b), phocas.MeaMed(b)]
    for rule in rules:
        told = rule.explain(rows)
        finite = np.unique(doubles(rows)[:, 200:], axis=0)
        assert len(finite) == m
        slow = dropped_slowly(rule, doubles(rows)[:, 200:])
        fast = rule.explain(rows[:, 200:]).dropped
        np.testing.assert_array_equal(fast, slow, err_msg=str(rule))
        assert told.expected == pytest.approx(_expected(rule, m, b))
        assert slow.mean() == pytest.approx(told.expected)


def _expected(rule: Rule, m: int, b: int) -> float:
    if rule == phocas.Median():
        return 1 - (2 - m % 2) / m
    return (2 if isinstance(rule, phocas.TrimmedMean) else 1) * b / m


def test_expected_shares() -> None:
    for text, share in [
        ("mean", 0),
        ("median", 18 / 20),
        ("trimmed-mean:b=6", 12 / 20),
        ("phocas:b=6", 6 / 20),
        ("heraclius:b=6", 0),
        ("heraclius:b=6,cutoff=0", 6 / 20),
        ("monitor:rule=phocas:b=6", 6 / 20),
        ("meamed:b=6", 6 / 20),
        ("krum:b=6", 19 / 20),
        ("multi-krum:b=6", 6 / 20),
        ("multi-krum:b=6,select=5", 15 / 20),
        ("bulyan:b=4", 16 / 20),
        ("mda:b=6", 6 / 20),
        ("cge:b=6", 6 / 20),
        ("geometric-median", 0),
        ("centered-clipping:radius=1.0", 0),
        ("nnm:b=6|phocas:b=6", 6 / 20),
        ("bucketing:size=2|trimmed-mean:b=2", 4 / 10),
    ]:
        assert phocas.parse_rule(text).expected(20) == pytest.approx(share), text


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", examples(M) + pipelines(M), ids=str)
def test_explaining_changes_no_bit(rule: Rule, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(M, 2100))
    values[2] = np.nan
    rows = stored(values, dtype)
    told = rule.explain(rows)
    assert bits(told.value) == bits(rule(rows))
    assert told.dropped.shape == (M,)
    assert told.dropped.dtype == np.float64
    assert ((told.dropped >= 0) & (told.dropped <= 1)).all()
    assert 0 <= told.expected < 1
    np.testing.assert_array_equal(told.excess, told.dropped - told.expected)


@pytest.mark.parametrize("lie", [np.nan, np.inf, -1e20, 3e38])
@pytest.mark.parametrize(
    "rule",
    [r for r in strongest(20) + pipelines(20) if "mean" not in str(r).split("|")[-1].split(":")],
    ids=str,
)
def test_wrong_rows_stand_out(rule: Rule, lie: float) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(20, 3000)).astype(np.float32) / 60
    wrong = [3, 11]
    rows[wrong] = lie
    told = rule.explain(rows)
    if "clipping" in str(rule) and not np.isfinite(lie):
        assert np.isfinite(doubles(told.value)).all()
    honest = np.delete(told.dropped, wrong)
    if "bucketing" in str(rule):
        # Who shares a bucket with a liar shares the blame.
        honest = np.delete(told.dropped, [2, 3, 10, 11])
    assert told.dropped[wrong].min() >= honest.mean()
    if not str(rule).startswith(("clipping", "adaptive")):
        assert told.dropped[wrong].min() > 0.8


def test_selecting_rules_report_the_chosen_rows() -> None:
    rows = np.random.default_rng(2).normal(size=(20, 50))
    rows[:4] += 50
    told = phocas.MultiKrum(b=4).explain(rows)
    np.testing.assert_array_equal(told.dropped, [1] * 4 + [0] * 16)
    krum = phocas.Krum(b=4).explain(rows)
    assert sorted(krum.dropped) == [0] + [1] * 19
    np.testing.assert_array_equal(rows[np.argmin(krum.dropped)], krum.value)
    assert np.mean(told.dropped) == pytest.approx(told.expected)
    assert np.mean(krum.dropped) == pytest.approx(krum.expected)
    bulyan = phocas.Bulyan(b=4).explain(rows)
    assert np.mean(bulyan.dropped) == pytest.approx(bulyan.expected, abs=0.02)


def test_ties_are_kept() -> None:
    """A value that equals the farthest kept one counts as kept."""
    rows = np.array([[1.0], [1.0], [1.0], [1.0], [5.0]])
    for rule in (phocas.Median(), phocas.TrimmedMean(1), phocas.Phocas(1), phocas.MeaMed(1)):
        np.testing.assert_array_equal(rule.explain(rows).dropped, [0, 0, 0, 0, 1])


def test_a_lost_rule_drops_everyone() -> None:
    rows = np.full((9, 3), np.nan)
    told = phocas.Krum(b=1).explain(rows)
    assert np.isnan(told.value).all()
    np.testing.assert_array_equal(told.dropped, np.ones(9))


def test_every_rule_is_explained() -> None:
    rows = np.random.default_rng(3).normal(size=(M, 7))
    assert {type(rule) for rule in examples(M)} == set(RULES.values()) - {phocas.FLTrust}
    for rule in examples(M):
        assert rule.explain(rows).expected == rule.expected(M)
