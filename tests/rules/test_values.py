"""Every rule against its plain twin, on values that break the naive way to compute it."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import (
    DTYPES,
    LARGEST,
    ROUNDING,
    TINY,
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
from phocas import CenteredClipping, GeometricMedian, Heraclius, MeaMed, Phocas, Rule
from phocas.rules.cliques import smallest_diameter
from phocas.rules.reference import reference, weights

KINDS = ("normal", "grid", "equal", "offset", "huge", "small", "signs", "wide")
SEEDS = st.integers(0, 2**32 - 1)


def matrix(kind: str, rng: np.random.Generator, m: int, d: int, dtype: str) -> Doubles:
    """Return values that a type can hold, of the kind that rounding, ties or overflow dislike."""
    normal = rng.normal(size=(m, d))
    values = {
        "normal": normal,
        "grid": rng.integers(-3, 4, size=(m, d)).astype(np.float64),
        "equal": np.tile(normal[:1], (m, 1)),
        "offset": 1000 + normal * (1e-2 if dtype in ("float32", "float64") else 5),
        "huge": np.clip(normal, -3, 3) * (LARGEST[dtype] / 3),
        "small": rng.integers(-9, 10, size=(m, d)) * TINY[dtype],
        "signs": np.copysign(0.0, normal),
        "wide": normal * 10.0 ** rng.integers(-4, 5, size=(m, d)),
    }[kind]
    return doubles(stored(values, dtype))


def computing(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def accepted(rule: Rule, column: Doubles, dtype: str) -> list[tuple[float, float]]:
    """Return (value, tolerance) for each answer that rounding allows: of near ties, either side."""
    ordered = np.sort(np.where(np.isnan(column), np.inf, column))
    m = len(ordered)
    window = rule.window(m)
    windows = [ordered[window.trim : m - window.trim]]
    if window.drop:
        eps = ROUNDING[computing(dtype)]
        y = float(np.sum(windows[0] / len(windows[0])))
        if not np.isfinite(y):
            return []
        size = m - window.drop
        candidates = [ordered[i : i + size] for i in range(window.drop + 1)]
        radii = [max(abs(c[0] / 2 - y / 2), abs(c[-1] / 2 - y / 2)) for c in candidates]
        width = windows[0][-1] / 2 - windows[0][0] / 2
        # Halved, so that distances between the largest values are finite.
        slack = 2 * eps * (m * width + abs(y) + min(radii)) + 2 * m * TINY[computing(dtype)]
        windows = [c for c, r in zip(candidates, radii, strict=True) if r <= min(radii) + slack]
    return [_tolerated(kept, m, dtype) for kept in windows]


def _tolerated(kept: Doubles, m: int, dtype: str) -> tuple[float, float]:
    eps, tiny = ROUNDING[computing(dtype)], TINY[computing(dtype)]
    value = float(np.sum(kept.astype(np.longdouble)) / len(kept))
    width = kept[-1] * eps - kept[0] * eps
    rounding = abs(value) * (ROUNDING[dtype] + 2 * eps) + TINY[dtype]
    return value, rounding + (4 + m) * width + 4 * m * tiny


def assert_weights_match(rule: Heraclius, rows: Doubles, got: Doubles, dtype: str) -> None:
    """Compare with the twin: a mean that does not jump, if the cutoff is 1 or more."""
    with np.errstate(all="ignore"):
        twin, kept = reference(rule, rows), weights(rule, rows) > 0
    eps, tiny = ROUNDING[computing(dtype)], TINY[computing(dtype)]
    for j, value in enumerate(got):
        column = rows[kept[:, j], j]
        if not np.isfinite(twin[j]) or not np.isfinite(column).all():
            assert not np.isfinite(value), (str(rule), rows[:, j], value)
            continue
        rounding = abs(twin[j]) * ROUNDING[dtype] + TINY[dtype] + 4 * len(rows) * tiny
        slack = 8 * len(rows) * eps * np.abs(column).max()
        assert abs(value - twin[j]) <= rounding + slack, (str(rule), rows[:, j], value, twin[j])


def assert_columns_match(rule: Rule, rows: Doubles, got: Doubles, dtype: str) -> None:
    if isinstance(rule, Heraclius) and rule.b:
        if rule.cutoff >= 1:
            assert_weights_match(rule, rows, got, dtype)
        return
    twin = reference(rule, rows)
    for j, value in enumerate(got):
        with np.errstate(all="ignore"):
            if isinstance(rule, phocas.Mean | phocas.Monitor):
                answers = [_tolerated(np.sort(rows[:, j]), len(rows), dtype)]
                slack = 2 * len(rows) * ROUNDING[computing(dtype)] * np.abs(rows[:, j]).max()
                answers = [(value, tolerance + slack) for value, tolerance in answers]
            else:
                answers = accepted(rule, rows[:, j], dtype)
        finite = [(e, t) for e, t in answers if np.isfinite(e)]
        if not finite:
            assert not np.isfinite(value), (str(rule), rows[:, j], value)
            continue
        assert any(abs(value - e) <= t for e, t in finite), (str(rule), rows[:, j], value, finite)
        slack = 4 * len(rows) * ROUNDING["float64"] * max(abs(e) for e, _ in finite)
        assert any(abs(twin[j] - e) <= t + slack for e, t in finite), "the twin itself is off"


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=SEEDS,
    kind=st.sampled_from(KINDS),
    m=st.sampled_from([1, 2, 3, 4, 5, 8, 13, 20, 30]),
    d=st.sampled_from([0, 1, 5, 16, 17, 35]),
)
def test_column_rules_equal_their_twins(dtype: str, seed: int, kind: str, m: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    for rule in examples(m):
        if not rule.columnwise:
            continue
        values = matrix(kind, rng, m, d, dtype)
        # Up to two more than the rule is told to survive: past its promise it must still be the
        # rule of the definition, or say NaN or inf.
        for column in values.T:
            number = rng.integers(0, min(m, int(getattr(rule, "b", 0)) + 2) + 1)
            column[rng.permutation(m)[:number]] = rng.choice(hostile_values(dtype), number)
        rows = stored(values, dtype)
        assert_columns_match(rule, doubles(rows), doubles(rule(rows)), dtype)


@pytest.mark.parametrize("m", [129, 192, 193, 256, 300, 1024])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_column_rules_equal_their_twins_with_many_rows(m: int, dtype: str) -> None:
    rng = np.random.default_rng(m)
    kinds = {"normal": 7, "grid": 7, "small": 4, "equal": 2}
    values = np.concatenate([matrix(k, rng, m, n, dtype) for k, n in kinds.items()], axis=1)
    b = m // 3
    for column in values.T[:14]:
        column[rng.permutation(m)[:b]] = rng.choice(hostile_values(dtype), b)
    rows = stored(values, dtype)
    rules = phocas.Median(), phocas.TrimmedMean(b), Phocas(b), MeaMed(b), phocas.Mean()
    for rule in (*rules, Heraclius(b), phocas.Monitor(Heraclius(b))):
        assert_columns_match(rule, doubles(rows), doubles(rule(rows)), dtype)


def test_ties_go_to_the_smaller_value() -> None:
    # y is 4 for all three; 0 and 8 are as far from it, and the smaller one is nearer.
    rows = np.array([[0.0], [3.0], [4.0], [5.0], [8.0]])
    assert MeaMed(b=1)(rows) == 3.0
    assert Phocas(b=1)(rows) == 3.0
    assert Phocas(b=1)(-rows) == -5.0
    assert Phocas(b=1)(np.float32(rows) * np.float32(1e-20)) == np.float32(3.0) * np.float32(1e-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule",
    [r for r in strongest(20) if r.columnwise and not isinstance(r, Heraclius)],
    ids=str,
)
def test_a_column_does_not_know_where_it_stands(rule: Rule, dtype: str) -> None:
    """Tails, chunks and vectors begin anywhere, and change nothing."""
    values = np.random.default_rng(5).normal(size=(20, 8300))
    rows = stored(values, dtype)
    whole = rule(rows)
    for start, stop in [
        (0, 0),
        (0, 1),
        (3, 18),
        (1, 17),
        (2, 19),
        (5, 4100),
        (0, 4096),
        (100, 4197),
        (7, 8300),
    ]:
        assert bits(rule(rows[:, start:stop])) == bits(whole[start:stop])


# -- rows ------------------------------------------------------------------------------------------


def spoil(rng: np.random.Generator, values: Doubles, number: int, dtype: str) -> None:
    """Replace rows, or one value of each, by extremes that no measure of length overlooks."""
    extremes = hostile_values(dtype)[: 7 if dtype != "float16" else 3]
    for i in rng.permutation(len(values))[:number]:
        if rng.integers(2):
            values[i] = rng.choice(extremes, values.shape[1])
        else:
            values[i, rng.integers(values.shape[1])] = rng.choice(extremes)


def assert_close(got: Any, wanted: Doubles, rows: Doubles, dtype: str, factor: float) -> None:
    finite = np.abs(rows[np.isfinite(rows) & (np.abs(rows) < 1e19)])
    scale = float(max(finite.max(initial=1.0), np.abs(wanted).max(initial=0.0)))
    eps = ROUNDING[dtype] + factor * ROUNDING[computing(dtype)]
    np.testing.assert_allclose(doubles(got), wanted, rtol=0, atol=eps * scale)


JUMPING = (phocas.CAF, phocas.SMEA, phocas.DnC, phocas.FLAME, phocas.FoolsGold)


def decided(rule: Rule, values: Doubles, dtype: str) -> bool:
    """Tell whether rounding does not decide which direction is first, or which set is best."""
    eps = ROUNDING[computing(dtype)]
    noise = np.random.default_rng(0).normal(size=values.shape) * 64 * eps
    usual = np.where(np.abs(values) < 1e19, np.abs(values), 0).max(initial=1.0)
    with np.errstate(all="ignore"):
        apart = np.abs(reference(rule, values * (1 + noise)) - reference(rule, values))
    return bool(apart.max(initial=0.0) <= 300 * eps * usual)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=SEEDS,
    m=st.sampled_from([1, 2, 3, 5, 7, 8, 11, 13]),
    d=st.sampled_from([1, 3, 17, 40]),
    kind=st.integers(0, 2),
)
def test_row_rules_equal_their_twins(dtype: str, seed: int, m: int, d: int, kind: int) -> None:
    rng = np.random.default_rng(seed)
    for rule in examples(m):
        if rule.columnwise:
            continue
        values = matrix(("normal", "grid", "equal")[kind], rng, m, d, dtype)
        b = int(getattr(rule, "b", (m - 1) // 2))
        spoil(rng, values, 0 if averages(rule) else int(rng.integers(0, b + 1)), dtype)
        rows = stored(values, dtype)
        values = doubles(rows)
        if isinstance(rule, JUMPING) and not decided(rule, values, dtype):
            continue
        if isinstance(rule, GeometricMedian) and not rule.smoothing:
            _check_geometric_median(rule, values, rule(rows), dtype)
            continue
        iterates = isinstance(rule, CenteredClipping | GeometricMedian | phocas.CAF)
        # MoNNA keeps a trusted row of any size, whose rounding is m times that of the mean.
        tolerance = 300 if iterates else 8 * m if isinstance(rule, phocas.MoNNA) else 8
        assert_close(rule(rows), reference(rule, values), values, dtype, tolerance)


def _check_geometric_median(rule: Rule, rows: Doubles, got: Any, dtype: str) -> None:
    """The point is not unique where rows lie on a line, but the sum of distances is."""
    present = rows[np.isfinite(rows).all(axis=1)]
    near = np.abs(present).max(axis=1) < 1e19
    origin = present[near].mean(axis=0)

    def cost(point: Doubles) -> float:
        gone = np.linalg.norm(present[near] - point, axis=1).sum()
        # |x - p| - |x - o| for far x, without cancellation
        far = present[~near] - origin
        with np.errstate(over="ignore"):
            towards = far / np.linalg.norm(far, axis=1, keepdims=True)
        return float(gone - (towards @ (point - origin)).sum())

    spread = np.linalg.norm(present[near] - origin, axis=1).max()
    slack = (
        1e-4 * spread * len(rows) + 40 * len(rows) * ROUNDING[dtype] * np.abs(present[near]).max()
    )
    assert cost(doubles(got)) <= cost(reference(rule, present)) + slack


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-3, 1e12, 1e20, 1e30])
@pytest.mark.parametrize("lie", [np.nan, 3e38, 1e5])
def test_geometric_median_at_any_scale(scale: float, lie: float) -> None:
    """Squares of 1e-30 and 1e30 have no place in single precision, nor has 1e-30 / 3e38."""
    rng = np.random.default_rng(0)
    rows = ((rng.normal(size=(9, 50)) + 1) * scale).astype(np.float32)
    rows[:3] = lie * np.sign(rng.normal(size=(3, 50)))
    got = doubles(GeometricMedian()(rows))
    honest = doubles(rows[3:])
    if abs(lie) > 1e38 * scale:
        # Its weight is less than single precision can hold: the row is left out.
        assert ((got >= honest.min(axis=0)) & (got <= honest.max(axis=0))).all()
    else:
        np.testing.assert_allclose(got, reference(GeometricMedian(), rows), atol=2e-5 * scale)


@pytest.mark.parametrize("m", [*range(3, 17), 40])
def test_bulyan_may_drop_more_than_half_of_what_it_chose(m: int) -> None:
    rows = np.round(np.random.default_rng(m).normal(size=(m, 35)), 2)
    for b in {(m - 3) // 4, (m - 3) // 5, (m - 3) // 6}:
        rows[:b] = np.inf
        wanted = reference(phocas.Bulyan(b), rows)
        np.testing.assert_allclose(phocas.Bulyan(b)(rows), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", pipelines(11), ids=str)
def test_pipelines_equal_their_twins(rule: Rule) -> None:
    rng = np.random.default_rng(3)
    rows = stored(rng.normal(size=(11, 60)), "float32")
    assert_close(rule(rows), reference(rule, rows), doubles(rows), "float32", 300)


@given(seed=SEEDS, m=st.integers(1, 9), levels=st.sampled_from([2, 4, 50]))
def test_the_first_set_of_smallest_diameter(seed: int, m: int, levels: int) -> None:
    """For any symmetric matrix, with many ties and with infinite distances."""
    squared = np.random.default_rng(seed).integers(0, levels, size=(m, m)).astype(np.float64)
    squared[squared == levels - 1] = np.inf
    squared = np.maximum(squared, squared.T)
    np.fill_diagonal(squared, 0)
    for size in range(1, m + 1):
        wanted = min(
            combinations(range(m), size),
            key=lambda members: squared[np.ix_(members, members)].max(),
        )
        assert smallest_diameter(squared, size) == list(wanted)


def test_adaptive_clipping_makes_every_infinite_row_zero() -> None:
    """Also when there are more of them than it shortens, so that its radius is infinite."""
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, 1.0], [np.inf, 1.0]])
    rule = phocas.AdaptiveClipping(b=1) | phocas.Mean()
    np.testing.assert_array_equal(rule(rows), [1.0, 1.5])
    np.testing.assert_array_equal(reference(rule, rows), [1.0, 1.5])


@pytest.mark.parametrize("i", range(5))
def test_an_infinite_row_makes_its_bucket_infinite(i: int) -> None:
    rows = np.arange(15.0).reshape(5, 3)
    rows[i] = [np.inf, -np.inf, 1e9]
    for text in ("bucketing:size=2|median", "bucketing:size=2|trimmed-mean:b=1"):
        rule = phocas.parse_rule(text)
        np.testing.assert_allclose(rule(rows), reference(rule, rows))


@pytest.mark.parametrize("m", [40, 130, 200])
@pytest.mark.parametrize(
    "text",
    [
        "krum:b=9",
        "multi-krum:b=9",
        "bulyan:b=9",
        "mda:b=9",
        "cge:b=9",
        "geometric-median",
        "geometric-median:iterations=3,smoothing=0.1",
        "centered-clipping:radius=5.0,iterations=2",
        "monna:b=9,trusted=3",
        "caf:b=9",
        "signguard",
        "dnc:b=9",
        "flame",
        "foolsgold",
        "nnm:b=9|phocas:b=9",
        "nnm:b=9|krum:b=9",
        "bucketing:size=2|median",
        "adaptive-clipping:b=9|trimmed-mean:b=9",
    ],
)
def test_row_rules_equal_their_twins_with_many_rows(text: str, m: int) -> None:
    if text.startswith("bulyan") and m > 40:
        pytest.skip("the twin takes seconds")
    rng = np.random.default_rng(m)
    values = rng.normal(size=(m, 65))
    values[rng.permutation(m)[:9]] = np.inf
    rows = stored(values, "float32")
    rule = phocas.parse_rule(text)
    honest = doubles(rows)[np.isfinite(rows).all(axis=1)]
    # The twin of MDA tries all sets; here the only finite one is known.
    wanted = honest.mean(axis=0) if text.startswith("mda") else reference(rule, rows)
    assert_close(rule(rows), wanted, honest, "float32", 3000 if "geo" in text else 500)


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_krum_selects_as_in_double_precision_at_an_offset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (1000 + rng.normal(size=(20, 50_000)) * 1e-3).astype(np.float32)
    rows[:6] = 1e20
    krum = phocas.Krum(b=6)
    chosen = doubles(reference(krum, rows))
    np.testing.assert_array_equal(doubles(krum(rows)), chosen)
    kept = phocas.MultiKrum(b=6, select=5).explain(rows).dropped == 0
    from phocas.rules.reference import scores, squared_distances

    exact = scores(squared_distances(doubles(rows)), 20 - 6 - 2)
    assert set(np.flatnonzero(kept)) == set(np.argsort(exact)[:5])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_krum_selects_as_in_double_precision_in_half_precision(kind: str) -> None:
    rng = np.random.default_rng(1)
    rows = stored(rng.normal(size=(9, 200_000)) * 40, kind)
    rows[3] = float(np.inf)
    wanted = reference(phocas.Krum(b=2), doubles(rows))
    np.testing.assert_array_equal(doubles(phocas.Krum(b=2)(rows)), wanted)


def test_half_types_are_computed_in_single_precision() -> None:
    """The same as widening, computing and rounding once."""
    values = torch.randn(13, 400, generator=torch.Generator().manual_seed(0)) * 100
    for kind in (torch.float16, torch.bfloat16):
        rows = values.to(kind)
        for rule in strongest(13) + pipelines(13):
            got, wide = rule(rows), rule(rows.float())
            assert got.dtype == kind
            assert bits(got) == bits(wide.to(kind)), str(rule)
