"""CellFilter: what is replaced, who is out, and that no second matrix is made for it."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import DTYPES, ROUNDING, bits, doubles, num_threads, stored

import phocas
from phocas import (
    CellFilter,
    Krum,
    Mean,
    Monitor,
    Rule,
    ShardedAggregation,
    TrimmedMean,
    parse_rule,
)
from phocas.kernels import BLOCK_COLUMNS, masking
from phocas.rules import execution
from phocas.rules.accelerator import DeviceMatrix
from phocas.rules.base import plan_of
from phocas.rules.reference import implausible, reference

BOTH = "cell-filter:b=8|nnm:b=6|trimmed-mean:b=6"
D = 3 * BLOCK_COLUMNS + 77


def gradients(seed: int, m: int = 20, d: int = D) -> np.ndarray:
    """Return rows with layers of different scale, columns of zeros, and a few wrong cells."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, d)) * 10.0 ** rng.integers(-4, 1, size=d)
    rows[rng.random((m, d)) < 0.4] = 0
    wrong = rng.random((m, d)) < 0.01
    rows[wrong] = rng.choice([np.nan, np.inf, -np.inf, 1e20, -1e3, 40.0], size=wrong.sum())
    return rows


def in_parts(rule: Rule, rows: Any, borders: list[int]) -> tuple[bytes, np.ndarray]:
    """Aggregate as holders of columns do; return the bits, and the shares of all together."""
    ranges = list(itertools.pairwise(borders))
    evaluation = ShardedAggregation(rule, len(rows))
    while evaluation.request is not None:
        evaluation.answer([evaluation.partial(rows[:, a:b], a) for a, b in ranges])
    parts = [evaluation.explain(rows[:, a:b], a) for a, b in ranges]
    widths = np.diff(borders)
    dropped = widths @ np.stack([part.dropped for part in parts]) / widths.sum()
    return b"".join(bits(part.value) for part in parts), dropped


# -- the definition --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 20, 200])
@pytest.mark.parametrize("cutoff", [0.7, 8.0])
def test_what_is_implausible_becomes_the_trimmed_mean(m: int, dtype: str, cutoff: float) -> None:
    """A mean of one row of them shows a row as it is after cleaning."""
    b = (m - 1) // 2
    rows = stored(gradients(m, m) if m > 5 else gradients(m, m).clip(-40, 40), dtype)
    seen = doubles(rows)
    rule = CellFilter(b, cutoff)
    wrong = implausible(rule, seen)
    counted = parse_rule(f"monitor:rule=({rule}|mean)").explain(rows).dropped
    np.testing.assert_allclose(counted, wrong.mean(axis=1), atol=3.5 / D)
    pipeline = rule | TrimmedMean(0)
    got, wanted = doubles(pipeline(rows)), reference(pipeline, seen)
    sure = np.isfinite(wanted)
    near = 64 * ROUNDING[dtype] * np.abs(seen[~wrong]).max()
    # A value on the very edge may be on either side of it.
    assert np.mean(np.abs(got[sure] - wanted[sure]) > near) < 2e-3


def test_nothing_implausible_is_nothing_done() -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, size=(20, D)).astype(np.float32)
    after = parse_rule("nnm:b=6|trimmed-mean:b=6")
    told, wanted = parse_rule(BOTH).explain(rows), after.explain(rows)
    assert bits(told.value) == bits(wanted.value)
    np.testing.assert_array_equal(told.dropped, wanted.dropped)
    assert bits((CellFilter(0) | after)(gradients(1))) == bits(after(gradients(1)))


def test_all_that_may_be_is_implausible() -> None:
    """Where the m - b nearest are equal, whatever differs is implausible."""
    rows = np.zeros((9, D), np.float32)
    rows[:4] = np.random.default_rng(0).choice([-1, 1], size=(4, D)) * 1e-3
    told = (CellFilter(4) | Mean()).explain(rows)
    assert not told.value.any()
    np.testing.assert_array_equal(told.dropped, [1] * 4 + [0] * 5)


def test_a_row_that_is_mostly_implausible_is_out() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, 4000))
    rows[3, :2200] = 1e6  # more than half
    rows[5, 2200:] = -1e6  # less
    rule = CellFilter(2) | Krum(2)
    assert bits(rule(rows)) != bits(Krum(2)(rows))
    told = (CellFilter(2) | phocas.MultiKrum(2)).explain(rows)
    assert told.dropped[3] == 1
    assert told.dropped[5] >= 0.45
    wanted = reference(CellFilter(2) | phocas.MultiKrum(2), rows)
    np.testing.assert_allclose(told.value, wanted, atol=1e-9)


