"""Partial participation: m of N clients per round, Byzantine clients, blame by client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phocas.attacks import parse_attack
from phocas.attacks.participation import among
from phocas.data import Dataset, batch_indices, load
from phocas.experiments.config import ConfigError, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.training import Task, Trainer

N, M = 40, 10


@pytest.fixture(scope="module")
def data() -> Dataset:
    made: Dataset = load("synthetic:train=400,test=60,side=8,noise=20")
    return made


def make(data: Dataset, **settings: Any) -> Trainer:
    given: dict[str, Any] = {"rule": "phocas:b=4", "num_workers": M, "clients": N, "lr": 0.3}
    return Trainer("softmax", data=data, **{**given, **settings})


def test_clients_participate_equally_often_with_their_own_samples(data: Dataset) -> None:
    task = Task.make(
        "softmax", data=data, rule="median", num_workers=M, clients=N, split="partition", seed=5
    )
    seen = np.zeros(N)
    for round_ in range(400):
        participants = task.participants(round_)
        assert participants is not None
        assert len(set(participants.tolist())) == M
        assert (np.diff(participants) > 0).all()
        seen[participants] += 1
    # Binomial(400, 1/4) has a standard deviation of 8.7; six of them are beyond chance for 40
    # clients.
    assert abs(seen - 100).max() < 6 * 8.7
    participants = task.participants(3)
    assert participants is not None
    labels = data.train_labels[batch_indices(task.assignment, N, 32, 5, 3)[participants]]
    assert (task.batches(3)[1].numpy() == labels).all()


def test_participating_byzantine_clients_have_the_first_rows(data: Dataset) -> None:
    with make(data, attack="constant:q=16,value=1000", rule="median") as trainer:
        for done in trainer.rounds(20):
            participants = done.participants
            assert participants is not None
            byzantine = int((participants < 16).sum())
            rows = trainer.server.rows
            assert (rows[:byzantine] == 1000).all()
            assert (rows[byzantine:].abs() < 1000).all()
            assert done.touched == byzantine * rows.shape[1]


def test_resampled_byzantine_clients_are_hypergeometric() -> None:
    attack = parse_attack("gaussian:q=16,who=resampled")
    participants = np.arange(20, 30)
    rng = np.random.default_rng(2)
    numbers = [among(attack, participants, N, rng).q for _ in range(2000)]  # type: ignore[attr-defined]
    assert np.mean(numbers) == pytest.approx(4, abs=0.15)
    assert max(numbers) > 6
    whole = parse_attack("a-little-is-enough:q=39")
    left = among(whole, np.arange(M), N, rng)
    assert left.q == M - 1  # type: ignore[attr-defined]  # one is left to be lied about


def test_clients_are_judged_only_by_rounds_they_participated_in(data: Dataset) -> None:
    with make(data, attack="gaussian:q=4") as trainer:
        rounds = list(trainer.rounds(60))
        shares = trainer.participation.shares()
    assert {share.client for share in shares[:4]} == set(range(4))
    assert all(done.flagged == () for done in rounds)
    by_hand: dict[int, list[float]] = {}
    for done in rounds:
        assert done.participants is not None
        for client, dropped in zip(done.participants.tolist(), done.dropped, strict=True):
            by_hand.setdefault(client, []).append(float(dropped))
    for share in shares:
        own = by_hand[share.client]
        assert share.rounds == len(own)
        assert share.dropped == pytest.approx(np.mean(own))
    assert rounds[-1].loss < rounds[0].loss


def test_full_participation_equals_a_plain_run(data: Dataset) -> None:
    settings: dict[str, Any] = {"attack": "gaussian:q=3", "local_steps": 2, "num_workers": N}
    vectors = []
    for clients in (None, N):
        with make(data, clients=clients, **settings) as trainer:
            list(trainer.rounds(3))
            vectors.append(trainer.server.vector.clone())
    assert torch.equal(*vectors)


def test_resumed_run_keeps_its_bits_and_dropped_shares(tmp_path: Path, data: Dataset) -> None:
    values = {
        "dataset": "synthetic:train=400,test=60,side=8,noise=20",
        "model": "softmax",
        "workers": M,
        "clients": N,
        "servers": 1,
        "rule": "phocas:b=4",
        "attack": "sign-flip:q=8",
        "split": "dirichlet:alpha=0.3",
        "rounds": 12,
        "evaluate_every": 5,
        "checkpoint_rounds": 4,
    }
    tables = []
    for name, stops in (("whole", [99]), ("halves", [7, 99])):
        config = make_config({**values, "results": str(tmp_path / f"{name}.sqlite")})
        for stop in stops:
            steps = iter(range(stop))
            record = execute(config, should_stop=lambda it=steps: next(it, None) is None, data=data)  # type: ignore[misc]
        with Results(Path(config.results), read=True) as results:
            kept = results.table("dropped", record.id)
            tables.append(([(r["round"], r["worker"], r["share"]) for r in kept], record))
    (whole, one), (halves, two) = tables
    assert whole == halves
    assert one.final_accuracy == two.final_accuracy
    first = [worker for at, worker, _ in whole if at == 5]
    assert M < len(first) <= N
    assert not any(math.isnan(share) for _, _, share in whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": M - 1}, "clients must be at least (num_)?workers, .*: got 9 clients for 10"),
        ({"clients": N, "worker_momentum": 0.9}, "take part in every round"),
        ({"clients": N, "attack": "gaussian:q=41"}, "q <= m: got q=41 with m=40"),
        ({"clients": N, "rule": "phocas:b=5"}, "2b < m: got b=5 with m=10"),
    ],
)
def test_impossible_settings_are_rejected(
    data: Dataset, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(data, **options)
    with pytest.raises(ConfigError, match=message):
        make_config({"rule": "phocas:b=4", "workers": M, **options})
