"""The detector flags Byzantine workers soon, and honest ones at most as often as it says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

import phocas
from phocas.attacks import parse_attack
from phocas.detection import FALSE_ALARM, Detector
from phocas.detection.comparison import Sample
from phocas.detection.evalues import EValueTest, distances, invested_by, products, tail_sizes
from phocas.sharding import shard_bounds

M, B, COLUMNS = 20, 6, 200

Lie = Callable[[np.ndarray, int, np.random.Generator], None]


def apart_of(rows: np.ndarray) -> np.ndarray:
    return np.asarray(distances(products(rows))[0])


def first_flagged(
    lie: Lie, *, m: int = M, b: int = B, rounds: int = 60, seed: int = 0, columns: int = COLUMNS
) -> dict[int, int]:
    """Let workers draw noise that an attack changes; return the round in which each was flagged."""
    rng = np.random.default_rng(seed)
    detector = Detector(m, b)
    for number in range(rounds):
        rows = rng.standard_normal((m, columns))
        lie(rows, number, rng)
        detector.observe(rows)
    return {one.worker: one.flagged for one in detector.evidence() if one.flagged is not None}


def honest(rows: np.ndarray, number: int, rng: np.random.Generator) -> None:
    """Change nothing."""


def heavy_tailed(rows: np.ndarray, _: int, rng: np.random.Generator) -> None:
    """Let someone be far beyond the others in every round, each time another."""
    rows /= rng.random((len(rows), 1)) ** 2


def scaled(q: int, scale: float, *, first: int = 0, often: float = 1.0) -> Lie:
    def lie(rows: np.ndarray, number: int, rng: np.random.Generator) -> None:
        struck = rng.random(q) < often
        if number >= first:
            rows[:q][struck] *= scale

    return lie


@pytest.mark.parametrize(
    ("q", "b", "scale", "limit"),
    [
        *((1, 6, 200, 5), (1, 6, 1.5, 5), (1, 1, 200, 5), (3, 6, 1.5, 10), (6, 6, 1.5, 20)),
        *((1, 9, 200, 6), (6, 9, 2, 30), (6, 6, math.nan, 20), (2, 6, -math.inf, 8)),
    ],
)
def test_only_byzantine_workers_are_flagged_and_soon(
    q: int, b: int, scale: float, limit: int
) -> None:
    found = first_flagged(scaled(q, scale), b=b)
    assert set(found) == set(range(q))
    assert max(found.values()) <= limit


@pytest.mark.parametrize(("m", "b", "limit"), [(4, 1, 15), (5, 1, 10), (5, 2, 15), (64, 20, 5)])
def test_worlds_of_other_sizes(m: int, b: int, limit: int) -> None:
    found = first_flagged(scaled(1, 3.0), m=m, b=b, rounds=limit)
    assert set(found) == {0}


@pytest.mark.parametrize(
    ("scale", "often", "limit"), [(50, 0.2, 40), (50, 0.05, 140), (1.5, 0.2, 160)]
)
def test_worker_that_is_faulty_now_and_then_is_flagged(
    scale: float, often: float, limit: int
) -> None:
    assert set(first_flagged(scaled(1, scale, often=often), rounds=limit)) == {0}


@pytest.mark.parametrize(("q", "scale", "limit"), [(1, 50, 5), (1, 1.5, 9), (3, 1.5, 17)])
def test_worker_that_turns_faulty_late_is_flagged_as_soon(q: int, scale: float, limit: int) -> None:
    found = first_flagged(scaled(q, scale, first=400), rounds=430)
    assert set(found) == set(range(q))
    assert max(found.values()) <= 400 + limit


@pytest.mark.parametrize(("scale", "limit"), [(50, 9), (1.5, 24)])
def test_worker_that_turns_faulty_while_few_rounds_are_observed_is_flagged(
    scale: float, limit: int
) -> None:
    rng = np.random.default_rng(0)
    detector = Detector(M, B)
    looked = 0
    for number in range(400 + limit):
        rows = rng.standard_normal((M, COLUMNS))
        if number >= 400:
            rows[3] *= scale
        if detector.wants():
            detector.observe(rows)
            looked += number < 400
        else:
            detector.rest()
    assert detector.flagged() == (3,)
    assert looked < 64 + 110
    since = detector.evidence()[3].flagged
    assert since is not None
    assert 400 < since <= 400 + limit


def test_a_few_wild_cells_are_enough() -> None:
    def lie(rows: np.ndarray, _: int, rng: np.random.Generator) -> None:
        rows[4, rng.random(rows.shape[1]) < 0.02] *= 1e20

    assert set(first_flagged(lie, rounds=12)) == {4}


def test_honest_workers_are_left_alone() -> None:
    assert first_flagged(honest, rounds=1000) == {}
    assert first_flagged(heavy_tailed, rounds=1000) == {}


def framed_by_the_rule(strength: float) -> Lie:
    """Six liars sit on the other side of worker 19's values, so that rules drop those."""

    def lie(rows: np.ndarray, _: int, __: np.random.Generator) -> None:
        centre, spread = rows[6:].mean(axis=0), rows[6:].std(axis=0)
        rows[:6] = centre - strength * spread * np.sign(rows[19] - centre)

    return lie


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_byzantine_workers_cannot_frame_through_the_rule(strength: float) -> None:
    """The dropped shares do point at the victim, which is why they accuse nobody."""
    lie = framed_by_the_rule(strength)
    assert 19 not in first_flagged(lie, rounds=100)
    rng = np.random.default_rng(1)
    detector = Detector(M, B)
    for number in range(30):
        rows = rng.standard_normal((M, 2000))
        lie(rows, number, rng)
        detector.update(phocas.Phocas(b=6).explain(rows).dropped)
    assert detector.flagged() == ()
    if strength >= 1:
        assert 19 in detector.unusual()


