"""Locations of wrong values: absurd workers, repeated addresses, and who may report them."""

from __future__ import annotations

import numpy as np
import pytest

from phocas.detection.locations import TIMES, AddressMemory, Locations, ParameterFinding
from phocas.detection.parameter_test import absurd, middle, plausible

NAN, INF = np.nan, np.inf


def finding(
    parameter: int = 0, worker: int = 2, *, again: bool = True, wrong: bool = True
) -> ParameterFinding:
    return ParameterFinding(parameter, worker, 5, 100, 0.01, wrong, 7, 16, 0.9, again)


@pytest.mark.parametrize(
    ("sizes", "usual", "b", "expected"),
    [
        ([1, 1, 1, 1], 1, 1, []),
        ([1, 1, 17, 1], 1, 1, [2]),
        ([1, 1, 15, 1], 1, 1, []),
        ([1, 1, NAN, 1], 1, 1, [2]),
        ([1, 1, INF, 1], 1, 1, [2]),
        ([NAN, 1, INF, 1], 1, 1, []),  # two of four cannot both be faulty
        ([NAN, 1, INF, 1, 1], 1, 2, [0, 2]),
        ([0, 0, 1e30, 0], 0, 1, []),  # no other worker uses it
        ([0, 0, NAN, 0], 0, 1, [2]),
        ([1e-9, 1e-9, 1, 1e-9], 1, 1, []),  # large here, and nothing in its unit
        ([1, 1, 1e30, 1], 1, 0, []),
        ([NAN, NAN, NAN, NAN], NAN, 1, []),
    ],
)
def test_absurd_workers_are_found(
    sizes: list[float], usual: float, b: int, expected: list[int]
) -> None:
    found = absurd(np.array(sizes, np.float64), usual, b)
    assert np.flatnonzero(found).tolist() == expected


@pytest.mark.parametrize("m", range(3, 10))
def test_middle_is_between_honest_values_whatever_a_minority_sends(m: int) -> None:
    rng = np.random.default_rng(m)
    honest = rng.normal(size=m - (m - 1) // 2)
    for wrong in (NAN, INF, -INF, 1e300):
        values = rng.permutation([*honest, *[wrong] * ((m - 1) // 2)])
        assert honest.min() <= middle(values) <= honest.max()


def test_findings_travel_as_numbers_and_other_numbers_are_not_read() -> None:
    original = finding()
    assert len(original.numbers()) == ParameterFinding.NUMBERS
    assert ParameterFinding.read(np.array(original.numbers())) == original
    for place, value in [(0, NAN), (3, 0), (3, -1), (8, INF)]:
        numbers = np.array(original.numbers())
        numbers[place] = value
        assert ParameterFinding.read(numbers) is None
    assert ParameterFinding.read(np.zeros(3)) is None


def test_repeated_addresses_are_distinguished_from_random_ones() -> None:
    rng = np.random.default_rng(0)
    memory = AddressMemory()
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
    memory = AddressMemory()
    locations = Locations(4, b=1)
    for parameter in range(200):
        memory.compare(parameter, 2, np.arange(6000), 6000)
        memory.compare(0, 2, np.arange(6000 * parameter, 6000 * (parameter + 1)), 6000)
        locations.add(parameter, 0, [finding(parameter)])
    assert len(memory.known) == 64
    assert max(map(len, memory.known.values())) == 4096
    assert len(locations.workers[2]) == 64


def test_worker_is_flagged_by_more_than_b_others() -> None:
    locations = Locations(5, b=1)
    for round in range(1, 4):
        for holder in (0, 2):  # the worker itself does not count
            locations.add(round, holder, [finding()])
        locations.flag(round)
    assert not locations.flagged.any()
    for round in range(4, 4 + TIMES):
        locations.add(round, 3, [finding(parameter=9)])
        locations.flag(round)
    assert locations.flagged.tolist() == [0, 0, 3 + TIMES, 0, 0]


@pytest.mark.parametrize(
    ("rounds", "again", "wrong", "flagged"),
    [
        ((1, 2, 3), True, True, True),
        ((1, 9, 17), True, True, True),
        ((1, 10, 19), True, True, False),  # too long ago
        ((1, 2, 3), False, True, False),  # elsewhere each time
        ((1, 2, 3), True, False, False),  # wrong, and not absurd
    ],
)
def test_worker_is_flagged_if_absurd_at_the_same_addresses_within_eight_rounds(
    rounds: tuple[int, ...], again: bool, wrong: bool, flagged: bool
) -> None:
    locations = Locations(4, b=1)
    for round in rounds:
        for holder in range(4):
            locations.add(round, holder, [finding(again=again, wrong=wrong)])
        locations.flag(round)
    assert (locations.flagged[2] == rounds[-1]) == flagged


def test_findings_of_a_faulty_holder_may_have_any_numbers() -> None:
    locations = Locations(4, b=1)
    locations.add(1, 3, [finding(worker=99), finding(worker=-1), finding(parameter=10**9)])
    locations.flag(1)
    assert not locations.flagged.any()


def test_no_worker_is_flagged_with_b_0() -> None:
    locations = Locations(4, b=0)
    for round in range(1, 9):
        for holder in range(4):
            locations.add(round, holder, [finding()])
        locations.flag(round)
    assert not locations.flagged.any()
