"""Splits assign every sample, and a batch depends only on (seed, round, worker)."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from phocas.data import (
    IID,
    SPLITS,
    Assignment,
    ByLabel,
    Dirichlet,
    FunctionSplit,
    GammaSimilarity,
    LongTail,
    Partition,
    Split,
    batch_indices,
    holdings,
    parse_split,
    picture,
    sample,
)

LABELS = np.random.default_rng(0).integers(10, size=1000)
EVERY = [
    IID(),
    Partition(),
    Dirichlet(0.3),
    Dirichlet(1e-4, minimum=7),
    ByLabel(),
    ByLabel(3),
    GammaSimilarity(0.33),
    GammaSimilarity(1),
    LongTail(1.0, ByLabel()),
]


def slow_batches(
    parts: list[np.ndarray], batch_size: int, seed: int, round_number: int
) -> list[list[int]]:
    """Draw the same batches word by word, with Python's integers."""
    stream = np.random.Philox(
        key=np.array([seed, round_number], np.uint64),
        counter=np.array([0, 0, 0, 0x62617463686573], np.uint64),
    )
    return [
        [int(part[((int(stream.random_raw()) >> 32) * len(part)) >> 32]) for _ in range(batch_size)]
        for part in parts
    ]


@pytest.mark.parametrize("split", EVERY, ids=str)
def test_batches_match_the_slow_reference(split: Split) -> None:
    parts = split.assign(LABELS, 6, np.random.default_rng(1))
    for seed, round_number in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 2**64 - 1)):
        got = batch_indices(parts, 6, 9, seed, round_number)
        assert got.dtype == np.int64
        assert got.tolist() == slow_batches(list(parts), 9, seed, round_number)


def test_batches_match_frozen_values() -> None:
    whole = Assignment.everything(60000, 2)
    assert batch_indices(whole, 2, 4, seed=7, round=3).tolist() == [
        [215, 26637, 14243, 56972],
        [21814, 24492, 37127, 16108],
    ]


def test_batch_of_a_worker_depends_only_on_its_own_part() -> None:
    parts = [np.arange(5), np.arange(100, 900), np.array([3])]
    others = [np.arange(50), np.arange(100, 900), np.arange(7), np.arange(9)]
    a = batch_indices(parts, 3, 16, seed=5, round=2)
    b = batch_indices(others, 4, 16, seed=5, round=2)
    np.testing.assert_array_equal(a[1], b[1])
    assert (a[0] != b[0]).any()
    assert a[2].tolist() == [3] * 16


def test_batches_differ_by_seed_round_and_worker() -> None:
    whole = Assignment.everything(10**6, 20)
    rows = {
        tuple(row)
        for seed in range(5)
        for number in range(5)
        for row in batch_indices(whole, 20, 8, seed, number).tolist()
    }
    assert len(rows) == 5 * 5 * 20


def test_batches_are_uniform() -> None:
    parts = Assignment([np.arange(7), np.arange(7, 20)])
    counts = np.zeros(20)
    for number in range(400):
        np.add.at(counts, batch_indices(parts, 2, 100, 3, number), 1)
    expected = np.repeat([40000 / 7, 40000 / 13], [7, 13])
    # 18 degrees of freedom: one seed in a thousand exceeds 42.3, and the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 42.3


@pytest.mark.parametrize(
    ("workers", "batch", "seed", "number"),
    [(3, 4, 0, 0), (2, 0, 0, 0), (2, 4, -1, 0), (2, 4, 0, -1), (2, 4, 2**64, 0)],
)
def test_batches_reject_invalid_arguments(workers: int, batch: int, seed: int, number: int) -> None:
    with pytest.raises(ValueError, match=r"workers|2\^64"):
        batch_indices(Assignment.everything(10, 2), workers, batch, seed, number)


def test_sample_draws_from_the_part_with_replacement() -> None:
    drawn = sample(np.array([4, 9]), 50, np.random.default_rng(0))
    assert set(drawn.tolist()) == {4, 9}