def crowd(rows: np.ndarray) -> np.ndarray:
    return apart_of(rows[6:])


def framed_by_distance(rows: np.ndarray, _: int, rng: np.random.Generator) -> None:
    """Liars sit opposite to the victim, as far from it as can be, and near to everyone else."""
    centre = rows[6:].mean(axis=0)
    rows[:6] = centre - 0.8 * (rows[19] - centre) + 1e-3 * rng.standard_normal((6, rows.shape[1]))


def framed_when_it_pays(rows: np.ndarray, _: int, __: np.random.Generator) -> None:
    """Liars let the victim be the farthest when chance has made it so, and hide it otherwise."""
    apart = crowd(rows)
    centre = rows[6:].mean(axis=0)
    rows[:6] = centre if apart[:-1, -1].mean() > apart.mean() else 100 * centre + 3


def framed_by_ties(rows: np.ndarray, _: int, __: np.random.Generator) -> None:
    """Liars copy whoever is farther than the victim, so that nobody but the victim stands alone."""
    apart = crowd(rows).mean(axis=0)
    order = np.argsort(apart)[::-1]
    ahead = [6 + int(i) for i in order if apart[i] > apart[-1]][:6]
    rows[: len(ahead)] = rows[ahead]
    rows[len(ahead) : 6] = rows[6:].mean(axis=0)


def framed_by_references(rows: np.ndarray, _: int, __: np.random.Generator) -> None:
    """Liars are references for whom the victim is always the farthest."""
    rows[:6] = rows[6:19].mean(axis=0) - 0.5 * (rows[19] - rows[6:19].mean(axis=0))


@pytest.mark.parametrize(
    "lie", [framed_by_distance, framed_when_it_pays, framed_by_ties, framed_by_references]
)
def test_byzantine_workers_cannot_frame_through_distances(lie: Lie) -> None:
    found = [first_flagged(lie, rounds=60, seed=seed) for seed in range(12)]
    assert not any(set(one) - set(range(6)) for one in found)


