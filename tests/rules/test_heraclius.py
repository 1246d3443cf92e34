"""Heraclius between Phocas and the mean, its blocks of columns, and Monitor."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import DTYPES, LARGEST, ROUNDING, bits, doubles, hostile_values, stored

import phocas
from phocas import (
    NNM,
    Heraclius,
    Krum,
    Mean,
    Median,
    Monitor,
    Phocas,
    Rule,
    ShardedAggregation,
    kernels,
)
from phocas.kernels import BLOCK_COLUMNS, Window
from phocas.rules.measures import rows_of
from phocas.rules.reference import HERACLIUS_BLOCK, reference, weights

SEEDS = st.integers(0, 2**32 - 1)
D = 2 * BLOCK_COLUMNS + 77


def sparse_rows(seed: int, m: int = 20, d: int = D) -> np.ndarray:
    """Return rows as gradients are: layers of different scale, and columns of zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(3, size=(m, d)) * 10.0 ** rng.integers(-4, 1, size=d)
    rows[rng.random((m, d)) < 0.5] = 0
    return rows


# -- the definition --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", [5, 20, 200])
@pytest.mark.parametrize("cutoff", [0.3, 1.0, 4.0])
def test_it_is_its_twin(m: int, dtype: str, cutoff: float) -> None:
    rows = stored(sparse_rows(m, m), dtype)
    b = (m - 1) // 3
    rows[0, ::5], rows[1, ::7], rows[2, ::9] = np.nan, 1e20, -3e38
    for tail in (0.0, 0.5, 16.0):
        rule = Heraclius(b, cutoff, tail)
        wanted = reference(rule, rows)
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(rule(rows), wanted, rtol=0, atol=64 * ROUNDING[dtype] * scale)
    rule = Heraclius(b, cutoff, tail=0)
    told = rule.explain(rows)
    dropped = (weights(rule, doubles(rows)) == 0).mean(axis=1)
    # A value on the edge of its window may be on either side of it.
    np.testing.assert_allclose(told.dropped, dropped, atol=(2.5 if m < 200 else 4.5) / D)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 20, 200])
def test_without_cutoff_it_is_phocas(m: int, dtype: str) -> None:
    rows = stored(sparse_rows(m, m), dtype)
    b = (m - 1) // 2
    assert bits(Heraclius(b, cutoff=0)(rows)) == bits(Phocas(b)(rows))
    assert bits(Heraclius(0)(rows)) == bits(Phocas(0)(rows))


@pytest.mark.parametrize("m", [5, 20, 200])
def test_with_a_huge_cutoff_it_is_the_mean_of_the_finite_values(m: int) -> None:
    rows = sparse_rows(m, m).astype(np.float32)
    rows[:2, ::3] = [[np.nan], [-np.inf]]
    told = Heraclius(2, cutoff=1e30).explain(rows)
    finite = np.where(np.isfinite(rows), rows, np.nan).astype(np.float64)
    np.testing.assert_allclose(told.value, np.nanmean(finite, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(told.dropped, np.isnan(finite).mean(axis=1))


def test_the_weight_falls_from_one_to_nothing() -> None:
    """Sixteen columns with the same radius, 1: a liar at distance x counts 2 - x / cutoff."""
    for x, weight in ((1.0, 1), (2.9, 1), (3.1, 1), (4.5, 0.5), (5.9, 0.1 / 3), (6.1, 0)):
        rows = np.array([[-1.0], [0.0], [0.0], [0.0], [1.0], [x]]).repeat(16, axis=1)
        told = Heraclius(1, cutoff=3).explain(rows)
        # The trimmed mean is 1/4, whose fifth-nearest value, -1, is 5/4 away.
        share = np.clip(2 - (x - 0.25) / (3 * 1.25), 0, 1)
        np.testing.assert_allclose(told.value, share * x / (5 + share), atol=1e-12)
        assert told.dropped[5] == (share == 0)
        assert abs(share - weight) < 0.7


def test_dropped_values_are_those_without_weight() -> None:
    rows = sparse_rows(0).astype(np.float64)
    rows[3] *= 50
    rule = Heraclius(8, tail=0)
    np.testing.assert_array_equal(
        rule.explain(rows).dropped, (weights(rule, rows) == 0).mean(axis=1)
    )


def test_all_byzantine_values_are_dropped_and_no_honest_ones() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20, 5000)).astype(np.float32) / 100
    rows[:6] = rng.normal(size=(6, 5000)) * 200
    dropped = Heraclius(8).explain(rows).dropped
    assert dropped[:6].min() > 0.95
    assert dropped[6:].max() < 0.001


