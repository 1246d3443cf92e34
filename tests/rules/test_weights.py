"""Workers with weights: each stands for as many workers, and nobody is above a cap."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.silos import table
from numpy.typing import NDArray
from tests.helpers import examples_of, hostile_values

import phocas
from phocas import Rule, ShardedAggregation, parse_rule
from phocas.rules.algebra import heaviest
from phocas.rules.reference import reference
from phocas.rules.weighting import Weighted, capped, units_of

COLUMN_RULES = ["mean", "median", "trimmed-mean:b=2", "phocas:b=2", "meamed:b=2", "heraclius:b=2"]
CUTOFFS = ["heraclius:b=2,cutoff=0.7,tail=0", "heraclius:b=2,cutoff=0"]
ROW_RULES = ["krum:b=2", "multi-krum:b=2", "multi-krum:b=2,select=3", "mda:b=2", "cge:b=2"]
PIPELINES = ["nnm:b=2|phocas:b=2", "nnm:b=2|median", "clipping:radius=5.0|heraclius:b=2"]
ALL = [*COLUMN_RULES, *CUTOFFS, *ROW_RULES, "geometric-median", *PIPELINES]
WEIGHTS = (3, 1, 4, 1, 5, 2, 4, 3, 5)
Doubles = NDArray[np.float64]


def some_rows(dtype: str = "float64", *, ties: bool = False, columns: int = 300) -> NDArray[Any]:
    """Return nine rows; the heaviest workers, 4 and 8, send what nobody should."""
    rng = np.random.default_rng(11)
    rows = rng.normal(size=(9, columns))
    if ties:
        rows = np.round(rows * 2)
    for worker in (4, 8):
        rows[worker] = np.resize(hostile_values(dtype), columns)
        rows[worker, ::3] = rng.normal(size=len(rows[worker, ::3]))
    with np.errstate(over="ignore"):
        return rows.astype(dtype)


def bits(values: Any) -> bytes:
    return np.asarray(values).tobytes()


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_worker_of_weight_w_stands_for_w_workers(rule: str, ties: bool, dtype: str) -> None:
    rows = some_rows(dtype, ties=ties)
    if rule == "mean":
        rows[[4, 8]] = 1.0
    weighted = Weighted(parse_rule(rule), WEIGHTS)
    got = weighted(rows)
    wanted = reference(weighted, rows)
    assert got.dtype == rows.dtype
    precision = 1e-4 if "geometric" in rule or dtype == "float32" else 1e-9
    np.testing.assert_allclose(got, wanted, rtol=precision, atol=precision)


@pytest.mark.parametrize(("m", "b"), [(5, 1), (5, 2), (12, 2), (12, 5), (20, 2)])
@pytest.mark.parametrize("most", [3, 40])
def test_any_b_and_any_weights(m: int, b: int, most: int) -> None:
    """What of a column is known before its values are depends on both, and so does the code."""
    rng = np.random.default_rng(m + most)
    rows = rng.normal(size=(m, 65))
    share = (1 / m + 1 / (2 * b)) / 2  # so that the b heaviest have less than half
    weights = np.floor(10 * capped(1 + most * rng.random(m) ** 3, share)).astype(int)
    rows[np.argsort(weights)[m - b :], ::2] = rng.choice([np.nan, np.inf, -1e300])
    for rule in (phocas.TrimmedMean(b), phocas.Phocas(b), phocas.MeaMed(b)):
        weighted = Weighted(rule, tuple(weights.tolist()))
        wanted = reference(weighted, rows)
        np.testing.assert_allclose(weighted(rows), wanted, rtol=1e-9, atol=1e-12)


def test_a_weighted_rule_is_written_with_its_weights() -> None:
    assert str(phocas.Median().weighted([1, 2, 2], 0.4)).endswith(
        "rule=(median),weights=1/2/2,max_share=0.4"
    )


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 13, 33, 70, 200])
def test_any_number_of_workers(m: int) -> None:
    rng = np.random.default_rng(m)
    rows = rng.normal(size=(m, 70))
    weights = rng.integers(5, 9, size=m)
    b = (m - 1) // 4
    rows[np.argsort(weights)[m - b :]] = np.nan
    for rule in (phocas.TrimmedMean(b), phocas.Phocas(b), phocas.Heraclius(b), phocas.Median()):
        if m < 3 and isinstance(rule, phocas.Median):
            continue
        weighted = Weighted(rule, tuple(weights.tolist()))
        np.testing.assert_allclose(weighted(rows), reference(weighted, rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("weight", [1, 7.5, 1e-300, 1e300])
def test_equal_weights_give_the_bits_of_the_rule(rule: str, weight: float) -> None:
    rows = some_rows("float32")
    plain = parse_rule(rule)
    why = plain.explain(rows, weights=[weight] * 9)
    assert bits(why.value) == bits(plain(rows))
    assert bits(why.dropped) == bits(plain.explain(rows).dropped)
    assert why.expected == plain.expected(9)
    capped_ = plain(rows, weights=WEIGHTS, max_share=1 / 9)
    assert bits(capped_) == bits(plain(rows))


@pytest.mark.parametrize("rule", ALL)
def test_scale_does_not_matter_and_zero_is_not_there(rule: str) -> None:
    rows = some_rows()
    plain = parse_rule(rule)
    with_absent = np.insert(rows, 2, np.nan, axis=0)
    weights = np.insert(np.array(WEIGHTS, float), 2, 0.0)
    value = plain(rows, weights=WEIGHTS)
    assert bits(plain(with_absent, weights=weights)) == bits(value)
    if "med" not in rule:  # where the middle is between two values, a median goes by the last unit
        scaled = plain(rows, weights=np.array(WEIGHTS) * 0.37)
        np.testing.assert_allclose(scaled, value, rtol=1e-5, atol=1e-5)
    assert plain.explain(with_absent, weights=weights).dropped[2] == 1


@pytest.mark.parametrize(
    "rule", ["phocas:b=2", "heraclius:b=2", "nnm:b=2|heraclius:b=2", "cge:b=2"]
)
@pytest.mark.parametrize("cuts", [(700,), (3, 1024, 1500)])
def test_shards_and_threads_give_the_same_bits(rule: str, cuts: tuple[int, ...]) -> None:
    rows = some_rows("float32", columns=2100)
    weighted = Weighted(parse_rule(rule), WEIGHTS)
    whole = weighted(rows)
    evaluation = ShardedAggregation(weighted, m=9)
    edges = [0, *cuts, rows.shape[1]]
    shards = list(itertools.pairwise(edges))
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in shards])
    parts = [evaluation.finish(rows[:, a:b], start=a) for a, b in shards]
    assert bits(np.concatenate(parts)) == bits(whole)
    for threads in (1, 2):
        phocas.set_num_threads(threads)
        assert bits(weighted(rows)) == bits(whole)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_mappings(dtype: str) -> None:
    rows = torch.from_numpy(some_rows(columns=64)[:, :64]).to(getattr(torch, dtype))
    for rule in ("phocas:b=2", "heraclius:b=2", "nnm:b=2|phocas:b=2"):
        weighted = Weighted(parse_rule(rule), WEIGHTS)
        whole = weighted([{"a": row[:40], "b": row[40:]} for row in rows])
        assert whole["a"].dtype == rows.dtype
        wanted = reference(weighted, rows.double().numpy())
        got = torch.cat([whole["a"], whole["b"]]).double().numpy()
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=2**-7)


def test_dropped_workers_are_reported() -> None:
    rows = np.arange(5.0)[:, None] * np.ones(40)
    rows[3] = 1e9
    why = phocas.Phocas(b=1).explain(rows, weights=[2, 3, 2, 4, 3])
    assert why.dropped.tolist() == [0, 0, 0, 1, 0]
    assert why.expected == pytest.approx(4 / 14)
    why = phocas.MultiKrum(b=1).explain(rows, weights=[2, 3, 2, 4, 3])
    assert why.dropped[3] == 1
    assert why.value[0] == pytest.approx((0 * 2 + 3 * 1 + 2 * 2 + 3 * 4) / 10)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ([1, 2, float("nan"), 1, 1], "worker 2 has nan; leave a worker out with 0"),
        ([1, 2, float("inf"), 1, 1], "worker 2 has inf"),
        ([1, 2, 3, -1, 1], "worker 3 has -1"),
        ([0, 0, 0, 0, 0], "must not all be 0"),
        ([1, 2, 3], "one for each of 5 workers"),
        ([[1, 2, 3, 4, 5]], "one for each"),
        ("heavy", "weights must be"),
        ([1, 1, 0, 0, 0], "Phocas needs 2b < m: got b=1 with m=2"),
        ([1, 1, 1, 1, 1e9], "the largest b is 0, or max_share=0.4999 would hold"),
        (
            [10, 10, 10, 10, 60],
            "heaviest worker counts 0.67 times as much as one of a light worker",
        ),
        ([1, 2, 2, 1, 6], "the heaviest of 5 workers has 50.0% of all weight"),
    ],
)
def test_bad_weights_are_rejected(weights: Any, complaint: str) -> None:
    rows = np.ones((5, 3))
    with pytest.raises((ValueError, TypeError), match=complaint):
        phocas.Phocas(b=1)(rows, weights=weights)


def test_advice_of_an_error_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        m = int(rng.integers(3, 30))
        b = int(rng.integers(1, (m - 1) // 2 + 1))
        weights = tuple((rng.pareto(0.4, size=m) + 1e-3).tolist())
        rule = phocas.TrimmedMean(b)
        try:
            Weighted(rule, weights).check(m)
        except ValueError as error:
            text = str(error)
            largest = int(text.split("largest b is ")[1].split(",", maxsplit=1)[0])
            share = float(text.split("max_share=")[1].split(maxsplit=1)[0])
            Weighted(phocas.TrimmedMean(largest), weights).check(m)
            Weighted(rule, weights, share).check(m)
            if largest + 1 < m / 2:
                with pytest.raises(ValueError, match="of all weight"):
                    Weighted(phocas.TrimmedMean(largest + 1), weights).check(m)


@pytest.mark.parametrize("share", [0, -1, 0.19, 1.1, float("nan"), True])
def test_bad_caps_are_rejected(share: float) -> None:
    with pytest.raises(ValueError, match="max_share must be between 1/5"):
        phocas.Mean()(np.ones((5, 3)), weights=[1, 2, 3, 4, 5], max_share=share)


def test_a_cap_needs_weights_and_some_rules_have_none() -> None:
    rows = np.ones((7, 3))
    with pytest.raises(ValueError, match="max_share needs weights"):
        phocas.Mean()(rows, max_share=0.5)
    for rule in ("bulyan:b=1", "centered-clipping:radius=1.0", "monitor:rule=mean"):
        with pytest.raises(ValueError, match="cannot be weighted"):
            phocas.aggregate(rows, rule, weights=[1] * 7)
    with pytest.raises(ValueError, match="cannot be weighted"):
        phocas.aggregate(rows, "bucketing:size=2|median", weights=[1] * 7)
    with pytest.raises(TypeError, match="host memory"):
        phocas.Median()(torch.ones(3, 2, device="meta"), weights=[1, 2, 2])


# -- the cap and the units -------------------------------------------------------------------------


def test_cap_that_lowers_no_weight_changes_no_bit() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 20))
    weights = [100, 1, 2, 3, 4]
    plain = phocas.Mean()(rows, weights=weights)
    assert np.array_equal(phocas.Mean()(rows, weights=weights, max_share=1.0), plain)
    assert np.array_equal(phocas.Mean()(rows, weights=weights, max_share=0.95), plain)
    assert not np.array_equal(phocas.Mean()(rows, weights=weights, max_share=0.5), plain)


def test_no_share_is_above_the_cap_and_the_cap_is_attained() -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        m = int(rng.integers(2, 40))
        weights = rng.pareto(0.3, size=m) + 1e-6
        share = float(rng.uniform(1 / m, 1))
        found = capped(weights, share)
        assert np.all(found <= weights * (1 + 1e-12))
        shares = found / found.sum()
        assert shares.max() <= share * (1 + 1e-9)
        lowered = found < weights * (1 - 1e-9)
        if lowered.any():
            np.testing.assert_allclose(shares[lowered], share, rtol=1e-6)
        units = units_of(weights, m, share)
        assert units.min() >= 1
        assert units.sum() <= 1 << 22


# -- the promise, by search ------------------------------------------------------------------------


def candidates(honest: Doubles, rng: np.random.Generator, count: int) -> Doubles:
    """Return lies: far away, at honest values and just beside them, and anything between."""
    low, high = honest.min(), honest.max()
    span = high - low + 1e-9
    near = rng.choice(honest, size=count) + rng.choice([-1e-9, 0, 1e-9], size=count) * span
    between = rng.uniform(low - span, high + span, size=count)
    far = rng.choice([-np.inf, np.inf, np.nan, -1e30, 1e30, 0.0], size=count)
    return np.choose(rng.integers(0, 3, size=count), [near, between, far])


@pytest.mark.parametrize(
    "kind", [phocas.TrimmedMean, phocas.Phocas, phocas.MeaMed, phocas.Heraclius]
)
def test_the_guarantee_holds_under_a_search_for_the_worst(kind: type[Rule]) -> None:
    rng = np.random.default_rng(8)
    worst = 0.0
    for _ in range(60):
        m = int(rng.integers(3, 12))
        weights = rng.integers(1, 20, size=m)
        rules = [rule for rule in examples_of(kind, m) if getattr(rule, "b", 0)]
        fitting = []
        for rule in rules:
            try:
                fitting.append(Weighted(rule, tuple(weights.tolist())))
                fitting[-1].check(m)
            except ValueError:
                fitting.pop()
        for weighted in fitting:
            q = weighted.tolerates(m).values
            bound = weighted.error_bound(m, q)
            assert q >= 1
            assert bound is not None
            liars = np.argsort(weights, kind="stable")[m - q :]
            honest = np.delete(np.arange(m), liars)
            values = rng.standard_t(2, size=m) * 10.0 ** rng.integers(-3, 4)
            rows = np.repeat(values[:, None], 400, axis=1)
            for liar in liars:
                rows[liar] = candidates(values[honest], rng, 400)
            w = weights[honest] / weights[honest].sum()
            mean = float(w @ values[honest])
            spread = math.sqrt(float(w @ (values[honest] - mean) ** 2))
            # Blocks share a spread, so the squares of distances are to be compared on average.
            distance = weighted(rows) - mean
            if getattr(weighted.rule, "cutoff", 0):
                found = math.sqrt(float(np.mean(distance**2)))
            else:
                found = float(np.abs(distance).max())
            assert found <= bound * spread * (1 + 1e-9) + 1e-12
            worst = max(worst, found / (bound * spread))
    assert worst > 0.1  # the search comes near: the bound is not idle


def test_no_worker_moves_a_trimmed_mean_by_more_than_its_share() -> None:
    """|f(x) - f(x')| <= w / (T - 2B) (H - L), whatever one worker sends (docs/theory.md)."""
    rng = np.random.default_rng(9)
    closest = 0.0
    for _ in range(300):
        m = int(rng.integers(3, 12))
        weights = rng.integers(1, 9, size=m)
        b = int(rng.integers(0, (m - 1) // 2 + 1))
        total, cut = int(weights.sum()), heaviest(weights, b)
        if 2 * cut >= total:
            continue
        values = rng.normal(size=m)
        who = int(rng.integers(m))
        others = np.delete(values, who)
        order = np.argsort(others)
        mass = np.cumsum(np.delete(weights, who)[order])
        w = int(weights[who])
        low = others[order][np.searchsorted(mass, cut - w, side="right")] if cut >= w else -np.inf
        high = (
            others[order][np.searchsorted(mass, total - cut, side="left")]
            if (mass[-1] >= total - cut)
            else np.inf
        )
        rows = np.repeat(values[:, None], 500, axis=1)
        rows[who] = candidates(others, rng, 500)
        moved = phocas.TrimmedMean(b)(rows, weights=weights)
        if b == 0:
            continue  # the mean has no bound
        assert np.ptp(moved) <= w / (total - 2 * cut) * (high - low) * (1 + 1e-9) + 1e-12
        if 0 < high - low < np.inf:
            closest = max(closest, float(np.ptp(moved) / (w / (total - 2 * cut) * (high - low))))
    assert closest > 0.9


def test_the_attack_that_owns_the_mean_is_harmless() -> None:
    """One client of ten claims 1e9 examples, as field.md has it of Flower's MultiKrum."""
    rng = np.random.default_rng(2)
    rows = rng.normal(1.0, 0.1, size=(10, 50))
    rows[7] = -100.0
    examples = [600.0] * 7 + [1e9] + [500.0] * 2
    assert phocas.Mean()(rows, weights=examples).mean() < -99
    capped_ = phocas.Phocas(b=1)(rows, weights=examples, max_share=0.2)
    assert abs(capped_.mean() - 1) < 0.1
    with pytest.raises(ValueError, match="of all weight"):
        phocas.Phocas(b=1)(rows, weights=examples)


def test_study_of_silos_gives_the_published_errors_and_ours_stay_small() -> None:
    found = {
        (rule, share): [each for (each,) in errors]
        for rule, share, errors in table(spread=0.1, seeds=1)
    }
    none, small, large = found["mean", 1.0]
    assert none == pytest.approx(0.0, abs=1e-4)
    assert small == pytest.approx(5.52, rel=0.02)
    assert large == pytest.approx(518.02, rel=0.02)
    for (rule, share), (_, small, large) in found.items():
        if share != 1.0 and "clipping:radius" not in rule:
            assert max(small, large) < 0.2, rule
