# ruff: noqa: INP001 - a script, not a package
"""Count the honest runs in which the detector flags a worker, and time the flags of faulty ones.

    python benchmarks/false_alarms.py --runs 10000 --rounds 100000
    python benchmarks/false_alarms.py --study --runs 100 --results alarms.jsonl

With ``--study`` the runs are real: they train a small MLP on MNIST with seeds from 1 on, where the
data of the 20 workers differ, by label and by Dirichlet 0.1. In the runs of ``--rounds`` rounds
(500) all workers are honest. In further runs worker 0 becomes faulty in round 200, and has to be
flagged within 30 rounds. The file of ``--results`` has a line for each run; a run that has a line
is not repeated. The status is 1 if a target is missed. ``--rule``, ``--model``, ``--lr`` and
``--worker-momentum`` change the runs.

Without ``--study`` the runs are simulated:

The simulation is the worst case of the guarantee for b = 1 of m ranks: the faulty rank is always
the nearest, so that each of the m - 1 honest ranks is the farthest with the largest probability
that is possible. Every round is observed. In a share of the rounds the farthest score is striking.
All wealth is in two measures, as in the test of all parameters together. :func:`compare` checks the
simulation against :class:`phocas.detection.evalues.EValueTest`, which is too slow for many runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from phocas.attacks import Gaussian, SignFlip
from phocas.attacks.base import Scene
from phocas.attacks.touched import Touched
from phocas.detection import FALSE_ALARM
from phocas.detection.evalues import STRATEGIES, EValueTest, invested_by
from phocas.training.trainer import Trainer

PARTS = (0.6, 0.4)
STRIKING = 0.05
ONSET = 200


class _Late:
    """An attack that begins in round ONSET."""

    def _corrupt(self: Any, scene: Scene) -> Touched:
        begun = scene.round >= ONSET
        if not begun:
            return Touched(scene.shape)
        return super()._corrupt(scene)  # type: ignore[misc,no-any-return]  # of an attack


@dataclass(frozen=True)
class LateSignFlip(_Late, SignFlip):
    """Worker 0 multiplies its rows by -scale."""


@dataclass(frozen=True)
class LateGaussian(_Late, Gaussian):
    """Worker 0 sends Gaussian noise."""


FAULTS = {
    "gaussian": LateGaussian(q=1),
    "sign-flip": LateSignFlip(q=1),
    "scale": LateSignFlip(q=1, scale=-10.0),
}


SPLITS = ("by-label", "dirichlet:alpha=0.1")
IN_TIME = 30


def train(seed: int, rounds: int, fault: str | None, settings: dict[str, Any]) -> dict[int, int]:
    """Return the flagged workers of a real run, each with the round in which it was flagged."""
    attack = FAULTS[fault] if fault else None
    with Trainer(data="mnist", attack=attack, seed=seed, threads=1, **settings) as trainer:
        for _ in trainer.rounds(rounds):
            pass
        evidence = trainer.detector.evidence()
    return {one.worker: one.flagged for one in evidence if one.flagged}


def done(path: Path) -> dict[str, dict[str, int]]:
    """Return the flagged workers of the runs in a file, by the text of their settings."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {line["run"]: line["flagged"] for line in map(json.loads, lines)}


def study(given: argparse.Namespace) -> bool:
    """Run what is not in the file, print a table, and return whether all targets are met."""
    settings = {"model": given.model, "rule": given.rule, "lr": given.lr}
    settings |= {"worker_momentum": given.worker_momentum, "num_workers": 20}
    known = done(given.results)
    met = True
    for fault, split in product((None, *FAULTS), SPLITS):
        rounds = ONSET + IN_TIME if fault else given.rounds
        alarms, delays = [], []
        for seed in range(1, given.runs + 1):
            run = f"{fault} {split} {rounds} {seed} {settings}"
            if run not in known:
                found = train(seed, rounds, fault, {"split": split, **settings})
                known[run] = {str(worker): number for worker, number in found.items()}
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run, "flagged": known[run]}) + "\n")
            flagged = dict(known[run])
            if fault and flagged.get("0", ONSET + 1) > ONSET:
                delays.append(flagged.pop("0", rounds + 1) - ONSET)
            if flagged:
                alarms.append(f"{seed}: {flagged}")
        in_time = sum(delay <= IN_TIME for delay in delays)
        late = f", flagged in time {in_time}, median {np.median(delays):g} rounds" if fault else ""
        print(
            f"{split}, {fault or 'no fault'}: {given.runs} runs of {rounds} rounds, false alarms in"
            f" {len(alarms)}{late}",
            flush=True,
        )
        for alarm in alarms:
            print(f"    honest workers flagged, with the round, in seed {alarm}")
        met = met and not alarms and in_time == len(delays)
    return met


