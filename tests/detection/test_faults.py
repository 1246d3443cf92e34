"""Faults without adversaries: one witness, single parameters, late onsets, few false alarms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from benchmarks.false_alarms import compare, simulate

from phocas.detection import FALSE_ALARM, Detector
from phocas.detection.evalues import RUN_LENGTH, invested_by
from phocas.detection.observer import RankObserver, Segment

M, PARAMETERS, WIDTH = 4, 6, 600
NAN = math.nan

Change = Callable[[torch.Tensor, int, int], None]
"""Changes the (m, columns) rows of a holder in a step."""


def parts(holder: int) -> list[Segment]:
    """Return six parameters of 100 columns, of which each rank holds a quarter."""
    return [Segment(p, 100 * p, 100 * (p + 1), holder * 100) for p in range(PARAMETERS)]


def run(change: Change, steps: int, seed: int = 0, signal: float = 0.3) -> Iterator[Detector]:
    """Yield the detector after every step of four ranks that observe one another."""
    rng = torch.Generator().manual_seed(seed)
    detector = Detector(M, 1, threat="faults")
    observers = [RankObserver(M, 1, 0, None, "faults", PARAMETERS) for _ in range(M)]
    way = [signal * torch.randn(WIDTH, generator=rng) for _ in range(M)]
    for step in range(steps):
        told = []
        for holder, observer in enumerate(observers):
            rows = way[holder] + torch.randn(M, WIDTH, generator=rng)
            change(rows, holder, step)
            observer.see(rows, parts(holder), holder * WIDTH)
            observer.bet()
            told.append(observer.numbers.copy())
            observer.end()
        detector.hear(np.array(told), np.zeros((M, M)), M * WIDTH)
        for observer in observers:
            observer.follow(detector)
        yield detector


def flagged_after(change: Change, begin: int, steps: int, seed: int = 0) -> tuple[int, Detector]:
    """Return after how many steps rank 2 is flagged, and the detector."""
    for step, detector in enumerate(run(change, begin + steps, seed)):
        if detector.flagged():
            assert detector.flagged() == (2,)
            assert step >= begin
            return step + 1 - begin, detector
    raise AssertionError(f"not flagged in {steps} steps")


def honest(rows: torch.Tensor, holder: int, step: int) -> None:
    """Change nothing."""


def test_honest_ranks_are_not_flagged_and_most_quiet_steps_are_not_observed() -> None:
    observed = 0
    for detector in run(honest, 600):
        observed += detector.wants()
        assert detector.flagged() == ()
    assert observed <= 64 + 0.35 * 536


@pytest.mark.parametrize("begin", [0, 300])
@pytest.mark.parametrize("value", [1e20, -1e30, 3e38])
def test_one_implausible_value_is_enough_in_any_step(value: float, begin: int) -> None:
    def change(rows: torch.Tensor, holder: int, step: int) -> None:
        if holder == 1 and step == begin + 5:
            rows[2, 317] = value

    steps, detector = flagged_after(change, begin, 6)
    assert steps == 6
    flag = detector.flag(2)
    assert (flag.kind, flag.grounds, flag.onset) == ("wrong", ("values",), begin + 6)
    ((parameter, location),) = flag.locations
    assert (parameter, location.addresses) == (3, [117])


def test_lone_overflow_is_reported_and_flagged_the_third_time() -> None:
    """An honest rank may overflow once in a while, when a loss scale grows."""

    def seldom(rows: torch.Tensor, holder: int, step: int) -> None:
        if holder == 1 and step % 50 == 20:
            rows[2, 317] = math.inf

    for detector in run(seldom, 200):
        assert detector.flagged() == ()
    assert detector.nonfinite[0][:2] == (2, 21)

    def often(rows: torch.Tensor, holder: int, step: int) -> None:
        if holder == 1 and step % 20 == 3:
            rows[2, 317] = NAN

    steps, detector = flagged_after(often, 0, 60)
    assert steps == 44
    assert detector.flag(2).kind in {"nonfinite", "hardware"}
    assert detector.flag(2).onset == 4


def test_rank_whose_nan_ruined_the_model_is_flagged() -> None:
    def change(rows: torch.Tensor, holder: int, step: int) -> None:
        if step == 8 and holder == 0:
            rows[2, 5] = NAN
        if step > 8:
            rows[:, 7] = NAN

    steps, detector = flagged_after(change, 8, 4)
    assert steps == 2
    assert detector.flag(2).onset == 9


def test_diverging_model_flags_no_rank() -> None:
    """Rows grow, and one rank is the first to overflow; two ranks overflow before all do."""

    def grows(rows: torch.Tensor, holder: int, step: int) -> None:
        if step >= 20:
            rows *= 1e7 ** (step - 19)
        if step >= 22:
            rows[2, 5] = math.inf
        if step >= 23:
            rows[:, 5] = math.inf

    def two(rows: torch.Tensor, holder: int, step: int) -> None:
        if step >= 20:
            rows[1:3, 5] = NAN

    for change in (grows, two):
        for detector in run(change, 24):
            assert detector.flagged() == ()


def test_values_where_others_have_none_are_not_implausible() -> None:
    """One rank has tokens for an expert, while there is evidence against the rank."""
    observer = RankObserver(M, 1, 0, None, "faults", PARAMETERS)
    observer.attention = (2,)
    rows = torch.zeros(M, WIDTH)
    rows[2] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    observer.see(rows, parts(0), 0)
    assert [finding.worker for finding in observer.findings] == [2, 2]
    assert not any(finding.implausible for finding in observer.findings)


def in_parameter(change: Callable[[torch.Tensor], torch.Tensor], begin: int) -> Change:
    def wrong(rows: torch.Tensor, holder: int, step: int) -> None:
        if step >= begin:
            rows[2, 300:400] = change(rows[2, 300:400])

    return wrong


def flipped(values: torch.Tensor) -> torch.Tensor:
    return -values


def noise(values: torch.Tensor) -> torch.Tensor:
    rng = torch.Generator().manual_seed(int(1e6 * values[0].abs()))
    return values + values.std() * torch.randn(len(values), generator=rng)


@pytest.mark.parametrize(("begin", "limit"), [(0, 30), (300, 60)])
@pytest.mark.parametrize("change", [flipped, noise])
def test_fault_in_one_parameter_is_flagged_with_it(
    change: Callable[[torch.Tensor], torch.Tensor], begin: int, limit: int
) -> None:
    _, detector = flagged_after(in_parameter(change, begin), begin, limit)
    flag = detector.flag(2)
    assert flag.grounds == ("distances",)
    assert [parameter for parameter, _ in flag.locations] == [3]
    assert abs(flag.onset - (begin + 1)) <= 12
    assert flag.kind == ("wrong" if change is flipped else "differs")


def everywhere(scale: float, begin: int) -> Change:
    def wrong(rows: torch.Tensor, holder: int, step: int) -> None:
        if step >= begin:
            rows[2] *= scale

    return wrong


@pytest.mark.parametrize(("scale", "limit"), [(4.0, 16), (-1.0, 40), (1.4, 40)])
def test_delay_does_not_grow_with_the_honest_time_before(scale: float, limit: int) -> None:
    delays = [flagged_after(everywhere(scale, begin), begin, 60)[0] for begin in (100, 400, 1600)]
    assert max(delays) <= limit
    assert delays[2] <= delays[0] + 10


def test_wealth_in_play_is_at_most_one_in_the_stated_run_length() -> None:
    assert invested_by(0) == 0
    assert invested_by(RUN_LENGTH) <= 1
    late = [invested_by(t + 1) - invested_by(t) for t in (10, 1000, 10**5, 10**7)]
    assert min(late) >= 1e-7 * RUN_LENGTH / 1e4 * 0.99  # no onset is too late for a bet


@pytest.mark.parametrize("m", [4, 8])
def test_simulated_false_alarms_are_as_rare_as_stated(m: int) -> None:
    compare(m)
    runs, rounds = 4000, 300
    found, largest = simulate(runs, rounds, m, seed=0)
    allowed = runs * FALSE_ALARM * invested_by(rounds)
    assert found <= allowed + 3 * math.sqrt(allowed)
    assert largest > 100  # e-values do grow by chance


@pytest.mark.slow
def test_false_alarms_in_many_honest_runs_of_the_stated_length() -> None:
    found, _ = simulate(10_000, RUN_LENGTH, 4, seed=1)
    assert found <= 10_000 * FALSE_ALARM
