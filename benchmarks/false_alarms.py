# ruff: noqa: INP001 - a script, not a package
"""Simulate honest runs, and count those in which the detector flags a rank.

    python benchmarks/false_alarms.py --runs 10000 --rounds 100000
    python benchmarks/false_alarms.py --split by-label --runs 100 --rounds 500 --seed 100
    python benchmarks/false_alarms.py --split by-label --runs 20 --rounds 230 --fault sign-flip

With ``--split`` the runs are real: they train the paper's MLP on MNIST, where the data of the 20
workers differ. With ``--fault`` worker 0 becomes faulty in round 200, and the script prints after
how many rounds it is flagged. Without ``--split`` the runs are simulated:

The simulation is the worst case of the guarantee for b = 1 of m ranks: the faulty rank is always
the nearest, so that each of the m - 1 honest ranks is the farthest with the largest probability
that is possible. Every round is observed. In a share of the rounds the farthest score is striking.
All wealth is in two measures, as in the test of all parameters together. :func:`compare` checks the
simulation against :class:`phocas.detection.evalues.EValueTest`, which is too slow for many runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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


def train(seed: int, rounds: int, fault: str | None, settings: dict[str, Any]) -> dict[int, int]:
    """Return the flagged workers of a real run, each with the round in which it was flagged."""
    attack = FAULTS[fault] if fault else None
    with Trainer("mlp", data="mnist", attack=attack, seed=seed, threads=1, **settings) as trainer:
        for _ in trainer.rounds(rounds):
            pass
        evidence = trainer.detector.evidence()
    return {one.worker: one.flagged for one in evidence if one.flagged}


def study(given: argparse.Namespace) -> None:
    """Print the flagged workers of real runs in which the data of workers differ."""
    settings = {"split": given.split, "rule": given.rule, "lr": given.lr}
    settings |= {"worker_momentum": given.worker_momentum, "num_workers": 20}
    wrong, delays = 0, []
    for seed in range(given.seed, given.seed + given.runs):
        flagged = train(seed, given.rounds, given.fault, settings)
        found = flagged.pop(0, None) if given.fault else None
        delays.append(found - ONSET if found else np.inf)
        wrong += bool(flagged)
        if flagged:
            print(f"seed {seed}: honest workers flagged, with the round: {flagged}", flush=True)
    said = f"{given.split}, {given.rule}, lr {given.lr:g}, momentum {given.worker_momentum:g}"
    print(f"{said}: {wrong} of {given.runs} runs of {given.rounds} rounds have a false alarm")
    if given.fault:
        print(
            f"{given.fault} from round {ONSET} on is flagged after {np.median(delays):g} rounds"
            f" (median), {max(delays):g} (largest)"
        )


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
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", help="train real runs whose data differ: by-label, ...")
    parser.add_argument("--rule", default="mean")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--worker-momentum", type=float, default=0.0)
    parser.add_argument("--fault", choices=FAULTS, help="of worker 0, from round 200 on")
    given = parser.parse_args()
    if given.split:
        study(given)
        return
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
