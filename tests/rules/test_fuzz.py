"""Rules of the tables and random pipelines against their twins, on rows that nobody should send.

A result must be that of the twin up to rounding, or one that exact arithmetic cannot tell from it
(:mod:`tests.rules.admissible`). It must have the same bits in any layout, and by any number of
threads and shards. ``python -m pytest tests/rules/test_fuzz.py -m slow`` runs more of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers import (
    ROUNDING,
    TINY,
    Doubles,
    bits,
    doubles,
    examples_of,
    num_threads,
)
from tests.rules.admissible import admissible

import phocas
from phocas import PRE_AGGREGATORS, RULES, Pipeline, Rule, ShardedAggregation, parse_rule
from phocas.rules.reference import reference
from phocas.rules.weighting import Weighted

SIZES = ((3, 5), (5, 3), (8, 17), (8, 100), (11, 16), (13, 40), (25, 16))
OFFSETS = ("none", "near 1000", "close to 1000", "wide", "grid")
LIES = ("none", "cells", "rows", "equal", "zeros", "ends")
# The twins do not scale what double precision cannot square: test_numbers.py goes beyond.
ENDS = {"float32": (TINY["float32"], 1.5e35), "float64": (1e-150, 1e146)}
# Weights with a mean behind a mix have a definition of their own: add them here when it is settled.
WEIGHABLE = ("median", "trimmed-mean:b=1", "krum:b=1", "multi-krum:b=1", "cge:b=1", "mda:b=1")


def some_rule(rng: np.random.Generator, m: int) -> Rule:
    """Return a rule of the table, behind up to two pre-aggregators."""
    stages: list[phocas.PreAggregator] = []
    size = m
    for _ in range(rng.choice([0, 1, 1, 2])):
        found = examples_of(
            list(PRE_AGGREGATORS.values())[rng.integers(len(PRE_AGGREGATORS))], size
        )
        stage = found[rng.integers(len(found))]
        if not (stages and stage.outermost):
            stages.append(stage)
            size = stage.rows_after(size)
    while True:
        rules = examples_of(list(RULES.values())[rng.integers(len(RULES))], size)
        rule = rules[rng.integers(len(rules))] if rules else phocas.Median()
        costly = isinstance(rule, phocas.MDA | phocas.SMEA) and size > 13  # the twin tries all sets
        if not costly and not (stages and rule.outermost):
            return Pipeline(tuple(stages), rule) if stages else rule


def some_rows(rng: np.random.Generator, m: int, d: int, dtype: str) -> Doubles:
    """Return rows that a type can hold, some of them wrong."""
    values = rng.normal(size=(m, d))
    offset, lie = OFFSETS[rng.integers(len(OFFSETS))], LIES[rng.integers(len(LIES))]
    if offset == "near 1000":
        values += 1000
    elif offset == "close to 1000":
        values = 1000 + 10.0 ** -rng.integers(1, 4) * values
    elif offset == "wide":
        values *= 10.0 ** rng.integers(-4, 5, size=(m, d))
    elif offset == "grid":
        values = rng.integers(-3, 4, size=(m, d)).astype(np.float64)
    wrong = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20, -1e20, TINY[dtype], -TINY[dtype], -0.0]
    some = rng.permutation(m)[: rng.integers(0, m // 3 + 2)]
    for i in some:
        if lie == "cells":
            values[i, rng.integers(d)] = rng.choice(wrong)
        elif lie == "rows":
            values[i] = rng.choice(wrong, d) if rng.integers(2) else rng.choice(wrong)
        elif lie == "equal":
            values[i] = values[0]
        elif lie == "zeros":
            values[i] = 0.0
    if lie == "ends":
        values = np.clip(values, -2000, 2000) * ENDS[dtype][rng.integers(2)]
    with np.errstate(all="ignore"):
        return doubles(values.astype(dtype))


def layouts(rows: Any) -> list[Any]:
    """Return the same rows as lists, in other orders of memory, and as mappings."""
    m, d = rows.shape
    spaced = np.zeros((m, 2 * d), rows.dtype)
    spaced[:, ::2] = rows
    cut = d // 3
    return [
        list(rows),
        np.asfortranarray(rows),
        spaced[:, ::2],
        [{"first": row[:cut], "second": row[cut:]} for row in rows],
    ]


def in_shards(rule: Rule, rows: Any, cut: int) -> Any:
    """Aggregate as two servers do."""
    d = rows.shape[1]
    servers = [(ShardedAggregation(rule, len(rows), d=d), a, b) for a, b in ((0, cut), (cut, d))]
    while servers[0][0].request is not None:
        partials = [server.partial(rows[:, a:b], start=a) for server, a, b in servers]
        for server, _, _ in servers:
            server.answer(partials)
    return np.concatenate([server.finish(rows[:, a:b], a) for server, a, b in servers])


def matches(rule: Rule, rows: Doubles, got: Doubles, dtype: str) -> bool:
    """Tell whether a result is the twin's up to rounding, or cannot be told from it exactly."""
    wanted = reference(rule, rows)
    with np.errstate(all="ignore"):
        sizes = np.abs(rows)
        usual = np.where(sizes <= 1e6 * np.nanmedian(sizes), sizes, 0).max(axis=0)
        size, tiny = 2 * np.abs(wanted) + 1e-9, 64
        if isinstance(rule, Pipeline):
            # Factors of whole rows, as of clipping, are rounded relative to the largest results,
            # and a filter before another rule rounds subnormal values twice.
            size, tiny = size + np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0) / 8, 256
        same = np.abs(got - wanted) <= 64 * ROUNDING[dtype] * np.minimum(usual, size)
        same |= np.abs(got - wanted) <= tiny * TINY[dtype]
        same |= ~np.isfinite(got) & ~np.isfinite(wanted)
    return bool(same.all()) or admissible(rule, rows, got, dtype)


