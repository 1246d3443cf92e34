"""Curves with matplotlib, for the demo, for sweeps and for the paper's figures."""

from __future__ import annotations

import io
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from phocas.experiments.reproduction.verdicts import interval
from phocas.report.palette import BASELINE
from phocas.specs import one_of, positive

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.report.palette import Style

MARKERS = 8
"""Markers along one curve."""
BELOW, ABOVE = 0.13, 0.03
"""Range of the zoomed panel, measured from the best final accuracy."""
CRASH = 0.5
"""Some repeats crashed if final accuracies differ by more than this share of the gain."""

Floats = npt.NDArray[np.float64]
BANDS = {
    "range": "lowest to highest",
    "deviation": "mean +- deviation",
    "interval": "95% interval of the mean",
}
"""The kinds of bands around a curve, and their descriptions."""
PAPER_WIDTH = 3.25
"""Inches: the column of a conference paper."""
_PAPER: dict[Any, Any] = {
    "font.family": "serif",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3,
    "pdf.fonttype": 42,  # fonts that journals accept
}


@dataclass(frozen=True)
class Looks:
    """The style, the width in inches and the band of a figure.

    The style ``paper`` has small serif letters, no title, and the legend below.
    """

    style: str = "screen"
    width: float | None = None
    band: str = "range"

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown style or band, or a width that is not positive."""
        one_of("a figure", "style", self.style, ("screen", "paper"))
        one_of("a figure", "band", self.band, BANDS)
        if self.width is not None:
            positive("a figure", "width", self.width)

    @property
    def paper(self) -> bool:
        """Return whether the figure is for a paper."""
        return self.style == "paper"

    def columns(self, labels: Collection[str]) -> int:
        """Return the columns of the legend: in a paper two, if the labels are short enough."""
        widest = 0.4 + 0.055 * max(map(len, labels), default=0)  # inches, at 7 points
        return 2 if self.paper and 2 * widest <= (self.width or PAPER_WIDTH) else 1

    def size(self, across: int, down: int, labels: Collection[str]) -> tuple[float, float]:
        """Return the width and the height of a figure with that many panels, and its labels."""
        if not self.paper:
            width = 3.4 + 3.4 * across
            height = 0.8 + 3.0 * down
            scale = 1.0 if self.width is None else self.width / width
            return width * scale, height * scale
        width = self.width or PAPER_WIDTH
        lines = math.ceil(len(labels) / self.columns(labels))
        return width, 0.8 * width / across * down + 0.16 * lines + 0.2

    def applied(self) -> AbstractContextManager[None]:
        """Return the context in which the figure is drawn and written."""
        return mpl.rc_context(_PAPER if self.paper else {})


@dataclass(frozen=True, eq=False)
class RunCurve:
    """One labelled curve of a figure."""

    label: str
    x: Sequence[float] | Floats
    """Rounds, seconds, or values of b."""
    y: Sequence[float] | Floats
    """One value per point, or a matrix (repeats, points)."""
    style: Style

    @property
    def repeats(self) -> Floats:
        """The values as a matrix (repeats, points)."""
        return np.atleast_2d(self.y)

    def with_final(self, digits: str = ".3f") -> RunCurve:
        """Return the curve with its mean final value appended to the label."""
        return replace(self, label=f"{self.label}  {self.repeats[:, -1].mean():{digits}}")


def accuracy_figure(curves: Sequence[RunCurve], path: Path, *, title: str) -> None:
    """Write a figure of test accuracy by round; the legend lists the best final accuracy first."""
    ordered = sorted(curves, key=lambda curve: -curve.repeats[0, -1])
    best = ordered[0].repeats[0, -1]
    shown = [curve.with_final() for curve in ordered]
    save_figure(zoomed_figure(title, shown, "top-1 accuracy", (best - BELOW, best + ABOVE)), path)


def zoomed_figure(
    title: str, curves: Sequence[RunCurve], metric: str, zoom: tuple[float, float] | None
) -> Figure:
    """Draw curves by round; a second panel shows only the range ``zoom`` of the metric."""
    panels = {"": curves, "zoomed": curves} if zoom else {"": curves}
    figure = panel_figure(title, panels, f"{metric} on the test set", size=(10, 4.2), share_y=False)
    for axes, limits in zip(figure.axes, ((0, 1), zoom), strict=False):
        axes.set_ylim(limits)
    return figure


def panel_figure(
    title: str,
    panels: Mapping[str, Sequence[RunCurve]],
    y_label: str,
    x_label: str = "round",
    *,
    across: int = 3,
    size: tuple[float, float] | None = None,
    share_y: bool = True,
    by_round: bool = True,
    looks: Looks | None = None,
) -> Figure:
    """Draw one panel for each group of curves, and one legend for all of them.

    Args:
        title: Title of the figure.
        panels: The curves of each panel, by the title of the panel.
        y_label: Label of the vertical axes; only the leftmost panels show it.
        x_label: Label of the horizontal axes; only the lowest panels show it.
        across: The largest number of panels in a row.
        size: Width and height in inches; by default they grow with the panels.
        share_y: Give all panels the same vertical range.
        by_round: Whether the horizontal axis counts rounds. Then the axis starts at 0, and each
            repeat of a curve is a line of its own if some repeats crash.
        looks: Style, width and band.
    """
    looks = looks or Looks()
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)
    labels = {curve.label for curves in panels.values() for curve in curves}
    size = size or looks.size(across, down, labels)
    figure = new_figure(*size, "" if looks.paper else title)
    grid = list(figure.subplots(down, across, sharey=share_y, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles: dict[str, mpl.artist.Artist] = {}
    for place, (axes, (name, curves)) in enumerate(zip(grid, panels.items(), strict=False)):
        for index, curve in enumerate(curves):
            _draw_curve(axes, curve, index, split_crashes=by_round, looks=looks)
        if by_round:
            axes.set_xlim(0, max(float(curve.x[-1]) for curve in curves) or 1)
        axes.set_title(name, fontsize=7 if looks.paper else 9, loc="left")
        if place % across == 0:
            axes.set_ylabel(y_label)
        if place + across >= len(panels):
            axes.set_xlabel(x_label)
        plain(axes)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center" if looks.paper else "outside right center",
        ncols=looks.columns(labels),
        frameon=False,
        handlelength=2.5 if looks.paper else 3.5,
        fontsize=7 if looks.paper else 9,
    )
    return figure


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure, sizes in inches, with its title at the top left."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    return figure


def _draw_curve(
    axes: Axes, curve: RunCurve, index: int, *, split_crashes: bool, looks: Looks
) -> None:
    """Draw the mean of a curve's repeats over a band.

    Where some repeats crash and others do not, each repeat is a thin line, because no band
    describes them. Curves that coincide stay visible: the index moves the markers, and the baseline
    is dotted and on top.
    """
    repeats, style = curve.repeats, curve.style
    if split_crashes and crashes(repeats):
        axes.plot(curve.x, repeats.T, color=style.colour, alpha=0.5, linewidth=0.6)
    elif len(repeats) > 1:
        low, high = band_of(repeats, looks.band)
        axes.fill_between(curve.x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    every = max(1, len(curve.x) // MARKERS)
    axes.plot(
        curve.x,
        repeats.mean(axis=0),
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markevery=(index * every // 6 % every, every),
        markersize=3 if looks.paper else 5,
        linewidth=1.0 if looks.paper else 1.6,
        zorder=2.1 if style == BASELINE else 2.0,
        label=curve.label,
    )


def band_of(repeats: Floats, band: str) -> tuple[Floats, Floats]:
    """Return the lower and the upper end of the band around the mean of several repeats."""
    if band == "range":
        return repeats.min(axis=0), repeats.max(axis=0)
    mean, deviation = repeats.mean(axis=0), repeats.std(axis=0, ddof=1)
    if band == "interval":
        found = [interval(column) for column in repeats.T]
        deviation = np.array([each.high - each.mean for each in found])
    return mean - deviation, mean + deviation


def crashes(repeats: Floats) -> bool:
    """Return whether the final values of repeats differ by a large part of the whole gain."""
    gain = float(repeats.max() - repeats[:, 0].min())
    return gain > 0.1 and float(np.ptp(repeats[:, -1])) > CRASH * gain


def save_figure(figure: Figure, path: Path, dpi: int = 100) -> None:
    """Write a figure as PNG, SVG or PDF, by its suffix; the same figure gives the same bytes."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a figure is written as .png, .svg or .pdf: got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _lay_out(figure, dpi)
    if path.suffix == ".pdf":
        figure.savefig(path, metadata={"CreationDate": None})
        return
    if path.suffix == ".svg":
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "phocas"}):  # text stays text
            figure.savefig(path, metadata={"Date": None})
        return
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=dpi)
    with Image.open(memory) as image:  # a palette of 256 colours makes a third of the bytes
        image.convert("RGB").quantize(256).save(path, optimize=True)


def save_png_and_svg(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as ``stem.png`` and ``stem.svg`` and return the paths."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        save_figure(figure, path)
    return paths


def _lay_out(figure: Figure, dpi: int) -> None:
    """Place the parts of a figure once: each file would repeat it, and draw the figure twice."""
    engine = figure.get_layout_engine()
    if engine is not None:
        figure.set_dpi(dpi)
        engine.execute(figure)
        with mpl.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
            figure.set_layout_engine(None)


def plain(axes: Axes) -> None:
    """Draw a pale grid, and remove the upper and the right border."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
