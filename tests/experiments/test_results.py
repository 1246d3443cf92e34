"""Results files: versions, concurrent readers and writers, and rewinding to a checkpoint."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from phocas.detection.comparison import OutlierCount
from phocas.experiments.config import make_config
from phocas.experiments.results import SCHEMA_VERSION, Results
from phocas.training.evaluation import Metrics
from phocas.training.trainer import Round

PHASES = ("data", "gradients", "attack", "aggregate", "update", "metrics")


def a_round(number: int, *, finite: bool = True, by_server: bool = False, ms: float = 1.0) -> Round:
    return Round(
        number=number,
        loss=float(number) if finite else float("nan"),
        lr=0.1,
        action="applied" if finite else "skipped",
        finite=finite,
        gradient_norm=1.0 if finite else float("inf"),
        honest_distance=None,
        dropped=np.array([0.25, 0.5]),
        expected_dropped=0.4,
        by_server=np.array([[0.0, 0.5], [1.0, 0.5]]) if by_server else None,
        touched=3,
        flagged=(1,) if number > 2 else (),
        unusual=(0, 1) if number > 1 else (),
        flagged_servers=(5,) if number > 3 else (),
        lost=2 if number > 2 else None,
        outlier_counts=(OutlierCount(4.0, 3, 5, 0.25), OutlierCount(64.0, 1, 1, 0.01))
        if number % 4 == 1
        else (),
        seconds=dict.fromkeys(PHASES, ms / 6e3),
    )


def begin(results: Results, seed: int = 0) -> int:
    return results.begin(make_config({"seed": seed}), {"phocas": "0"}, {"name": "here"})


def test_run_is_stored_with_all_its_data(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.sqlite"
    with Results(path) as results:
        run = begin(results)
        results.record(run, [], [(0, Metrics(2.3, 0.1, 0.3, 0.01))])
        rounds = [
            a_round(1, ms=5),
            a_round(2, finite=False, ms=1),
            a_round(3, by_server=True, ms=2),
        ]
        results.record(
            run, rounds, [(3, Metrics(float("nan"), 0.9, 0.95, 0.01))], [(3, [0.25, 0.5])]
        )
        results.record(run, [a_round(4)], [(4, Metrics(1.0, 0.8, 0.97, 0.01))])
        results.end(run, "complete")
    with Results(path) as results:
        record = results.run(run)
        assert record.status == "complete"
        assert (record.final_accuracy, record.best_accuracy) == (0.8, 0.9)
        assert (record.final_top3, record.best_top3) == (0.97, 0.97)
        assert (record.rounds_done, record.nonfinite_rounds, record.skipped_rounds) == (4, 1, 1)
        assert (record.suspects, record.unusual, record.suspect_servers) == ((1,), (0, 1), (5,))
        assert (record.lost, record.byzantine) == (2, None)
        assert record.ms_per_round == pytest.approx(1)
        assert record.config["workers"] == 20
        table = results.table("rounds", run)
        assert [row["loss"] for row in table] == [1.0, None, 3.0, 4.0]
        assert table[1]["gradient_norm"] == float("inf")
        assert [row["top1"] for row in results.table("evaluations", run)] == [0.1, 0.9, 0.8]
        assert [row["share"] for row in results.table("dropped", run)] == [0.25, 0.5]
        shares = {
            (row["server"], row["worker"]): row["share"]
            for row in results.table("dropped_by_server", run)
        }
        assert shares == {(0, 0): 0.0, (0, 1): 0.5, (1, 0): 1.0, (1, 1): 0.5}
        assert [tuple(row.values())[1:] for row in results.table("implausible", run)] == [
            (1, 4.0, 3, 5, 0.25),
            (1, 64.0, 1, 1, 0.01),
        ]
        with pytest.raises(ValueError, match="no table 'runs; DROP"):
            results.table("runs; DROP TABLE runs", run)
        with pytest.raises(ValueError, match="there is no run 99"):
            results.run(99)


def test_rewind_deletes_later_rounds(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite") as results:
        run, other = begin(results), begin(results, seed=1)
        for target in (run, other):
            results.record(
                target,
                [a_round(number) for number in (1, 2, 3, 4)],
                [(2, Metrics(1, 0.5, 0.6, 0)), (4, Metrics(1, 0.6, 0.7, 0))],
                [(2, [0.1, 0.2]), (4, [0.1, 0.2])],
            )
        results.rewind(run, 2)
        assert [row["round"] for row in results.table("rounds", run)] == [1, 2]
        assert [row["round"] for row in results.table("evaluations", run)] == [2]
        assert {row["round"] for row in results.table("dropped", run)} == {2}
        assert len(results.table("rounds", other)) == 4
        results.record(run, [a_round(3)])
        assert results.run(run).rounds_done == 3


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite") as results:
        run = begin(results)
        results.record(run, [a_round(1)])
        with pytest.raises(sqlite3.IntegrityError):
            results.record(run, [a_round(2), a_round(1)])
        assert [row["round"] for row in results.table("rounds", run)] == [1]


def test_files_of_other_kinds_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.write_bytes(b"this is no database, whatever its name says" * 50)
    with pytest.raises(
        ValueError, match=r"r\.sqlite cannot be used as a results file: .*not a database"
    ):
        Results(path)
    newer = tmp_path / "newer.sqlite"
    Results(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}, this phocas reads"):
        Results(newer)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(ValueError, match="schema version 0"):
        Results(foreign)
    with pytest.raises(FileNotFoundError, match="no results file"):
        Results(tmp_path / "none.sqlite", read=True)


VERSION_4 = """
    ALTER TABLE runs DROP COLUMN test_top3; ALTER TABLE runs DROP COLUMN test_accuracy;
    PRAGMA user_version = 4;
