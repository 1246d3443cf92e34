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

from phocas.cli import GROUPS, RENAMED, application, main
from phocas.experiments.config import RunConfig, expand_grid, make_config, option_of
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
    "--num-workers",
    "--num-servers",
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
    assert set(map(option_of, RunConfig.model_fields)) - shown == {
        f"--set {name}" for name in ("optimizer_options", "worker_resources", "server_resources")
    }
    assert set(FLAGS) <= shown
    assert "…" not in text
    assert (RunConfig.model_fields["on_nonfinite"].description or "")[:20] in text


def test_help_fits_a_screen_and_names_every_command_in_its_group(phocas: Phocas) -> None:
    lines = phocas("--help").splitlines()
    assert len(lines) <= 31
    assert max(map(len, lines)) <= 80
    for heading, names in GROUPS.items():
        start = lines.index(heading)
        listed = lines[start + 1 : start + 1 + len(names)]
        assert tuple(line.split()[0] for line in listed) == names
        assert all(len(line.split()) > 3 for line in listed)
    assert "<bool>" not in phocas("train", "--help")


@pytest.mark.parametrize("old", RENAMED)
def test_renamed_commands_work_with_a_line_on_stderr(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = []
    for words in ([old], RENAMED[old].split()):
        monkeypatch.setattr(sys, "argv", ["phocas", *words, "--help"])
        with pytest.raises(SystemExit):
            main()
        shown.append(capfd.readouterr())
    assert shown[0].out == shown[1].out
    assert shown[0].err == f"phocas: phocas {old} is deprecated: use phocas {RENAMED[old]}\n"
    assert shown[1].err == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("rules krum --workers 11 --json", "--workers is deprecated: use --num-workers"),
        ("rules krum --workers=11 --json", "--workers is deprecated: use --num-workers"),
        (
            "theory plan --clients 30 --liars 3 --num-workers 9 --rounds 5 --json",
            "--liars is deprecated: use --byzantine",
        ),
        ("train --config no.toml --resume", "--resume has no effect: an unfinished run is always"),
        ("train --config no.toml --servers 5", "--servers is deprecated: use --num-servers"),
    ],
)
def test_renamed_options_work_with_a_line_on_stderr(
    words: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phocas", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capfd.readouterr().err.splitlines()
    assert errors[0].startswith(f"phocas: {line}")
    if "no.toml" in words:
        assert errors[1:] == ["phocas: there is no configuration file no.toml"]
    else:
        assert (ended.value.code or 0, errors[1:]) == (0, [])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("bench --dtype int8", "--dtype has no effect without --rule"),
        ("bench --costs c.json --num-workers 9", "--num-workers has no effect without --rule"),
        ("audit --rule mean --tensor x", "--tensor has no effect without --matrix"),
        ("audit --rule mean --matrix x.npy --dims 9", "--dims has no effect with --matrix"),
        ("audit --rule mean --matrix x.npy --tensor x", "--tensor has no effect with a .npy file"),
        (
            "audit --rule mean --attack constant:q=1 --byzantine 2",
            "--byzantine has no effect with --attack",
        ),
        ("data --split iid", "--split has no effect without a data set"),
        ("data synthetic --seed 3", "--seed has no effect without --split"),
        ("data synthetic --source npm", "--source has no effect with synthetic, which is not"),
        ("reproduce mnist --judge --processes 2", "--processes has no effect with --judge"),
        ("reproduce mnist --dry-run --judge", "--judge has no effect with --dry-run"),
        ("sweep grid.toml --dry-run --json", "--json has no effect with --dry-run"),
        ("results export --model 1 --table rounds", "--table has no effect with --model"),
        ("results export --csv - -o x", "--output has no effect with --csv"),
        ("results report --port 0", "--port has no effect without --serve"),
        ("results report --serve -o x.html", "--output has no effect with --serve"),
        ("rules --b 2", "--b is for one rule"),
        (
            "theory plan --clients 30 --byzantine 3 --servers 2 --num-workers 9 --rounds 5",
            "--servers and --b are for values that are wrong at random",
        ),
        ("audit --rule mean --attack label-flip:q=3", "acts on data, not on rows"),
    ],
)
def test_an_option_without_effect_is_an_error(phocas: Phocas, words: str, line: str) -> None:
    told = phocas(*words.split(), status=2)
    assert line in told
    assert len(told.splitlines()) == 1


def test_results_without_a_subcommand_lists(tmp_path: Path, phocas: Phocas) -> None:
    with Results(tmp_path / "phocas.sqlite") as results:
        results.begin(make_config({}), {}, {})
    assert phocas("results") == phocas("results", "list")
    assert "0/500" in phocas("results")


def test_help_and_versions(phocas: Phocas) -> None:
    assert phocas("--help") == phocas("-h") == phocas("-h", "rules")
    for group in ((), ("theory",)):
        assert phocas(*group, "--help") == phocas(*group, status=2, stream="output")
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


def test_runs_are_distinguished_by_the_settings_that_differ(tmp_path: Path, phocas: Phocas) -> None:
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

    common, heading, *rows = phocas("results", "list").splitlines()
    assert common == "synthetic:train=60,test=20,side=8, softmax, phocas:b=2, seed 0"
    assert heading.split()[:4] == ["run", "lr", "split", "status"]
    assert rows[0].split()[:4] == ["1", "0.1", "iid", "complete"]
    assert rows[1].split()[:4] == ["2", "0.5", "dirichlet:alpha=0.3", "complete"]
    listed = json.loads(phocas("results", "list", "--json"))
    assert [run["config"]["lr"] for run in listed] == [0.1, 0.5]
    table = phocas("results", "export", "--csv", "-", "--table", "rounds").splitlines()
    assert {"lr", "split", "rule", "seed"} <= set(table[0].split(","))


def test_a_table_too_wide_leaves_columns_out_and_breaks_no_word(
    tmp_path: Path, phocas: Phocas
) -> None:
    with Results(tmp_path / "phocas.sqlite") as results:
        for lr in (0.1, 0.25):
            for rule in ("nnm:b=6|phocas:b=6", "bucketing:size=2|geometric-median"):
                config = make_config({"rule": rule, "lr": lr, "attack": f"gaussian:q=3,std={lr}"})
                results.begin(config, {}, {})
    text = phocas("results", "list")
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
    news = "loss 0.1234  accuracy 0.912  300/s  flagged 0-5, 7, 9"
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
