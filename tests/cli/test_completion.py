"""The Tab key: commands, options, names of rules and attacks, and names of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from phocas.cli.completion import MODELS, complete_task
from phocas.experiments.reproduction.tasks import scales, tasks
from phocas.training.models import MODELS as TABLE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Phocas

SCALES = ("medium", "paper", "small")
OWN = """
raise RuntimeError("completion must not import this")


def dnc(rows, b): ...


class Mine: ...


def _private(): ...
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("phocas tr", ["train"]),
        ("phocas results s", ["show"]),
        ("phocas train --worker-d", ["--worker-data"]),
        ("phocas train --rule trim", ["trimmed-mean"]),
        ("phocas train --lr 0.1 --quiet --attack gau", ["gaussian"]),
        ("phocas train --split dir", ["dirichlet"]),
        ("phocas train --model res", ["resnet18"]),
        ("phocas train --dataset fash", ["fashion-mnist"]),
        ("phocas audit --rule my", ["my_code:dnc", "my_code:Mine"]),
        ("phocas audit --rule krum:b=2 --attack alie --attack omni", ["omniscient"]),
        ("phocas rules nnm:b=2|medi", ["nnm:b=2|median"]),
        ("phocas attacks mimi", ["mimic"]),
        ("phocas reproduce cifar10", ["cifar10", *(f"cifar10-{scale}" for scale in SCALES)]),
        ("phocas attacks nothing-like-it", []),
    ],
)
def test_the_shell_completes(
    phocas: Phocas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str]
) -> None:
    (tmp_path / "my_code.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setenv("_PHOCAS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert phocas().split() == found


def test_tasks_are_completed_with_their_scales() -> None:
    every = [f"{task}-{scale}" for task in tasks() for scale in scales(task)]
    assert complete_task("") == sorted([*tasks(), *every])


def test_names_of_models_are_those_of_their_table() -> None:
    assert tuple(TABLE) == MODELS