"""
VERSION_3 = f"""
    {VERSION_4}
    ALTER TABLE runs DROP COLUMN lost; ALTER TABLE runs DROP COLUMN byzantine;
    PRAGMA user_version = 3;
"""
VERSION_2 = f"""
    {VERSION_3}
    DROP TABLE implausible;
    ALTER TABLE runs DROP COLUMN unusual; ALTER TABLE runs DROP COLUMN suspect_servers;
    PRAGMA user_version = 2;
"""
VERSION_1 = f"""
    {VERSION_2}
    ALTER TABLE runs DROP COLUMN origin;
    CREATE TABLE old (run INTEGER NOT NULL REFERENCES runs (id), round INTEGER NOT NULL,
        loss REAL, top1 REAL NOT NULL, top3 REAL NOT NULL, seconds REAL NOT NULL,
        PRIMARY KEY (run, round)) STRICT, WITHOUT ROWID;
    INSERT INTO old SELECT * FROM evaluations; DROP TABLE evaluations;
    ALTER TABLE old RENAME TO evaluations; PRAGMA user_version = 1;
"""


OLDER = [VERSION_1, VERSION_2, VERSION_3, VERSION_4]


@pytest.mark.parametrize("back", OLDER, ids=["1", "2", "3", "4"])
def test_files_of_older_versions_are_read_and_upgraded(tmp_path: Path, back: str) -> None:
    path = tmp_path / "r.sqlite"
    with Results(path) as results:
        run = begin(results)
        results.record(run, [a_round(1)], [(1, Metrics(1, 0.5, 0.6, 0))])
        results.end(run, "complete")
        expected = results.run(run), results.table("evaluations", run)
    with sqlite3.connect(path) as connection:
        connection.executescript(back)
    connection.close()
    for read in (True, False, True):
        with Results(path, read=read) as results:
            assert (results.run(run), results.table("evaluations", run)) == expected
    with Results(path) as results:
        longer = results.begin(make_config({}), {}, {}, origin="run 1, round 1")
        results.copy(run, longer, 1, evaluate_every=1)
        results.record(longer, [a_round(2)])
        assert results.run(longer).origin == "run 1, round 1"
        assert results.run(longer).unusual == (0, 1)
        assert len(results.table("rounds", longer)) == 2


def write_many(path: str, seed: int, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    with Results(Path(path)) as results:
        run = begin(results, seed)
        for number in range(1, 61):
            results.record(run, [a_round(number)], [(number, Metrics(1, 0.5, 0.6, 0))])
        results.end(run, "complete")


def test_processes_write_one_file_while_another_reads(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    writers = [
        context.Process(target=write_many, args=(str(path), seed, start)) for seed in range(2)
    ]
    for writer in writers:
        writer.start()
    start.wait()  # all three open the missing file at the same moment
    with Results(path) as results:
        while any(writer.is_alive() for writer in writers):
            for record in results.runs():
                assert len(results.table("rounds", record.id)) >= record.rounds_done
        for writer in writers:
            writer.join()
            assert writer.exitcode == 0
        records = results.runs()
        assert sorted(record.seed for record in records) == [0, 1]
        assert all(record.rounds_done == 60 and record.status == "complete" for record in records)
        assert all(len(results.table("evaluations", record.id)) == 60 for record in records)
