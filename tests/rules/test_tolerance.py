"""What ``rule.tolerates`` promises, by attack: so many are survived, and where known no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from tests.helpers import Doubles, examples, pipelines

import phocas
from phocas import Rule, Tolerance, parse_rule

D = 6

PIPELINES = [
    f"{stage}|{rule}"
    for stage, rule in itertools.product(
        ["nnm:b=1", "nnm:b=2", "bucketing:size=2", "bucketing:size=3", "adaptive-clipping:b=2"],
        ["median", "phocas:b=1", "meamed:b=1", "geometric-median", "mda:b=1", "mean"],
    )
] + [
    "bucketing:size=2|nnm:b=1|trimmed-mean:b=1",
    "nnm:b=2|bucketing:size=2|median",
    "adaptive-clipping:b=1|nnm:b=2|krum:b=1",
    "nnm:b=2|multi-krum:b=2",
    "bucketing:size=2|bulyan:b=1",
    "clipping:radius=3|median",
    "cell-filter:b=1|nnm:b=1|phocas:b=1",
    "cell-filter:b=3|nnm:b=2|trimmed-mean:b=2",
    "cell-filter:b=2,cutoff=0.5|nnm:b=2|krum:b=1",
    "cell-filter:b=2|bucketing:size=2|median",
    "cell-filter:b=3|adaptive-clipping:b=1|median",
]


def possible(m: int) -> list[Rule]:
    """Return all examples, and those of the pipelines that hold with m workers."""
    found = examples(m) + pipelines(m)
    for text in PIPELINES:
        rule = parse_rule(text)
        try:
            rule.check(m)
        except ValueError:
            continue
        found.append(rule)
    return found


def byzantine_rows(honest: Doubles, q: int, rng: np.random.Generator) -> Iterator[Doubles]:
    """Yield what q liars may send who see the honest rows: far away, near by, alone or together."""
    mean, spread = honest.mean(axis=0), honest.std(axis=0) + 1e-9
    ones = np.ones((q, 1))
    for value in (np.nan, np.inf, -np.inf, 1e30, -1e12):
        yield np.full((q, D), value)
    for steps in (1.0, 3.0, -40.0, 1e6):
        yield ones * (mean + steps * spread)
    yield ones * honest[rng.integers(len(honest))]
    yield ones * (-5 * mean)
    yield mean + 1e4 * rng.normal(size=(q, D))
    yield rng.choice([np.nan, np.inf, -np.inf, 1e20, -1e5, 0.0], size=(q, D))
    # Half far out, to draw a centre after them, and half just outside of the honest values.
    yield np.where(np.arange(q)[:, None] < q // 2, 1e9, honest.max(axis=0) + 0.1 * spread)


def assert_survived(rule: Rule, rows: Doubles, wrong: np.ndarray, q: int, seed: int) -> None:
    """Compare the distance from the honest mean with the spreads that the rule declares."""
    limit = rule.error_bound(len(rows), q)
    assert limit is not None
    honest = np.where(wrong, np.nan, rows)
    mean = np.nanmean(honest, axis=0)
    spread = np.sqrt(np.nanmean(np.square(honest - mean), axis=0).sum())
    got = rule(rows, rng=np.random.default_rng(seed))
    distance = np.sqrt(np.square(got - mean).sum())
    most = limit * (1 + 1e-5) or 1e-12  # a bound of 0, with b = 0, is a mean, which rounds
    assert distance <= most * spread, (str(rule), q, distance / spread, limit)


def attack_rows(rule: Rule, m: int, seed: int) -> None:
    rng = np.random.default_rng([m, seed])
    q = rule.tolerates(m).rows
    rows = rng.normal(size=(m, D)) * rng.choice([1e-3, 1.0, 30.0]) + rng.normal(size=D) * 5
    chosen = rng.permutation(m)[:q]
    wrong = np.zeros((m, D), bool)
    wrong[chosen] = True
    for lie in byzantine_rows(np.delete(rows, chosen, axis=0), q, rng):
        attacked = rows.copy()
        attacked[chosen] = lie
        assert_survived(rule, attacked, wrong, q, seed)


def attack_values(rule: Rule, m: int, seed: int) -> None:
    """Replace q values of each column, in other rows each time."""
    rng = np.random.default_rng([m, seed, 1])
    q = rule.tolerates(m).values
    rows = rng.normal(size=(m, D)) + rng.normal(size=D) * 5
    order = np.argsort(rng.random((m, D)), axis=0)
    wrong = order < q
    honest = np.take_along_axis(rows, np.argsort(order, axis=0)[q:], axis=0)
    for lie in byzantine_rows(honest, q, rng):
        attacked = rows.copy()
        attacked.T[wrong.T] = lie.T.ravel()
        assert_survived(rule, attacked, wrong, q, seed)


def promised(m: int, draws: int) -> None:
    for rule in possible(m):
        tolerance = rule.tolerates(m)
        assert 0 <= tolerance.values <= tolerance.rows <= (m - 1) // 2
        for seed in range(draws):
            if rule.error_bound(m, 0) is None:
                assert tolerance == Tolerance()
                continue
            attack_rows(rule, m, seed)
            attack_values(rule, m, seed)


@pytest.mark.parametrize("m", [7, 11])
def test_guarantee_holds(m: int) -> None:
    promised(m, 1)


@pytest.mark.slow
@pytest.mark.parametrize("m", range(5, 42))
def test_guarantee_holds_for_every_m(m: int) -> None:
    promised(m, 8)


# The rules of which it is known that they survive not one more.
TIGHT = (
    *("mean", "median", "trimmed-mean:b=2", "phocas:b=2", "meamed:b=2", "mda:b=2"),
    *("geometric-median", "bucketing:size=2|median", "bucketing:size=3|median", "nnm:b=2|median"),
)


@pytest.mark.parametrize("m", [5, 6, 13, 20])
@pytest.mark.parametrize("text", TIGHT)
def test_one_more_is_not_survived(text: str, m: int) -> None:
    rule = parse_rule(text)
    rng = np.random.default_rng(m)
    rows = rng.normal(size=(m, D))
    q = rule.tolerates(m).rows + 1
    if 2 * q > m:
        rows[:q] = 1e12  # a majority that agrees: whoever is right is nobody's to know
    worst = 0.0
    # Of the draws of a bucketing rule one puts every liar into a bucket of its own.
    for seed in range(400 if "bucketing" in text else 1):
        for lie in (1e12, np.nan, np.inf):
            rows[:q] = lie
            got = rule(rows, rng=np.random.default_rng(seed))
            far = np.abs(got).max() if np.isfinite(got).all() else np.inf
            worst = max(worst, float(far))
        if worst > 1e6:
            return
    pytest.fail(f"{rule} survived {q} of {m} rows: its promise is too low")


@pytest.mark.parametrize(
    ("text", "rows", "values"),
    [
        ("mean", 0, 0),
        ("median", 9, 9),
        ("phocas:b=6", 6, 6),
        ("meamed:b=0", 0, 0),
        ("krum:b=6", 6, 0),
        ("bulyan:b=2", 4, 4),
        ("bulyan:b=4", 5, 5),
        ("geometric-median", 9, 0),
        ("mda:b=6", 6, 0),
        ("cge:b=6", 0, 0),
        ("centered-clipping:radius=1000", 0, 0),
        ("clipping:radius=1|mean", 0, 0),
        ("clipping:radius=1|median", 0, 0),
        ("adaptive-clipping:b=6|mean", 0, 0),
        ("adaptive-clipping:b=6|median", 9, 0),
        ("bucketing:size=2|median", 4, 4),
        ("bucketing:size=4|median", 2, 2),
        ("bucketing:size=2|geometric-median", 4, 0),
        ("nnm:b=2|phocas:b=6", 2, 0),
        ("nnm:b=6|krum:b=2", 2, 0),
        ("bucketing:size=2|nnm:b=3|median", 3, 0),
        ("cell-filter:b=8|nnm:b=6|trimmed-mean:b=6", 8, 8),
        ("cell-filter:b=8|mean", 8, 8),
        ("cell-filter:b=2|median", 2, 2),
        ("cell-filter:b=0|median", 9, 9),
        ("cell-filter:b=0|nnm:b=6|krum:b=2", 2, 0),
        ("cell-filter:b=8|clipping:radius=1|median", 0, 0),
        ("cell-filter:b=8|centered-clipping:radius=1", 0, 0),
    ],
)
def test_guarantees_by_hand(text: str, rows: int, values: int) -> None:
    assert parse_rule(text).tolerates(20) == Tolerance(rows, values)


def test_an_impossible_rule_guarantees_nothing() -> None:
    for rule in (phocas.Phocas(4), phocas.Krum(3), phocas.MDA(4), phocas.NNM(4) | phocas.Median()):
        with pytest.raises(ValueError, match="largest b is"):
            rule.tolerates(8)
        with pytest.raises(ValueError, match="largest b is"):
            rule.error_bound(8, 0)


def test_honest_rows_beyond_the_radius_are_why_clipping_guarantees_nothing() -> None:
    rows = np.full((9, 3), 100.0)
    for text in ("clipping:radius=1|median", "centered-clipping:radius=1"):
        assert np.linalg.norm(phocas.aggregate(rows, text)) < 2