def test_no_more_rows_are_out_than_what_follows_survives() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(9, 2000)).astype(np.float32)
    rows[:4] = [[np.nan], [np.inf], [1e9], [-1e9]]
    for text in (
        "cell-filter:b=4|mean",
        "cell-filter:b=4|nnm:b=2|krum:b=2",
        "cell-filter:b=4|median",
    ):
        rule = parse_rule(text)
        value = rule(rows)
        assert np.isfinite(value).all()
        assert np.abs(value).max() < 6
        np.testing.assert_allclose(value, reference(rule, rows), atol=1e-5)


def test_equal_byzantine_rows_do_not_lose_the_rule() -> None:
    """Equal liars make eight honest rows of fourteen implausible: more than NNM survives as NaN."""
    rows = np.zeros((20, D))
    rows[12:] = np.random.default_rng(2).normal(size=(8, D))
    value = parse_rule(BOTH)(rows)
    assert np.isfinite(value).all()
    assert np.abs(value).max() <= np.abs(rows).max()


def test_cells_kill_rules_of_rows_and_not_after_cleaning() -> None:
    rng = np.random.default_rng(3)
    honest = rng.normal(size=(20, D)) + 2
    rows = honest.copy()
    for worker in range(20):
        rows[worker, rng.integers(D, size=5)] = rng.choice([np.nan, np.inf, -1e20])
    rows[:6] = -10 * honest[6:].mean(axis=0)
    mean = honest[6:].mean(axis=0)
    far = np.linalg.norm(mean)
    after = parse_rule("nnm:b=6|trimmed-mean:b=6")
    assert not np.linalg.norm(after(rows) - mean) < far
    assert np.linalg.norm(parse_rule(BOTH)(rows) - mean) < 0.5 * far


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "text", [BOTH, "cell-filter:b=6|heraclius:b=8", "cell-filter:b=8|krum:b=6"]
)
def test_holders_of_columns_have_the_bits_of_one(text: str, dtype: str) -> None:
    rows = stored(gradients(4), dtype)
    rows[3] = np.nan
    rule = parse_rule(text)
    whole = rule.explain(rows)
    for borders in ([0, D], [0, 1, 1000, 1030, 2048, D], [0, 1024, 2048, D], [0, 500, 501, D]):
        got, dropped = in_parts(rule, rows, borders)
        assert got == bits(whole.value)
        if rule.window(20).cutoff:
            np.testing.assert_allclose(dropped, whole.dropped, atol=0.01)


def test_chunks_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = "cell-filter:b=2|nnm:b=1|median", "cell-filter:b=20|nnm:b=20|median"
    for m, text in ((20, BOTH), (6, few), (5, few), (70, many)):
        rows = gradients(5, m, 20_000).astype(np.float32)
        if m < 7:
            rows = np.nan_to_num(rows, nan=9.0).clip(-40, 40)  # more than b of them would be lost
        else:
            rows[1] = np.inf
        rule = parse_rule(text)
        found = set()
        for size, threads in ((1 << 24, 2), (1, 1), (1, 5), (1 << 19, 2)):
            monkeypatch.setattr(masking, "CHUNK_BYTES", size)
            with num_threads(threads):
                found.add(bits(rule(rows)))
        assert len(found) == 1
        wanted = reference(rule, rows)
        sure = np.isfinite(wanted)
        assert np.mean(np.abs(rule(rows) - wanted)[sure] > 1e-4) < 1e-3


def test_forms_of_rows_change_no_bit() -> None:
    rows = gradients(6).astype(np.float32)
    rule = parse_rule(BOTH)
    whole = bits(rule(rows))
    borders = [0, 700, 701, 2000, D]
    named = [{str(a): row[a:b] for a, b in itertools.pairwise(borders)} for row in rows]
    assert bits(rule(named)) == whole
    assert bits(rule(list(rows))) == whole
    assert bits(rule(np.asfortranarray(rows))) == whole
    assert bits(rule(torch.from_numpy(rows))) == whole
    half = torch.from_numpy(rows).to(torch.bfloat16)
    assert bits(rule(half)) == bits(rule(list(half)))


def test_inputs_are_left_alone() -> None:
    rows = gradients(7).astype(np.float32)
    rows.setflags(write=False)
    before = bits(rows)
    parse_rule(BOTH).explain(rows)
    assert bits(rows) == before


