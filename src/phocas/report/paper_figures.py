"""The paper's figures: accuracy against rounds or b, one line a rule, a band over the repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from phocas.experiments.reproduction.tasks import BASELINE, label_of
from phocas.report import palette
from phocas.report.figures import Curve, draw_by_round, draw_legend, draw_line, plain, save_png

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.experiments.reproduction.outcomes import Outcomes, Repeats
    from phocas.experiments.reproduction.tasks import Figure
    from phocas.report.palette import Style

AXES = {"top1": "top-1 accuracy", "top3": "top-3 accuracy"}
CRASH = 0.5  # of what was learnt, between the ends of two repeats: one of them has crashed
DODGE = 0.05  # between the points of two rules with the same b, which may coincide


def draw(figure: Figure, outcomes: Outcomes, stem: Path) -> list[Path]:
    """Draw a figure as ``stem.png`` and ``stem.svg`` and return their paths."""
    cases = outcomes.figure(figure.name)
    canvas = Canvas(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    metric = AXES[outcomes.reproduction.metric]
    if figure.axis == "b":
        _by_b(canvas, figure, cases, metric)
    elif figure.panel:
        _by_panel(canvas, figure, cases, metric)
    else:
        _by_round(canvas, figure, cases, metric)
    thin = figure.axis == "rounds" and any(map(_crashes, cases))
    several = any(len(case.seeds) > 1 for case in cases)
    marks = "; line: mean, band: lowest to highest" if several else ""
    marks += "; thin: each repeat, where some crash" if thin else ""
    canvas.suptitle(
        f"{outcomes.reproduction.title}. {figure.title}\n{_repeats(cases)}{marks}",
        x=0.01,
        ha="left",
        fontsize=10.5,
    )
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    save_png(canvas, paths[0])
    # Text stays text, and the same results give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.name}):
        canvas.savefig(paths[1], metadata={"Date": None})
    return paths


def _repeats(cases: Sequence[Repeats]) -> str:
    """Say how many repeats are shown, and of which lines some are missing."""
    wanted = cases[0].wanted
    short = [case for case in cases if len(case.seeds) < wanted]
    noun = "repeat" if wanted == 1 else "repeats"
    if not short:
        return f"{wanted} {noun}"
    least = min(len(case.seeds) for case in short)
    shown = f"{least}" if len(short) == len(cases) else f"{least} to {wanted}"
    return f"{shown} of {wanted} {noun}: some are missing, see the legend"


def _name(case: Repeats) -> str:
    missing = len(case.seeds) < case.wanted
    count = f" ({len(case.seeds)} of {case.wanted} repeats)" if missing else ""
    return case.case.label + count


def _line(axes: Axes, case: Repeats, index: int, label: str) -> None:
    style = _style(case, index)
    mean = case.accuracy.mean(axis=0)
    if _crashes(case):
        axes.plot(case.rounds, case.accuracy.T, color=style.colour, alpha=0.5, linewidth=0.6)
    elif len(case.seeds) > 1:
        low, high = case.accuracy.min(axis=0), case.accuracy.max(axis=0)
        axes.fill_between(case.rounds, low, high, color=style.colour, alpha=0.18, linewidth=0)
    draw_line(axes, Curve(label, case.rounds, mean, style), index, label)


def _crashes(case: Repeats) -> bool:
    """Say whether some repeats crash and others do not: no band describes that."""
    learnt = float(case.best.max() - case.accuracy[:, 0].min())
    return learnt > 0.1 and float(np.ptp(case.final)) > CRASH * learnt


def _style(case: Repeats, index: int) -> Style:
    """Return the style of a rule; lines of one rule with names of their own must differ."""
    if case.case.label == BASELINE:
        return palette.BASELINE
    named = case.case.label != label_of(case.case.config)
    return palette.style_of(None if named else case.case.config.rule, index)


def _by_round(canvas: Canvas, figure: Figure, cases: Sequence[Repeats], metric: str) -> None:
    def lines(axes: Axes) -> None:
        for index, case in enumerate(cases):
            _line(axes, case, index, f"{_name(case)}  {case.final.mean():.3f}")

    draw_by_round(canvas, lines, metric, figure.zoom)


def _by_panel(canvas: Canvas, figure: Figure, cases: Sequence[Repeats], metric: str) -> None:
    values = sorted({case.case.config.batch_size for case in cases})
    canvas.set_size_inches(12, 3.8)
    panels = canvas.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for axes, value in zip(panels, values, strict=True):
        shown = [case for case in cases if case.case.config.batch_size == value]
        for index, case in enumerate(shown):
            _line(axes, case, index, _name(case))
        axes.set_title(
            f"batch {value}, learning rate {shown[0].case.config.lr:g}", fontsize=9, loc="left"
        )
        axes.set_xlabel("round")
        if figure.zoom:
            axes.set_ylim(*figure.zoom)
        plain(axes)
    panels[0].set_ylabel(f"{metric} on the test set")
    draw_legend(canvas, panels[0])


def _by_b(canvas: Canvas, figure: Figure, cases: Sequence[Repeats], metric: str) -> None:
    canvas.set_size_inches(8, 4)
    axes = canvas.subplots()
    by_label: dict[str, list[Repeats]] = {}
    for case in cases:
        by_label.setdefault(case.case.label, []).append(case)
    for index, (label, points) in enumerate(by_label.items()):
        style = _style(points[0], index)
        values = [getattr(case, figure.value) for case in points]
        if points[0].case.b is None:
            name = f"{_name(points[0])}  {values[0].mean():.3f}"
            axes.axhline(values[0].mean(), color=style.colour, linestyle=style.dash, label=name)
            continue
        b = [(case.case.b or 0) + index * DODGE for case in points]
        if any(len(v) > 1 for v in values):
            low, high = [v.min() for v in values], [v.max() for v in values]
            axes.fill_between(b, low, high, color=style.colour, alpha=0.18, linewidth=0)
        least = min(len(case.seeds) for case in points)
        short = f" (from {least} of {points[0].wanted})" if least < points[0].wanted else ""
        axes.plot(
            b,
            [v.mean() for v in values],
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            label=label + short,
        )
    axes.set_xlabel("b (q of Krum and Multi-Krum)")
    when = "at the end" if figure.value == "final" else "greatest on the way"
    axes.set_ylabel(f"{metric}, {when}")
    axes.set_ylim(0, 1)
    plain(axes)
    draw_legend(canvas, axes)