def test_byzantine_workers_that_take_turns_cause_no_false_alarm() -> None:
    def lie(rows: np.ndarray, number: int, _: np.random.Generator) -> None:
        rows[number % 6] *= 30

    assert set(first_flagged(lie, rounds=300)) <= set(range(6))


@pytest.mark.parametrize("attack", ["alie:q=6", "mimic:q=6", "ipm:q=6"])
def test_attack_within_honest_noise_causes_no_false_alarm(attack: str) -> None:
    liars = parse_attack(attack)

    def lie(rows: np.ndarray, number: int, rng: np.random.Generator) -> None:
        liars.corrupt(rows, rng=rng, round=number)

    assert set(first_flagged(lie, rounds=200)) <= set(range(6))


@pytest.mark.parametrize(("q", "rounds"), [(1, 24), (3, 24), (6, 32)])
def test_worker_that_pulls_back_within_noise_is_flagged_by_direction(q: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    plain, directed = Detector(M, B), Detector(M, B, direction=True)
    way = rng.standard_normal(COLUMNS)
    for _ in range(rounds):
        rows = way + 4 * rng.standard_normal((M, COLUMNS))
        rows[:q] *= -1
        plain.observe(rows)
        directed.observe(rows, direction=way + rng.standard_normal(COLUMNS))
    assert directed.flagged() == tuple(range(q))
    assert plain.flagged() == ()


@pytest.mark.parametrize("against", ["victim", "itself", "seen"])
def test_byzantine_workers_cannot_frame_through_the_direction(against: str) -> None:
    """Liars make the course what they like, from all that they saw before, and hide or pull."""
    rng = np.random.default_rng(0)
    detector = Detector(M, B, direction=True)
    past = np.zeros((M, COLUMNS))
    for _ in range(300):
        course = {"victim": -past[19], "itself": -past[B:].mean(axis=0), "seen": past[0]}[against]
        rows = 1 + 3 * rng.standard_normal((M, COLUMNS))
        rows[:B] = rows[B:].mean(axis=0) if against == "victim" else course
        detector.observe(rows, direction=course)
        past = rows
    assert set(detector.flagged()) <= set(range(B))


@pytest.mark.parametrize("course", [0.0, np.nan, np.inf, None])
def test_a_direction_without_progress_is_no_evidence(course: float | None) -> None:
    rng = np.random.default_rng(0)
    detector = Detector(8, 2, direction=True)
    way = None if course is None else np.full(COLUMNS, course)
    for _ in range(30):
        rows = 1 + rng.standard_normal((8, COLUMNS))
        rows[3] = [np.nan, 1e200, -1e200][rng.integers(3)]
        detector.observe(rows, direction=way)
    assert detector.flagged() == (3,)
    assert detector.direction_test is not None
    wealth = detector.direction_test.wealth
    assert wealth.max() < 1  # nothing was staked, so that nothing was won or lost
    assert (wealth == wealth[..., :1]).all()


def alarms(runs: int, rounds: int, m: int, b: int, together: int, seed: int) -> int:
    """Count runs in which an honest worker is flagged, with one reference and the least slack.

    All references of a run are the worst that they can be: one and the same. The honest are so few
    that odds are fair to the last digit, and b liars are nearest to everyone.
    """
    rng = np.random.default_rng(seed)
    reach = np.array(tail_sizes(m, b))[:, None, None]
    odds = (m - b - 1) / reach
    prior = 1 / reach / (1 / reach).sum()
    found = 0
    for _ in range(0, runs, together):
        wealth = np.zeros((3, len(reach), together, m - b - 1))
        ever = np.zeros(together, bool)
        for number in range(rounds):
            ranks = rng.random((together, m - b - 1)).argsort(axis=1) + 1
            won = ranks <= reach
            for style, (share, part) in enumerate([(0.95, 0.8), (0.6, 0.1), (0.2, 0.1)]):
                wealth[style] += part * prior * (invested_by(number + 1) - invested_by(number))
                wealth[style] *= 1 - share + share * odds * won
            ever |= wealth.sum(axis=(0, 1)).max(axis=1) >= m / FALSE_ALARM
        found += int(ever.sum())
    return found


def test_false_alarms_are_as_rare_as_guaranteed() -> None:
    assert alarms(runs=4000, rounds=60, m=20, b=6, together=2000, seed=0) <= 9  # 4 at the most


@pytest.mark.slow
@pytest.mark.parametrize(("m", "b"), [(20, 6), (5, 1), (20, 9)])
def test_false_alarms_are_as_rare_as_guaranteed_in_many_runs(m: int, b: int) -> None:
    runs = 100_000
    found = alarms(runs=runs, rounds=200, m=m, b=b, together=5000, seed=1)
    assert found <= runs * FALSE_ALARM


def rich(m: int, b: int, *, by_score: bool = False) -> EValueTest:
    """Return bets that all have one coin, and to which nothing new is added any more."""
    bets = EValueTest(m, b, by_score=by_score)
    bets.wealth[:] = 1.0
    bets.usual[:] = 1.0
    bets._invested[:] = 0.0
    return bets


@pytest.mark.parametrize("lie", ["near", "infinite", "tied", "chosen"])
def test_e_value_of_an_honest_worker_does_not_grow_on_average(lie: str) -> None:
    """An honest worker has each place among the honest once, and liars answer to each of them."""
    m, b = 8, 2
    reference, worker, honest_count = m - 1, m - 2, m - b - 1
    worth = []
    for place in range(1, honest_count + 1):
        apart = np.zeros((m, m))
        apart[reference, b:worker] = np.delete(np.arange(1.0, honest_count + 1), place - 1)
        apart[reference, worker] = place
        farthest = float(honest_count)
        apart[reference, :b] = {
            "near": 0.1,
            "infinite": np.inf,
            "tied": farthest,
            "chosen": 0.1 if place > honest_count - b else farthest,
        }[lie]
        bets = rich(m, b)
        bets.observe(np.stack([apart, apart]))
        worth.append(bets.wealth[:, :, :, reference, worker])
    assert np.mean(worth, axis=0).max() <= 1 + 1e-9
    if lie == "near":
        assert np.mean(worth, axis=0)[:, :3].min() >= 1 - 1e-9  # fair: nothing is given away


@pytest.mark.parametrize("lie", ["near", "infinite", "tied"])
def test_e_value_by_scores_of_an_honest_worker_does_not_grow_on_average(lie: str) -> None:
    """An honest worker has each place among the honest once, whatever the scores of the faulty."""
    m, b = 8, 2
    worth = []
    for place in range(1, m - b + 1):
        scores = np.zeros(m)
        scores[b:] = np.insert(np.delete(np.arange(1.0, m - b + 1), place - 1), 0, place)
        scores[:b] = {"near": 0.1, "infinite": np.inf, "tied": float(m - b)}[lie]
        bets = rich(m, b, by_score=True)
        bets.observe(np.stack([scores, scores])[:, None])
        worth.append(bets.wealth[:, :, :, 0, b])
    assert np.mean(worth, axis=0).max() <= 1 + 1e-9
    if lie == "near":
        assert np.mean(worth, axis=0)[:, :3].min() >= 1 - 1e-9  # fair: nothing is given away


def test_a_missing_reference_changes_no_e_value() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 50))
    rows[3] = np.nan
    bets = rich(8, 2)
    bets.observe(distances(products(rows)))
    assert (bets.wealth[..., 3, :] == 1).all()
    assert (bets.wealth[..., 4, :] != 1).any()
    assert first_flagged(lambda rows, _, __: rows.fill(np.nan), rounds=40) == {}