@pytest.mark.parametrize("split", EVERY[1:], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 20, 100])
def test_every_sample_has_one_owner(split: Split, workers: int) -> None:
    parts = split.assign(LABELS, workers, np.random.default_rng(2))
    assert len(parts) == workers
    assert min(map(len, parts)) >= split.least
    assert sorted(np.concatenate(list(parts)).tolist()) == list(range(1000))
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("split", EVERY, ids=str)
def test_split_depends_only_on_its_seed(split: Split) -> None:
    one, same, other = (split.assign(LABELS, 8, np.random.default_rng(s)) for s in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    differs = any(len(a) != len(b) or (a != b).any() for a, b in zip(one, other, strict=True))
    assert differs == (not isinstance(split, IID))


def test_iid_assigns_all_samples_to_every_worker() -> None:
    parts = IID().assign(LABELS, 4, np.random.default_rng(0))
    assert len(parts) == 4
    assert all((part == np.arange(1000)).all() for part in parts)
    assert parts[-1].tolist() == parts[0].tolist()
    with pytest.raises(IndexError):
        parts[4]


@given(st.integers(1, 300), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_partition_gives_equal_parts(samples: int, workers: int) -> None:
    labels = np.zeros(samples, np.uint8)
    if workers > samples:
        with pytest.raises(ValueError, match=f"the most workers is {samples}"):
            Partition().assign(labels, workers, np.random.default_rng(0))
        return
    sizes = Partition().assign(labels, workers, np.random.default_rng(0)).sizes
    assert sizes.max() - sizes.min() <= 1
    assert sizes.sum() == samples


def test_smaller_alpha_gives_less_equal_parts() -> None:
    def unevenness(alpha: float) -> float:
        parts = Dirichlet(alpha).assign(LABELS, 10, np.random.default_rng(5))
        return float(holdings(parts, LABELS).std())

    assert unevenness(1e-4) > 2 * unevenness(0.5) > 4 * unevenness(1e4)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1e300])
def test_extreme_alpha_assigns_all_samples_and_no_empty_part(alpha: float) -> None:
    parts = Dirichlet(alpha, minimum=2).assign(LABELS, 30, np.random.default_rng(0))
    assert parts.sizes.min() >= 2
    assert parts.sizes.sum() == 1000


def test_dirichlet_can_give_each_worker_exactly_its_minimum() -> None:
    parts = Dirichlet(0.01, minimum=100).assign(LABELS, 10, np.random.default_rng(0))
    assert parts.sizes.tolist() == [100] * 10


def test_by_label_bounds_the_classes_of_a_worker() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 60))
    held = holdings(ByLabel().assign(labels, 10, np.random.default_rng(0)), labels)
    assert (np.count_nonzero(held, axis=1) == 1).all()
    assert (np.count_nonzero(held, axis=0) == 1).all()
    held = holdings(ByLabel(2).assign(labels, 20, np.random.default_rng(0)), labels)
    assert np.count_nonzero(held, axis=1).max() <= 4
    assert held.sum(axis=1).tolist() == [30] * 20


@given(st.integers(1, 60), st.integers(1, 30), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gamma_similarity_gives_every_worker_equal_parts(
    samples: int, workers: int, gamma: float
) -> None:
    if samples < workers:
        return
    labels = np.arange(samples) % 3
    parts = GammaSimilarity(gamma).assign(labels, workers, np.random.default_rng(0))
    assert sorted(np.concatenate(list(parts)).tolist()) == list(range(samples))
    assert parts.sizes.max() - parts.sizes.min() <= 2


@pytest.mark.parametrize("gamma", [0.0, 0.33, 1.0])
def test_gamma_is_the_share_of_samples_that_are_divided_at_random(gamma: float) -> None:
    labels = np.repeat(np.arange(10), 200)
    held = holdings(GammaSimilarity(gamma).assign(labels, 10, np.random.default_rng(0)), labels)
    most = held.max(axis=1).mean()  # of 200: its own class, and a tenth of what is random
    assert abs(most - 200 * (1 - gamma + gamma / 10)) < 25


def test_long_tail_keeps_a_falling_share_of_each_class() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 64))
    split = LongTail(0.5, ByLabel())
    parts = split.assign(labels, 4, np.random.default_rng(0))
    held = holdings(parts, labels)
    assert held.sum(axis=0).tolist() == [64, 32, 16, 8, 4]
    assert (np.count_nonzero(held, axis=1) < 5).all(), "the rest is divided by label"
    tiny = LongTail(1e-9).assign(labels, 4, np.random.default_rng(0))
    assert np.bincount(labels[tiny[0]]).tolist() == [64, 1, 1, 1, 1]


