"""Heat maps of accuracies: a panel for each rule, splits as rows, Byzantine workers as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

_DARK = 0.6
"""Accuracies below this value are written in white."""


@dataclass(frozen=True)
class HeatMap:
    """One panel.

    Attributes:
        title: the title.
        rows: the names of the rows.
        columns: the names of the columns.
        values: accuracies from 0 to 1, a list for each row; None if not run.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


def heatmap_figure(maps: Sequence[HeatMap], *, title: str, x: str, across: int = 2) -> Figure:
    """Draw heat maps side by side, all with the same colours.

    Args:
        maps: the panels.
        title: the title of the figure.
        x: the label of the columns.
        across: number of panels in a row.
    """
    across = min(across, len(maps))
    down = -(-len(maps) // across)
    tallest = max(len(each.rows) for each in maps)
    widest = max(len(each.columns) for each in maps)
    margin = 0.09 * max(len(row) for each in maps for row in each.rows)
    size = (across * (margin + 1.0 + 0.75 * widest) + 1, down * (1.1 + 0.5 * tallest) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    image = None
    for axes, each in zip(panels, maps, strict=False):
        values = np.array(
            [[np.nan if value is None else value for value in row] for row in each.values], float
        )
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_title(each.title, fontsize=9)
        axes.set_xticks(range(len(each.columns)), each.columns, fontsize=8)
        axes.set_yticks(range(len(each.rows)), each.rows, fontsize=8)
        axes.set_xlabel(x, fontsize=8)
        for (i, j), value in np.ndenumerate(values):
            text = "not run" if np.isnan(value) else f"{value:.2f}"
            colour = "white" if value < _DARK else "black"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=panels.tolist(), shrink=0.8, label="accuracy")
    return figure
