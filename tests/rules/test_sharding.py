"""The same bits, however the columns are cut, held or computed."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from tests.helpers import DTYPES, bits, examples, num_threads, pipelines, stored, strongest

import phocas
from phocas import Bucketing, Krum, Rule, ShardedAggregation
from phocas.rules.algebra import of_mixed
from phocas.rules.reference import squared_distances

M = 11
EVERY = examples(M) + pipelines(M)


def rows_of_shards(d: int, dtype: str = "float32", m: int = M) -> np.ndarray:
    """Return rows whose sums round, with two that are out of every measure."""
    rng = np.random.default_rng(d)
    rows = rng.normal(size=(m, d)) * 10.0 ** rng.integers(-3, 3, size=(1, d))
    rows[2, d // 2 :] = np.nan
    rows[7] *= 1e18
    return np.asarray(stored(rows, dtype))


def cuts(d: int, s: int) -> list[tuple[int, int]]:
    """Cut d columns into s ranges, of very different widths and some of them empty."""
    rng = np.random.default_rng(1000 * s + d)
    borders = [0, *sorted(rng.integers(0, d + 1, size=s - 1).tolist()), d]
    return list(itertools.pairwise(borders))


def sharded(
    rule: Rule, rows: np.ndarray, ranges: list[tuple[int, int]], seed: int | None = None
) -> np.ndarray:
    """Aggregate as servers do: everyone has its own evaluation, and partials go by wire."""
    servers = [
        ShardedAggregation(rule, len(rows), None if seed is None else np.random.default_rng(seed))
        for _ in ranges
    ]
    while servers[0].request is not None:
        wire = [
            pickle.dumps(server.partial(rows[:, a:b], start=a))
            for server, (a, b) in zip(servers, ranges, strict=True)
        ]
        for i, server in enumerate(servers):
            heard = [pickle.loads(message) for message in wire]
            server.answer(heard[i:] + heard[:i])  # everyone hears in another order
    assert all(server.request is None for server in servers)
    return np.concatenate(
        [server.finish(rows[:, a:b], a) for server, (a, b) in zip(servers, ranges, strict=True)]
    )


@pytest.mark.parametrize("rule", examples(M), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_stay_where_they_are_get_the_bits_of_those_that_come(
    rule: Rule, dtype: str
) -> None:
    for d in (0, 1, 3000):
        rows = torch.empty(M, 2 * d, dtype=getattr(torch, dtype))
        for held in (rows[:, :d], rows[:, ::2]):  # adjacent values, and others
            evaluation = ShardedAggregation(rule, M, whole_blocks=False)
            first = torch.from_numpy(np.asarray(rows_of_shards(max(1, d))[:, :d]))
            held.copy_(first)
            while evaluation.request is not None:
                evaluation.answer([evaluation.partial(held, 0)])
            again = evaluation.prepare(held, 0)
            for values in (first, -3.0 * first.flip(0)):
                held.copy_(values)
                wanted, got = evaluation.explain(held, 0), again()
                assert bits(got.value) == bits(wanted.value)
                assert got.value.dtype == held.dtype
                np.testing.assert_array_equal(got.dropped, wanted.dropped)
                assert got.expected == wanted.expected


def test_prepared_columns_count_drops_with_any_number_of_threads() -> None:
    before = phocas.get_num_threads()
    held = torch.from_numpy(rows_of_shards(20_000))
    evaluation = ShardedAggregation("phocas:b=3", M)
    again = evaluation.prepare(held, 0)
    wanted = evaluation.explain(held, 0)
    try:
        for threads in (1, 3, 3, 2):
            phocas.set_num_threads(threads)
            got = again()
            assert bits(got.value) == bits(wanted.value)
            np.testing.assert_array_equal(got.dropped, wanted.dropped)
    finally:
        phocas.set_num_threads(before)


@pytest.mark.parametrize("m", [9, 193])  # above 192 rows, two kernels compute mean and counts
def test_prepared_columns_of_a_monitor_get_the_bits_of_those_that_come(m: int) -> None:
    rows = rows_of_shards(5000, m=m)
    evaluation = ShardedAggregation("monitor:rule=(phocas:b=1)", m)
    wanted, got = evaluation.explain(rows, 0), evaluation.prepare(rows, 0)()
    assert bits(got.value) == bits(wanted.value)
    np.testing.assert_array_equal(got.dropped, wanted.dropped)


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_shards_get_the_bits_of_one_server(rule: Rule) -> None:
    for d in (5, 5000):
        rows = rows_of_shards(d)
        whole = rule(rows)
        for s in (1, 3, 20):
            assert bits(sharded(rule, rows, cuts(d, s))) == bits(whole), (d, s)
    even = [(i * 1024, (i + 1) * 1024) for i in range(4)]
    rows = rows_of_shards(4096)
    assert bits(sharded(rule, rows, even)) == bits(rule(rows))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("rule", strongest(M), ids=str)
def test_shards_of_other_types(rule: Rule, dtype: str) -> None:
    rows = rows_of_shards(3000, dtype)
    assert bits(sharded(rule, rows, cuts(3000, 20))) == bits(rule(rows))


@pytest.mark.parametrize("text", ["krum:b=30", "multi-krum:b=9", "geometric-median", "cge:b=3"])
@pytest.mark.parametrize("m", [65, 200])
def test_shards_of_many_rows(text: str, m: int) -> None:
    rule = phocas.parse_rule(text)
    rows = rows_of_shards(9000, m=m)
    assert bits(sharded(rule, rows, cuts(9000, 7))) == bits(rule(rows))


def test_shards_of_subnormal_values() -> None:
    """Edges are copied as they are: half of an odd subnormal number would be another number."""
    rows = (np.random.default_rng(0).integers(-9, 10, size=(9, 3000)) * 1.4e-45).astype(np.float32)
    for rule in (Krum(b=2), phocas.GeometricMedian(), phocas.CGE(b=3)):
        assert bits(sharded(rule, rows, cuts(3000, 20))) == bits(rule(rows))


def test_shards_draw_the_same_buckets() -> None:
    rule = Bucketing(size=2) | phocas.Median()
    rows = rows_of_shards(500)
    whole = rule(rows, rng=np.random.default_rng(9))
    assert bits(sharded(rule, rows, cuts(500, 3), seed=9)) == bits(whole)
    assert bits(whole) != bits(rule(rows))


def test_shards_have_the_same_dropped_shares() -> None:
    rows = rows_of_shards(3000)
    for rule in strongest(M):
        evaluation = ShardedAggregation(rule, M)
        ranges = [(0, 1000), (1000, 3000)]
        while evaluation.request is not None:
            evaluation.answer([evaluation.partial(rows[:, a:b], a) for a, b in ranges])
        told = rule.explain(rows)
        explained = evaluation.explain(rows, start=0)
        assert bits(explained.value) == bits(told.value)
        np.testing.assert_array_equal(explained.dropped, told.dropped)
        parts = [evaluation.explain(rows[:, a:b], a) for a, b in ranges]
        joined = (parts[0].dropped + 2 * parts[1].dropped) / 3
        if rule.columnwise:
            np.testing.assert_allclose(joined, told.dropped, atol=1e-12)


# -- refusals --------------------------------------------------------------------------------------


def test_columns_must_be_measured_once_each() -> None:
    rows = rows_of_shards(4096)

    def ask(*ranges: tuple[int, int], d: int | None = None) -> ShardedAggregation:
        evaluation = ShardedAggregation(Krum(b=2), M, d=d)
        evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in ranges])
        return evaluation

    for doubled in (((0, 4096), (0, 4096)), ((0, 2048), (1024, 4096)), ((0, 9), (8, 20))):
        with pytest.raises(ValueError, match="measured once each"):
            ask(*doubled)
    for holes in (((0, 1024), (2048, 4096)), ((1024, 4096),), ((0, 10), (11, 20))):
        with pytest.raises(ValueError, match="begins at column"):
            ask(*holes)
    with pytest.raises(ValueError, match=r"all 4096 columns .* none from column 3000 on"):
        ask((0, 3000), d=4096)
    with pytest.raises(ValueError, match="must be 4000 columns: got 4096"):
        ask((0, 3000), (3000, 4096), d=4000)
    assert ask((0, 3000), (3000, 4096), d=4096).request is None


def test_calls_out_of_order_are_rejected() -> None:
    rows = rows_of_shards(100)
    waiting = ShardedAggregation(Krum(b=2), M)
    with pytest.raises(ValueError, match="needs an answer"):
        waiting.finish(rows)
    with pytest.raises(ValueError, match="at least one partial"):
        waiting.answer([])
    with pytest.raises(ValueError, match="columns must be of 11 rows: got 10"):
        waiting.partial(rows[:10], start=0)
    ready = ShardedAggregation(phocas.Median(), M)
    assert ready.request is None
    with pytest.raises(ValueError, match="ready to finish"):
        ready.partial(rows, start=0)
    with pytest.raises(ValueError, match="ready to finish"):
        ready.answer([])
    with pytest.raises(ValueError, match=r"2b \+ 2 < m"):
        ShardedAggregation(Krum(b=5), M)
    other = ShardedAggregation(Krum(b=2), 9)
    with pytest.raises(ValueError, match="same rows"):
        waiting.answer([waiting.partial(rows, 0), other.partial(rows[:9], 100)])


# -- threads, and the algebra ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_threads_change_no_bit(rule: Rule) -> None:
    rows = rows_of_shards(40_000)
    wanted, dropped = [], []
    for threads in (1, 2, 5):
        with num_threads(threads):
            wanted.append(bits(rule(rows)))
            dropped.append(rule.explain(rows).dropped)
    assert wanted[0] == wanted[1] == wanted[2]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    np.testing.assert_array_equal(dropped[0], dropped[2])


def test_distances_of_mixes_follow_from_those_of_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(9, 30)) + 1000
    weights = rng.random((6, 9)) * (rng.random((6, 9)) < 0.5) + np.eye(6, 9)
    weights /= weights.sum(axis=1, keepdims=True)
    weights[:, 4] = 0
    weights[2, 4] = 1
    weights /= weights.sum(axis=1, keepdims=True)
    squared = squared_distances(rows)
    wanted = squared_distances(weights @ rows)
    np.testing.assert_allclose(of_mixed(squared, weights), wanted, rtol=1e-10, atol=1e-9)
    far = squared.copy()
    far[4, :] = far[:, 4] = np.inf
    far[4, 4] = 0
    got = of_mixed(far, weights)
    assert np.isinf(got[2, [0, 1, 3, 4, 5]]).all()
    assert got[2, 2] == 0
    others = np.ix_([0, 1, 3, 4, 5], [0, 1, 3, 4, 5])
    np.testing.assert_allclose(got[others], wanted[others], rtol=1e-10, atol=1e-9)


def test_many_mixes_fit_in_memory_and_time() -> None:
    """All differences of 500 mixes of 500 rows at once would be a gigabyte."""
    rows = np.random.default_rng(0).normal(size=(500, 300)).astype(np.float32)
    rows[:100] = np.inf
    tracemalloc.start()
    got = phocas.aggregate(rows, "nnm:b=100|krum:b=100")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20
    np.testing.assert_allclose(got, rows[100:].mean(axis=0), atol=1e-5)


def test_tensors_are_sharded_like_arrays() -> None:
    rows = rows_of_shards(2000)
    tensor = torch.from_numpy(rows)
    evaluation = ShardedAggregation(Krum(b=2), M)
    parts = [evaluation.partial(tensor[:, a:b], start=a) for a, b in ((0, 700), (700, 2000))]
    evaluation.answer(parts)
    got = torch.cat([evaluation.finish(tensor[:, a:b]) for a, b in ((0, 700), (700, 2000))])
    assert bits(got) == bits(Krum(b=2)(rows))
