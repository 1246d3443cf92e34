"""Runs against Theorems 3 and 4, and the figures that the command draws of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from phocas.cli import main
from phocas.report.theory import byzantine_values
from phocas.theory.trajectories import RULES, Rule, smooth_problem, strongly_convex


@pytest.mark.parametrize("rule", RULES)
def test_runs_stay_under_the_corrected_bounds(rule: Rule) -> None:
    small, large = (strongly_convex(rule, step=step, rounds=400) for step in (0.02, 0.4))
    assert small.holds
    assert large.holds
    assert not small.printed_holds  # the printed floor shrinks with the step, the error does not
    assert large.printed_holds
    assert small.measured[-1] > 0.5 * large.measured[-1]
    last = smooth_problem(rule, rounds=100)
    assert last.holds
    assert last.printed_holds
    assert last.measured[-1] > 0.01 * last.bound[-1]  # the run moves, so the bound is tested


def test_impossible_runs_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"the largest step is 0\.4"):
        strongly_convex("phocas", step=0.5, rounds=1)
    with pytest.raises(ValueError, match="rounds >= 1"):
        smooth_problem("phocas", rounds=0)
    with pytest.raises(ValueError, match="the largest b is"):
        smooth_problem("phocas", m=4, q=2, rounds=1)


def test_models_of_failures_are_those_of_figure_1() -> None:
    classic, general = (byzantine_values(general=kind) for kind in (False, True))
    for wrong in (classic, general):
        assert wrong.shape == (5, 8)
        assert set(wrong.sum(axis=0)) == {2}
    assert set(classic.sum(axis=1)) == {0, 8}
    assert np.count_nonzero(general.any(axis=1)) > 2


def test_command_draws_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["phocas", "theory", "figures", "--rounds", "300", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    text = capsys.readouterr().out
    assert text.count("holds, not as printed") == 2
    assert "does not hold" not in text
    assert {path.name for path in tmp_path.iterdir()} == {
        "figure-1.png", "figure-1.svg", "theorems.png", "theorems.svg"
    }  # fmt: skip
    assert "(b) Generalized Byzantine" in (tmp_path / "figure-1.svg").read_text()
