"""Figures of runs, with matplotlib."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from phocas.report.palette import BASELINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.report.palette import Style

MARKS = 8  # along a line
BELOW, ABOVE = 0.13, 0.03  # the best accuracy at the end: what is shown zoomed


CRASH = 0.5  # of what was learnt, between the ends of two repeats: one of them has crashed

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """How repeats are drawn: the index moves the marks."""

    label: str
    style: Style
    index: int


@dataclass(frozen=True)
class Curve:
    """The accuracy of one run by round, or by the time it took."""

    label: str
    rounds: Sequence[float]
    accuracy: Sequence[float]
    style: Style


def accuracy_figure(curves: Sequence[Curve], path: Path, *, title: str) -> None:
    """Draw test accuracy against rounds; the legend is in the order of the final accuracies."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    ordered = sorted(curves, key=lambda curve: -curve.accuracy[-1])
    best = ordered[0].accuracy[-1]

    def lines(axes: Axes) -> None:
        for index, curve in enumerate(ordered):
            draw_line(axes, curve, index, f"{curve.label}  {curve.accuracy[-1]:.3f}")

    draw_by_round(figure, lines, "top-1 accuracy", zoom=(best - BELOW, best + ABOVE))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save_png(figure, path)


def draw_by_round(
    canvas: Figure,
    lines: Callable[[Axes], None],
    metric: str,
    zoom: tuple[float, float] | None,
) -> None:
    """Draw lines against rounds, beside it the accuracies that ``zoom`` says, and a legend."""
    panels = canvas.subplots(1, 2 if zoom else 1, squeeze=False)[0]
    for axes in panels:
        lines(axes)
        axes.set_xlabel("round")
        axes.set_xlim(0, max(line.get_xdata()[-1] for line in axes.lines))
        plain(axes)
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel(f"{metric} on the test set")
    if zoom:
        panels[1].set_ylim(*zoom)
        panels[1].set_title("zoomed", fontsize=9, loc="left")
    draw_legend(canvas, panels[0])


def draw_legend(canvas: Figure, axes: Axes) -> None:
    """Say beside the panels what their lines are."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(
        handles, labels, loc="outside right center", frameon=False, handlelength=3.5, fontsize=9
    )


def draw_line(axes: Axes, curve: Curve, index: int, label: str) -> None:
    """Draw one curve; lines which coincide are told apart.

    The index moves a line's marks, and the baseline is dotted and on top of the others.
    """
    every = max(1, len(curve.rounds) // MARKS)
    axes.plot(
        curve.rounds,
        curve.accuracy,
        color=curve.style.colour,
        linestyle=curve.style.dash,
        marker=curve.style.marker,
        markevery=(index * every // 6, every),
        markersize=5,
        linewidth=1.6,
        zorder=2.1 if curve.style == BASELINE else 2.0,
        label=label,
    )


def draw_band(axes: Axes, x: Sequence[float], repeats: Floats, line: Line) -> None:
    """Draw the mean of repeats, (repeats, points), over a band from the lowest to the highest.

    Where some crash and others do not, no band describes that, and each is drawn thin.
    """
    if crashes(repeats):
        axes.plot(x, repeats.T, color=line.style.colour, alpha=0.5, linewidth=0.6)
    elif len(repeats) > 1:
        low, high = repeats.min(axis=0), repeats.max(axis=0)
        axes.fill_between(x, low, high, color=line.style.colour, alpha=0.18, linewidth=0)
    curve = Curve(line.label, x, repeats.mean(axis=0), line.style)
    draw_line(axes, curve, line.index, line.label)


def crashes(accuracy: Floats) -> bool:
    """Say whether some repeats end far below others, in shares of what was learnt."""
    learnt = float(accuracy.max() - accuracy[:, 0].min())
    return learnt > 0.1 and float(np.ptp(accuracy[:, -1])) > CRASH * learnt


def save_figure(canvas: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, as its name says; the same figure gives the same file."""
    if path.suffix == ".png":
        save_png(canvas, path)
        return
    if path.suffix != ".svg":
        raise ValueError(f"a figure is written as .png or .svg: got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "phocas"}):  # text stays text
        canvas.savefig(path, metadata={"Date": None})


def save_png(canvas: Figure, path: Path) -> None:
    """Write 256 colours, which is all there are: a third of the bytes."""
    memory = io.BytesIO()
    canvas.savefig(memory, format="png", dpi=100)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(memory) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def plain(axes: Axes) -> None:
    """Leave nothing but a pale grid and two axes."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