@pytest.mark.parametrize(("m", "b"), [(1, 0), (2, 0), (2, 1), (3, 1), (20, 0), (20, 19), (5, 4)])
def test_no_worker_is_flagged_where_detection_is_impossible(m: int, b: int) -> None:
    assert first_flagged(scaled(1, 1e6), m=m, b=b, rounds=100) == {}


@pytest.mark.parametrize("m", [4, 5, 8, 20])
def test_without_b_the_largest_possible_b_is_assumed(m: int) -> None:
    detector = Detector(m)
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = rng.standard_normal((m, COLUMNS))
        rows[0] *= 3
        detector.observe(rows)
    assert (detector.flagged() == (0,)) == bool(tail_sizes(m, detector.b))
    assert bool(tail_sizes(m, detector.b)) == (m > 4)


@pytest.mark.parametrize("scale", [1e-170, 1e-30, 1.0, 1e30, 1e150])
def test_only_the_order_of_distances_matters(scale: float) -> None:
    def lie(rows: np.ndarray, _: int, __: np.random.Generator) -> None:
        rows[2] *= 2
        rows *= scale

    found = first_flagged(lie, rounds=8)
    assert found == ({2: 5} if scale > 1e-100 else {})


def test_byzantine_holders_of_columns_decide_nothing() -> None:
    """Of eight holders two say that worker 7 lies, and that worker 0 does not."""
    m, b = 8, 2
    rng = np.random.default_rng(0)
    bets = [EValueTest(m, b) for _ in range(m)]
    detector = Detector(m, b)
    for _ in range(40):
        rows = rng.standard_normal((m, 8, 50))
        rows[0] *= 3
        odds = np.stack(
            [one.observe(distances(products(rows[:, i]))) for i, one in enumerate(bets)]
        )
        odds[:2] = [0, 0, 0, 0, 0, math.nan, -math.inf, math.inf]
        detector.observe_holders(odds)
    assert detector.flagged() == (0,)


