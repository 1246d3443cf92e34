"""The figure and the report of time complexity: time and instructions against m and d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from phocas.experiments.reproduction.complexity import BOUND, series
from phocas.experiments.reproduction.growth import exponent_of
from phocas.report.claims_table import claim_lines
from phocas.report.figures import new_figure, plain, save_png_and_svg
from phocas.report.palette import Palette

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.experiments.reproduction.complexity import Axis, Complexity, Measurements
    from phocas.experiments.reproduction.verdicts import ClaimResult
    from phocas.report.palette import Style


def _panels(study: Complexity, found: Measurements) -> list[tuple[Axis, int, str]]:
    """Return the panels with measurements: along m or d, threads (0: instructions), and title."""
    sizes = study.sizes
    panels: list[tuple[Axis, int, str]] = [
        ("m", number, f"milliseconds, {_threads(number)}, d = {sizes.at_d:,}")
        for number in sizes.threads
    ]
    if sizes.counts:
        panels.append(("m", 0, "instructions for one dimension (AVX2)"))
    panels += [
        ("d", number, f"milliseconds, {_threads(number)}, m = {sizes.at_m}")
        for number in sizes.threads
    ]
    return [panel for panel in panels if series(study, found, "Mean", panel[0], panel[1])]


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def draw_complexity(study: Complexity, found: Measurements, stem: Path) -> list[Path]:
    """Draw the figure as ``stem.png`` and ``stem.svg``; a hollow mark is a memory-bound size."""
    palette = Palette()
    styles = {label: palette.style(rule) for label, rule in study.specs(study.sizes.at_m).items()}
    panels = _panels(study, found)
    across = 3 if len(panels) > 4 else min(2, len(panels))
    down = -(-len(panels) // across)
    title = (
        f"{study.title}, {found.machine.get('cpu', '')}. Lines: fitted powers; hollow marks:"
        f" memory-bound, at least {BOUND:.0%} of the bandwidth of memory"
    )
    figure = new_figure(4.2 * across, 3.4 * down + 0.4, title)
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (axis, threads, name) in zip(grid, panels, strict=False):
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xscale("log", base=2 if axis == "m" else 10)
        axes.set_yscale("log")
        axes.set_xlabel("workers, m" if axis == "m" else "dimensions, d")
        for label, style in styles.items():
            _draw(axes, study, found, label, style, axis, threads)
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc="upper left")
    return save_png_and_svg(figure, stem)


def _draw(
    axes: Axes,
    study: Complexity,
    found: Measurements,
    label: str,
    style: Style,
    axis: Axis,
    threads: int,
) -> None:
    points = series(study, found, label, axis, threads)
    if not points:
        return
    unit = 1 if threads == 0 else 1e3
    x = np.array([getattr(point, axis) for point in points], np.float64)
    y = unit * np.array([point.best for point in points])
    bound = np.array([found.memory_bound(point) for point in points])
    name = label
    if len(points) >= 3:
        slope = exponent_of(points, axis)
        name = f"{label}  {axis}^{slope.mean:.2f} ± {slope.high - slope.mean:.2f}"
        level = np.exp(np.log(y).mean() - slope.mean * np.log(x).mean())
        axes.plot(x, level * x**slope.mean, color=style.colour, linestyle=style.dash, linewidth=1)
    marks: dict[str, Any] = {
        "color": style.colour,
        "marker": "o",
        "linestyle": "none",
        "markersize": 5,
    }
    axes.plot(x[~bound], y[~bound], **marks, label=name)
    axes.plot(x[bound], y[bound], **marks, fillstyle="none")


def markdown(
    study: Complexity, found: Measurements, findings: Sequence[ClaimResult], command: str
) -> str:
    """Write the report: how it was made, the claims, and all measurements."""
    bandwidth = ", ".join(
        f"{value:g} GB/s by {_threads(number)}" for number, value in found.bandwidth.items()
    )
    machine = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    lines = [
        f"# {study.title}: the claims",
        "",
        f"Made by `{command}`.",
        "",
        f"- scale {study.scale}; rules have b = m / 4",
        f"- {machine}",
        f"- memory is read at {bandwidth}",
        "- an exponent is the slope of a line through logarithms; `repeats` counts its points",
        "",
        *claim_lines(findings),
        "",
        f"![{study.title}](complexity.png)",
        "",
    ]
    for axis, threads, name in _panels(study, found):
        labels = list(study.specs(study.sizes.at_m))
        every = {label: series(study, found, label, axis, threads) for label in labels}
        sizes = [getattr(point, axis) for point in every[labels[0]]]
        unit = 1 if threads == 0 else 1e3
        lines += [
            f"## Against {axis}: {name}",
            "",
            f"| {axis} | {' | '.join(labels)} |",
            "|---|" + "---|" * len(labels),
        ]
        for size in sizes:
            cells = []
            for label in labels:
                own = [point for point in every[label] if getattr(point, axis) == size]
                star = "*" if own and found.memory_bound(own[0]) else ""
                cells.append(f"{unit * own[0].best:,.3g}{star}" if own else "-")
            lines.append(f"| {size:,} | {' | '.join(cells)} |")
        lines += ["", "A star marks a memory-bound size.", ""] if threads else [""]
    return "\n".join(lines).rstrip() + "\n"
