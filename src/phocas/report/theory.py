"""Figures of the paper's theory: its two models of failures, and its convergence theorems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phocas.report.figures import new_figure, plain, save_png_and_svg
from phocas.report.palette import GREY, STYLES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from phocas.theory.trajectories import Trajectory


def byzantine_values(
    m: int = 5, d: int = 8, q: int = 2, *, general: bool, seed: int = 0
) -> NDArray[np.bool_]:
    """Return which values of an (m, d) matrix are Byzantine, q in each column.

    Args:
        m: number of workers.
        d: number of dimensions.
        q: number of Byzantine values in each column.
        general: whether they may be anywhere (the paper's Definition 4), or are those of q workers
            (Definition 1).
        seed: seed of the positions.

    >>> byzantine_values(general=True).sum(axis=0)
    array([2, 2, 2, 2, 2, 2, 2, 2])
    """
    rng = np.random.default_rng(seed)
    workers = rng.permutation(m)[:q]
    wrong = np.zeros((m, d), bool)
    for column in range(d):
        wrong[rng.permutation(m)[:q] if general else workers, column] = True
    return wrong


def draw_models(stem: Path) -> None:
    """Draw the paper's Figure 1, as PNG and SVG: 5 workers, 8 dimensions, Byzantine ones shaded."""
    title = "Figure 1: Byzantine values (shaded) among 5 workers and 8 dimensions, 2 per dimension"
    figure = new_figure(8.5, 2.6, title)
    names = ("(a) Classic Byzantine", "(b) Generalized Byzantine")
    for axes, name, general in zip(figure.subplots(1, 2), names, (False, True), strict=True):
        wrong = byzantine_values(general=general)
        axes.pcolormesh(wrong, cmap="Greys", vmin=0, vmax=1.6, edgecolors="black", linewidth=0.8)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xticks(np.arange(wrong.shape[1]) + 0.5, range(1, wrong.shape[1] + 1))
        axes.set_yticks(np.arange(wrong.shape[0]) + 0.5, range(1, wrong.shape[0] + 1))
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_xlabel("dimension")
        axes.set_ylabel("worker")
        axes.set_aspect("equal")
    save_png_and_svg(figure, stem)


def draw_trajectories(trajectories: Sequence[Trajectory], stem: Path) -> None:
    """Draw runs against their bounds, as PNG and SVG; one panel for each theorem and step."""
    panels: dict[tuple[int, float], list[Trajectory]] = {}
    for each in trajectories:
        panels.setdefault((each.theorem, each.step), []).append(each)
    title = "Theorems 3 and 4. Solid: a run; dashed: its bound; dotted: the bound as printed"
    figure = new_figure(4.3 * len(panels), 3.8, title)
    grid = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, ((theorem, step), own) in zip(grid, panels.items(), strict=True):
        kind = "strongly convex" if theorem == 3 else "smooth, not convex"
        axes.set_title(f"Theorem {theorem}: {kind}, step {step:g}", fontsize=9, loc="left")
        for each in own:
            colour = STYLES[each.rule].colour
            first = 0 if theorem == 3 else 1
            rounds = np.arange(first, first + len(each.bound))
            axes.plot(rounds, each.measured, color=colour, label=each.rule)
            axes.plot(rounds, each.bound, color=colour, linestyle="--")
            if each.printed is not None:
                axes.plot(rounds, each.printed, color=GREY, linestyle=":")
        axes.set_yscale("log")
        axes.set_xlabel("round")
        axes.set_ylabel("distance to optimum" if theorem == 3 else "mean squared gradient so far")
        plain(axes)
        axes.legend(frameon=False, fontsize=8)
    save_png_and_svg(figure, stem)
