"""Clients that no longer act as in their own past are excluded from training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phocas.attacks import SignFlip
from phocas.attacks.base import Scene
from phocas.attacks.touched import Touched
from phocas.experiments.config import ConfigError, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.report.page.contents import Contents
from phocas.report.run import about_run
from phocas.training import Trainer
from phocas.training.trainer import Round

ONSET = 60
SETTINGS: dict[str, Any] = {
    "data": "synthetic:train=1000,test=100,side=8",
    "rule": "trimmed-mean:b=2",
    "num_workers": 10,
    "clients": 12,
    "split": "by-label",
    "lr": 0.05,
}


@dataclass(frozen=True)
class LateFlip(SignFlip):
    """Byzantine clients send their negative gradients from round 60 on."""

    def _corrupt(self, scene: Scene) -> Touched:
        return super()._corrupt(scene) if scene.round >= ONSET else Touched(scene.shape)


def run(rounds: int, **settings: Any) -> list[Round]:
    with Trainer("softmax", attack=LateFlip(q=1), **{**SETTINGS, **settings}) as trainer:
        return list(trainer.rounds(rounds))


def drawn(done: Round, client: int) -> bool:
    assert done.participants is not None
    assert len(set(done.participants.tolist())) == 10
    return client in done.participants


def test_client_that_changes_is_excluded_and_readmitted() -> None:
    rounds = run(150, exclude="evidence:rounds=10")
    first = next(i for i, done in enumerate(rounds) if done.excluded)
    assert ONSET < first < 120
    assert all(done.excluded in ((), (0,)) for done in rounds)
    assert "excluded for 10 rounds, false alarm probability 0.001: 0" in rounds[first].news
    assert [drawn(done, 0) for done in rounds[first + 1 : first + 11]] == [False] * 10
    assert "readmitted after 10 rounds: 0" in rounds[first + 10].news
    assert any(drawn(done, 0) for done in rounds[first + 11 :])
    assert rounds[first + 10].flagged == ()


def test_never_is_the_default_and_changes_nothing() -> None:
    plain, named = run(100), run(100, exclude="never")
    late = run(100, exclude="evidence")
    assert [done.loss for done in plain] == [done.loss for done in named]
    assert all(done.excluded == () for done in plain)
    assert plain[-1].flagged == late[-1].flagged == late[-1].excluded == (0,)
    before = next(i for i, done in enumerate(late) if done.excluded) + 1
    assert [done.loss for done in plain[:before]] == [done.loss for done in late[:before]]
    assert not any(drawn(done, 0) for done in late[before:])


def test_rounds_are_filled_if_too_few_clients_remain() -> None:
    """With as many clients as workers nobody can be left out."""
    rounds = run(110, exclude="evidence", clients=10)
    assert rounds[-1].excluded == (0,)
    assert drawn(rounds[-1], 0)


def test_checkpoint_keeps_exclusions(tmp_path: Path) -> None:
    made: dict[str, Any] = {**SETTINGS, "attack": LateFlip(q=1), "exclude": "evidence:rounds=30"}
    with Trainer("softmax", **made) as trainer:
        list(trainer.rounds(100))
        assert trainer.exclusions.since
        trainer.save(tmp_path / "state")
        wanted = [(d.loss, d.excluded, d.news) for d in trainer.rounds(40)]
    with Trainer("softmax", **made) as trainer:
        trainer.load(tmp_path / "state")
        assert [(d.loss, d.excluded, d.news) for d in trainer.rounds(40)] == wanted
    assert any("readmitted" in line for *_, news in wanted for line in news)


def test_run_reports_exclusions(tmp_path: Path) -> None:
    """A client that sends NaN is excluded without a past."""
    path = tmp_path / "results.sqlite"
    config = make_config(
        {
            "dataset": "synthetic:train=400,test=60,side=8",
            "model": "softmax",
            "rule": "trimmed-mean:b=2",
            "workers": 8,
            "servers": 1,
            "clients": 10,
            "split": "by-label",
            "attack": "constant:q=1,value=nan",
            "exclude": "evidence:rounds=15",
            "rounds": 60,
            "results": str(path),
        }
    )
    execute(config)
    with Results(path, read=True) as results:
        (record,) = results.runs()
        found = results.exclusions(record.id)
        assert found
        assert {each.client for each in found} == {0}
        assert found[0].last == found[0].first + 14
        told = [str(each) for each in found]
        assert about_run(results, record)["excluded"] == told
    assert Contents(path).read()["runs"][0]["excluded"] == told
    assert str(found[0]) == f"0 (rounds {found[0].first} to {found[0].last})"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"exclude": "sometimes"}, "unknown policy of exclusion 'sometimes'"),
        ({"exclude": "evidence:rounds=0"}, "rounds >= 1: got rounds=0"),
        ({"exclude": "evidence:false_alarm=2"}, "needs 0 < false_alarm < 1"),
        ({"exclude": "evidence", "clients": None}, "exclude is for clients: set clients too"),
        (
            {"exclude": "evidence", "split": "iid"},
            "exclude compares each client with its own past: set worker_data = differ",
        ),
        ({"exclude": "evidence", "worker_data": "alike"}, "set worker_data = differ"),
        ({"exclude": "evidence", "engine": "ray"}, "exclude is for the local engine"),
    ],
)
def test_exclusion_that_has_no_effect_is_rejected(settings: dict[str, Any], complaint: str) -> None:
    given = {"workers": 10, "clients": 12, "split": "by-label", "rule": "trimmed-mean:b=2"}
    with pytest.raises(ConfigError, match=complaint):
        make_config({**given, **settings})


def test_identity_of_runs_without_the_policy_stays() -> None:
    given = {"workers": 10, "clients": 12, "split": "by-label", "rule": "trimmed-mean:b=2"}
    plain = make_config(given)
    assert plain.identity() == make_config({**given, "exclude": "never"}).identity()
    assert plain.identity() != make_config({**given, "exclude": "evidence"}).identity()
