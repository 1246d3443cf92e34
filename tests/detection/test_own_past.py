"""Workers whose data differ are compared with their own past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from phocas.attacks import SignFlip
from phocas.attacks.base import Scene
from phocas.attacks.touched import Touched
from phocas.detection import Detector
from phocas.detection.own_past import FIRST_VERDICT, OwnPast
from phocas.integrations.client_history import MOST_CLIENTS, ClientHistory
from phocas.integrations.client_replies import Client
from phocas.integrations.clients import Terms
from phocas.integrations.merging.tensors import in_memory
from phocas.rules import Median
from phocas.training.trainer import Trainer

M, COLUMNS = 12, 64
ONSET = 100


def gradients(rounds: int, seed: int) -> np.ndarray:
    """Return rows of workers with other data: own directions, sizes and noise, and common drift.

    The logarithm of a row's length has a deviation of 0.5 from round to round. Lengths fall to a
    tenth, and in round 60 the learning rate, and with it all rows, changes by a factor of 8.
    """
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(M, COLUMNS)) * np.exp(rng.normal(size=(M, 1)))
    noise = rng.uniform(0.2, 1.5, size=(M, 1)) * np.linalg.norm(means, axis=1)[:, None] / 8
    drift = np.exp(-np.linspace(0, 2.3, rounds)) * np.where(np.arange(rounds) < 60, 1.0, 8.0)
    sizes = np.exp(0.5 * rng.normal(size=(rounds, M, 1)))
    rows = means + noise * rng.normal(size=(rounds, M, COLUMNS))
    return np.asarray(rows * sizes * drift[:, None, None])


def flags(rows: np.ndarray, momentum: float = 0.0) -> dict[int, int]:
    """Return the flagged workers, each with the round in which it was flagged."""
    detector = Detector(M, 3, momentum=momentum, data="differ")
    for values in rows:
        detector.observe(values)
    return {one.worker: one.flagged for one in detector.evidence() if one.flagged}


@pytest.mark.parametrize("seed", range(10))
def test_honest_workers_with_other_data_are_not_flagged(seed: int) -> None:
    assert flags(gradients(300, seed)) == {}


def test_the_test_between_workers_flags_the_same_honest_workers() -> None:
    detector = Detector(M, 3)
    for values in gradients(300, 0):
        detector.observe(values)
    assert detector.flagged()


FACTORS = {"sign-flip": -1.0, "scaled": 10.0, "nan": np.nan, "overflow": 1e200}


def faulty(fault: str, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return what a faulty worker sends in place of a row."""
    noise = rng.normal(size=row.shape)
    if fault == "gaussian":
        return 200 * noise
    if fault == "noise of the same length":
        return np.asarray(noise * np.linalg.norm(row) / np.linalg.norm(noise))
    return FACTORS[fault] * row


@pytest.mark.parametrize("fault", [*FACTORS, "gaussian", "noise of the same length"])
@pytest.mark.parametrize("workers", [[4], [0, 5, 7]])
def test_workers_that_become_faulty_are_flagged_within_30_rounds(
    fault: str, workers: list[int]
) -> None:
    rng = np.random.default_rng(1)
    rows = gradients(ONSET + 30, 3)
    for values in rows[ONSET:]:
        for worker in workers:
            values[worker] = faulty(fault, values[worker], rng)
    found = flags(rows)
    assert sorted(found) == workers
    assert all(ONSET < when <= ONSET + 30 for when in found.values())


def test_worker_that_is_byzantine_from_its_first_round_is_its_own_measure() -> None:
    rows = gradients(200, 5)
    rows[:, 2] *= -10
    assert flags(rows) == {}


def test_with_momentum_only_what_is_new_in_a_row_is_compared() -> None:
    rows = gradients(ONSET + 30, 6)
    sent = np.zeros_like(rows)
    velocity = np.zeros_like(rows[0])
    for number, values in enumerate(rows):
        velocity = 0.9 * velocity + 0.1 * values
        sent[number] = velocity
    assert flags(sent, momentum=0.9) == {}
    sent[ONSET:, 3] *= 10
    assert list(flags(sent, momentum=0.9)) == [3]


def test_history_counts_by_participation() -> None:
    rng = np.random.default_rng(0)
    rows = gradients(300, 7)
    part, whole = OwnPast(M), OwnPast(M)
    taken = np.zeros(M, int)
    for values in rows:
        who = np.sort(rng.choice(M, 8, replace=False))
        part.observe(values[who], who)
        taken[who] += 1
        assert set(part.no_verdict()) >= set(np.flatnonzero(taken < FIRST_VERDICT))
    for values in rows:
        whole.observe(values)
    assert part.no_verdict() == whole.no_verdict() == ()
    assert part.evidence().max() < 1


def test_late_joiner_has_no_verdict_before_it_has_a_past() -> None:
    test = OwnPast(M)
    others = np.arange(M - 1)
    for values in gradients(150, 8)[:100]:
        test.observe(values[others], others)
    assert test.no_verdict() == (M - 1,)
    for number, values in enumerate(gradients(150, 8)[100:]):
        values[M - 1] *= -1 if number % 2 else 100  # whatever it sends, it has no past
        test.observe(values)
        if number < FIRST_VERDICT - 1:
            assert M - 1 in test.no_verdict()
            assert test.evidence()[M - 1] == 0


