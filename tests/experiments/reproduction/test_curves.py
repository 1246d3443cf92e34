"""Curves files: a study judged again without its results, and files that cannot be judged."""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phocas.cli import main
from phocas.experiments.reproduction.curves import (
    NAME,
    Curves,
    published_curves,
    read_curves,
    write_curves,
)
from phocas.experiments.reproduction.outcomes import RunOutcome, read_outcomes
from phocas.experiments.reproduction.tasks import plan

TASK = """
title = "softmax on made-up images"
metric = "top1"
figures = ["own"]
[settings]
dataset = "synthetic:train=400,test=100,side=8"
model = "softmax"
rounds = 12
batch_size = 4
evaluate_every = 4
"""
FIGURE = """
title = "Two rules"
axis = "rounds"
[[grid]]
rule = ["mean", "heraclius:b=6"]
attack = "gaussian:q=6"
"""
RUN = RunOutcome("complete", (0, 10), (0.1, 0.93), 0.5, 1.25, 1.0, 0.0, 0, 0.93, None)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["phocas", "reproduce", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    status = ended.value.code or 0
    assert isinstance(status, int)
    return status, capsys.readouterr().err


def test_study_is_judged_again_from_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TASK)
    Path("own.toml").write_text(FIGURE)
    status, text = command(monkeypatch, capsys, "tiny.toml", "--repeats", "2", "--processes", "1")
    assert status == 0, text
    folder = Path("phocas-tiny-paper")
    planned = plan("tiny.toml", repeats=2)
    runs = read_outcomes(folder / "results.sqlite", planned.runs())
    curves = read_curves(folder / NAME, "tiny", "paper")
    kept = curves.find(list(runs))
    for identity, run in runs.items():
        read = kept[identity]
        assert (read.status, read.rounds, read.accuracy) == (run.status, run.rounds, run.accuracy)
        for name in ("distance", "aggregate_ms", "dropped_of_byzantine", "dropped_of_honest"):
            assert getattr(read, name) == pytest.approx(getattr(run, name), rel=1e-4)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    words = ["tiny.toml", "--judge", "--results", str(folder / NAME)]
    status, text = command(monkeypatch, capsys, *words, "--output", "again")
    assert status == 0
    assert f"judging 4 runs of {folder / NAME}" in text
    made = {path.name: path.read_bytes() for path in Path("again").iterdir()}
    assert set(made) == {"claims.md", "own.png", "own.svg"}
    assert made["own.svg"] == before["own.svg"]
    lines = [text.decode().splitlines()[4:] for text in (made["claims.md"], before["claims.md"])]
    assert lines[0] == lines[1]  # all but the command
    status, text = command(monkeypatch, capsys, "tiny.toml", "--results", str(folder / NAME))
    assert status == 2
    assert "is a curves file, which only --judge reads" in text


def test_repeats_are_added_until_the_claims_are_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The claims about the Gaussian attack that these three rules can decide."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TASK.replace('"own"', '"gaussian"'))
    Path("gaussian.toml").write_text(
        FIGURE.replace("heraclius:b=6", "phocas:b=6") + '[[grid]]\nrule = "mean"\n'
    )
    words = ["tiny.toml", "--processes", "1", "--hours"]
    status, text = command(monkeypatch, capsys, *words, "1", "--repeats", "2")
    assert status == 0, text
    assert "repeat 1: 2 claims are not decided" in text
    report = Path("phocas-tiny-paper/claims.md").read_text()
    assert "6 of 6 runs of 12 rounds are complete" in report
    for hours in ("0", "-1", "nan", "inf"):
        status, text = command(monkeypatch, capsys, *words, hours)
        assert status == 2
        assert text.startswith("phocas: --hours must be a number above 0: got")
    assert command(monkeypatch, capsys, "tiny.toml", "--judge", "--hours", "1")[0] == 2


def test_curves_of_earlier_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_curves(
        path, Curves("mnist", "paper", 2, {"phocas": "1"}, {"a" * 64: RUN}, [{"rule": "x"}])
    )
    other = replace(RUN, status="stopped", test_accuracy=0.5, distance=float("nan"))
    write_curves(path, Curves("mnist", "paper", 2, {"phocas": "1"}, {"b" * 64: other}))
    found = read_curves(path, "mnist", "paper")
    assert found.find(["a" * 64, "c" * 64]) == {"a" * 64: RUN}
    assert found.find(["b" * 64])["b" * 64].test_accuracy == 0.5
    assert found.errors == [{"rule": "x"}]
    content = path.read_bytes()
    write_curves(path, Curves("mnist", "paper", 2, {"phocas": "1"}, {"b" * 64: other}))
    assert path.read_bytes() == content


def _damaged(path: Path, change: str) -> None:
    content = json.loads(lzma.decompress(path.read_bytes()))
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif change == "text":
        path.write_text("no curves")
    elif change == "format":
        path.write_bytes(lzma.compress(json.dumps({**content, "format": 99}).encode()))
    elif change == "run":
        content["runs"] = {"a" * 12: ["complete", [0, 10], [0.1]]}
        path.write_bytes(lzma.compress(json.dumps(content).encode()))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("cut", "is no curves file, or is damaged"),
        ("text", "is no curves file, or is damaged (LZMAError)"),
        ("run", "is no curves file, or is damaged (ValueError)"),
        ("format", "has format 99 of curves: this version of phocas reads format 1"),
        ("study", "must have the curves of tiny at scale paper: it has those of mnist at"),
        ("settings", "none of the 1 runs in these curves belongs to tiny at scale paper as it is"),
    ],
)
def test_curves_that_cannot_be_judged_are_one_line_and_stay(
    change: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TASK)
    Path("own.toml").write_text(FIGURE)
    folder = Path("phocas-tiny-paper")
    study = "mnist" if change == "study" else "tiny"
    write_curves(folder / NAME, Curves(study, "paper", 2, {"phocas": "1"}, {"a" * 64: RUN}))
    _damaged(folder / NAME, change)
    content = (folder / NAME).read_bytes()
    for words in ([] if change == "settings" else ["--processes", "1"], ["--judge"]):
        if not words:
            continue
        status, text = command(monkeypatch, capsys, "tiny.toml", *words)
        assert status == 2
        assert line in text
        assert len(text.splitlines()) == 1
        assert [path.name for path in folder.iterdir()] == [NAME]
        assert (folder / NAME).read_bytes() == content


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_published_studies_can_be_judged(
    whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = sorted(published_curves("x", "y").parent.iterdir())
    assert files
    for file in files:
        study, _, scale = file.name.partition(".")[0].rpartition("-")
        figure = [] if whole else ["--figure", "base" if study == "rare" else "gaussian"]
        status, text = command(monkeypatch, capsys, study, "--scale", scale, "--judge", *figure)
        assert status == 0, text
        reports = list(Path(f"phocas-{study}-{scale}").glob("*.md"))
        assert len(reports) == 1
        assert "not drawn" not in text