@pytest.mark.parametrize("split", EVERY, ids=str)
def test_some_workers_draw_from_all_samples_and_the_others_divide_them(split: Split) -> None:
    among = np.arange(100, 1000, 2)
    rng = np.random.default_rng(3)
    parts = split.assign(LABELS, 6, rng, among=among, iid=[0, 4])
    assert parts[0].tolist() == parts[4].tolist() == among.tolist()
    rest = [parts[worker] for worker in (1, 2, 3, 5)]
    if isinstance(split, IID):
        assert all(part.tolist() == among.tolist() for part in rest)
    else:
        assert sorted(np.concatenate(rest).tolist()) == among.tolist()
    drawn = batch_indices(parts, 6, 50, seed=1, round=2)
    assert drawn.tolist() == slow_batches(list(parts), 50, 1, 2)


def test_all_workers_may_draw_from_all_samples() -> None:
    parts = ByLabel().assign(LABELS, 2, np.random.default_rng(0), iid=[0, 1])
    assert parts.sizes.tolist() == [1000, 1000]


@pytest.mark.parametrize("split", EVERY, ids=str)
def test_split_spec_round_trips(split: Split) -> None:
    assert parse_split(str(split)) == split
    assert split.name in SPLITS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dirichlet", "needs alpha"),
        ("dirichlet:alpha=0", "alpha > 0"),
        ("dirichlet:alpha=nan", "alpha > 0"),
        ("dirichlet:alpha=much", "must be a number"),
        ("dirichlet:alpha=1,minimum=0", "minimum >= 1"),
        ("by-label:shards=1.5", "must be an integer"),
        ("partitoin", "did you mean 'partition'"),
        ("gamma-similarity", "needs gamma"),
        ("gamma-similarity:gamma=1.1", "0 <= gamma <= 1: got gamma=1.1"),
        ("gamma-similarity:gamma=-0.1", "0 <= gamma <= 1"),
        ("gamma-similarity:gamma=nan", "0 <= gamma <= 1"),
        ("long-tail:factor=0", "0 < factor <= 1"),
        ("long-tail:factor=2", "0 <= factor <= 1"),
        ("long-tail:split=by-lable", "did you mean 'by-label'"),
    ],
)
def test_invalid_split_raises_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_split(text)


def test_invalid_labels_and_parts_are_rejected() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(TypeError, match="whole number"):
        Partition().assign(np.ones(5), 2, rng)
    with pytest.raises(TypeError, match="whole number"):
        Partition().assign(np.ones((5, 2), int), 2, rng)
    with pytest.raises(ValueError, match="num_workers >= 1"):
        IID().assign(LABELS, 0, rng)
    with pytest.raises(ValueError, match="by-label needs at least 3"):
        ByLabel(3).assign(LABELS[:8], 3, rng)
    with pytest.raises(ValueError, match="worker 1 has none"):
        Assignment([np.array([0]), np.array([], int)])
    with pytest.raises(ValueError, match="worker 0 has -1"):
        Assignment([np.array([3, -1])])
    with pytest.raises(ValueError, match="at least one worker"):
        Assignment([])