def test_a_block_gives_a_deviation_to_columns_that_have_none() -> None:
    """Where most gradients are zero, a single honest value is not implausible."""
    rows = np.random.default_rng(0).normal(size=(20, BLOCK_COLUMNS))
    rows[:, 0] = 0
    rows[4, 0] = 1.0
    assert Phocas(8)(rows)[0] == 0
    assert Heraclius(8)(rows)[0] == pytest.approx(1 / 20)
    alone = rows[:, :1]
    assert Heraclius(8)(alone)[0] == 0


# -- bad values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 20, 200])
@given(seed=SEEDS)
def test_it_survives_b_of_anything_within_the_honest_cutoff(m: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = (m - 1) // 2
    honest = rng.normal(size=(m, 40))
    values = honest.copy()
    for column in values.T:
        number = rng.integers(0, b + 1)
        column[rng.permutation(m)[:number]] = rng.choice(hostile_values(dtype), number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = doubles(Heraclius(b)(stored(values, dtype)))
    # A liar counts at most cutoff spreads, and no radius exceeds the honest range.
    range_ = np.ptp(honest)
    assert (np.abs(got - honest.mean(axis=0)) <= (1 + 4) * range_).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 200])
def test_blocks_of_extreme_radii(m: int, dtype: str) -> None:
    """Radii of 0, of infinity and of the largest numbers; more than b wrong values shows."""
    rule = Heraclius(1)
    equal = np.full((m, D), 0.1)
    np.testing.assert_array_equal(
        doubles(rule(stored(equal, dtype))), doubles(stored(equal, dtype))[0]
    )
    one = equal.copy()
    one[0] = LARGEST[dtype]
    told = rule.explain(stored(one, dtype))
    np.testing.assert_array_equal(doubles(told.value), doubles(stored(equal, dtype))[0])
    np.testing.assert_array_equal(told.dropped, np.eye(m)[0])
    lost = equal.copy()
    lost[:2] = np.nan
    assert not np.isfinite(doubles(rule(stored(lost, dtype)))).any()
    some = equal.copy()
    some[:2, : D // 2] = np.inf
    some[0, D // 2 :] = -np.inf
    got = doubles(rule(stored(some, dtype)))
    assert not np.isfinite(got[: D // 2]).any()
    np.testing.assert_array_equal(got[D // 2 :], doubles(stored(equal, dtype))[0, 0])
    largest = np.full((m, D), LARGEST[dtype])
    largest[::2] *= -1
    largest[0] = np.inf
    got = doubles(rule(stored(largest, dtype)))
    assert np.isfinite(got).all()
    assert (np.abs(got) <= LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_scale_is_too_large_or_too_small(dtype: str) -> None:
    """Squares of such radii overflow or vanish: weights must not."""
    rows = stored(np.random.default_rng(0).normal(size=(9, D)), dtype)
    rows[0] = 100
    powers = {"float32": (-95, 100), "float64": (-1000, 900)}[dtype]
    told = Heraclius(2).explain(rows)
    for power in powers:
        factor = np.ldexp(rows.dtype.type(1), power)
        far = Heraclius(2).explain(rows * factor)
        assert bits(far.value) == bits(told.value * factor)
        np.testing.assert_array_equal(far.dropped, told.dropped)


@given(seed=SEEDS, m=st.sampled_from([5, 6, 20, 200]))
def test_it_is_within_what_it_keeps(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    tiny = float(rng.choice([1.4e-45, 1e-38, 1e-30, 1.0]))
    rows = (rng.integers(-3, 4, size=(m, 50)) * tiny).astype(np.float32)
    got = Heraclius((m - 1) // 2, cutoff=float(rng.choice([0.1, 1, 4, 1e30])))(rows)
    assert ((got >= rows.min(axis=0)) & (got <= rows.max(axis=0))).all()


def test_a_cutoff_is_a_number_from_0_on() -> None:
    for wrong in (-1.0, np.nan, np.inf, -np.inf, 1e31):
        with pytest.raises(ValueError, match=r"Heraclius needs 0 <= cutoff <= 1e\+30: got cutoff="):
            Heraclius(2, cutoff=wrong)
    for strange in ("4", None, True, 1j):
        with pytest.raises(TypeError, match="Heraclius needs a number cutoff: got"):
            Heraclius(2, cutoff=strange)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heraclius: cutoff must be a number, got 'far'"):
        phocas.parse_rule("heraclius:b=2,cutoff=far")
    assert phocas.parse_rule("heraclius:b=2") == Heraclius(2, 4)
    assert str(Heraclius(2, 6)) == "heraclius:b=2,cutoff=6.0"


# -- blocks ----------------------------------------------------------------------------------------


def test_the_twin_has_the_same_blocks() -> None:
    assert HERACLIUS_BLOCK == BLOCK_COLUMNS


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 8, 16, 17, 500, BLOCK_COLUMNS])
def test_the_deviation_is_that_of_the_kernel(kind: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    for power in (-148, -130, -126, -60, 0, 100, 126):
        rows = (np.clip(rng.standard_t(2, size=(5, size)), -3, 3) * 2.0**power).astype(kind)
        rows[:2, ::4] = np.inf
        window = Window(1, 1, cutoff=4.0)
        radii = kernels.radii(rows_of(rows), window)
        answers = []
        for given_spread in (None, float(kernels.spread(radii))):
            out = np.empty(size, kind)
            kernels.reduce(rows_of(rows), window, out.ctypes.data, spread=given_spread)
            answers.append(out.tobytes())
        assert answers[0] == answers[1], power
        finite = np.where(np.isfinite(radii), radii, 0).astype(np.longdouble)
        exact = float(np.sqrt(np.mean(finite**2)))
        tiny = float(np.finfo(kind).smallest_subnormal)
        assert float(kernels.spread(radii)) == pytest.approx(exact, rel=1e-5, abs=tiny)


def in_parts(rule: Rule, rows: Any, borders: list[int], d: int | None = None) -> bytes:
    """Aggregate as servers do that hold the columns between borders."""
    ranges = list(itertools.pairwise(borders))
    evaluation = ShardedAggregation(rule, len(rows), d=d)
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows[:, a:b], a) for a, b in ranges])
    return b"".join(bits(evaluation.finish(rows[:, a:b], a)) for a, b in ranges)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 200])
def test_any_cut_of_blocks_gives_the_same_bits(m: int, dtype: str) -> None:
    rows = stored(sparse_rows(1, m), dtype)
    rule = Heraclius((m - 1) // 2)
    block = BLOCK_COLUMNS
    whole = bits(rule(rows))
    for borders in (
        [0, D],
        [0, block, 2 * block, D],
        [0, 1, D - 1, D],
        [0, block - 1, block + 1, D],
        [0, 3, 50, 50, 900, 1500, 1501, D],
    ):
        assert in_parts(rule, rows, borders) == whole, borders
        assert in_parts(rule, rows, borders, D) == whole, borders


def test_holders_exchange_no_more_than_the_radii_of_cut_blocks() -> None:
    rows = sparse_rows(1)
    evaluation = ShardedAggregation(Heraclius(8), 20)
    part = evaluation.partial(rows[:, 100 : 2 * BLOCK_COLUMNS], 100)
    assert sum(values.size for _, values in part.edges) == BLOCK_COLUMNS - 100
    assert sum(values.size for _, values in part.sums) == 0
    with pytest.raises(ValueError, match="begins at column 100 where 0 was expected"):
        evaluation.answer([part])


def test_pieces_and_copies_have_the_blocks_of_the_whole() -> None:
    values = sparse_rows(2, 9, 3000).astype(np.float32)
    rule = Heraclius(3)
    whole = bits(rule(values))
    sizes = [700, 1, 1299, 1000]
    borders = [0, *itertools.accumulate(sizes)]
    named = [{str(a): row[a:b] for a, b in itertools.pairwise(borders)} for row in values]
    assert bits(rule(named)) == whole
    assert bits(rule(np.asfortranarray(values))) == whole
    wide = np.tile(values, (1, 30))
    assert bits(rule(np.asfortranarray(wide))) == bits(rule(wide))


@pytest.mark.parametrize("text", ["nnm:b=2|heraclius:b=3", "bucketing:size=2|heraclius:b=2"])
def test_mixes_have_the_same_blocks(text: str) -> None:
    rows = sparse_rows(3, 11).astype(np.float32)
    rule = phocas.parse_rule(text)
    np.testing.assert_allclose(rule(rows), reference(rule, rows), atol=1e-4)
    assert in_parts(rule, rows, [0, 3, 900, 1500, D]) == bits(rule(rows))


def test_a_shard_may_have_blocks_of_its_own() -> None:
    rows = sparse_rows(4).astype(np.float32)
    evaluation = ShardedAggregation(Heraclius(8), 20, whole_blocks=False)
    assert evaluation.request is None
    assert bits(evaluation.finish(rows[:, 100:1500])) == bits(Heraclius(8)(rows[:, 100:1500]))


def test_cut_blocks_need_answers_and_locations() -> None:
    rows = sparse_rows(4)
    evaluation = ShardedAggregation(Heraclius(8), 20)
    with pytest.raises(ValueError, match="needs an answer to Radii"):
        evaluation.finish(rows)
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows, 0)])
    with pytest.raises(ValueError, match="give the column at which these begin, as start="):
        evaluation.finish(rows)
    assert bits(evaluation.finish(rows, 0)) == bits(Heraclius(8)(rows))
    with pytest.raises(ValueError, match="must begin where they were measured: got start=7"):
        evaluation.finish(rows[:, 7:], 7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 15, 1024, 1500, 4096])
