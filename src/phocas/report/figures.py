"""Figures of runs, with matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.report.palette import Style

MARKS = 8  # along a line


@dataclass(frozen=True)
class Curve:
    """The accuracy of one run by round."""

    label: str
    rounds: Sequence[int]
    accuracy: Sequence[float]
    style: Style


def accuracy_figure(curves: Sequence[Curve], path: Path, *, title: str) -> None:
    """Draw test accuracy against rounds; the legend is in the order of the final accuracies."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, curve in enumerate(sorted(curves, key=lambda curve: -curve.accuracy[-1])):
        draw_line(axes, curve, index, f"{curve.label}  {curve.accuracy[-1]:.3f}")
    axes.set_xlabel("round")
    axes.set_ylabel("top-1 accuracy on the test set")
    axes.set_xlim(0, max(curve.rounds[-1] for curve in curves))
    axes.set_ylim(0, 1)
    plain(axes)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(
        title="rule, and final accuracy",
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        alignment="left",
        handlelength=3,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_line(axes: Axes, curve: Curve, index: int, label: str) -> None:
    """Draw one curve; the index moves its marks, so that lines which coincide are told apart."""
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
        label=label,
    )


def plain(axes: Axes) -> None:
    """Leave nothing but a pale grid and two axes."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
