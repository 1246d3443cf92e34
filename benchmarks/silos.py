# ruff: noqa: INP001 - a script, not a package
"""Aggregate the updates of seven silos of which one has half of all examples and one is malicious.

    python benchmarks/silos.py

The sizes of the largest and of the smallest silo, the attack and the error are those of a public
discussion (KatherLab/MediSwarm, pull request 566): 17,834 of 34,496 examples (51.7%) and 190
(0.6%), an update times -1000, and the distance from the mean of honest updates over the length of
this mean. The other sizes and the differences between silos are ours. The discussion has an error
of 5.52 for the weighted mean and of 0.04 with clipped norms if the smallest silo attacks, and of
518.02 and 1.19 if the largest one does.
"""

from __future__ import annotations

import argparse

import numpy as np

import phocas

SIZES = np.array([17834, 6000, 4500, 3000, 1800, 1172, 190])
D = 10_000
RULES: list[tuple[str, float | None]] = [
    ("mean", 1.0),
    ("clipping:radius={radius}|mean", 1.0),
    ("clipping:radius={radius}|mean", 0.3),
    ("median", None),
    ("trimmed-mean:b=1", None),
    ("trimmed-mean:b=1", 0.4999),
    ("trimmed-mean:b=1", 0.3),
    ("trimmed-mean:b=1", 0.2),
    ("geometric-median", 0.3),
    ("nnm:b=1|trimmed-mean:b=1", 0.3),
    ("adaptive-clipping:b=1|trimmed-mean:b=1", 0.3),
]


def error(rule: str, share: float | None, spread: float, attacker: int | None, seed: int) -> float:
    """Return the distance of an aggregate from the weighted mean of honest updates."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=D)
    rows = common + spread * rng.normal(size=(len(SIZES), D))
    target = np.average(rows, axis=0, weights=SIZES)
    if attacker is not None:
        rows[attacker] *= -1000
    radius = float(np.median(np.linalg.norm(rows, axis=1)))
    weights = None if share is None else SIZES.tolist()
    text = rule.format(radius=radius)
    found = phocas.aggregate(rows, text, weights=weights, max_share=share)
    return float(np.linalg.norm(found - target) / np.linalg.norm(target))


def table(spread: float, seeds: int) -> list[tuple[str, float | None, list[float]]]:
    """Return the mean error of every rule: no attack, the smallest silo, the largest silo."""
    attackers = (None, len(SIZES) - 1, 0)
    found = []
    for rule, share in RULES:
        by_seed = [[error(rule, share, spread, who, n) for who in attackers] for n in range(seeds)]
        found.append((rule, share, np.mean(by_seed, axis=0).tolist()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--spread", type=float, default=0.1, help="how much silos differ, in lengths of the update"
    )
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print("| rule | `max_share` | no attack | smallest silo attacks | largest silo attacks |")
    print("|---|---|---|---|---|")
    for rule, share, errors in table(arguments.spread, arguments.seeds):
        cap = "no weights" if share is None else f"{share:g}"
        numbers = " | ".join(f"{each:.2f}" for each in errors)
        print(f"| `{rule.format(radius='median')}` | {cap} | {numbers} |")
