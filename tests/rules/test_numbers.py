"""Rows so small or so large that their squares vanish or overflow are rows like any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from tests.helpers import bits, doubles, num_threads, stored

import phocas
from phocas import Rule, ShardedAggregation
from phocas.rules import measures
from phocas.rules.algebra import Distances, Norms
from phocas.rules.inputs import open_rows
from phocas.rules.reference import squared_distances

MEASURING = [
    phocas.parse_rule(text)
    for text in (
        "krum:b=3",
        "multi-krum:b=3",
        "bulyan:b=2",
        "mda:b=3",
        "cge:b=3",
        "geometric-median",
        "nnm:b=3|median",
        "nnm:b=3|krum:b=3",
        "adaptive-clipping:b=3|trimmed-mean:b=3",
        "bucketing:size=2|geometric-median",
    )
]
LIARS = 2


def rows_with_byzantine() -> np.ndarray:
    """Return eleven rows, two of them four hundred times as long as the others."""
    rows = np.random.default_rng(4).normal(size=(11, 1500)) + 0.5
    rows[:LIARS] = 400.0
    return rows


@pytest.mark.parametrize("rule", MEASURING, ids=str)
@pytest.mark.parametrize("exponent", [-990, -700, -560, -500, 500, 660, 1010])
def test_byzantine_rows_are_dropped_at_every_scale(rule: Rule, exponent: int) -> None:
    """A power of two changes no digit of a number, and so should change none of the result."""
    rows = rows_with_byzantine()
    wanted = np.ldexp(rule(rows), exponent)
    got = rule(np.ldexp(rows, exponent))
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=0)
    if rule in MEASURING[:5]:
        assert bits(got) == bits(wanted)


@pytest.mark.parametrize("rule", MEASURING, ids=str)
def test_subnormal_byzantine_rows_are_dropped(rule: Rule) -> None:
    counts = np.random.default_rng(5).integers(1, 2000, size=(11, 300)).astype(np.float64)
    counts[:LIARS] = 900_000
    got = rule(counts * 5e-324) / 5e-324
    # Subnormal numbers are whole multiples of the smallest: a mean is off by a few of them.
    np.testing.assert_allclose(got, rule(counts), rtol=0.005, atol=12)
    assert np.all(got < 2000) or rule == phocas.GeometricMedian()


@pytest.mark.parametrize("exponent", [-560, 660])
def test_shards_scale_alike(exponent: int) -> None:
    rows = np.ldexp(rows_with_byzantine(), exponent)
    for rule in MEASURING:
        evaluation = ShardedAggregation(rule, len(rows), d=rows.shape[1])
        while evaluation.request is not None:
            shards = [(0, 7), (7, 1100), (1100, 1500)]
            evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in shards])
        parts = [evaluation.finish(rows[:, a:b]) for a, b in shards]
        assert bits(np.concatenate(parts)) == bits(rule(rows)), str(rule)


def test_equal_rows_do_not_hide_farther_rows() -> None:
    """Most rows are equal, so that nothing is typical: the others' distances stay what they are."""
    rows = np.zeros((9, 5))
    rows[6] = 1.0
    rows[7] = 1e100
    rows[8] = 1e-170
    for first in (rows, rows[[8, 7, 6, 5, 4, 3, 2, 1, 0]]):
        got = (phocas.NNM(b=1) | phocas.Phocas(b=1))(first)
        assert np.all(np.abs(got) < 1)
    assert phocas.CGE(b=1)(rows).max() < 1


@pytest.mark.parametrize("power", [-40, 40])
def test_scaled_requests_are_exact(power: int) -> None:
    rows = rows_with_byzantine().astype(np.float32)
    matrix = open_rows(rows)
    for request, scaled in (
        (Distances(wide=True), Distances(wide=True, scale=2.0**power)),
        (Norms(), Norms(scale=2.0**power)),
    ):
        wanted = np.ldexp(matrix.measure(request), 2 * power)
        np.testing.assert_array_equal(matrix.measure(scaled), wanted)


# -- products --------------------------------------------------------------------------------------


def _far_crowd(rows: np.ndarray, rng: np.random.Generator) -> None:
    rows[::3] = 5e4 + rng.normal(size=rows[::3].shape)


