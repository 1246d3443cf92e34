"""Results as tables: rows without any package, data frames of those that are installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from phocas.experiments.config import expand_grid
from phocas.experiments.results import Results, ResultsError
from phocas.experiments.runner import execute
from phocas.report.exports import export_rows, write_parquet
from phocas.results import LoadedResults, columns_of, load

GRID: dict[str, Any] = {
    "dataset": "synthetic:train=60,test=20,side=8",
    "model": "softmax",
    "num_workers": 7,
    "rounds": 6,
    "evaluate_every": 3,
    "optimizer_options": {"momentum": 0.5},
    "grid": {"rule": ["mean", "phocas:b=2"], "attack": "gaussian:q=2", "seed": [0, 1]},
}
INSTALLED = [name for name in ("pandas", "polars") if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "phocas.sqlite"
    for config in expand_grid({**GRID, "results": str(path)}, "grid"):
        execute(config)
    return path


def test_rows_are_those_of_the_file(file: Path) -> None:
    loaded = load(file, frame="rows")
    with Results(file, read=True) as opened:
        records = opened.runs()
        rounds = opened.table("rounds", 2)
        evaluations = opened.table("evaluations", 2)
        dropped = opened.table("dropped", 2)
    assert [row["run"] for row in loaded.runs] == [record.id for record in records]
    run = loaded.runs[1]
    assert (run["rule"], run["seed"], run["byzantine"]) == ("mean", 1, [0, 1])
    assert run["optimizer_options"] == '{"momentum": 0.5}'
    assert run["final_accuracy"] == records[1].final_accuracy
    assert run["lr"] == 0.1
    own = {row["round"]: row for row in loaded.rounds if row["run"] == 2}
    assert {number: own[number]["loss"] for number in range(1, 7)} == {
        row["round"]: row["loss"] for row in rounds
    }
    for row in evaluations:
        assert own[row["round"]]["accuracy"] == row["top1"]
        assert own[row["round"]]["test_loss"] == row["loss"]
        assert own[row["round"]]["evaluation_seconds"] == row["seconds"]
    assert own[2]["accuracy"] is None
    assert len(own) == len(rounds) + sum(row["round"] == 0 for row in evaluations)
    workers = [row for row in loaded.workers if row["run"] == 2]
    assert [(row["round"], row["worker"], row["dropped"]) for row in workers] == [
        (row["round"], row["worker"], row["share"]) for row in dropped
    ]
    assert {row["worker"] for row in workers if row["byzantine"]} == {0, 1}
    flagged = {row["worker"] for row in workers if row["flagged"]}
    assert flagged == set(records[1].suspects)


def test_notebooks_show_the_last_runs(file: Path) -> None:
    loaded = load(file, frame="rows")
    page = loaded._repr_html_()
    assert page.startswith(f"<table><caption>{file}: 4 runs</caption>")
    assert "phocas:b=2" in page
    assert repr(loaded) == f"LoadedResults({str(file)!r}, 4 runs)"


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_frames_have_the_same_numbers(file: Path, frame: Any) -> None:
    pytest.importorskip(frame)
    loaded, rows = load(file, frame=frame), load(file, frame="rows")
    for name in ("runs", "rounds", "workers"):
        table, wanted = getattr(loaded, name), columns_of(getattr(rows, name))
        assert list(table.columns) == list(wanted)
        assert len(table) == len(next(iter(wanted.values())))
    assert loaded.rounds["loss"].mean() == pytest.approx(
        sum(row["loss"] for row in rows.rounds if row["loss"] is not None) / 24
    )


def test_an_empty_file_gives_empty_tables(tmp_path: Path) -> None:
    with Results(tmp_path / "none.sqlite"):
        pass
    for frame in ("rows", *INSTALLED):
        loaded = load(tmp_path / "none.sqlite", frame=frame)  # type: ignore[arg-type]
        assert [len(each) for each in (loaded.runs, loaded.rounds, loaded.workers)] == [0, 0, 0]


def test_mistakes_are_clear(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="there is no results file"):
        load(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("not a database, " * 100)
    with pytest.raises(ResultsError, match="cannot be used as a results file"):
        load(tmp_path / "text")
    with pytest.raises(ValueError, match="unknown frame of load 'arrow'"):
        load(file, frame="arrow")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name in ("pandas", "polars"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load(file) == LoadedResults(file, "rows")
    with pytest.raises(ValueError, match="needs polars: pip install polars, or take frame='rows'"):
        load(file, frame="polars")


def test_parquet_needs_a_package_and_keeps_the_rows(file: Path, tmp_path: Path) -> None:
    with Results(file, read=True) as opened:
        rows = export_rows(opened, "runs", opened.runs())
    path = tmp_path / "runs.parquet"
    if not importlib.util.find_spec("pyarrow") and not importlib.util.find_spec("polars"):
        with pytest.raises(ValueError, match=re.escape("Parquet needs pyarrow or polars")):
            write_parquet(rows, path)
        return
    write_parquet(rows, path)
    assert path.read_bytes()[:4] == b"PAR1"
