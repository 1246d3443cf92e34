"""Every rule and pipeline with weights against slow definitions, which share nothing with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import phocas
from phocas import (
    PRE_AGGREGATORS,
    RULES,
    Pipeline,
    PreAggregator,
    Rule,
    ShardedAggregation,
    parse_rule,
)
from phocas.rules.algebra import Mix, Planning
from phocas.rules.reference import _CHOICES, _lengths, reference, squared_distances
from phocas.rules.weighting import Weighted, capped, units_of

Doubles = NDArray[np.float64]

STEPS = [
    "mean",
    "median",
    "trimmed-mean:b=1",
    "phocas:b=1",
    "heraclius:b=1,cutoff=1.5",
    "meamed:b=1",
    "krum:b=1",
    "multi-krum:b=1",
    "mda:b=1",
    "cge:b=1",
    "geometric-median",
    "geometric-median:iterations=3,smoothing=0.1",
    "caf:b=1",
    "smea:b=1",
    "dnc:b=1",
]
"""Every rule that has a definition with weights."""
BEFORE = [
    "",
    "clipping:radius=2|",
    "clipping:radius=99|",
    "adaptive-clipping:b=1|",
    "nnm:b=3|",
    "nnm:b=0|",
    "clipping:radius=2|nnm:b=3|",
    "nnm:b=3|adaptive-clipping:b=1|",
]
PIPELINES = [
    stages + last
    for stages in BEFORE
    for last in STEPS
    # Rows that were clipped to one length tie; the definitions below do not know their lengths.
    if not (last == "cge:b=1" and ("radius=2" in stages or "adaptive" in stages))
]
MEANS = ["mean", *(f"nnm:b=0|{last}" for last in STEPS)]
"""What a row of NaN breaks, as it should."""
WEIGHTLESS = [
    "bulyan:b=1",
    "centered-clipping:radius=1",
    "fl-trust",
    "flame",
    "foolsgold",
    "monna:b=1",
    "monitor:rule=mean",
    "signguard",
]
M = 9


# -- the definitions -------------------------------------------------------------------------------


def slowly_capped(weights: Doubles, share: float | None) -> Doubles:
    """Lower weights to the largest c with c <= share (sum of min(w, c)), found by halving."""
    low, high = 0.0, float(weights.max())
    if share is None or share >= 1 or high <= share * weights.sum():
        return weights
    for _ in range(200):
        middle = (low + high) / 2
        fits = middle <= share * np.minimum(weights, middle).sum() * (1 + 1e-15)
        low, high = (middle, high) if fits else (low, middle)
    return np.minimum(weights, low)


def overlap(order: Any, w: Doubles, low: float, high: float) -> Doubles:
    """Return how much of each weight lies between two masses, with weights laid end to end."""
    kept = np.zeros(len(w))
    begin = 0.0
    for i in order:
        kept[i] = max(0.0, min(begin + w[i], high) - max(begin, low))
        begin += w[i]
    return np.where(kept < 1e-9 * w.sum(), 0.0, kept)


def average(values: Doubles, kept: Doubles) -> Any:
    """Average what is kept; what has no weight is not multiplied."""
    some = kept > 0
    return np.average(values[some], axis=0, weights=kept[some])


def heaviest(w: Doubles, b: int) -> float:
    return float(np.sort(w)[len(w) - b :].sum())


def centre(column: Doubles, w: Doubles, cut: float) -> float:
    """Return the mean of a column without a mass at each end; cut to nothing, the middle."""
    half = min(cut, w.sum() / 2 * (1 - 1e-6))
    return float(average(column, overlap(np.argsort(column), w, half, w.sum() - half)))


def by_column(rule: Any, rows: Doubles, w: Doubles) -> Doubles:
    """Return what a rule that goes by columns makes of them."""
    values = np.where(np.isnan(rows), np.inf, rows)
    total, b = w.sum(), getattr(rule, "b", 0)
    mass = heaviest(w, b)
    if isinstance(rule, phocas.Mean):
        return np.asarray(average(rows, w))
    cut = total / 2 if isinstance(rule, phocas.Median | phocas.MeaMed) else mass
    centres = np.array([centre(column, w, cut) for column in values.T])
    if isinstance(rule, phocas.Median | phocas.TrimmedMean):
        return centres
    far = np.abs(values - centres)
    if not isinstance(rule, phocas.Heraclius):
        nearest = zip(values.T, far.T, strict=True)
        return np.array(
            [average(u, overlap(np.argsort(d), w, 0, total - mass)) for u, d in nearest]
        )
    radii = np.array([d[overlap(np.argsort(d), w, 0, total - mass) > 0].max() for d in far.T])
    spread = np.maximum(radii, np.sqrt(np.mean(radii**2)))
    falling = np.clip(2 - far / (rule.cutoff * spread), 0, 1)
    counted = np.where(far <= radii, 1, np.nan_to_num(falling)) * w[:, None]
    return np.array([average(u, k) for u, k in zip(values.T, counted.T, strict=True)])


def geometric_median(rows: Doubles, w: Doubles) -> Doubles:
    w, rows = w[np.isfinite(rows).all(axis=1)], rows[np.isfinite(rows).all(axis=1)]
    point = np.median(rows, axis=0) + 1e-3
    moved = 1.0
    while moved > 1e-9:
        pull = w / np.maximum(_lengths(rows - point), 1e-12)
        following = pull @ rows / pull.sum()
        moved, point = float(np.abs(following - point).max()), following
    return np.asarray(point)


def smoothed_median(rule: phocas.GeometricMedian, rows: Doubles, w: Doubles) -> Doubles:
    point = np.zeros(rows.shape[1])
    for _ in range(rule.iterations):
        lengths = _lengths(rows - point)
        point = average(rows, w / np.maximum(lengths, rule.smoothing))
    return point


def filtered_mean(rule: phocas.CAF, rows: Doubles, w: Doubles) -> Doubles:
    """Return the mean with the smallest variance on the way to the weight T - 2B, as CAF does."""
    least = w.sum() - 2 * heaviest(w, rule.b)
    means: list[Doubles] = []
    variances: list[float] = []
    w, rows = w[np.isfinite(rows).all(axis=1)], rows[np.isfinite(rows).all(axis=1)]
    while w.sum() > least and (not variances or variances[-1] > 1e-20):
        means.append(average(rows, w))
        values, vectors = np.linalg.eigh(np.cov(rows.T, aweights=w, ddof=0))
        variances.append(float(values[-1]))
        parts = np.where(w > 0, ((rows - means[-1]) @ vectors[:, -1]) ** 2, 0)
        w = w * (1 - parts / parts.max())
    return np.asarray(means[int(np.argmin(variances))])


def before(stage: Any, rows: Doubles, w: Doubles) -> Doubles:
    """Return the rows that a stage makes: each worker stands for as many as it weighs."""
    total, mass = w.sum(), heaviest(w, getattr(stage, "b", 0))
    if isinstance(stage, phocas.NNM):
        squared = squared_distances(rows)
        np.fill_diagonal(squared, -1)
        return np.array(
            [
                average(rows, overlap(np.argsort(each, kind="stable"), w, 0, total - mass))
                for each in squared
            ]
        )
    lengths = _lengths(rows)
    if isinstance(stage, phocas.Clipping):
        radius = stage.radius
    else:  # all that is longer than the mass 2 (B/T) (T - B) of the longest
        longest = np.argsort(-lengths)
        clipped = 2 * mass / total * (total - mass)
        radius = lengths[overlap(longest, w, clipped * (1 + 1e-9), total) > 0].max()
    factors = np.where(lengths > radius, radius / np.where(lengths, lengths, 1), 1.0)
    return np.array(
        [row * f if np.isfinite(row).all() else 0 * w[0] * np.ones_like(row)
         for row, f in zip(rows, factors, strict=True)]
    )  # fmt: skip


def slowly(rule: Rule, rows: Any, weights: Any, share: float | None = None) -> Doubles:
    """Aggregate by the definition of docs/theory.md."""
    given = np.asarray(weights, float)
    rows, w = np.asarray(rows, float)[given > 0], slowly_capped(given[given > 0], share)
    if isinstance(rule, Pipeline):
        for stage in rule.stages:
            rows = before(stage, rows, w)
        rule = rule.rule
    if isinstance(rule, phocas.GeometricMedian):
        return smoothed_median(rule, rows, w) if rule.smoothing else geometric_median(rows, w)
    if isinstance(rule, phocas.CAF):
        return filtered_mean(rule, rows, w)
    if type(rule) in _CHOICES:
        chosen = _CHOICES[type(rule)](rule, rows)
        return np.asarray(average(rows[chosen], w[chosen]))
    return by_column(rule, rows, w)


# -- comparisons -----------------------------------------------------------------------------------


def some_rows(seed: int, hostile: str) -> Doubles:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(M, 15)) * rng.uniform(0.3, 1.5, size=(M, 1)) + 0.2
    if hostile:
        rows[3] = {"far": -200.0, "nan": np.nan, "inf": np.inf}[hostile]
    return rows


WEIGHTS: dict[str, Callable[[np.random.Generator], NDArray[Any]]] = {
    "random": lambda rng: rng.uniform(3, 5, size=M),
    "counts": lambda rng: rng.integers(4, 8, size=M),
    "one is heavy": lambda rng: np.where(np.arange(M) == 3, 9.0, rng.uniform(3, 4, size=M)),
    "absent": lambda rng: np.where(np.isin(np.arange(M), (1, 6)), 0.0, rng.uniform(4, 5, size=M)),
    "claims": lambda rng: np.where(np.arange(M) == 3, 1e12, rng.uniform(1, 30, size=M)),
}


@pytest.mark.parametrize("kind", [*WEIGHTS])
@pytest.mark.parametrize("text", PIPELINES)
def test_weighted_rule_is_its_definition(text: str, kind: str) -> None:
    rule = parse_rule(text)
    weights = WEIGHTS[kind](np.random.default_rng(9))
    shares = [0.16, 0.145] if kind == "claims" else [None, 0.16]
    shares += [1.0] if set(STEPS[1:]).isdisjoint(text.split("|")) and "b=" not in text else []
    # Clipped, all rows are as far from that of zeros which NaN became: its neighbours are a draw.
    drawn = text.startswith("clipping:radius=2|nnm")
    for hostile in ("far",) if text in MEANS or drawn else ("far", "nan"):
        rows = some_rows(len(text), hostile)
        for share in shares:
            wanted = slowly(rule, rows, weights, share)
            got = rule(rows, weights=weights, max_share=share)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * (1 + abs(wanted).max()))


@pytest.mark.parametrize("text", PIPELINES)
def test_weights_count(text: str) -> None:
    """A rule that ignores its weights is the rule without: on no rows may it be."""
    rule = parse_rule(text)
    if "|krum:b=1" in f"|{text}" and "nnm" not in text:
        return  # the one row that it chooses by geometry is all of the result
    rows, weights = some_rows(3, "far"), np.arange(8.0, 8.0 + M)
    assert not np.allclose(rule(rows, weights=weights), rule(rows), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("text", PIPELINES)
def test_equal_weights_and_the_smallest_cap_are_the_rule(text: str) -> None:
    rule, rows = parse_rule(text), some_rows(4, "far" if text in MEANS else "inf")
    weights = np.random.default_rng(4).pareto(0.5, size=M) + 1e-3
    for found in (rule(rows, weights=[2.5] * M), rule(rows, weights=weights, max_share=1 / M)):
        assert found.tobytes() == rule(rows).tobytes()


@pytest.mark.parametrize("text", PIPELINES)
def test_weight_of_w_is_w_copies(text: str) -> None:
    """Where b counts copies, and rows are not chosen by geometry, weights are repetitions."""
    rule = parse_rule(text)
    rows, counts = some_rows(5, "far"), (3, 2, 2, 3, 2, 3, 2, 2, 3)
    got = rule(rows, weights=counts)
    wanted = reference(Weighted(rule, counts), rows)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", PIPELINES)
def test_shards_of_weighted_pipelines_give_the_same_bits(text: str) -> None:
    rows = np.random.default_rng(6).normal(size=(M, 2500)).astype(np.float32)
    weighted = parse_rule(text).weighted(np.arange(8, 8 + M), 0.15)
    evaluation = ShardedAggregation(weighted, m=M)
    shards = [(0, 700), (700, 1024), (1024, 2500)]
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in shards])
    parts = [evaluation.finish(rows[:, a:b], start=a) for a, b in shards]
    assert np.concatenate(parts).tobytes() == weighted(rows).tobytes()


def test_dropped_shares_of_a_weighted_mean_go_by_weight() -> None:
    rows = np.eye(5, 40)
    rows[2] *= 4
    why = parse_rule("clipping:radius=1|mean").explain(rows, weights=[1, 2, 3, 4, 0])
    np.testing.assert_allclose(why.dropped, [0, 0, 0.75, 0, 1], atol=1e-12)


def test_every_rule_of_the_table_has_weights_or_rejects_them() -> None:
    tested = {text.partition(":")[0] for text in (*STEPS, *WEIGHTLESS)}
    assert tested == set(RULES)
    assert {name.partition(":")[0] for text in BEFORE for name in text.split("|") if name} == {
        *PRE_AGGREGATORS
    } - {"cell-filter", "bucketing"}
    for text in (*WEIGHTLESS, "bucketing:size=2|median", "cell-filter:b=1|trimmed-mean:b=1"):
        with pytest.raises(ValueError, match="cannot be weighted"):
            phocas.aggregate(np.ones((M, 3)), text, weights=[1.0] * M)


@dataclass(frozen=True)
class Doubling(PreAggregator):
    """A stage of a user, of which nobody knows what weights mean."""

    name: ClassVar[str] = "doubling"

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        del rng
        yield from ()
        return Mix(2 * np.eye(m))


def test_stage_without_a_definition_rejects_weights() -> None:
    with pytest.raises(ValueError, match="cannot be weighted"):
        (Doubling() | phocas.Mean())(np.ones((3, 2)), weights=[1, 2, 3])


def test_cap_of_one_changes_nothing_and_light_weights_stay_light() -> None:
    weights = np.array([1.0, 1.0, 2.0, 96.0])
    assert capped(weights, 1.0).tolist() == weights.tolist()
    light = np.array([1e-20, 1.0, 1.0, 1.0])
    for share in (1 / 3, np.nextafter(1 / 3, 0), np.nextafter(1 / 3, 1)):
        assert capped(light, share)[0] == 1e-20
    rng = np.random.default_rng(7)
    for _ in range(300):
        w = rng.pareto(0.4, size=int(rng.integers(1, 20))) + 1e-6
        share = float(rng.choice([1.0, 0.5, 1 / 3, rng.uniform(1 / len(w), 1)]))
        if share * len(w) >= 1:
            np.testing.assert_allclose(capped(w, share), slowly_capped(w, share), rtol=1e-9)
            units = units_of(w, len(w), share)
            assert units.max() <= max(1, share * units.sum())


# -- claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "share", "largest"),
    [
        ("trimmed-mean:b=2", 0.25, "b=2 with max_share=0.25, .* is 0.2499"),
        ("trimmed-mean:b=3", 0.4, "b=3 with max_share=0.4, .* is 0.1666"),
        ("nnm:b=2|mean", 0.3, "is 0.2499"),
        ("nnm:b=3|phocas:b=1", 0.2, "is 0.1666"),
        ("median", 0.5, "1 worker with max_share=0.5, .* is 0.4999"),
        ("clipping:radius=1|geometric-median", 1.0, "is 0.4999"),
    ],
)
def test_cap_under_which_claims_could_hold_half_is_rejected(
    rule: str, share: float, largest: str
) -> None:
    rows = np.ones((9, 2))
    with pytest.raises(ValueError, match=largest) as caught:
        phocas.aggregate(rows, rule, weights=[1.0] * 9, max_share=share)
    advised = float(str(caught.value).rpartition(" is ")[2])
    phocas.aggregate(rows, rule, weights=[1.0] * 9, max_share=advised)


def test_no_claims_stop_a_rule_whose_cap_was_accepted() -> None:
    rng = np.random.default_rng(12)
    for _ in range(300):
        b = int(rng.integers(1, 5))
        m = int(rng.integers(2 * b + 1, 40))
        limit = 1 / (2 * b)
        share = max(1 / m, float(rng.choice([limit - 1e-6, limit - 1e-9, rng.uniform(0, limit)])))
        weights = rng.uniform(1, 100, size=m)
        weights[: int(rng.integers(0, m))] = rng.choice([1e12, 1e300, 1e-300])
        weighted = Weighted(phocas.TrimmedMean(b), tuple(weights.tolist()), share)
        weighted.check(m)
        assert weighted.tolerates(m).rows == b