def test_no_second_matrix_is_made() -> None:
    """Everything is copied, a chunk at a time; what is known of blocks is a tenth of the rows."""
    rows = np.random.default_rng(0).normal(size=(20, 1_500_000)).astype(np.float32)
    rows[:, ::100] *= 1e6
    rows[np.arange(20), np.arange(20)] = np.nan
    rule = parse_rule(BOTH)
    tracemalloc.start()
    rule(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes / 2


# -- blame, watching, devices ----------------------------------------------------------------------


def test_dropped_shares_count_cells_and_rows() -> None:
    rng = np.random.default_rng(8)
    rows = rng.normal(size=(20, 5000)).astype(np.float32)
    rows[2, :1000] = 1e5
    rows[7] = np.nan
    dropped = (CellFilter(8) | Mean()).explain(rows).dropped
    np.testing.assert_allclose(dropped[2], 0.2, atol=1e-6)
    assert dropped[7] == 1
    assert np.delete(dropped, [2, 7]).max() == 0
    told = parse_rule(BOTH).explain(rows)
    assert told.dropped[7] == 1
    assert told.dropped[2] >= 0.2


def test_a_watch_over_cleaning_is_the_mean() -> None:
    rows = gradients(9).clip(-1e4, 1e4)
    rule = parse_rule(BOTH)
    told = Monitor(rule).explain(rows)
    assert bits(told.value) == bits(Mean()(rows))
    np.testing.assert_array_equal(told.dropped, rule.explain(rows).dropped)


def test_a_function_is_given_cleaned_rows() -> None:
    rows = np.random.default_rng(9).normal(size=(9, D))
    rows[0, 5], rows[4, 2000] = 1e9, np.nan
    seen = []

    def mean(values: np.ndarray) -> np.ndarray:
        seen.append(values.copy())
        return np.asarray(values.mean(axis=0))

    (CellFilter(2) | phocas.FunctionRule(mean))(rows)
    assert np.isfinite(seen[0]).all()
    assert np.abs(seen[0]).max() < 10
    same = np.ones(rows.shape, bool)
    same[0, 5] = same[4, 2000] = False
    np.testing.assert_array_equal(seen[0][same], rows[same])


@pytest.mark.parametrize("text", [BOTH, "cell-filter:b=6|heraclius:b=8", f"monitor:rule=({BOTH})"])
def test_an_accelerator_cleans_too(text: str) -> None:
    rows = gradients(10).clip(-1e6, 1e6)
    rows[3] = np.nan if "monitor" not in text else 5e5
    tensors = torch.from_numpy(rows)
    there = DeviceMatrix([tensors[:, :500], tensors[:, 500:]], torch.cat)
    rule = parse_rule(text)
    value, _ = execution.explain(plan_of(rule, 20), there)
    np.testing.assert_allclose(value, rule(rows), rtol=1e-9, atol=1e-9)


# -- refusals --------------------------------------------------------------------------------------


def test_input_that_cannot_be_filtered_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"pre-aggregator, which needs a rule after it: write cell-filter"
    ):
        parse_rule("cell-filter:b=8")
    for text in ("cell-filter:b=2|cell-filter:b=2|median", "nnm:b=2|cell-filter:b=2|median"):
        with pytest.raises(ValueError, match="CellFilter must come first and once"):
            parse_rule(text)
    with pytest.raises(ValueError, match="CellFilter must come first"):
        phocas.NNM(2) | (CellFilter(2) | Mean())
    with pytest.raises(ValueError, match="CellFilter needs 2b < m: got b=5 with m=9"):
        parse_rule("cell-filter:b=5|median")(np.ones((9, 3)))
    for cutoff in (0.0, -1.0, 1e31, np.nan):
        with pytest.raises(ValueError, match="CellFilter needs"):
            CellFilter(2, cutoff=cutoff)
    evaluation = ShardedAggregation(BOTH, 20)
    evaluation.answer([evaluation.partial(np.ones((20, 9)), 0)])
    with pytest.raises(ValueError, match="needs an answer to OutlierShares"):
        evaluation.finish(np.ones((20, 9)), 0)


def test_too_much_is_not_hidden() -> None:
    """A column of which more is wrong than b is not finite, whatever follows."""
    rows = np.random.default_rng(0).normal(size=(20, 50))
    rows[:9, 7] = np.inf
    assert not np.isfinite((CellFilter(8) | Mean())(rows)[7])
    assert np.isfinite(np.delete((CellFilter(8) | Mean())(rows), 7)).all()
    assert np.isfinite((CellFilter(9) | Mean())(rows)).all()
