"""Sweeps: all cores, no run twice, killed processes and killed sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phocas.cli import main
from phocas.experiments.config import RunConfig, expand_grid
from phocas.experiments.results import Results
from phocas.experiments.sweep import Ended, Message, News, sweep

COMMON: dict[str, Any] = {
    "dataset": "synthetic:train=200,test=50,side=8",
    "model": "softmax",
    "workers": 7,
    "servers": 2,
    "rounds": 30,
    "batch_size": 8,
    "evaluate_every": 5,
    "checkpoint_rounds": 20,
}
GRID = {"rule": ["mean", "phocas:b=2"], "attack": ["none", "gaussian:q=2"], "seed": [0, 1]}


def configs(path: Path, **values: Any) -> list[RunConfig]:
    return expand_grid({**COMMON, "results": str(path), "grid": GRID, **values}, "grid")


def test_sweep_executes_each_run_once_with_the_bits_of_train(tmp_path: Path) -> None:
    grid = configs(tmp_path / "r.sqlite")
    news: list[Message] = []
    records = sweep(grid, processes=2, watch=news.append)
    assert [record.status for record in records if record] == ["complete"] * 8
    assert sorted(end.index for end in news if isinstance(end, Ended)) == list(range(8))
    again = sweep(grid, processes=2)
    assert again == records

    alone = configs(tmp_path / "alone.sqlite")[5]
    from phocas.experiments.runner import execute

    with Results(tmp_path / "r.sqlite") as results:
        found = results.table("rounds", records[5].id)  # type: ignore[union-attr]
    record = execute(alone.model_copy(update={"threads": 2}))
    with Results(tmp_path / "alone.sqlite") as results:
        expected = results.table("rounds", record.id)
    assert [row["loss"] for row in found] == [row["loss"] for row in expected]
    assert [row["gradient_norm"] for row in found] == [row["gradient_norm"] for row in expected]


def test_failed_run_does_not_end_the_others(tmp_path: Path) -> None:
    grid = configs(
        tmp_path / "r.sqlite", grid={"model": ["softmax", "cnn", "mlp:hidden=4"]}, rule="mean"
    )
    grid[1] = grid[1].model_copy(update={"dataset": "synthetic:train=200,test=50,side=3"})
    ends: list[Ended] = []
    sweep(grid, processes=1, watch=lambda n: ends.append(n) if isinstance(n, Ended) else None)
    assert [end.status for end in ends] == ["complete", "failed", "complete"]
    assert "sides of at least 4" in (ends[1].error or "")


def test_killed_process_is_replaced(tmp_path: Path) -> None:
    victim = """
import os, signal
def model():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "deadly.py").write_text(victim)
    grid = configs(tmp_path / "r.sqlite", grid={"seed": [0, 1, 2]}, rule="mean")
    grid[1] = grid[1].model_copy(update={"model": "deadly:model"})
    ends: list[Ended] = []
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        sweep(grid, processes=1, watch=lambda n: ends.append(n) if isinstance(n, Ended) else None)
    finally:
        os.chdir(before)
    assert [(end.index, end.status) for end in ends] == [
        (0, "complete"),
        (1, "failed"),
        (2, "complete"),
    ]
    assert ends[1].error == "its process ended with status -9"


def test_stopped_sweep_continues_later(tmp_path: Path) -> None:
    grid = configs(tmp_path / "r.sqlite", rounds=20_000, grid={"seed": [0, 1, 2]}, rule="mean")
    started: list[News] = []
    records = sweep(
        grid,
        processes=1,
        watch=lambda n: started.append(n) if isinstance(n, News) else None,
        should_stop=lambda: bool(started),
    )
    assert records[0] is not None
    assert records[0].status == "interrupted"
    assert records[1] is records[2] is None


def test_killed_sweep_loses_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in COMMON.items() if key != "rounds"]
    lines += ["rounds = 100", "[grid]", *(f"{k} = {json.dumps(v)}" for k, v in GRID.items())]
    grid = tmp_path / "grid.toml"
    grid.write_text("\n".join(lines))
    code = "import sys; sys.argv[0] = 'phocas'; from phocas.cli import main; main()"
    words = ["sweep", str(grid), "--processes", "2"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("[2/8]"):
            break
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with Results(tmp_path / "phocas.sqlite") as results:
        done = {record.id: record for record in results.runs() if record.status == "complete"}
        assert not any(record.status == "failed" for record in results.runs())
    assert len(done) >= 2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phocas", *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert [run["status"] for run in found] == ["complete"] * 8
    with Results(tmp_path / "phocas.sqlite") as results:
        after = {record.id: record for record in results.runs()}
    assert len(after) == 8  # interrupted runs continued under their own numbers
    assert all(after[number] == record for number, record in done.items())
