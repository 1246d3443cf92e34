"""Data stored for each round beside its numbers: shares, evidence, layers and pictures."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.experiments.test_results import a_round, begin

from phocas.experiments import detection_tables
from phocas.experiments.config import RunConfig, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute

SMALL: dict[str, Any] = {
    "dataset": "synthetic:train=80,test=20,side=8",
    "model": "softmax",
    "workers": 9,
    "servers": 3,
    "rounds": 24,
    "evaluate_every": 8,
    "rule": "phocas:b=3",
    "attack": "gaussian:q=2",
}


def config(path: Path, **more: Any) -> RunConfig:
    return make_config({**SMALL, "results": str(path), **more})


def test_run_stores_the_dropped_shares(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    record = execute(config(path, record_matrix=10))
    with Results(path, read=True) as results:
        shares = results.shares(record.id)
        assert shares is not None
        assert shares.rounds.tolist() == list(range(1, 25))
        assert shares.workers.shape == (24, 9)
        assert shares.workers[:, :2].min() > 0.9
        assert shares.workers[:, 2:].mean() < 0.4
        assert shares.servers is not None
        assert shares.servers.shape == (3, 9)
        assert shares.server_round == 24
        evidence = results.evidence(record.id)
        assert [each.worker for each in evidence] == list(range(9))
        assert tuple(each.worker for each in evidence if each.flagged) == record.suspects == (0, 1)
        assert results.layers(record.id) == [("1.weight", 640), ("1.bias", 10)]
        pictures = list(results.pictures(record.id))
    assert [picture.round for picture in pictures] == [10, 20]
    for picture in pictures:
        assert picture.values.shape == picture.lost.shape == (9, 256)
        # A Byzantine value may by chance be near enough to be kept, but rarely.
        assert (picture.lost[:2] == 255).mean() > 0.9
        assert picture.lost.sum(axis=0).max() == 3 * 255


def test_pictures_change_neither_results_nor_identity(tmp_path: Path) -> None:
    plain, shown = config(tmp_path / "a.sqlite"), config(tmp_path / "b.sqlite", record_matrix=1)
    assert plain.identity() == shown.identity()
    first, second = execute(plain), execute(shown)
    assert first.final_accuracy == second.final_accuracy
    assert first.suspects == second.suspects
    with Results(tmp_path / "b.sqlite", read=True) as results:
        assert len(list(results.pictures(second.id))) == 24


def test_interrupted_run_stores_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = execute(config(tmp_path / "whole.sqlite", record_matrix=5))
    path = tmp_path / "cut.sqlite"
    rounds = iter(range(100))
    execute(config(path, record_matrix=5), should_stop=lambda: next(rounds) == 11)
    cut = execute(config(path, record_matrix=5))
    longer = execute(config(path, record_matrix=5, rounds=30))
    with Results(tmp_path / "whole.sqlite") as one, Results(path) as two:
        expected, found = one.shares(whole.id), two.shares(cut.id)
        assert expected is not None
        assert found is not None
        np.testing.assert_array_equal(found.workers, expected.workers)
        assert two.evidence(cut.id) == one.evidence(whole.id)
        for mine, theirs in zip(two.pictures(cut.id), one.pictures(whole.id), strict=True):
            np.testing.assert_array_equal(mine.values, theirs.values)
        extended = two.shares(longer.id)
        assert extended is not None
        assert extended.rounds.tolist() == list(range(1, 31))
        assert [picture.round for picture in two.pictures(longer.id)] == [5, 10, 15, 20, 25, 30]


def test_stored_size_of_a_long_run_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection_tables, "MOST_ROUNDS", 10)
    with Results(tmp_path / "r.sqlite") as results:
        run = begin(results)  # of 500 rounds
        results.record(run, [a_round(number, by_server=True) for number in range(1, 501)])
        shares = results.shares(run)
    assert shares is not None
    assert shares.rounds.tolist() == list(range(50, 501, 50))


def test_files_without_these_tables_are_read_and_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    record = execute(config(path))
    with sqlite3.connect(path) as connection:
        for table in detection_tables.TABLES:
            connection.execute(f"DROP TABLE {table}")
    connection.close()
    with Results(path, read=True) as results:
        assert results.shares(record.id) is None
        assert results.evidence(record.id) == []
        assert results.layers(record.id) == []
        assert list(results.pictures(record.id)) == []
    longer = execute(config(path, rounds=26))
    with Results(path, read=True) as results:
        shares = results.shares(longer.id)
        assert shares is not None
        assert shares.rounds.tolist() == [25, 26]


def test_links_with_absurd_values_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    attack = "gambler:server=1,probability=0.2"
    record = execute(config(path, attack=attack, rounds=12, rule="phocas:b=2"))
    with Results(path, read=True) as results:
        absurd = results.absurd(record.id)
    assert absurd is not None
    assert absurd.shape == (3, 9)
    assert absurd[1].sum() > 2
    assert not absurd[[0, 2]].any()
    assert record.suspect_servers == (1,)
