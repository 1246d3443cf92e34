"""``phocas advise`` through the real command: what a run would have needed, and no choice."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phocas.cli import main
from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.rules import Heraclius

CASES = {
    "quiet": ("heraclius:b=3", "none"),
    "liars": ("heraclius:b=4", "gaussian:q=2"),
    "krum": ("krum:b=2", "gaussian:q=2"),
    "too many": ("phocas:b=1", "gaussian:q=3"),
    "mixed": ("nnm:b=3|trimmed-mean:b=3", "omniscient:q=1"),
    "watched": ("monitor:rule=(heraclius:b=3)", "gaussian:q=2"),
    "most": ("phocas:b=5", "gaussian:q=6,std=1e39"),
    "own": ("own_rules:Middle", "none"),
    "hidden": ("heraclius:b=4", "alie:q=3"),
    "skewed": ("heraclius:b=3", "alie:q=3", "dirichlet:alpha=0.1"),
    "skewed and spare": ("heraclius:b=5", "alie:q=3", "dirichlet:alpha=0.1"),
    "skewed and honest": ("phocas:b=3", "none", "dirichlet:alpha=5.0"),
    "cells": ("phocas:b=3", "bit-flip:columns=20"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of short runs, one for each case."""
    folder = tmp_path_factory.mktemp("advise")
    own = "from phocas import Median\n\nclass Middle(Median):\n    pass\n"
    (folder / "own_rules.py").write_text(own)
    for rule, attack, *split in CASES.values():
        config = make_config(
            {
                "dataset": "synthetic:train=300,test=50,side=8",
                "model": "mlp:hidden=16",
                "workers": 11,
                "servers": 1,
                "rounds": 24,
                "rule": rule.replace("own_rules:Middle", "median"),
                "attack": attack,
                "split": split[0] if split else "iid",
                "results": str(folder / "r.sqlite"),
            }
        )
        execute(config)
    with sqlite3.connect(folder / "r.sqlite") as connection:
        # The rule of a user's own is only read, so that a run by the median can stand for it.
        (text,) = connection.execute("SELECT config FROM runs WHERE rule = 'median'").fetchone()
        changed = json.dumps({**json.loads(text), "rule": "own_rules:Middle"})
        connection.execute("UPDATE runs SET config = ? WHERE rule = 'median'", (changed,))
    connection.close()
    return folder


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process, which has torch already; return status, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["phocas", "advise", *arguments])
        patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def advised(folder: Path, case: str) -> tuple[str, dict[str, Any]]:
    number = str(1 + list(CASES).index(case))
    status, screen, errors = run(folder, "r.sqlite", "--run", number)
    assert (status, errors) == (0, "")
    assert max(map(len, screen.splitlines())) <= 80
    assert "choose b for the faults that you expect" in " ".join(screen.split())
    return screen, json.loads(run(folder, "r.sqlite", "--run", number, "--json")[1])


def test_a_quiet_run_needed_nothing(folder: Path) -> None:
    screen, told = advised(folder, "quiet")
    assert (told["needed"], told["tolerated"], told["counted"]) == (0, 3, 6)
    assert "never used: b = 1-3" in screen


def test_what_was_needed_what_was_not_and_what_it_would_have_cost(folder: Path) -> None:
    screen, told = advised(folder, "liars")
    assert (told["needed"], told["tolerated"]) == (2, 4)
    assert "needed: b >= 2" in screen
    assert "never used: b = 3, 4" in screen
    bounds = {(cost["b"], cost["cutoff"]): cost["bound"] for cost in told["costs"]}
    assert sorted({b for b, _ in bounds}) == [1, 2, 3, 4]
    for (b, cutoff), bound in bounds.items():
        assert bound == Heraclius(b, cutoff).bound(11, 2)
        assert (bound is None) == (b < 2)
    assert {"none", "4"} <= set(screen.split())


def test_rules_of_rows_count_workers(folder: Path) -> None:
    screen, told = advised(folder, "krum")
    assert told["by_rows"]
    assert told["needed"] == told["tolerated"] == 2
    assert "all used: krum:b=2 tolerates 2, and no more" in screen
    assert advised(folder, "mixed")[1]["needed"] == 1


def test_too_small_a_b_is_said_to_have_no_bound(folder: Path) -> None:
    screen, told = advised(folder, "too many")
    assert (told["needed"], told["tolerated"]) == (3, 1)
    assert "NOT ENOUGH: phocas:b=1 tolerates 1, so that its error has no bound" in screen
    assert [cost["bound"] is None for cost in told["costs"]] == [True, False]


def test_where_most_are_wrong_no_b_is_enough(folder: Path) -> None:
    screen, told = advised(folder, "most")
    assert 2 * told["needed"] >= 11
    assert "needed: no b is enough" in screen
    assert f"{told['needed']} of 11 were wrong" in " ".join(screen.split())
    assert "b >=" not in screen


def test_advice_for_monitor_says_that_the_mean_tolerates_nothing(folder: Path) -> None:
    screen, told = advised(folder, "watched")
    assert (told["needed"], told["tolerated"], told["would"]) == (2, 0, 3)
    assert told["watched"].startswith("heraclius:b=3")
    assert "NO PROTECTION: monitor returns the mean, which tolerates nothing" in " ".join(
        screen.split()
    )
    assert "never used" not in screen
    assert {cost["b"] for cost in told["costs"]} == {1, 2, 3}


