"""The paper's figures: accuracy against rounds or b, one line a rule, a band over the repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from phocas.experiments.reproduction.tasks import BASELINE, label_of
from phocas.report import palette
from phocas.report.figures import (
    Line,
    crashes,
    draw_band,
    draw_by_round,
    draw_legend,
    plain,
    save_figure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.experiments.reproduction.outcomes import Outcomes, Repeats
    from phocas.experiments.reproduction.tasks import Figure
    from phocas.report.palette import Style

AXES = {"top1": "top-1 accuracy", "top3": "top-3 accuracy"}
DODGE = 0.05  # between the points of two rules with the same b, which may coincide
CROWDED = 8  # with more lines than this, bands and single repeats would hide them


def draw(figure: Figure, outcomes: Outcomes, stem: Path) -> list[Path]:
    """Draw a figure as ``stem.png`` and ``stem.svg`` and return their paths."""
    cases = outcomes.figure(figure.name)
    canvas = Canvas(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    metric = AXES[outcomes.reproduction.metric]
    lines = _Lines(cases)
    if figure.axis == "b":
        _by_b(canvas, figure, lines, metric)
    elif figure.panel:
        _by_panel(canvas, figure, lines, metric)
    else:
        _by_round(canvas, figure, lines, metric)
    by_round = figure.axis == "rounds"
    thin = by_round and not lines.crowded and any(crashes(case.accuracy) for case in cases)
    several = any(len(case.seeds) > 1 for case in cases)
    marks = "; line: mean" if several else ""
    marks += ", band: lowest to highest" if several and not (by_round and lines.crowded) else ""
    marks += "; thin: each repeat, where some crash" if thin else ""
    canvas.suptitle(
        f"{outcomes.reproduction.title}. {figure.title}\n{_repeats(cases)}{marks}",
        x=0.01,
        ha="left",
        fontsize=10.5,
    )
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        save_figure(canvas, path)
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


class _Lines:
    """A figure's lines and their styles; those of one rule with names of their own must differ."""

    def __init__(self, cases: Sequence[Repeats]) -> None:
        self.cases = cases
        colours = palette.Palette()
        self._styles: dict[str, Style] = {}
        for each in cases:
            label, config = each.case.label, each.case.config
            if label == BASELINE:
                style = palette.BASELINE
            elif label == label_of(config):
                style = colours.style(config.rule)
            else:
                style = colours.named(label)
            self._styles.setdefault(label, style)
        self.crowded = len(self._styles) > CROWDED

    def style(self, case: Repeats) -> Style:
        """Return the style of a case."""
        return self._styles[case.case.label]

    def draw(self, axes: Axes, case: Repeats, index: int, label: str) -> None:
        """Draw the repeats of a case by round, or their mean alone among many others."""
        repeats = case.accuracy.mean(axis=0, keepdims=True) if self.crowded else case.accuracy
        draw_band(axes, case.rounds, repeats, Line(label, self.style(case), index))


def _by_round(canvas: Canvas, figure: Figure, lines: _Lines, metric: str) -> None:
    def draw_all(axes: Axes) -> None:
        for index, case in enumerate(lines.cases):
            lines.draw(axes, case, index, f"{_name(case)}  {case.final.mean():.3f}")

    draw_by_round(canvas, draw_all, metric, figure.zoom)


def _by_panel(canvas: Canvas, figure: Figure, lines: _Lines, metric: str) -> None:
    values = sorted({case.case.config.batch_size for case in lines.cases})
    canvas.set_size_inches(12, 3.8)
    panels = canvas.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for axes, value in zip(panels, values, strict=True):
        shown = [case for case in lines.cases if case.case.config.batch_size == value]
        for index, case in enumerate(shown):
            lines.draw(axes, case, index, _name(case))
        axes.set_title(
            f"batch {value}, learning rate {shown[0].case.config.lr:g}", fontsize=9, loc="left"
        )
        axes.set_xlabel("round")
        if figure.zoom:
            axes.set_ylim(*figure.zoom)
        plain(axes)
    panels[0].set_ylabel(f"{metric} on the test set")
    draw_legend(canvas, panels[0])


def _by_b(canvas: Canvas, figure: Figure, lines: _Lines, metric: str) -> None:
    canvas.set_size_inches(8, 4)
    axes = canvas.subplots()
    by_label: dict[str, list[Repeats]] = {}
    for case in lines.cases:
        by_label.setdefault(case.case.label, []).append(case)
    for index, (label, points) in enumerate(by_label.items()):
        style = lines.style(points[0])
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
