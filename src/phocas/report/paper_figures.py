"""The paper's figures: accuracy by round or by b, one curve for each rule, a band over repeats."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from phocas.experiments.reproduction.tasks import BASELINE, label_of
from phocas.report import palette
from phocas.report.figures import RunCurve, crashes, panel_figure, save_png_and_svg, zoomed_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phocas.experiments.reproduction.outcomes import Outcomes, Repeats
    from phocas.experiments.reproduction.tasks import Figure
    from phocas.report.palette import Style

METRICS = {"top1": "top-1 accuracy", "top3": "top-3 accuracy"}
DODGE = 0.05
"""Horizontal distance between the points of two rules with the same b, which may coincide."""
CROWDED = 8
"""With more curves than this, only means are drawn: bands and single repeats would hide them."""


def draw(figure: Figure, outcomes: Outcomes, stem: Path) -> list[Path]:
    """Draw a figure as ``stem.png`` and ``stem.svg`` and return their paths."""
    cases = outcomes.figure(figure.name)
    metric = METRICS[outcomes.reproduction.metric]
    styles = _styles(cases)
    by_round, crowded = figure.axis == "rounds", len(styles) > CROWDED
    several = any(len(case.seeds) > 1 for case in cases)
    legend = "; line: mean" if several else ""
    legend += ", band: lowest to highest" if several and not (by_round and crowded) else ""
    if by_round and not crowded and any(crashes(case.accuracy) for case in cases):
        legend += "; thin: each repeat, where some crash"
    title = f"{outcomes.reproduction.title}. {figure.title}\n{_repeats(cases)}{legend}"

    def curve(case: Repeats, label: str) -> RunCurve:
        repeats = case.accuracy.mean(axis=0, keepdims=True) if crowded else case.accuracy
        return RunCurve(label, case.rounds, repeats, styles[case.case.label])

    if not by_round:
        canvas = panel_figure(
            title,
            {"": curves_by_b(cases, styles, figure.value)},
            f"{metric}, {'at the end' if figure.value == 'final' else 'best of the run'}",
            "b (q of Krum and Multi-Krum)",
            size=(8, 4),
            by_round=False,
        )
        canvas.axes[0].set_ylim(0, 1)
    elif figure.panel:
        batches = {case.case.config.batch_size: case.case.config for case in cases}
        panels = {
            f"batch {size}, learning rate {config.lr:g}": [
                curve(case, _name(case)) for case in cases if case.case.config.batch_size == size
            ]
            for size, config in sorted(batches.items())
        }
        label = f"{metric} on the test set"
        canvas = panel_figure(title, panels, label, across=len(panels), size=(12, 3.8))
        for axes in canvas.axes:
            axes.set_ylim(figure.zoom)
    else:
        curves = [curve(case, f"{_name(case)}  {case.final.mean():.3f}") for case in cases]
        canvas = zoomed_figure(title, curves, metric, figure.zoom)
    return save_png_and_svg(canvas, stem)


def _repeats(cases: Sequence[Repeats]) -> str:
    """Return how many repeats are shown, and whether some are missing."""
    wanted = cases[0].wanted
    short = [case for case in cases if len(case.seeds) < wanted]
    noun = "repeat" if wanted == 1 else "repeats"
    if not short:
        return f"{wanted} {noun}"
    least = min(len(case.seeds) for case in short)
    shown = f"{least}" if len(short) == len(cases) else f"{least} to {wanted}"
    return f"{shown} of {wanted} {noun}: some are missing, see the legend"


def _name(case: Repeats) -> str:
    """Return a case's label, with the number of its repeats if some are missing."""
    missing = len(case.seeds) < case.wanted
    count = f" ({len(case.seeds)} of {case.wanted} repeats)" if missing else ""
    return case.case.label + count


def _styles(cases: Sequence[Repeats]) -> dict[str, Style]:
    """Return the style of each label; labels that the reproduction file sets get their own."""
    colours = palette.Palette()
    styles: dict[str, Style] = {}
    for each in cases:
        label, config = each.case.label, each.case.config
        if label == BASELINE:
            styles[label] = palette.BASELINE
        elif label == label_of(config):
            styles.setdefault(label, colours.style(config.rule))
        else:
            styles.setdefault(label, colours.named(label))
    return styles


def curves_by_b(cases: Sequence[Repeats], styles: dict[str, Style], value: str) -> list[RunCurve]:
    """Return a curve by b for each label, and a level line for each label that has no b."""
    by_label: dict[str, list[Repeats]] = {}
    for case in cases:
        by_label.setdefault(case.case.label, []).append(case)
    known = [case.case.b for case in cases if case.case.b is not None]
    curves = []
    for index, (label, points) in enumerate(by_label.items()):
        values = [getattr(case, value) for case in points]
        if points[0].case.b is None:
            level = float(values[0].mean())
            ends = [min(known, default=0), max(known, default=1)]
            name = f"{_name(points[0])}  {level:.3f}"
            curves.append(RunCurve(name, ends, [level, level], styles[label]))
            continue
        least = min(len(case.seeds) for case in points)
        short = f" (from {least} of {points[0].wanted})" if least < points[0].wanted else ""
        b = np.array([case.case.b or 0 for case in points], np.float64)
        columns = np.array(list(zip_longest(*values, fillvalue=np.nan)))
        # No line joins two values of b if there are unmeasured ones between them.
        gaps = np.flatnonzero(np.diff(b) > 1) + 1
        columns = np.insert(columns, gaps, np.nan, axis=1)
        # Missing repeats are masked, so that mean and band are of those that there are.
        repeats = np.ma.masked_invalid(columns)
        across = np.insert(b, gaps, b[gaps] - 0.5) + index * DODGE
        curves.append(RunCurve(label + short, across, repeats, styles[label]))
    return curves