def test_one_long_row_of_others_does_not_change_the_common_change() -> None:
    rows = gradients(130, 9)
    honest = [worker for worker in range(M) if worker not in (0, 1, 2)]
    rows[60:, [0, 1, 2]] *= 1e6  # three change together
    assert set(flags(rows)) == {0, 1, 2}
    assert not set(honest) & set(flags(rows))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_of_a_checkpoint_restores_the_past(momentum: float) -> None:
    rows = gradients(ONSET + 20, 10)
    rows[ONSET:, 1] *= -1
    first = Detector(M, 3, momentum=momentum, data="differ")
    for values in rows[:90]:
        first.observe(values)
    second = Detector(M, 3, momentum=momentum, data="differ")
    second.load_state({name: array.copy() for name, array in first.state().items()})
    for values in rows[90:]:
        first.observe(values)
        second.observe(values)
    assert np.array_equal(first.e_values, second.e_values)
    assert first.flagged() == second.flagged()


def test_forgotten_worker_has_no_verdict() -> None:
    detector = Detector(M, 3, data="differ")
    for values in gradients(60, 11):
        detector.observe(values)
    assert detector.no_verdict() == ()
    detector.forget(4)
    assert detector.no_verdict() == (4,)


def test_bad_words_are_rejected() -> None:
    with pytest.raises(ValueError, match="data must be one of alike, differ: got 'other'"):
        Detector(5, data="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data must be one of alike, differ: got 'mixed'"):
        Terms(Median(), data="mixed")


def model_of(values: np.ndarray) -> dict[str, object]:
    values = values.astype(np.float32)
    counter = np.array([3], np.int64)
    return {
        "a": in_memory("a", values[:40].reshape(4, 10), "a"),
        "steps": in_memory("steps", counter, "steps"),
        "b": in_memory("b", values[40:], "b"),
    }


@pytest.mark.parametrize("updates", [False, True])
def test_clients_are_compared_with_their_past_by_name(*, updates: bool) -> None:
    rng = np.random.default_rng(0)
    history: ClientHistory[str] = ClientHistory(seed=1)
    base = rng.normal(size=COLUMNS)
    names = [f"site-{number}" for number in range(M)]
    for number, rows in enumerate(gradients(150, 12)):
        rows[3] *= -1 if number >= ONSET else 1
        there = sorted(rng.choice(M, 10, replace=False).tolist())
        clients = [
            Client(names[i], None, model_of(rows[i] + (0 if updates else base)), 1.0)  # type: ignore[arg-type]
            for i in there
        ]
        history.observe(clients, model_of(base), updates=updates)  # type: ignore[arg-type]
        if number == 20:
            assert history.no_verdict(names) == names
    assert history.flagged() == ["site-3"]
    assert history.no_verdict([*names, "stranger"]) == ["stranger"]


def test_clients_beyond_the_limit_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phocas.integrations.client_history.MOST_CLIENTS", 2)
    assert MOST_CLIENTS == 1000
    history: ClientHistory[int] = ClientHistory()
    base = np.zeros(COLUMNS)
    for rows in gradients(40, 13):
        clients = [Client(i, None, model_of(rows[i]), 1.0) for i in range(4)]  # type: ignore[arg-type]
        history.observe(clients, model_of(base))  # type: ignore[arg-type]
    assert history.no_verdict([0, 1, 2, 3]) == [2, 3]


@dataclass(frozen=True)
class LateFlip(SignFlip):
    """Worker 0 sends its negative gradient from round 60 on."""

    def _corrupt(self, scene: Scene) -> Touched:
        return super()._corrupt(scene) if scene.round >= 60 else Touched(scene.shape)


SETTINGS: dict[str, Any] = {
    "data": "synthetic:train=2000,test=100",
    "rule": "trimmed-mean:b=2",
    "num_workers": 10,
    "split": "by-label",
    "lr": 0.05,
}


def test_real_run_by_label_flags_only_the_worker_that_turns() -> None:
    with Trainer("softmax", attack=LateFlip(q=1), **SETTINGS) as trainer:
        assert trainer.task.worker_data == "differ"
        rounds = list(trainer.rounds(90))
    assert [done.flagged for done in rounds[:60]] == [()] * 60
    assert rounds[-1].flagged == (0,)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"split": "iid"}, "alike"),
        ({"split": "partition"}, "alike"),
        ({"split": "dirichlet:alpha=0.1"}, "differ"),
        ({"split": "by-label"}, "differ"),
        ({"split": "by-label", "worker_data": "alike"}, "alike"),
        ({"split": "iid", "worker_data": "differ"}, "differ"),
    ],
)
def test_split_decides_what_is_compared(settings: dict[str, str], expected: str) -> None:
    with Trainer("softmax", **{**SETTINGS, **settings}) as trainer:
        assert trainer.task.worker_data == expected
        assert (trainer.detector.own_past is not None) == (expected == "differ")


def test_checkpoint_of_a_run_continues_the_past(tmp_path: object) -> None:
    path = f"{tmp_path}/state"
    with Trainer("softmax", attack=LateFlip(q=1), **SETTINGS) as trainer:
        list(trainer.rounds(70))
        trainer.save(path)
        last = list(trainer.rounds(10))[-1]
        e_values = trainer.detector.e_values
    with Trainer("softmax", attack=LateFlip(q=1), **SETTINGS) as trainer:
        trainer.load(path)
        assert list(trainer.rounds(10))[-1].flagged == last.flagged
        assert np.array_equal(trainer.detector.e_values, e_values)


def test_clients_of_a_run_are_compared_with_their_past() -> None:
    with Trainer("softmax", clients=14, **SETTINGS) as trainer:
        list(trainer.rounds(60))
        assert trainer.detector.no_verdict() == ()
        assert trainer.detector.flagged() == ()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["by-label", "dirichlet:alpha=0.1"])
def test_no_false_alarm_in_500_rounds(split: str) -> None:
    with Trainer("mlp", data="mnist", split=split, rule="phocas:b=8", seed=7) as trainer:
        assert list(trainer.rounds(500))[-1].flagged == ()