def test_tail_of_one_range_has_the_bits_of_the_general_tail(columns: int, dtype: str) -> None:
    from phocas.rules.base import plan_of
    from phocas.rules.execution import Matrix, Reduction
    from phocas.rules.host import HostMatrix
    from phocas.rules.inputs import open_rows

    rng = np.random.default_rng(columns)
    rows = np.exp(2 * rng.normal(size=(7, columns))).astype(dtype)
    rows[1, ::3] *= 100
    rows[3, ::7] = np.nan
    matrix = open_rows(rows)
    assert isinstance(matrix, HostMatrix)
    plan = plan_of(Heraclius(2), 7)
    for mean in (False, True):
        for squares in (0.0, 1e6):
            found = []
            for keep in (HostMatrix.keep_tail, Matrix.keep_tail):
                out = np.ones(columns, dtype)
                outside = np.full(7, columns)
                reduction = Reduction(plan.window, tail=plan.tail, mean=mean, squares=squares)
                keep(matrix, reduction, None, [out], outside, 0)
                found.append((bits(out), outside.tolist()))
            assert found[0] == found[1]


# -- the tail --------------------------------------------------------------------------------------


def rare_rows(seed: int, m: int = 8, d: int = 4 * BLOCK_COLUMNS + 77) -> np.ndarray:
    """Return rows with features that all workers have, and many that one worker has."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, d)) / 100
    rows[:, d // 4 :] *= rng.random((m, d - d // 4)) < 0.02
    return rows


@given(SEEDS)
def test_honest_rare_values_count_as_in_the_mean(seed: int) -> None:
    rows = rare_rows(seed)
    rule = Heraclius(2)
    mean = rows.mean(axis=0)
    lost = np.linalg.norm(Heraclius(2, tail=0)(rows) - mean)
    assert np.linalg.norm(rule(rows) - mean) < 0.2 * lost
    assert rule.explain(rows).dropped.max() < 0.005


@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e3, 1e30])
def test_a_byzantine_row_adds_no_more_than_an_honest_tail(q: int, size: float) -> None:
    """Among all directions, along and against the gradient, the tail of a row is bounded."""
    honest = rare_rows(3)[q:]
    rng = np.random.default_rng(q)
    for direction in (rng.normal(size=honest.shape[1]), -honest.mean(axis=0)):
        wrong = direction / np.linalg.norm(direction) * size
        rows = np.vstack([np.tile(wrong, (q, 1)), honest])
        core = Heraclius(2, tail=0)(rows)
        tails = (Heraclius(2)(rows) - core) * len(rows)
        longest = np.linalg.norm(honest - core, axis=1).max()  # no tail is longer than its row
        assert np.linalg.norm(tails) <= len(rows) * longest


def test_an_adversary_within_the_limit_moves_the_model_by_a_bounded_amount() -> None:
    """For 1000 rounds, a worker sends the longest tail that counts, always in one direction."""
    m, rounds, d = 8, 1000, 512
    push = np.zeros(d)
    push[-8:] = 1.0
    moved, allowed = np.zeros(d), 0.0
    for seed in range(rounds):
        rows = rare_rows(seed, m, d)
        honest = rows[:-1]
        centre = np.median(honest, axis=0)
        allowed += np.linalg.norm(honest - centre, axis=1).max() / (m - 1)
        rows[-1] = centre + push * np.linalg.norm(honest - centre, axis=1).max()
        moved += Heraclius(1)(rows) - honest.mean(axis=0)
    assert 0 < moved @ push / np.linalg.norm(push) <= allowed


def test_wrong_cells_in_all_rows_are_bounded_by_the_limit() -> None:
    rows = rare_rows(5)
    m, d = rows.shape
    rng = np.random.default_rng(0)
    wrong = rows.copy()
    for column in rng.choice(d, 400, replace=False):
        wrong[rng.integers(m), column] = rng.choice([1e-1, 1e3, 1e38, np.nan, -np.inf])
    for tail in (0.5, 16.0):
        rule = Heraclius(1, tail=tail)
        core = Heraclius(1, tail=0)(wrong)
        known = np.where(np.isnan(wrong), np.inf, wrong)
        distances = np.sort(np.abs(known - np.median(known, axis=0)), axis=0)[m - 2]
        limit = tail * np.linalg.norm(2 * distances)  # radii are at most twice as large
        assert np.linalg.norm(rule(wrong) - core) <= m / (m - 1) * limit


def test_a_row_of_nan_leaves_the_mean_of_the_others() -> None:
    rows = rare_rows(6)
    others = np.delete(rows, 3, axis=0)
    rows[3] = np.nan
    result = Heraclius(2)(rows)
    lost = np.linalg.norm(Heraclius(2, tail=0)(rows) - others.mean(axis=0))
    assert np.linalg.norm(result - others.mean(axis=0)) < 0.1 * lost


@pytest.mark.parametrize(
    "text", ["bucketing:size=2|heraclius:b=1", "cell-filter:b=2|heraclius:b=2"]
)
def test_a_pipeline_has_no_tail(text: str) -> None:
    rows = rare_rows(7)
    assert bits(phocas.aggregate(rows, text, rng=0)) == bits(
        phocas.aggregate(rows, f"{text},tail=0", rng=0)
    )


@pytest.mark.parametrize("tail", [-1.0, np.nan, np.inf, 1e31])
def test_a_tail_that_is_no_length_is_rejected(tail: float) -> None:
    with pytest.raises(ValueError, match="Heraclius"):
        Heraclius(1, tail=tail)


# -- Monitor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [9, 200])
@pytest.mark.parametrize(
    "text",
    ["mean", "median", "phocas:b=3", "heraclius:b=3", "krum:b=3", "nnm:b=3|phocas:b=3", "cge:b=2"],
)
def test_monitor_is_the_mean_with_the_dropped_shares_of_the_rule(
    text: str, m: int, dtype: str
) -> None:
    rule = phocas.parse_rule(text)
    values = sparse_rows(5, m)
    values[2] *= 1000
    values[4, 5] = np.nan
    rows = stored(values, dtype)
    watch = phocas.parse_rule(f"monitor:rule=({text})")
    assert watch == Monitor(rule)
    told = watch.explain(rows)
    assert bits(told.value) == bits(watch(rows)) == bits(Mean()(rows))
    np.testing.assert_array_equal(told.dropped, rule.explain(rows).dropped)
    assert told.expected == rule.expected(m)


def test_watching_works_in_shards() -> None:
    rows = sparse_rows(6).astype(np.float32)
    rows[3] *= 300
    for rule in (Heraclius(8), NNM(6) | Phocas(6)):
        evaluation = ShardedAggregation(Monitor(rule), 20)
        ranges = [(0, 700), (700, D)]
        while evaluation.request is not None:
            evaluation.answer([evaluation.partial(rows[:, a:b], a) for a, b in ranges])
        parts = [evaluation.explain(rows[:, a:b], a) for a, b in ranges]
        assert b"".join(bits(part.value) for part in parts) == bits(Mean()(rows))
        widths = np.array([700, D - 700])
        joined = widths @ np.stack([part.dropped for part in parts]) / D
        # Each part rounds the number of values of a tail that are kept.
        np.testing.assert_allclose(joined, rule.explain(rows).dropped, atol=1.01 / D)


def test_monitor_is_written_and_rejected() -> None:
    assert str(Monitor(Heraclius(8))) == "monitor:rule=(heraclius:b=8)"
    assert phocas.parse_rule("monitor:rule=heraclius:b=8") == Monitor(Heraclius(8))
    nested = Monitor(NNM(6) | Heraclius(6, cutoff=2))
    assert phocas.parse_rule(str(nested)) == nested
    assert Monitor(Median()).columnwise
    assert not Monitor(Krum(2)).columnwise
    with pytest.raises(TypeError, match="Monitor needs a rule to go by: got 'phocas'"):
        Monitor("phocas")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="monitor needs rule: write monitor:rule="):
        phocas.parse_rule("monitor")
    with pytest.raises(ValueError, match="Monitor goes around a pipeline, not into one"):
        NNM(2) | Monitor(Median())
    with pytest.raises(ValueError, match="Krum needs 2b \\+ 2 < m"):
        Monitor(Krum(4)).explain(np.ones((9, 3)))


def test_watching_on_an_accelerator_is_the_mean() -> None:
    from phocas.rules import execution
    from phocas.rules.accelerator import DeviceMatrix
    from phocas.rules.base import plan_of

    rows = torch.from_numpy(sparse_rows(7))
    rows[3] *= 300
    watch = Monitor(Heraclius(8))
    there = DeviceMatrix([rows[:, :500], rows[:, 500:]], torch.cat)
    value, dropped = execution.explain(plan_of(watch, 20), there)
    torch.testing.assert_close(value, rows.mean(dim=0))
    np.testing.assert_allclose(dropped, Heraclius(8).explain(rows).dropped, atol=2 / D)