class Runs:
    """The wealth of the bets on the honest ranks of many runs, each with one faulty rank."""

    def __init__(self, runs: int, m: int) -> None:
        self.runs, self.honest, self.rounds = runs, m - 1, 0
        # Axes: strategy, honest rank, measure and run.
        self.wealth = np.zeros((len(STRATEGIES), m - 1, 2 * runs), np.float32)
        self.parts = np.repeat(PARTS, runs).astype(np.float32)

    def bet(self, farthest: np.ndarray, striking: np.ndarray) -> np.ndarray:
        """Return the e-values after a round, (honest ranks, runs).

        Args:
            farthest: which honest rank is the farthest, by measure and run.
            striking: whether its score is striking.
        """
        stake = invested_by(self.rounds + 1) - invested_by(self.rounds)
        self.rounds += 1
        won = (farthest == np.arange(self.honest)[:, None]).astype(np.float32)
        for number, strategy in enumerate(STRATEGIES):
            lose = np.float32(1 - strategy.fraction)
            gain = np.float32(strategy.fraction * self.honest)
            factors = won * gain + lose
            if strategy.striking:
                factors[:, ~striking] = 1.0
            wealth = self.wealth[number]
            wealth += self.parts * np.float32(strategy.prior * stake)
            wealth *= factors
        total = self.wealth.sum(axis=0)
        return np.asarray(total[:, : self.runs] + total[:, self.runs :])


def compare(m: int, rounds: int = 60) -> None:
    """Raise AssertionError if the simulation and the detector's test have different e-values."""
    rng = np.random.default_rng(1)
    runs, test = Runs(1, m), EValueTest(m, 1, PARTS, by_score=True)
    for _ in range(rounds):
        farthest = rng.integers(m - 1, size=2)
        known, striking = test.usual.copy(), rng.random(2) < 0.3
        scores = np.full((2, 1, m), 1.0)
        scores[:, 0, 0] = 0.5
        scores[[0, 1], 0, 1 + farthest] = np.where(striking, 9.0, 1.5)
        expected = test.observe(scores)[1:]
        found = runs.bet(farthest, striking & ~np.isnan(known))[:, 0]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def simulate(runs: int, rounds: int, m: int, seed: int) -> tuple[int, float]:
    """Return the number of runs in which an honest rank is flagged, and the largest e-value."""
    rng = np.random.default_rng(seed)
    simulated = Runs(runs, m)
    largest = np.zeros(runs, np.float32)
    for _ in range(rounds):
        farthest = rng.integers(m - 1, size=2 * runs, dtype=np.uint8)
        striking = rng.random(2 * runs, dtype=np.float32) < STRIKING
        np.maximum(largest, simulated.bet(farthest, striking).max(axis=0), out=largest)
    return int((largest >= m / FALSE_ALARM).sum()), float(largest.max())


def main() -> None:
    """Print the number of false alarms, and the number that the guarantee allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, help="10,000; with --study 100")
    parser.add_argument("--rounds", type=int, help="100,000; with --study 500")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--study", action="store_true", help="train real runs whose data differ")
    parser.add_argument("--results", type=Path, default=Path("alarms.jsonl"))
    parser.add_argument("--model", default="mlp:hidden=16")
    parser.add_argument("--rule", default="nnm:b=1|trimmed-mean:b=1")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--worker-momentum", type=float, default=0.0)
    given = parser.parse_args()
    given.runs = given.runs or (100 if given.study else 10_000)
    given.rounds = given.rounds or (500 if given.study else 100_000)
    if given.study:
        sys.exit(not study(given))
    compare(given.ranks)
    found, largest = simulate(given.runs, given.rounds, given.ranks, given.seed)
    allowed = given.runs * FALSE_ALARM * invested_by(given.rounds)
    print(
        f"{found} of {given.runs} honest runs of {given.rounds} rounds have a flagged rank, and at"
        f" most {allowed:.1f} may on average. The largest e-value is {largest:.3g}; ranks are"
        f" flagged at {given.ranks / FALSE_ALARM:.3g}."
    )


if __name__ == "__main__":
    main()
