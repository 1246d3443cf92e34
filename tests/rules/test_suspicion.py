"""Suspicion accuses liars, and honest workers only as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from phocas.rules.suspicion import FALSE_ALARM, Suspicion


def watch(rounds: np.ndarray, b: int) -> tuple[int, ...]:
    """Feed shares (rounds, m) and return who was suspected at any time."""
    suspicion = Suspicion(rounds.shape[1], b)
    ever: set[int] = set()
    for shares in rounds:
        suspicion.update(shares)
        ever |= set(suspicion.suspects())
    return tuple(sorted(ever))


def test_honest_workers_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.001, 0.05, 1.0):
        shares = np.clip(0.4 + spread * rng.standard_normal((1500, 20)), 0, 1)
        assert watch(shares, b=8) == ()


def test_honest_workers_are_left_alone_when_one_is_chosen_each_round() -> None:
    rng = np.random.default_rng(1)
    shares = np.ones((2000, 20))
    shares[np.arange(2000), rng.integers(20, size=2000)] = 0
    assert watch(shares, b=8) == ()


def test_false_alarms_are_as_rare_as_promised() -> None:
    """Between two workers the bet is lost at most as often as its stake says."""
    rng = np.random.default_rng(2)
    runs, rounds, m = 400, 60, 3
    alarms = sum(bool(watch(rng.random((rounds, m)) < 0.5, b=1)) for _ in range(runs))
    assert alarms <= 3  # 0.4 expected at the most


@pytest.mark.parametrize("q", [1, 6, 8])
def test_liars_are_found_and_only_they(q: int) -> None:
    rng = np.random.default_rng(3)
    shares = np.clip(0.2 + 0.05 * rng.standard_normal((100, 20)), 0, 1)
    shares[:, :q] = 1
    assert watch(shares, b=8) == tuple(range(q))


def test_the_first_accusation_takes_21_rounds() -> None:
    suspicion = Suspicion(20, 8)
    shares = np.full(20, 0.2)
    shares[4] = 1
    rounds = 0
    while not suspicion.suspects():
        suspicion.update(shares)
        rounds += 1
    assert (suspicion.suspects(), rounds) == ((4,), 21)


def test_workers_that_krum_never_chooses_are_found() -> None:
    rng = np.random.default_rng(4)
    shares = np.ones((600, 20))
    shares[np.arange(600), rng.integers(6, 20, size=600)] = 0
    assert watch(shares, b=6) == tuple(range(6))


def test_liars_that_are_always_kept_do_not_incriminate_the_honest() -> None:
    """As with a little is enough: b liars sit in the middle and are never dropped."""
    rng = np.random.default_rng(5)
    shares = np.clip(0.57 + 0.05 * rng.standard_normal((800, 20)), 0, 1)
    shares[:, :8] = 0
    assert watch(shares, b=8) == ()


def test_mimics_of_one_worker_do_not_incriminate_the_others() -> None:
    rng = np.random.default_rng(6)
    shares = np.clip(0.6 + 0.05 * rng.standard_normal((800, 20)), 0, 1)
    shares[:, :9] = 0  # eight copies, and the worker that they copy
    assert watch(shares, b=8) == ()


def test_a_rule_that_drops_nothing_suspects_nobody() -> None:
    assert watch(np.zeros((100, 5)), b=2) == ()


def test_state_goes_on() -> None:
    rng = np.random.default_rng(7)
    rounds = rng.random((40, 6))
    rounds[:, 0] = 1.5
    whole, first, second = (Suspicion(6, 2) for _ in range(3))
    for i, shares in enumerate(rounds):
        whole.update(shares)
        (first if i < 25 else second).update(shares)
        if i == 24:
            second.load_state(first.state())
    assert np.array_equal(whole.logs, second.logs)
    assert whole.suspects() == second.suspects() == (0,)
    assert np.array_equal(whole.shares(), second.shares())
    with pytest.raises(ValueError, match="6 workers"):
        Suspicion(7, 2).load_state(whole.state())
    assert 0 < FALSE_ALARM < 0.01