def test_a_faulty_server_is_distinguished_from_a_faulty_worker() -> None:
    d, s = 4000, 20
    bounds = shard_bounds(d, s)
    rng = np.random.default_rng(0)
    for first, stop, q, servers, suspects in [
        (*bounds[7], M, (7,), ()),
        (*bounds[7], B, (), None),
        (0, d, 3, (), (0, 1, 2)),
    ]:
        detector = Detector(M, B, bounds)
        for _ in range(60):
            rows = rng.standard_normal((M, d)).astype(np.float32)
            hit = rng.random((q, stop - first)) < 0.01
            rows[:q, first:stop][hit] *= 1e20
            sample = Sample.draw(d, rng)
            detector.observe(sample.take(rows), sample)
        assert detector.servers() == servers
        assert suspects is None or detector.flagged() == suspects


def test_gradients_that_vanish_do_not_make_honest_ones_absurd() -> None:
    """Workers with momentum have learned their own labels; now and then one sees something new."""
    d, s = 4000, 20
    bounds = shard_bounds(d, s)
    rng = np.random.default_rng(0)
    detector = Detector(M, B, bounds, momentum=0.9)
    rows = np.zeros((M, d), np.float32)
    samples = [Sample.draw(d, rng) for _ in range(342)]
    usual = []
    for number, (sample, following) in enumerate(itertools.pairwise(samples)):
        scale = 0.05 if number < 20 else 1e-13
        gradients = scale * rng.standard_normal((M, d)).astype(np.float32)
        if number > 200:
            gradients[number % M, bounds[18][0] :] = 0.6
        before, rows = rows, np.float32(0.9) * rows + np.float32(0.1) * gradients
        usual.append(float(np.median(np.abs(rows - 0.9 * before.astype(float)))))
        sent = rows.copy()
        if number >= 340:
            sent[:, slice(*bounds[7])] *= 1e20
        detector.observe(sample.take(sent), sample, following.take(sent))
        assert detector.servers() == ((7,) if number >= 340 else ())
    assert min(usual) < 1e-11 * usual[0]


def test_a_worker_that_differs_from_the_start_is_still_compared_to_its_own_past() -> None:
    rng = np.random.default_rng(0)
    detector = Detector(M, B)
    for number in range(330):
        rows = rng.standard_normal((M, COLUMNS))
        rows[0] *= 4
        rows[1] *= 8 if number >= 300 else 3
        detector.observe(rows)
        if number == 299:
            assert detector.unusual() == ()
    assert detector.unusual() == (1,)
    assert detector.flagged() == (0, 1)  # both differ from the others