def _crowd_at_the_centre(rows: np.ndarray, rng: np.random.Generator) -> None:
    """All the rows that the centre is taken from are far away."""
    rows[:: -(-len(rows) // 5)] = 3e4 + rng.normal(size=rows[:: -(-len(rows) // 5)].shape)


def _overflowing(rows: np.ndarray, rng: np.random.Generator) -> None:
    rows[1::4] = 1e20 + 1e14 * rng.normal(size=rows[1::4].shape)


def _lost(rows: np.ndarray, rng: np.random.Generator) -> None:
    rows[2::5, rng.integers(rows.shape[1])] = np.nan
    rows[3::5, 7] = -np.inf


def _equal(rows: np.ndarray, rng: np.random.Generator) -> None:
    del rng
    rows[1::2] = rows[0]


@pytest.mark.parametrize(
    "change", [None, _far_crowd, _crowd_at_the_centre, _overflowing, _lost, _equal]
)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("m", [65, 100, 131, 200])
def test_distances_of_many_rows_are_exact(
    m: int, offset: float, change: Callable[[np.ndarray, np.random.Generator], None] | None
) -> None:
    """By products as by differences: neither an offset nor a crowd far away costs digits."""
    rng = np.random.default_rng(m)
    values = rng.normal(size=(m, 2500)) + offset
    if change is not None:
        change(values, rng)
    rows = values.astype(np.float32)
    got = open_rows(rows).measure(Distances())
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = squared_distances(rows.astype(np.float64))
    wanted[np.isnan(wanted) | (wanted > 3e38)] = np.inf
    np.fill_diagonal(wanted, 0.0)
    assert np.array_equal(got, got.T)
    np.testing.assert_allclose(got, wanted, rtol=4e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_distances_of_many_rows_in_half_precision(dtype: str) -> None:
    rows = stored(np.random.default_rng(0).normal(size=(90, 3000)) * 40 + 300, dtype)
    wanted = squared_distances(doubles(rows))
    np.testing.assert_allclose(open_rows(rows).measure(Distances()), wanted, rtol=4e-6, atol=0)


def test_cuts_and_threads_change_no_product() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(100, 30_000)).astype(np.float32)
    _far_crowd(rows, rng)
    _lost(rows, rng)
    request = Distances()
    wanted = open_rows(rows).measure(request)
    for threads, borders in (
        (1, [0, 30_000]),
        (3, [0, 5, 4096, 9000, 30_000]),
        (2, [0, 6143, 30_000]),
    ):
        with num_threads(threads):
            parts = [
                measures.partial(request, a, measures.rows_of(np.ascontiguousarray(rows[:, a:b])))
                for a, b in itertools.pairwise(borders)
            ]
            assert bits(measures.total(request, parts)) == bits(wanted)


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("radius", [1e-3, 3.1e-5, 2e-7, 1.0])
@pytest.mark.parametrize("m", [3, 20])
def test_the_longest_row_is_clipped_to_its_radius(dtype: str, radius: float, m: int) -> None:
    """What makes 3e38 as short as 1e-7 has no digits left in single precision."""
    values = np.zeros((m, 40))
    largest = 1.7e308 if dtype == "float64" else 3.3e38
    values[0] = largest * np.sign(np.random.default_rng(1).normal(size=40))
    rows = stored(values, dtype)
    slack = 1 + (2**-7 if dtype == "bfloat16" else 1e-5)
    for rule in (
        phocas.CenteredClipping(radius=radius),
        phocas.Clipping(radius=radius) | phocas.Mean(),
    ):
        length = np.linalg.norm(np.asarray(rule(rows).tolist()))
        assert length <= radius / m * slack, str(rule)
        if dtype != "float64":  # whose rows of that length are infinite
            assert length >= radius / m / slack, str(rule)


@pytest.mark.parametrize("exponent", [-560, 500])
def test_a_radius_may_be_of_any_scale(exponent: int) -> None:
    rows = rows_with_byzantine()
    for iterations in (1, 3):
        wanted = np.ldexp(phocas.CenteredClipping(30.0, iterations)(rows), exponent)
        rule = phocas.CenteredClipping(float(np.ldexp(30.0, exponent)), iterations)
        np.testing.assert_allclose(rule(np.ldexp(rows, exponent)), wanted, rtol=1e-12, atol=0)
