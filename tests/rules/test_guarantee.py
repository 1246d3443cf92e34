"""With no more wrong values than a rule is told, its result stays among the honest ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import (
    DTYPES,
    LARGEST,
    ROUNDING,
    TINY,
    Doubles,
    doubles,
    hostile_values,
    stored,
)

import phocas
from phocas import Rule, parse_rule

SEEDS = st.integers(0, 2**32 - 1)
KINDS = ("normal", "grid", "equal", "offset", "tight", "huge", "small")


def honest_values(kind: str, rng: np.random.Generator, m: int, d: int, dtype: str) -> Doubles:
    """Return what honest workers send."""
    normal = rng.normal(size=(m, d))
    step = 2 * ROUNDING[dtype] * 1024
    values = {
        "normal": normal,
        "grid": rng.integers(-3, 4, size=(m, d)).astype(np.float64),
        "equal": np.tile(normal[:1], (m, 1)),
        "offset": 1000 + normal,
        "tight": 1024 + step * rng.integers(-2, 3, size=(m, d)),  # neighbouring numbers
        "huge": np.clip(normal, -3, 3) * (LARGEST[dtype] / 3),
        "small": rng.integers(-9, 10, size=(m, d)) * TINY[dtype],
    }[kind]
    return doubles(stored(values, dtype))


def byzantine_values(kind: str, dtype: str) -> list[float]:
    """Return values that are far from the honest ones: a lie near by may pull, and rightly so."""
    everything = hostile_values(dtype)
    if kind in ("offset", "tight"):
        return everything
    return everything[:3] if kind == "huge" else everything[:7]


def assert_among(got: Doubles, honest: Doubles, what: object, slack: float = 0.0) -> None:
    assert np.isfinite(got).all(), what
    low, high = np.nanmin(honest, axis=0), np.nanmax(honest, axis=0)
    outside = (got < low - slack) | (got > high + slack)
    assert not outside.any(), (what, got[outside], low[outside], high[outside])


COLUMN_RULES = ("median", "trimmed-mean:b={b}", "phocas:b={b}", "meamed:b={b}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", COLUMN_RULES)
@given(
    seed=SEEDS,
    kind=st.sampled_from(KINDS),
    m=st.sampled_from([1, 3, 4, 5, 8, 20]),
    share=st.floats(0, 1),
)
def test_column_rules_survive_b_byzantine_values_in_any_cells(
    text: str, dtype: str, seed: int, kind: str, m: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    b = round(share * ((m - 1) // 2))
    values = honest_values(kind, rng, m, 33, dtype)
    honest = values.copy()
    for j in range(33):
        wrong = rng.permutation(m)[: rng.integers(0, b + 1)]
        values[wrong, j] = rng.choice(byzantine_values(kind, dtype), len(wrong))
        honest[wrong, j] = np.nan
    rule = parse_rule(text.format(b=b))
    assert_among(doubles(rule(stored(values, dtype))), honest, (rule, kind))


@pytest.mark.parametrize("text", COLUMN_RULES)
@pytest.mark.parametrize("m", [129, 193, 1024])
def test_column_rules_survive_b_byzantine_values_among_many(text: str, m: int) -> None:
    rng = np.random.default_rng(m)
    b = (m - 1) // 2
    rule = parse_rule(text.format(b=b))
    for kind in KINDS:
        values = honest_values(kind, rng, m, 9, "float32")
        honest = values.copy()
        for j in range(9):
            wrong = rng.permutation(m)[:b]
            values[wrong, j] = rng.choice(byzantine_values(kind, "float32"), b)
            honest[wrong, j] = np.nan
        assert_among(doubles(rule(stored(values, "float32"))), honest, (rule, kind))


# -- whole rows ------------------------------------------------------------------------------------


def spoil(rng: np.random.Generator, values: Doubles, b: int, kind: str, dtype: str) -> Doubles:
    """Make b rows wrong, in all values or in one of them, and return the others."""
    wrong = rng.permutation(len(values))[:b]
    for i in wrong:
        whole = rng.integers(3)
        choice = rng.choice(byzantine_values(kind, dtype)[:7])
        if whole == 0:
            values[i] = rng.choice(byzantine_values(kind, dtype)[:7], values.shape[1])
        elif whole == 1:
            values[i] = choice  # the same for several, perhaps: they agree with one another
        else:
            # In half precision only what is not a number is too far in one value alone.
            one = np.nan if dtype == "float16" else choice
            values[i, rng.integers(values.shape[1])] = one
    return np.delete(values, wrong, axis=0)


ROW_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("krum:b={b}", lambda m: (m - 3) // 2),
    ("multi-krum:b={b}", lambda m: (m - 3) // 2),
    ("multi-krum:b={b},select=2", lambda m: (m - 3) // 2),
    ("bulyan:b={b}", lambda m: (m - 3) // 4),
    ("mda:b={b}", lambda m: (m - 1) // 2),
    ("nnm:b={b}|median", lambda m: (m - 1) // 2),
    ("nnm:b={b}|phocas:b={b}", lambda m: (m - 1) // 2),
    ("nnm:b={b}|trimmed-mean:b={b}", lambda m: (m - 1) // 2),
    ("nnm:b={b}|meamed:b={b}", lambda m: (m - 1) // 2),
    ("nnm:b={b}|krum:b={b}", lambda m: (m - 3) // 2),
    ("nnm:b={b}|mda:b={b}", lambda m: (m - 1) // 2),
    ("bucketing:size=2|median", lambda m: ((m + 1) // 2 - 1) // 2),
    ("bucketing:size=2|phocas:b={b}", lambda m: ((m + 1) // 2 - 1) // 2),
    ("bucketing:size=3|krum:b={b}", lambda m: ((m + 2) // 3 - 3) // 2),
    ("bucketing:size=2|nnm:b={b}|trimmed-mean:b={b}", lambda m: ((m + 1) // 2 - 1) // 2),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [text for text, _ in ROW_RULES])
@given(
    seed=SEEDS,
    kind=st.sampled_from(["normal", "grid", "equal", "offset", "tight", "huge"]),
    m=st.sampled_from([3, 7, 11, 20]),
    fewer=st.booleans(),
)
def test_row_rules_survive_b_wrong_rows(
    text: str, dtype: str, seed: int, kind: str, m: int, fewer: bool
) -> None:
    rng = np.random.default_rng(seed)
    b = min(dict(ROW_RULES)[text](m), 5)
    # Squares of the largest doubles have no type left to be measured in.
    if b < 0 or (kind == "huge" and dtype == "float64"):
        return
    rule = parse_rule(text.format(b=b))
    values = honest_values(kind, rng, m, 21, dtype)
    honest = spoil(rng, values, max(0, b - fewer), kind, dtype)
    got = doubles(rule(stored(values, dtype), rng=np.random.default_rng(seed)))
    # Mixes of b rows fewer than all are taken around a row that may not be in them: where the ones
    # that are agree, that rounds. With b wrong rows there is only one honest mix, which is exact.
    mixing = "nnm" in text and (fewer or "bucketing" in text)
    slack = 4 * m * ROUNDING["float64" if dtype == "float64" else "float32"] if mixing else 0.0
    assert_among(got, honest, (rule, kind), slack * float(np.abs(honest).max()))


# -- rules that bound norms ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=SEEDS,
    m=st.sampled_from([3, 5, 8, 20]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_geometric_median_stays_within_a_few_standard_deviations(
    dtype: str, seed: int, m: int, scale: float, offset: float
) -> None:
    """|GM - z| <= 2 (1 - a) / (1 - 2a) max |x - z| for any z, with a share a of wrong rows."""
    rng = np.random.default_rng(seed)
    if dtype == "float16":
        scale = 1.0
    b = (m - 1) // 2
    values = doubles(stored((rng.normal(size=(m, 15)) + offset) * scale, dtype))
    honest = spoil(rng, values, b, "normal", dtype)
    got = doubles(phocas.GeometricMedian()(stored(values, dtype)))
    assert np.isfinite(got).all()
    z = honest.mean(axis=0)
    radius = np.linalg.norm((honest - z) / scale, axis=1).max() * scale
    rounding = 10 * ROUNDING[dtype] * np.abs(honest).max()
    bound = 2 * (m - b) / (m - 2 * b) * radius + rounding
    assert np.linalg.norm((got - z) / scale) * scale <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "text",
    [
        "cge:b={b}",
        "centered-clipping:radius=2.5",
        "centered-clipping:radius=2.5,iterations=3",
        "clipping:radius=2.5|mean",
        "clipping:radius=2.5|phocas:b={b}",
        "adaptive-clipping:b={b}|mean",
        "adaptive-clipping:b={b}|geometric-median",
    ],
)
@given(seed=SEEDS, m=st.sampled_from([3, 5, 8, 20]))
def test_rules_that_bound_norms(text: str, dtype: str, seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    b = (m - 1) // 2
    rule: Rule = parse_rule(text.format(b=b))
    values = doubles(stored(rng.normal(size=(m, 15)), dtype))
    honest = spoil(rng, values, b, "normal", dtype)
    got = doubles(rule(stored(values, dtype)))
    assert np.isfinite(got).all()
    longest = float(np.linalg.norm(honest, axis=1).max())
    # A median of rows of a length may be longer than each, by no more than sqrt(d).
    bounds = {"cge": longest, "adaptive-clipping": longest, "clipping": 2.5}
    bound = bounds.get(text.partition(":")[0], 2.5 * int(getattr(rule, "iterations", 1)))
    bound *= np.sqrt(15) if "phocas" in text else 1
    assert np.linalg.norm(got) <= bound * (1 + 30 * ROUNDING[dtype])


def test_the_mean_alone_breaks() -> None:
    rows = np.ones((20, 3), np.float32)
    rows[4] = np.nan
    assert np.isnan(phocas.Mean()(rows)).all()
    assert phocas.Mean().tolerates(20) == phocas.Tolerance(0, 0)


def test_more_than_b_wrong_rows_are_not_hidden() -> None:
    """A rule that finds nothing to hold on to says NaN rather than choose a liar."""
    rows = np.ones((9, 4))
    rows[:6] = np.nan
    for text in ("krum:b=2", "multi-krum:b=2", "mda:b=2", "geometric-median", "cge:b=2"):
        assert np.isnan(phocas.aggregate(rows, text)).all(), text