def test_worker_that_is_dropped_far_more_than_others_is_unusual_at_once() -> None:
    detector = Detector(M, B)
    shares = np.full(M, 0.01)
    shares[4] = 1.0
    detector.update(shares)
    assert detector.unusual() == (4,)
    assert detector.flagged() == ()
    np.testing.assert_array_equal(detector.shares(), shares)
    krum = Detector(M, B)
    rng = np.random.default_rng(0)
    for _ in range(100):
        krum.update(np.arange(M) != rng.integers(M))
        assert krum.unusual() == ()


def test_samples_reach_every_column_and_know_their_owners() -> None:
    rng = np.random.default_rng(0)
    for d in (1, 7, 33, 1500):
        rows = np.arange(2 * d, dtype=np.float32).reshape(2, d)
        bounds = shard_bounds(d, 3)
        seen: set[int] = set()
        for _ in range(200):
            sample = Sample.draw(d, rng)
            values = sample.take(rows)
            np.testing.assert_array_equal(values[1], values[0] + d)
            parts = [rows[:, begin:end][:, sample.columns(begin, end)] for begin, end in bounds]
            np.testing.assert_array_equal(sample.joined(parts), values)
            seen |= set(values[0].ravel().astype(int).tolist())
            for run, owner in zip(values[0].astype(int), sample.owners(bounds), strict=True):
                within = [begin <= run[0] and run[-1] < end for begin, end in bounds]
                assert owner == (within.index(True) if any(within) else -1)
        assert seen == set(range(d))


def test_distances_are_exact_enough_and_survive_everything() -> None:
    rng = np.random.default_rng(0)
    rows = 1e4 + rng.standard_normal((5, 64)).astype(np.float32)
    apart = ((rows[:, None].astype(float) - rows[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(apart_of(rows.astype(float)), apart, rtol=1e-4)
    rows = rng.standard_normal((5, 64))
    rows[1, 3], rows[2, 5], rows[3, 7] = np.nan, -np.inf, 1e200
    apart = apart_of(rows)
    assert np.isinf(apart[1:4][~np.eye(5, dtype=bool)[1:4]]).all()
    assert apart[0, 4] == pytest.approx(((rows[0] - rows[4]) ** 2).sum())
    cosine = rows[0] @ rows[4] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[4])
    assert distances(products(rows))[1, 0, 4] == pytest.approx(1 - cosine)


def test_state_goes_on() -> None:
    rng = np.random.default_rng(7)
    bounds = shard_bounds(COLUMNS, 2)
    whole, first, second = (Detector(6, 2, bounds, direction=True) for _ in range(3))
    for i in range(40):
        rows = rng.standard_normal((6, COLUMNS))
        rows[0] *= 1.5
        rows[5, i] = 1e30
        sample = Sample.draw(COLUMNS, rng)
        for one in (whole, first if i < 25 else second):
            one.observe(sample.take(rows), sample, None, sample.take(np.ones((1, COLUMNS)))[0])
            one.update(rows[:, 0] > 0)
        if i == 24:
            second.load_state({name: array.copy() for name, array in first.state().items()})
    for name, array in whole.state().items():
        np.testing.assert_array_equal(array, second.state()[name])
    assert whole.evidence() == second.evidence()
    assert whole.unusual() == second.unusual()
    assert 5 in whole.flagged()
    with pytest.raises(ValueError, match="6 workers"):
        Detector(7, 2, bounds, direction=True).load_state(whole.state())


def test_rows_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="each of 6 workers: got shape"):
        Detector(6, 2).observe(np.zeros((5, 3)))
    with pytest.raises(ValueError, match="each of 6 workers: got shape"):
        Detector(6, 2).observe(np.zeros(6))