def defined(rule: Rule, rows: Doubles) -> bool:
    """Tell whether there is one result: no rule may iterate, and no column be lost to cleaning.

    test_values.py compares what the geometric median minimises. Of a column with more than b values
    that are not finite, cleaning promises nothing.
    """
    if isinstance(rule, Pipeline) and isinstance(rule.stages[0], phocas.CellFilter):
        lost = (~np.isfinite(rows)).sum(axis=0).max()
        if lost > rule.stages[0].b:
            return False
    return "geometric" not in str(rule)


def fuzz(seed: int, trials: int) -> int:
    """Draw rules and rows, and return how many comparisons were made."""
    rng = np.random.default_rng(seed)
    checks = 0
    for trial in range(trials):
        dtype = ("float32", "float64")[rng.integers(2)]
        m, d = SIZES[rng.integers(len(SIZES))]
        rule = some_rule(rng, m)
        values = some_rows(rng, m, d, dtype)
        rows = values.astype(dtype)
        where = f"seed {seed}, trial {trial}: {rule} of {m} x {d} {dtype}"
        got = rule(rows)
        wanted = bits(got)
        for layout in layouts(rows):
            assert bits(rule(layout)) == wanted, where
        with num_threads(1 + int(rng.integers(3))):
            explained = rule.explain(rows)
        assert bits(explained.value) == wanted, where
        assert ((explained.dropped >= 0) & (explained.dropped <= 1)).all(), where
        if not rule.whole:
            assert bits(in_shards(rule, rows, int(rng.integers(d + 1)))) == wanted, where
        checks += len(layouts(rows)) + 3
        if defined(rule, values):
            assert matches(rule, values, doubles(got), dtype), where
            checks += 1
    return checks


@pytest.mark.parametrize("seed", range(6))
def test_random_rules_equal_their_twins(seed: int) -> None:
    assert fuzz(seed, 40) > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_rules_equal_their_twins(seed: int) -> None:
    assert fuzz(seed, 100) > 600


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("text", WEIGHABLE)
def test_weights_equal_their_twins_in_any_layout(text: str, dtype: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(4):
        weighted = Weighted(parse_rule(text), tuple(rng.integers(2, 6, size=9).tolist()))
        rows = (rng.normal(size=(9, 17)) + rng.choice([0, 1000])).astype(dtype)
        rows[3] = rng.choice([np.nan, np.inf, 1e20, 0.0])
        got = weighted(rows)
        slack = 64 * ROUNDING[dtype] * max(1.0, np.abs(got).max())
        np.testing.assert_allclose(got, reference(weighted, doubles(rows)), rtol=0, atol=slack)
        assert {bits(weighted(layout)) for layout in layouts(rows)} == {bits(got)}


# -- what it has found -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_nnm_tells_far_rows_from_farther_ones(seed: int) -> None:
    """The square of 1e20 is infinite in single precision: all rows were as far from such a row."""
    rng = np.random.default_rng(seed)
    rows = (1000 + rng.normal(size=(25, 16))).astype(np.float32)
    rows[[1, 4, 7], [3, 5, 9]] = 1e20
    rows[[9, 12], 2] = [3e38, np.nan]
    rule = parse_rule("nnm:b=6|median")
    np.testing.assert_allclose(rule(rows), reference(rule, doubles(rows)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("text", ["multi-krum:b=1", "mda:b=1"])
def test_rows_that_double_precision_can_measure_are_not_lost(text: str) -> None:
    """More rows are far away than the rule survives: it has a result, far away as they are."""
    rows = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    rows[:2] *= np.float32(1e21)
    rule = parse_rule(text)
    wanted = reference(rule, doubles(rows))
    np.testing.assert_allclose(rule(rows), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
def test_rows_clipped_by_a_millionth_are_clipped(spread: float, dtype: str) -> None:
    """Weights of 0.999999 were taken for those of a mean, by which an offset cancels."""
    rule = parse_rule("adaptive-clipping:b=2|multi-krum:b=2")
    for seed in range(60):
        rows = (1000 + spread * np.random.default_rng(seed).normal(size=(8, 100))).astype(dtype)
        got, slack = rule(rows), 1000 * 8 * ROUNDING[dtype]
        np.testing.assert_allclose(got, reference(rule, doubles(rows)), rtol=0, atol=slack)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("before", ["adaptive-clipping:b=2", "clipping:radius=3.0"])
def test_clipped_rows_are_all_as_long(before: str, dtype: str) -> None:
    """Of as long ones the first are taken: not those that rounding has made the shortest."""
    rule = parse_rule(f"{before}|cge:b=3")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = (rng.normal(size=(8, 17)) * 10.0 ** rng.integers(-4, 5, size=(8, 17))).astype(dtype)
        wanted = reference(rule, doubles(rows))
        slack = 8 * ROUNDING[dtype] * np.abs(rows).max()
        np.testing.assert_allclose(rule(rows), wanted, rtol=0, atol=slack)


def test_buckets_of_buckets() -> None:
    rows = np.arange(1.0, 14.0)[:, None]
    rule = parse_rule("bucketing:size=2|bucketing:size=3|mean")
    # Seven buckets, the last of one row; of these three, the last of that one.
    np.testing.assert_allclose(rule(rows), [(3.5 + 9.5 + 13) / 3])
    np.testing.assert_allclose(rule.explain(rows).dropped, 0, atol=1e-12)
