"""Rules on differences to a base: rows minus the base, the rule, plus the base."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import phocas
from phocas import FunctionRule, Relative, Rule, ShardedAggregation, parse_rule
from phocas.rules.reference import reference

RULES = [
    "cell-filter:b=2|nnm:b=2|trimmed-mean:b=2",
    "cell-filter:b=2|multi-krum:b=2",
    "cell-filter:b=2|clipping:radius=30|mean",
    "cell-filter:b=2,cutoff=3|heraclius:b=2",
    "monitor:rule=(cell-filter:b=2|nnm:b=2|phocas:b=2)",
    "monitor:rule=phocas:b=2",
    "monitor:rule=cge:b=2",
    "nnm:b=2|trimmed-mean:b=2",
    "clipping:radius=30|median",
    "caf:b=2",
    "signguard",
    "dnc:b=2",
    "flame",
    "foolsgold",
]


def shortened(rows: NDArray[Any]) -> NDArray[Any]:
    """Return half of the median: what does not move with its rows."""
    return np.asarray(np.nanmedian(rows, axis=0) / 2)


FUNCTIONS: list[Rule] = [
    FunctionRule(shortened, b=2),
    FunctionRule(shortened, b=2, columnwise=True),
    phocas.NNM(b=2) | FunctionRule(shortened, b=2),
    phocas.Clipping(radius=30.0) | FunctionRule(shortened, b=2),
    phocas.CellFilter(b=2) | FunctionRule(shortened, b=2),
]


def by_definition(rule: Rule, rows: NDArray[Any], base: NDArray[Any]) -> NDArray[Any]:
    differences = rows.astype(float) - base
    if isinstance(rule, phocas.Monitor):
        return np.asarray(rows.astype(float).mean(axis=0))
    function = rule.rule if isinstance(rule, phocas.Pipeline) else rule
    if isinstance(function, FunctionRule):
        return np.asarray(base + rule(differences))  # a function is its own definition
    return np.asarray(base + reference(rule, differences))


def some_rows(hostile: bool, columns: int = 2300) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return nine rows near a base far from zero, of which two are wrong and two in some cells."""
    rng = np.random.default_rng(3)
    base = rng.normal(size=columns) * 100
    rows = base + rng.normal(size=(9, columns))
    if hostile:
        rows[4] = np.nan
        rows[7] = -1e6
        rows[1, 5] = rows[2, 1500] = 1e30
        rows[3, 9] = np.inf
    return rows, base


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("rule", [*map(parse_rule, RULES), *FUNCTIONS], ids=str)
def test_rule_on_differences_is_its_definition(rule: Rule, hostile: bool) -> None:
    robust = "cell-filter" in str(rule)  # one wrong cell breaks rules that go by whole rows
    rows, base = some_rows(hostile=False)
    if hostile and isinstance(rule, phocas.Monitor):
        rows[7] = -1e6
    elif hostile:
        rows = some_rows(hostile=True)[0] if robust else rows
        rows[[4, 7]] = np.array([[np.nan], [-1e6]])
    wanted = by_definition(rule, rows, base)
    why = Relative(rule).explain(np.vstack([rows, base]))
    np.testing.assert_allclose(why.value, wanted, rtol=1e-9, atol=1e-7)
    plain = rule.explain(rows - base)
    np.testing.assert_allclose(why.dropped[:9], plain.dropped, atol=1e-9)
    assert np.isfinite(wanted).all()


@pytest.mark.parametrize("text", RULES)
def test_shards_of_a_rule_on_differences_give_the_same_bits(text: str) -> None:
    rows, base = some_rows(hostile="monitor" not in text)
    if "cell-filter" not in text:
        rows = some_rows(hostile=False)[0]
    rule, m = Relative(parse_rule(text)), 10
    everything = np.vstack([rows, base]).astype(np.float32)
    evaluation = ShardedAggregation(rule, m)
    shards = list(itertools.pairwise([0, 300, 1024, 1800, 2300]))
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(everything[:, a:b], start=a) for a, b in shards])
    found = [evaluation.explain(everything[:, a:b], start=a) for a, b in shards]
    whole = rule.explain(everything)
    assert np.concatenate([each.value for each in found]).tobytes() == whole.value.tobytes()
    assert np.isfinite(whole.value).all()


def test_columns_rules_have_the_bits_that_they_have_without_a_base() -> None:
    rows, base = some_rows(hostile=True)
    for text in ("phocas:b=2", "monitor:rule=phocas:b=2", "cell-filter:b=2|trimmed-mean:b=2"):
        rule = parse_rule(text)
        got = Relative(rule)(np.vstack([rows, base]))
        assert got.tobytes() == rule(rows).tobytes()


def test_base_is_never_cleaned() -> None:
    """It is far from all rows, and implausible beside them."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(7, 1100))
    base = np.full(1100, 1e6)
    rule = parse_rule("cell-filter:b=1|clipping:radius=1e5|mean")
    got = Relative(rule)(np.vstack([rows, base]))
    np.testing.assert_allclose(got, base + reference(rule, rows - base), rtol=1e-9)


def test_base_of_a_base_is_rejected() -> None:
    with pytest.raises(TypeError, match="cannot be applied to differences to a base"):
        Relative(Relative(phocas.Median()))
