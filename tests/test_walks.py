"""The walks of ARCHITECTURE.md name every file that a call, a round and a DDP step run through.

Each walk has a largest number of files, so that a reader can follow it.

``python -m pytest tests/test_walks.py -s`` prints the files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from tests.integrations.scenes import act, play, start_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phocas
from phocas.integrations.ddp import protect
from phocas.training import Trainer

PACKAGE = Path(phocas.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"
RANKS = 3
OBSERVED = 64  # steps at the beginning; later, one in four is observed


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of the package with a function that ``call`` runs in this thread."""
    found: set[str] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        found.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    inside = [Path(name) for name in found if Path(name).is_relative_to(PACKAGE)]
    return sorted(str(path.relative_to(PACKAGE)) for path in inside)


def walk(heading: str) -> list[str]:
    """Return the files that a walk of ARCHITECTURE.md lists, sorted."""
    _, _, text = ARCHITECTURE.read_text().partition(f"\n### {heading}")
    listed = re.split(r"\n##", text)[0]
    steps = re.findall(r"^\d+\. ((?:`[\w/]+\.py`,?\s*)+):", listed, re.MULTILINE)
    return sorted(name for step in steps for name in re.findall(r"`([^`]+)`", step))


def check(what: str, files: list[str], heading: str, most: int) -> None:
    print(f"\n{what}: {len(files)} files\n  " + "\n  ".join(files))
    assert len(files) <= most
    assert files == walk(heading), f"ARCHITECTURE.md must list these files under {heading!r}"


def test_files_of_a_call() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 1000)).astype(np.float32)
    rule = phocas.Phocas(b=6)
    rule(rows)
    check("Phocas(b=6)(rows)", files_of(lambda: rule(rows)), "A call", most=7)


def test_files_of_a_round() -> None:
    with Trainer(
        "mlp", data="synthetic:train=500,test=100", num_workers=10, rule="phocas:b=3", lr=0.1
    ) as trainer:
        for _ in range(3):
            trainer.step()
        rounds = files_of(lambda: [trainer.step() for _ in range(4)])  # one counts outliers
        check("a round of training with detection", rounds, "A round", most=15)


def test_files_of_a_ddp_step(tmp_path: Path) -> None:
    quiet, observed = play(Path(__file__), tmp_path, world=RANKS)("ddp_steps")[0]
    check("a DDP step that is observed", observed, "A step of DDP", most=10)
    seldom = {"detection/parameter_test.py", "detection/evalues.py"}
    assert set(observed) - set(quiet) == seldom


def ddp_steps(rank: int) -> Any:
    """Return the files of a step that is not observed, and of one that is."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)))
    guard = protect(model, "phocas:b=1")
    torch.manual_seed(rank)

    def step() -> None:
        model(torch.randn(8, 20)).square().mean().backward()

    while guard.steps < OBSERVED + 1:
        step()
    steps = sorted((files_of(step) for _ in range(4)), key=len)
    return steps[0], steps[-1]


if __name__ == "__main__":
    act({"ddp_steps": ddp_steps}, start_ranks(RANKS), Path(sys.argv[1]), RANKS)
