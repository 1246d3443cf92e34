"""Figures of runs, with matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Curve:
    """The accuracy of one run by round."""

    label: str
    rounds: Sequence[int]
    accuracy: Sequence[float]


def accuracy_figure(curves: Sequence[Curve], path: Path, *, title: str) -> None:
    """Draw test accuracy against rounds; the legend is in the order of the final accuracies."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    order = sorted(range(len(curves)), key=lambda i: -curves[i].accuracy[-1])
    for i in order:
        curve = curves[i]
        axes.plot(
            curve.rounds,
            curve.accuracy,
            color=COLOURS[i % len(COLOURS)],
            linestyle=DASHES[i % len(DASHES)],
            linewidth=1.8,
            label=f"{curve.label}  {curve.accuracy[-1]:.3f}",
        )
    axes.set_xlabel("round")
    axes.set_ylabel("top-1 accuracy on the test set")
    axes.set_xlim(0, max(curve.rounds[-1] for curve in curves))
    axes.set_ylim(0, 1)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
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