def test_assignment_is_read_only() -> None:
    parts = Partition().assign(LABELS, 4, np.random.default_rng(0))
    with pytest.raises(ValueError, match="read-only"):
        parts[0][0] = 5


def drawn(parts: Assignment, labels: np.ndarray, **options: object) -> str:
    console = Console(file=io.StringIO(), width=100, **options)  # type: ignore[arg-type]
    console.print(picture(parts, labels, tuple("abc")))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_picture_shows_every_count() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    parts = Assignment([np.array([0, 1, 3]), np.array([2, 4, 5])])
    lines = drawn(parts, labels).splitlines()
    assert lines[1].split() == ["worker", "a", "b", "c", "in", "all"]
    assert lines[2].split() == ["0", "2", "1", "0", "3"]
    assert lines[3].split() == ["1", "1", "0", "2", "3"]
    coloured = drawn(parts, labels, force_terminal=True, color_system="truecolor")
    assert coloured.count("48;2;248;216;72") == 2  # the two largest cells are the brightest
    assert coloured.count("48;2;24;24;32") == 2  # the two empty ones the darkest


def test_picture_of_iid_is_one_row() -> None:
    labels = np.array([0, 0, 1, 2])
    lines = drawn(Assignment.everything(4, 5), labels).splitlines()
    assert [line.split() for line in lines[2:]] == [["all", "5", "2", "1", "1", "4"]]


def shifted(
    labels: np.ndarray, num_workers: int, rng: np.random.Generator, step: int = 1
) -> list[np.ndarray]:
    """Deal the samples in turn, after a shuffle."""
    order = rng.permutation(len(labels))
    return [order[step * worker :: num_workers] for worker in range(num_workers)]


def test_function_is_a_split() -> None:
    text = f"{__name__}:shifted:step=2"
    split = parse_split(text)
    assert str(split) == text
    assert split == FunctionSplit(shifted, {"step": 2})
    assert SPLITS.of(shifted, "test") == FunctionSplit(shifted)
    parts = split.assign(LABELS, 4, np.random.default_rng(3))
    order = np.random.default_rng(3).permutation(len(LABELS))
    assert [part.tolist() for part in parts] == [
        sorted(order[2 * worker :: 4].tolist()) for worker in range(4)
    ]
    whole = SPLITS.of(f"long-tail:factor=1,split=({text})", "test")
    assert whole.assign(LABELS, 4, np.random.default_rng(3))[0].size
    with pytest.raises(ValueError, match=r"unknown parameter of .*shifted 'stop'; did you mean"):
        parse_split(f"{__name__}:shifted:stop=2")
    with pytest.raises(TypeError, match="FunctionSplit needs a function of labels: got 5"):
        FunctionSplit(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "for each of 3 workers: got none"),
        ([np.arange(3)], "for each of 3 workers: got 1 arrays"),
        (5, "for each of 3 workers: got none"),
        ([np.arange(3.0)] * 3, r"whole numbers.*got float64 of shape \(3,\) for worker 0"),
        ([np.arange(3), np.zeros(0, int), np.arange(2)], r"got int64 of shape \(0,\) for worker 1"),
        ([np.arange(3), np.arange(3), np.array([-1])], "from 0 to 999: got -1 to -1 for worker 2"),
        ([np.arange(3), np.array([1000]), np.arange(3)], "got 1000 to 1000 for worker 1"),
    ],
)
def test_wrong_parts_are_rejected_with_file_and_line(returned: object, words: str) -> None:
    def wrong(labels: np.ndarray) -> object:
        del labels
        return returned

    with pytest.raises(ValueError, match=rf"test_splits\.py:\d+: .*wrong must return .*{words}"):
        FunctionSplit(wrong).assign(LABELS, 3, np.random.default_rng(0))


def test_function_cannot_change_the_labels() -> None:
    def wrong(labels: np.ndarray) -> None:
        labels[:] = 0

    with pytest.raises(ValueError, match="read-only"):
        FunctionSplit(wrong).assign(LABELS, 3, np.random.default_rng(0))
