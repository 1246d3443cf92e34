"""What the commands show: options, tables at 80 columns, what tells runs apart, what is done."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from typer.main import get_command

from phocas.cli import application
from phocas.experiments.config import RunConfig, expand_grid, make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.report.progress import _bars
from phocas.report.tables import differing, labels

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Phocas

COMMON = {
    "dataset": "synthetic:train=60,test=20,side=8",
    "model": "softmax",
    "workers": 7,
    "servers": 2,
    "rounds": 3,
    "rule": "phocas:b=2",
}
GRID = """
dataset = "synthetic:train=60,test=20,side=8"
model = "softmax"
workers = 7
servers = 2
rounds = 3
rule = "phocas:b=2"
[grid]
lr = [0.1, 0.5]
split = ["iid", "dirichlet:alpha=0.3"]
"""
FLAGS = [
    "--dataset",
    "--model",
    "--workers",
    "--servers",
    "--rounds",
    "--batch-size",
    "--lr",
    "--rule",
    "--attack",
    "--seed",
    "--split",
    "--on-nonfinite",
    "--evaluate-every",
    "--threads",
    "--engine",
    "--address",
    "--processes",
    "--deadline",
    "--faults",
    "--data-dir",
    "--results",
    "--config",
    "--set",
    "--resume",
    "--restart",
    "--save-model",
    "--quiet",
    "--json",
]


def commands() -> list[tuple[str, ...]]:
    """Return the words of every command, those of groups too."""
    found: list[tuple[str, ...]] = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), get_command(application()))]
    while waiting:
        words, command = waiting.pop()
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), each) for name, each in inner.items()]
        if words:
            found.append(words)
    return found


def test_every_setting_is_an_option_of_train(phocas: Phocas) -> None:
    text = phocas("train", "-h")
    shown = set(re.findall(r"--[a-z-]+", text))
    fields = {f"--{name.replace('_', '-')}" for name in RunConfig.model_fields}
    assert fields - shown == {"--optimizer-options"}  # a table, for TOML and --set
    assert set(FLAGS) <= shown
    assert "…" not in text
    assert (RunConfig.model_fields["on_nonfinite"].description or "")[:20] in text


def test_help_and_versions(phocas: Phocas) -> None:
    assert phocas("--help") == phocas("-h") == phocas("-h", "rules")
    assert re.fullmatch(r"phocas \d+\.\d+\.\d+\S*\n", phocas("--version"))
    assert "[grid]" in phocas("sweep", "--help")


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_command_has_help_under_both_names(phocas: Phocas, words: tuple[str, ...]) -> None:
    short = phocas(*words, "-h")
    assert short == phocas(*words, "--help")
    assert f"Usage: phocas {' '.join(words)}" in " ".join(short.split())
    assert max(map(len, short.splitlines())) <= 80
    assert "…" not in short


@pytest.mark.parametrize("words", [("--version",), ("-h",), ("rules", "phocas", "--json")])
def test_the_module_is_the_command(phocas: Phocas, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phocas", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout) == phocas(*words)


def test_runs_are_told_apart_by_what_differs(tmp_path: Path, phocas: Phocas) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    dry = phocas("sweep", "grid.toml", "--dry-run").splitlines()
    assert dry[0] == "to run      phocas:b=2, lr 0.1, iid"
    assert dry[-1] == "4 runs into phocas.sqlite, 4 of them to be run"
    values = {**COMMON, "results": "phocas.sqlite"}
    execute(make_config({**values, "lr": 0.1}))
    execute(make_config({**values, "lr": 0.5, "split": "dirichlet:alpha=0.3"}))
    dry = phocas("sweep", "grid.toml", "--dry-run").splitlines()
    states = [line.split()[0] for line in dry]
    assert states == ["complete", "to", "to", "complete", "4"]

    common, heading, *rows = phocas("runs").splitlines()
    assert common == "synthetic:train=60,test=20,side=8, softmax, phocas:b=2, seed 0"
    assert heading.split()[:4] == ["run", "lr", "split", "status"]
    assert rows[0].split()[:4] == ["1", "0.1", "iid", "complete"]
    assert rows[1].split()[:4] == ["2", "0.5", "dirichlet:alpha=0.3", "complete"]
    listed = json.loads(phocas("runs", "--json"))
    assert [run["config"]["lr"] for run in listed] == [0.1, 0.5]
    table = phocas("export", "--csv", "-", "--table", "rounds").splitlines()
    assert {"lr", "split", "rule", "seed"} <= set(table[0].split(","))


def test_a_table_too_wide_leaves_columns_out_and_breaks_no_word(
    tmp_path: Path, phocas: Phocas
) -> None:
    with Results(tmp_path / "phocas.sqlite") as results:
        for lr in (0.1, 0.25):
            for rule in ("nnm:b=6|phocas:b=6", "bucketing:size=2|geometric-median"):
                config = make_config({"rule": rule, "lr": lr, "attack": f"gaussian:q=3,std={lr}"})
                results.begin(config, {}, {})
    text = phocas("runs")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "not shown at this width: ms/round, best" in text
    assert lines[1].split()[-1] == "final"
    assert len(lines) == 2 + 4 + 1


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_keeps_its_count_and_the_time_left(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    bars = _bars(console, ["multi-krum:b=8, dirichlet:alpha=0.3, seed 3"] * 2, 4000)
    news = "loss 0.1234  accuracy 0.912  300/s  suspects 0-5, 7, 9"
    bars.add_task(
        "multi-krum:b=8, dirichlet:alpha=0.3, seed 3", total=4000, completed=123, news=news
    )
    console.print(bars.get_renderable())
    (line,) = file.getvalue().splitlines()
    assert len(line) <= width
    assert "123/4000" in line
    assert "--:--" in line
    assert "loss 0.1234" in line


def test_what_differs_is_found_whatever_it_is() -> None:
    grid = {"workers": [7, 9], "batch_size": [4, 8], "lr": [0.1, 0.2]}
    configs = [config.model_dump() for config in expand_grid({**COMMON, "grid": grid}, "grid")]
    assert differing(configs) == ["workers", "batch_size", "lr"]
    assert len(set(labels(configs))) == 8
    assert labels(configs)[0] == "phocas:b=2, workers 7, batch size 4, lr 0.1"
    named = [
        {**configs[0], "name": "a"},
        {**configs[0], "name": "b"},
        {**configs[0], "name": "b", "seed": 1},
    ]
    assert labels(named) == ["a, seed 0", "b, seed 0", "b, seed 1"]
