"""Where wrong values lie: who is absurd, what comes again, and who may say so."""

from __future__ import annotations

import numpy as np
import pytest

from phocas.rules.places import TIMES, Finding, Memory, Traces, absurd, middle, plausible

NAN, INF = np.nan, np.inf


def finding(
    parameter: int = 0, worker: int = 2, *, again: bool = True, wrong: bool = True
) -> Finding:
    return Finding(parameter, worker, 5, 100, 0.01, wrong, 7, 16, 0.9, again)


@pytest.mark.parametrize(
    ("sizes", "usual", "b", "expected"),
    [
        ([1, 1, 1, 1], 1, 1, []),
        ([1, 1, 17, 1], 1, 1, [2]),
        ([1, 1, 15, 1], 1, 1, []),
        ([1, 1, NAN, 1], 1, 1, [2]),
        ([1, 1, INF, 1], 1, 1, [2]),
        ([NAN, 1, INF, 1], 1, 1, []),  # two of four: it is not they who are wrong
        ([NAN, 1, INF, 1, 1], 1, 2, [0, 2]),
        ([0, 0, 1e30, 0], 0, 1, []),  # nobody else had a use for it
        ([0, 0, NAN, 0], 0, 1, [2]),
        ([1e-9, 1e-9, 1, 1e-9], 1, 1, []),  # large here, and nothing in its unit
        ([1, 1, 1e30, 1], 1, 0, []),
        ([NAN, NAN, NAN, NAN], NAN, 1, []),
    ],
)
def test_who_is_absurd(sizes: list[float], usual: float, b: int, expected: list[int]) -> None:
    found = absurd(np.array(sizes, np.float64), usual, b)
    assert np.flatnonzero(found).tolist() == expected


@pytest.mark.parametrize("m", range(3, 10))
def test_the_middle_is_between_honest_values_whatever_a_minority_says(m: int) -> None:
    rng = np.random.default_rng(m)
    honest = rng.normal(size=m - (m - 1) // 2)
    for lie in (NAN, INF, -INF, 1e300):
        values = rng.permutation([*honest, *[lie] * ((m - 1) // 2)])
        assert honest.min() <= middle(values) <= honest.max()


def test_findings_travel_as_numbers_and_what_is_none_is_not_read() -> None:
    original = finding()
    assert len(original.numbers()) == Finding.NUMBERS
    assert Finding.read(np.array(original.numbers())) == original
    for place, value in [(0, NAN), (3, 0), (3, -1), (8, INF)]:
        numbers = np.array(original.numbers())
        numbers[place] = value
        assert Finding.read(numbers) is None
    assert Finding.read(np.zeros(3)) is None


def test_addresses_that_come_again_are_told_from_those_that_do_not() -> None:
    rng = np.random.default_rng(0)
    memory = Memory()
    fixed = np.arange(3, 60_000, 48)
    for look in range(6):
        part = np.sort(rng.choice(fixed, 500, replace=False))
        share, stride, again = memory.compare(0, 1, part, 60_000)
        assert again == (look > 0)
        if look:
            assert stride % 48 == 0
            assert share > 0.25
        drawn = np.sort(rng.choice(60_000, 500, replace=False))
        assert not memory.compare(1, 1, drawn, 60_000)[2]
    everything = np.arange(100)
    assert memory.compare(2, 1, everything, 100) == (-1.0, 0, False)
    assert memory.compare(2, 1, everything, 100) == (0.0, 1, True)  # no more than chance
    assert not memory.compare(3, 1, np.empty(0, np.int64), 100)[2]
    assert memory.compare(3, 1, np.empty(0, np.int64), 100) == (0.0, 0, False)


def test_rows_that_are_plausible_are_absurd_nowhere() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(2000):
        m, parts = int(rng.integers(3, 9)), int(rng.integers(1, 6))
        sizes = np.exp(rng.normal(size=(parts, m)))
        for _ in range(int(rng.integers(3))):
            where = rng.integers(parts), rng.integers(m)
            sizes[where] *= rng.choice([15.0, 16.0, 1e3, np.inf, np.nan])
        sizes[rng.random(parts) < 0.1] = 0.0
        lengths = np.sqrt(np.square(sizes).sum(axis=0))
        easy = plausible(lengths)
        wrong = [absurd(row, middle(lengths), b=m) for row in sizes]
        if easy:
            assert not np.any(wrong)
        seen.add((easy, bool(np.any(wrong))))
    assert seen == {(True, False), (False, True), (False, False)}


def test_memory_is_bounded() -> None:
    memory = Memory()
    traces = Traces(4, b=1)
    for parameter in range(1000):
        memory.compare(parameter, 2, np.arange(50_000), 50_000)
        memory.compare(0, 2, np.arange(50_000 * parameter, 50_000 * (parameter + 1)), 50_000)
        traces.hear(parameter, 0, [finding(parameter)])
    assert len(memory.known) == 64
    assert max(map(len, memory.known.values())) == 4096
    assert len(traces.workers[2]) == 64


def test_a_worker_is_named_by_more_than_b_others() -> None:
    traces = Traces(5, b=1)
    for round in range(1, 4):
        for holder in (0, 2):  # the worker itself does not count
            traces.hear(round, holder, [finding()])
        traces.judge(round)
    assert not traces.since.any()
    for round in range(4, 4 + TIMES):
        traces.hear(round, 3, [finding(parameter=9)])
        traces.judge(round)
    assert traces.since.tolist() == [0, 0, 3 + TIMES, 0, 0]


@pytest.mark.parametrize(
    ("rounds", "again", "wrong", "named"),
    [
        ((1, 2, 3), True, True, True),
        ((1, 9, 17), True, True, True),
        ((1, 10, 19), True, True, False),  # too long ago
        ((1, 2, 3), False, True, False),  # elsewhere each time
        ((1, 2, 3), True, False, False),  # wrong, and not absurd
    ],
)
def test_what_counts_as_the_same_again(
    rounds: tuple[int, ...], again: bool, wrong: bool, named: bool
) -> None:
    traces = Traces(4, b=1)
    for round in rounds:
        for holder in range(4):
            traces.hear(round, holder, [finding(again=again, wrong=wrong)])
        traces.judge(round)
    assert (traces.since[2] == rounds[-1]) == named


def test_a_liar_may_say_anything() -> None:
    traces = Traces(4, b=1)
    traces.hear(1, 3, [finding(worker=99), finding(worker=-1), finding(parameter=10**9)])
    traces.judge(1)
    assert not traces.since.any()


def test_nobody_is_named_with_b_0() -> None:
    traces = Traces(4, b=0)
    for round in range(1, 9):
        for holder in range(4):
            traces.hear(round, holder, [finding()])
        traces.judge(round)
    assert not traces.since.any()
