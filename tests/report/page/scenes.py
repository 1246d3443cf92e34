"""Results files for the tests of the HTML report: real runs, and many synthetic ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from phocas.detection import Evidence
from phocas.experiments.config import make_config
from phocas.experiments.results import Results
from phocas.experiments.runner import execute
from phocas.training.evaluation import Metrics
from phocas.training.trainer import Round

PHASES = ("data", "gradients", "attack", "aggregate", "update", "metrics")
SMALL: dict[str, Any] = {
    "dataset": "synthetic:train=120,test=40,side=8",
    "model": "softmax",
    "workers": 10,
    "servers": 4,
    "rounds": 30,
    "evaluate_every": 5,
    "rule": "phocas:b=3",
}
SUSPECT = 6
"""The worker whose rows are NaN."""
HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>\u2028'


def real_runs(path: Path) -> None:
    """Train the mean, and rules under a crashed worker and under the gambler attack."""
    common = {**SMALL, "results": str(path)}
    for seed in (0, 1):
        for rule, attack in (
            ("mean", "none"),
            ("phocas:b=3", f"crash:worker={SUSPECT}"),
            ("heraclius:b=3", f"crash:worker={SUSPECT}"),
            ("mean", f"crash:worker={SUSPECT}"),
            ("phocas:b=3", "gambler:server=2,probability=0.05"),
        ):
            settings = {"rule": rule, "attack": attack, "seed": seed}
            execute(make_config({**common, **settings, "record_matrix": 10}))


def a_round(number: int, m: int, rng: np.random.Generator, byzantine: int = 0) -> Round:
    """Return a synthetic round in which most values of one worker are dropped."""
    dropped = rng.uniform(0.25, 0.35, m)
    dropped[byzantine] = 0.98
    return Round(
        number=number,
        loss=2.0 / number,
        lr=0.1,
        action="applied",
        finite=True,
        gradient_norm=1.0,
        honest_distance=None,
        dropped=dropped,
        expected_dropped=0.3,
        by_server=rng.uniform(0.2, 0.4, (20, m)) if number % 10 == 0 else None,
        touched=0,
        flagged=(byzantine,) if number > 9 else (),
        seconds=dict.fromkeys(PHASES, 0.004),
    )


def many_runs(path: Path, runs: int, rounds: int, m: int = 20) -> None:
    """Write so many synthetic runs of so many rounds."""
    rules = ["mean", "krum:b=8", "median", *(f"phocas:b={b}" for b in (4, 6, 8)), "meamed:b=8"]
    attacks = [None, "gambler", "gaussian:q=6", "omniscient:q=6", "bit-flip", "sign-flip:q=6"]
    rng = np.random.default_rng(0)
    template = [a_round(number, m, rng) for number in range(1, rounds + 1)]
    with Results(path) as results:
        for number in range(runs):
            settings = {
                "rule": rules[number % len(rules)],
                "attack": attacks[number // len(rules) % len(attacks)] or "none",
                "seed": number // (len(rules) * len(attacks)),
                "rounds": rounds,
                "results": str(path),
            }
            run = results.begin(
                make_config(settings), {"phocas": "0"}, {"name": "here"}, None, [("w", 10**5)]
            )
            end = rng.uniform(0.5, 0.95)
            metrics = [
                (at, Metrics(1 / (1 + at), end * at / (at + 20), 0.9, 0.01))
                for at in range(0, rounds + 1, 10)
            ]
            evidence = [
                Evidence(i, 1e6 * (i == 0), 9 if i == 0 else None, 0.3, 1) for i in range(m)
            ]
            results.record(run, template, metrics, (), evidence)
            results.end(run, "complete")


def embedded_data(page: str) -> dict[str, Any]:
    """Return the embedded data of an HTML report."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def guard_report() -> dict[str, Any]:
    """Return the report of a guard of eight ranks, of which one has faulty memory."""
    return {
        "schema": 2,
        "rule": "watch:phocas:b=2",
        "ranks": 8,
        "members": list(range(8)),
        "steps": 120,
        "dropped": [0.24, 0.25, 0.26, 0.25, 0.25, 0.61, 0.24, 0.25],
        "expected": 0.25,
        "nonfinite": [{"rank": 5, "step": 11, "parameters": ["blocks.3.mlp.weight"], "seen_by": 7}],
        "lost": None,
        "suspects": [
            {
                "rank": 5,
                "host": f"node7{HOSTILE}",
                "kind": "hardware",
                "since": 10,
                "flagged": 12,
                "grounds": ["distances", "addresses"],
                "sure": 0.99997,
                "dropped": 0.61,
                "expected": 0.25,
                "layers": {"blocks.3.mlp.weight": 0.4},
                "places": {
                    "blocks.3.mlp.weight": {
                        "since": 10,
                        "share": 0.4,
                        "others": 0.001,
                        "addresses": [96, 224, 352],
                        "stride": 128,
                        "repeats": 0.98,
                        "kind": "hardware",
                    }
                },
            }
        ],
        "unusual": [2],
        "failure": None,
    }
