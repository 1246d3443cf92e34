# ruff: noqa: INP001 - a script, not a package
"""Aggregate the updates of seven silos of which one has half of all examples and one is malicious.

    python benchmarks/silos.py
    python benchmarks/silos.py --figure silos.png

The sizes of the largest and of the smallest silo, the attack and the error are those of a public
discussion (KatherLab/MediSwarm, pull request 566): 17,834 of 34,496 examples (51.7%) and 190
(0.6%), an update times -1000, and the distance from the mean of honest updates over the length of
this mean. The other sizes and the differences between silos are ours. The discussion has an error
of 5.52 for the weighted mean and of 0.04 with clipped norms if the smallest silo attacks, and of
518.02 and 1.19 if the largest one does.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

import phocas
from phocas.report.figures import new_figure, plain, save_figure
from phocas.report.palette import GREY, Palette
from phocas.report.statistics import spread as statistics_of

SIZES = np.array([17834, 6000, 4500, 3000, 1800, 1172, 190])
D = 10_000
ATTACKERS = {
    "no attack": None,
    "smallest silo attacks": len(SIZES) - 1,
    "largest silo attacks": 0,
}
"""The silo that attacks, by the name of the case."""
LOWEST = 0.01
"""Smaller errors are drawn at this value, because the axis is logarithmic."""
Row = tuple[str, float | None, list[list[float]]]
"""A rule, its ``max_share``, and its errors by case and seed."""
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


def table(spread: float, seeds: int) -> list[Row]:
    """Return the errors of every rule by seed, a list for each of ``ATTACKERS``."""
    return [
        (
            rule,
            share,
            [
                [error(rule, share, spread, who, n) for n in range(seeds)]
                for who in ATTACKERS.values()
            ],
        )
        for rule, share in RULES
    ]


def name(rule: str, share: float | None) -> tuple[str, str]:
    """Return the names of a rule and of its ``max_share`` for readers."""
    clipped = rule.replace("clipping:radius={radius}|", "norms clipped to their median, ")
    return clipped.replace("|", ", "), "no weights" if share is None else f"{share:g}"


def cell(errors: list[float]) -> str:
    """Return the mean over the seeds and its 95% interval."""
    found = statistics_of(errors)
    if found["high"] is None:
        return f"{found['mean']:.3f}"
    return f"{found['mean']:.3f} ± {found['high'] - (found['mean'] or 0):.3f}"


def draw(rows: list[Row], path: Path) -> None:
    """Draw the mean errors of every rule on a logarithmic axis."""
    seeds = len(rows[0][2][0])
    title = (
        "Seven silos; the largest has 51.7% of the examples, the smallest 0.6%\n"
        f"error of the aggregate, mean of {seeds} seeds"
    )
    figure = new_figure(8.5, 4.6, title)
    axes = figure.subplots()
    colours = Palette()
    marks = dict(zip(ATTACKERS, (("|", 10), ("o", 5), ("s", 8)), strict=True))
    for place, (rule, _, errors) in enumerate(rows):
        colour = colours.style(rule.replace(":radius={radius}", "")).colour
        for (attacker, (marker, size)), values in zip(marks.items(), errors, strict=True):
            x = max(statistics.fmean(values), LOWEST)
            face = "none" if attacker.startswith("largest") else colour
            axes.plot(x, place, marker, markersize=size, color=colour, markerfacecolor=face)
    for attacker, (marker, size) in marks.items():
        face = "none" if attacker.startswith("largest") else GREY
        axes.plot([], [], marker, markersize=size, color=GREY, markerfacecolor=face, label=attacker)
    axes.set_xscale("log")
    axes.set_xlim(LOWEST * 0.8, 1500)
    axes.set_xticks(
        [LOWEST, 0.1, 1, 10, 100, 1000], [f"≤ {LOWEST}", "0.1", "1", "10", "100", "1000"]
    )
    axes.minorticks_off()
    axes.set_yticks(
        range(len(rows)),
        [f"{rule}; {share}" for rule, share in (name(*row[:2]) for row in rows)],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlabel("distance from the weighted mean of honest updates, in lengths of this mean")
    axes.set_ylabel("rule; max_share")
    plain(axes)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--spread", type=float, default=0.1, help="how much silos differ, in lengths of the update"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--figure", type=Path, help="draw the table to this .png or .svg file")
    arguments = parser.parse_args()
    found = table(arguments.spread, arguments.seeds)
    print("| rule | `max_share` |", " | ".join(ATTACKERS), "|\n" + "|---" * 5 + "|")
    for rule, share, errors in found:
        print("|", " | ".join([*name(rule, share), *map(cell, errors)]), "|")
    if arguments.figure is not None:
        draw(found, arguments.figure)