def test_byzantine_workers_of_the_simulation_are_needed_whatever_is_seen(folder: Path) -> None:
    screen, told = advised(folder, "hidden")
    assert next(one["most"] for one in told["seen"] if one["cutoff"] == 64) < 3
    assert (told["byzantine"], told["needed"], told["unknown"]) == (3, 3, None)
    assert "needed: b >= 3, for 3 Byzantine workers of the attack" in screen
    assert "never used: b = 4" in screen
    assert {cost["b"] for cost in told["costs"]} == {2, 3, 4}


def test_nothing_is_called_unused_where_data_differ_or_the_attack_does_not_say(
    folder: Path,
) -> None:
    screen, told = advised(folder, "skewed")
    assert (told["needed"], told["tolerated"]) == (3, 3)
    assert "all used: heraclius:b=3 tolerates 3" in screen
    for case, needed, words in (
        ("skewed and spare", 3, "b = 4, 5 was needed too, because workers hold different data"),
        ("skewed and honest", 0, "b = 1-3 was needed too, because workers hold different data"),
        ("cells", 1, "b = 2, 3 was needed too, because bit-flip:columns=20 does not say how many"),
    ):
        screen, told = advised(folder, case)
        assert told["needed"] == needed
        assert f"not known: whether {words}" in " ".join(screen.split())
        assert "never used" not in screen


def test_ones_own_rule_is_not_imported(folder: Path) -> None:
    (folder / "own_rules.py").write_text("raise SystemExit('imported')\n")
    screen, told = advised(folder, "own")
    assert (told["tolerated"], told["costs"]) == (None, [])
    assert "is your own: its guarantee is not known here" in screen


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"clients": 40},
            "every worker has its row in every round: got clients 40; a run without clients",
        ),
        ({"asynchronous": "kardam:b=2"}, "got asynchronous kardam:b=2"),
        ({}, "none of its rounds is recorded"),
    ],
)
def test_why_nothing_was_counted(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    values = {
        "dataset": "synthetic:train=120,test=20,side=8",
        "model": "softmax",
        "workers": 7,
        "servers": 1,
        "rounds": 2,
        "results": str(tmp_path / "r.sqlite"),
        **({"rule": "median"} if "asynchronous" not in changed else {}),
        **changed,
    }
    if changed:
        execute(make_config(values))
    else:
        with Results(tmp_path / "r.sqlite") as results:
            results.begin(make_config(values), {}, {})
    status, out, errors = run(tmp_path, "r.sqlite")
    assert (status, out) == (2, "")
    assert reason in errors
    assert "older phocas" not in errors
    assert len(errors.splitlines()) == 1


def test_a_run_that_was_interrupted_says_how_far_it_got(folder: Path, tmp_path: Path) -> None:
    values = {"dataset": "synthetic:train=60,test=20,side=8", "model": "softmax", "servers": 1}
    results = str(tmp_path / "r.sqlite")
    done = execute(
        make_config({**values, "rounds": 1000, "results": results}), should_stop=lambda: True
    )
    assert done.status == "interrupted"
    screen = run(tmp_path, "r.sqlite")[1]
    assert screen.splitlines()[0].endswith("20 workers; interrupted, 1 of 1000 rounds")
    told = json.loads(run(tmp_path, "r.sqlite", "--json")[1])
    assert (told["status"], told["rounds_done"], told["rounds"]) == ("interrupted", 1, 1000)
    assert "; complete, 24 of 24 rounds\n" in advised(folder, "quiet")[0]


def test_a_run_of_an_older_phocas_is_to_be_run_again(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "r.sqlite", tmp_path / "r.sqlite")
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        connection.execute("DELETE FROM implausible")
    connection.close()
    assert "recorded by an older phocas; run it again" in run(tmp_path, "r.sqlite")[2]


def test_the_last_run_is_the_default_and_mistakes_are_one_line(folder: Path) -> None:
    command = [sys.executable, "-m", "phocas", "advise", "r.sqlite"]
    assert subprocess.check_output(command, cwd=folder, text=True).startswith(f"run {len(CASES)}: ")
    with Results(folder / "old.sqlite") as results:
        results.begin(make_config({}), {}, {})
    Results(folder / "empty.sqlite").close()
    for arguments, words in (
        (("nowhere.sqlite",), "there is no results file nowhere.sqlite"),
        (("r.sqlite", "--run", "99"), "there is no run 99"),
        (("old.sqlite",), "run 1 has no counts of implausible values"),
        (("empty.sqlite",), "there is no run in empty.sqlite"),
        (("own_rules.py",), "cannot be used as a results file"),
    ):
        status, out, errors = run(folder, *arguments)
        assert (status, out) == (2, "")
        assert words in errors
        assert len(errors.splitlines()) == 1


def test_rules_are_those_of_the_page_for_such_data_and_momentum(folder: Path) -> None:
    screen, told = advised(folder, "liars")
    assert [each["failures"] for each in told["rules"]] == [
        "none", "faults", "any", "adversaries", "the paper's"
    ]  # fmt: skip
    assert "cell-filter:b=4|nnm:b=4|trimmed-mean:b=4" in screen
    assert "rules for workers whose data are alike, without momentum" in " ".join(screen.split())
    screen, told = advised(folder, "skewed")
    assert {each["data"] for each in told["rules"]} == {"differ"}
    assert {each["rule"] for each in told["rules"]} == {"nnm:b=3|trimmed-mean:b=3"}
    most = advised(folder, "most")[1]  # six of eleven: the largest b that any rule may have is 5
    assert "heraclius:b=5" in {each["rule"] for each in most["rules"]}
