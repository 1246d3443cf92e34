"""The paper's experiment on real MNIST with its four attacks: 100 rounds, and slow all 500."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from phocas.data import DataError, load
from phocas.experiments.config import make_config
from phocas.experiments.sweep import sweep
from phocas.training import Trainer

if TYPE_CHECKING:
    from pathlib import Path

CASES = {
    ("mean", "none"): 0.92,
    ("phocas:b=6", "gaussian:q=6"): 0.90,
    ("phocas:b=6", "omniscient:q=6"): 0.90,
    ("phocas:b=8", "bit-flip"): 0.90,
    ("phocas:b=8", "gambler"): 0.90,
}


def test_sign_flipping_worker_is_flagged_despite_noisy_gradients() -> None:
    try:
        data = load("mnist")
    except DataError as error:
        pytest.skip(f"MNIST is out of reach: {error}")
    with Trainer("mlp", data=data, rule="phocas:b=6", attack="sign-flip:q=6") as trainer:
        for _ in range(28):
            trainer.step(detailed=False)
        assert trainer.detector.flagged() == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("rounds", "below"), [(100, 0.05), pytest.param(500, 0.0, marks=pytest.mark.slow)]
)
def test_the_papers_settings_reach_the_papers_accuracy(
    tmp_path: Path, rounds: int, below: float
) -> None:
    try:
        load("mnist")
    except DataError as error:
        pytest.skip(f"MNIST is out of reach: {error}")
    results = str(tmp_path / "r.sqlite")
    configs = [
        make_config({"rule": rule, "attack": attack, "rounds": rounds, "results": results})
        for rule, attack in CASES
    ]
    records = sweep(configs)
    for record, (case, least) in zip(records, CASES.items(), strict=True):
        assert record is not None
        assert record.status == "complete"
        assert record.final_accuracy is not None
        assert record.final_accuracy >= least - below, case
        assert record.skipped_rounds == 0
        byzantine = (0, 1, 2, 3, 4, 5) if "q=6" in case[1] else ()
        assert record.suspects == byzantine, case


WAITLESS = {
    ("buffered:buffers=15", "phocas:b=6"): (300, 0.1, 0.88, 1.0),
    ("buffered:buffers=15", "heraclius:b=6"): (300, 0.1, 0.88, 1.0),
    ("zeno:validation=128", "mean"): (1630, 0.05, 0.85, 1.0),
    ("mean", "mean"): (1000, 0.02, 0.0, 0.5),
}


@pytest.mark.slow
def test_asynchronous_training_survives_slow_and_byzantine_workers(tmp_path: Path) -> None:
    try:
        load("mnist")
    except DataError as error:
        pytest.skip(f"MNIST is out of reach: {error}")
    common = {
        "servers": 1,
        "attack": "gaussian:q=6",
        "speeds": "slow:workers=4,factor=10",
        "evaluate_every": 500,
        "results": str(tmp_path / "r.sqlite"),
    }
    configs = [
        make_config({**common, "asynchronous": policy, "rule": rule, "rounds": rounds, "lr": lr})
        for (policy, rule), (rounds, lr, _, _) in WAITLESS.items()
    ]
    for record, (case, (*_, least, most)) in zip(sweep(configs), WAITLESS.items(), strict=True):
        assert record is not None
        assert record.status == "complete", record.message
        assert record.final_accuracy is not None
        assert least < record.final_accuracy <= most, case
