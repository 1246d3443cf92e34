"""Studies of other authors: their figures, our runs, and the verdict of each cell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from phocas.cli import main
from phocas.data import DataError, load
from phocas.experiments.attack_benchmark import Accuracy, CellResult
from phocas.experiments.config import ConfigError
from phocas.experiments.reproduction.published import (
    PublishedCell,
    is_published,
    judge,
    plan_published,
)
from phocas.experiments.runner import build_trainer, execute

STUDY = """
title = "A study"
source = "a journal"
percent = true
seeds = 3
heat_map = true
[settings]
dataset = "synthetic:train=120,test=40"
model = "softmax"
rounds = 3
byzantine_data = "iid"
[scale.paper]
[scale.small]
rounds = 2
[[tables]]
name = "first"
title = "The first table"
columns = [
    { name = "f = 1", f = 1, num_workers = 6 },
    { name = "f = 2", f = 2, num_workers = 7 },
]
rows = [
    { name = "mean", rule = "mean", attack = "sign-flip:q={f}", published = ["50.0 +- 1.0", "0"] },
    { name = "worst", rule = "trimmed-mean:b={f}", attack = BOTH, published = ["-", "90"] },
    { name = "other", not_run = "a rule is missing", published = ["1", "2"] },
]
[notes]
"first: mean, f = 1" = "other initial weights"
""".replace("BOTH", '["sign-flip:q={f}", "mimic:q={f}"]')


def result(*values: float) -> CellResult:
    accuracy = Accuracy.of(values)
    return CellResult("", "x", accuracy, None, {"x": accuracy})


@pytest.mark.parametrize(
    ("published", "ours", "verdict"),
    [
        (Accuracy(0.90, 0.01, 3), (0.896, 0.897, 0.898), "agrees"),
        (Accuracy(0.90, 0.001, 3), (0.95, 0.951, 0.949), "better"),
        (Accuracy(0.90, 0.001, 3), (0.80, 0.801, 0.799), "worse"),
        (Accuracy(0.90, 0.20, 3), (0.80, 0.801, 0.799), "not decided"),
        (Accuracy(0.90, 0.001, 3), (0.2, 0.5, 0.9), "not decided"),
        (Accuracy(0.90, None, 3), (0.80, 0.801, 0.799), "worse"),
        (Accuracy(0.90, None, 3), (0.80,), "not decided"),
        (Accuracy(0.90, 0.001, 3), (0.80,), "worse"),
        (None, (0.80,), "not run"),
        (Accuracy(0.90, 0.001, 3), None, "not run"),
    ],
)
def test_verdict_of_a_cell(
    published: Accuracy | None, ours: tuple[float, ...] | None, verdict: str
) -> None:
    cell = PublishedCell("row", "column", published, None)
    assert judge(cell, None if ours is None else result(*ours), 0.005) == verdict


@pytest.mark.parametrize(
    ("task", "tables", "cells", "to_run"),
    [
        ("bucketing", ["table-1", "table-2", "experiment-3"], 100, 100),
        ("byzfl", ["heat-map"], 32, 32),
    ],
)
def test_packaged_studies_have_every_published_cell(
    task: str, tables: list[str], cells: int, to_run: int
) -> None:
    study = plan_published(task, repeats=1)
    assert is_published(task)
    assert [table.name for table in study.tables] == tables
    every = [cell for table in study.tables for cell in table.cells]
    assert len(every) == cells
    assert sum(cell.cell is not None for cell in every) == to_run
    assert all(cell.published is not None and 0 <= cell.published.mean <= 1 for cell in every)
    assert all(bool(cell.reason) == (cell.cell is None) for cell in every)
    (scaled,) = {run.rounds for run in plan_published(task, repeats=1, scale="small").runs()}
    assert scaled == 60


@pytest.mark.parametrize("task", ["bucketing", "byzfl"])
def test_a_round_of_a_packaged_study_runs(task: str) -> None:
    config = plan_published(task, repeats=1).runs()[-1]
    changed = {"dataset": "synthetic:train=200,test=20", "batch_size": 2, "threads": 1}
    with build_trainer(config.model_copy(update=changed)) as trainer:
        done = next(trainer.rounds(1))
    assert done.finite
    assert done.touched


def test_command_reports_theirs_beside_ours_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(STUDY)

    def run(*words: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["phocas", "reproduce", "mine.toml", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert (ended.value.code or 0) == 0, output.err
        return output.out

    assert "6 runs, 1 of each" in run("--repeats", "1", "--dry-run")
    told = run("--repeats", "1", "--processes", "1")
    assert "not run: 3" in told
    text = Path("phocas-mine-paper/verdicts.md").read_text()
    assert "| other | 1.0; not run | 2.0; not run |" in text
    assert "- Not run: a rule is missing." in text
    assert "- mean, f = 1: other initial weights" in text
    assert Path("phocas-mine-paper/first.png").exists()
    assert run("--repeats", "1", "--judge") == told
    Path("phocas-mine-paper/results.sqlite").unlink()
    curves = "phocas-mine-paper/curves.json.xz"
    assert run("--repeats", "1", "--judge").splitlines()[:-1] == told.splitlines()[:-1]
    assert f"from {curves}" in run("--repeats", "1", "--judge", "--results", curves)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"50.0 +- 1.0", "0"', '"50.0"', "needs one published figure for each of 2 columns"),
        ("50.0 +- 1.0", "about 50", "a published figure is '93.2"),
        ("trimmed-mean:b={f}", "trimmed-mean:b=5", "the largest b is 2"),
        ('"mean", attack', '"maen", attack', "unknown rule 'maen'"),
        ("title = ", "titel = ", "titel"),
        ("first: mean, f = 1", "first: mean, f = 7", "unknown cell 'first: mean, f = 7'"),
    ],
)
def test_a_wrong_study_is_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(STUDY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        plan_published(str(path), repeats=1)


@pytest.mark.slow
def test_sign_flip_in_byzfls_benchmark_reaches_the_published_accuracy(tmp_path: Path) -> None:
    """One attack of the cell gamma = 1, f = 1: the run has ended at 0.985, published is 0.98."""
    places = {"results": str(tmp_path / "r.sqlite")}
    study = plan_published("byzfl", repeats=1, places=places)
    wanted = "heat-map: TrMean, gamma 1, f = 1"
    config = next(run for run in study.runs() if run.name == wanted)
    try:
        load("mnist")
    except DataError as error:
        pytest.skip(f"MNIST is out of reach: {error}")
    record = execute(config)
    assert record.attack == "inner-product:q=1,epsilon=1.0"
    assert record.test_accuracy == pytest.approx(0.98, abs=0.01)
