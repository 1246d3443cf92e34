"""Accuracy against virtual time: what is gained by not waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from phocas.report.figures import Curve, draw_legend, draw_line, plain, save_png
from phocas.report.palette import style_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phocas.experiments.results import Results, RunRecord


def method(record: RunRecord) -> str:
    """Name how a run treats rows that are late.

    >>> from types import SimpleNamespace as Record
    >>> method(Record(config={"asynchronous": "zeno"}, rule="mean"))  # type: ignore[arg-type]
    'zeno'
    """
    policy = record.config.get("asynchronous")
    if policy is not None:
        return f"{policy}, {record.rule}" if policy.startswith("buffered") else str(policy)
    deadline = record.config.get("virtual_deadline")
    waits = "waits for all" if deadline is None else f"waits {deadline:g} s"
    return f"{waits}, {record.rule}"


def draw_virtual_time(results: Results, runs: Sequence[RunRecord], path: Path) -> None:
    """Draw a panel for each attack, a line for each method: the mean over its runs."""
    found: dict[str, dict[str, list[tuple[list[float], list[float]]]]] = {}
    for record in runs:
        rows = results.table("evaluations", record.id)
        clock = {row["round"]: row["seconds"] for row in results.table("virtual", record.id)}
        begun = {0: 0.0, **clock}
        points = [
            (begun[row["round"]], row["top1"])
            for row in rows
            if row["top1"] is not None and row["round"] in begun
        ]
        if clock and points:
            seconds, accuracy = map(list, zip(*sorted(points), strict=True))
            panel = found.setdefault(record.attack or "no attack", {})
            panel.setdefault(method(record), []).append((seconds, accuracy))
    if not found:
        raise ValueError(f"{results.path} has no runs with a virtual clock: set speeds in them")
    methods = list(dict.fromkeys(name for panel in found.values() for name in panel))
    figure = Figure(figsize=(4 + 3 * len(found), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (attack, lines) in zip(panels, found.items(), strict=True):
        for name in methods:
            index = methods.index(name)
            curve = _mean(name, lines.get(name, [([0.0], [np.nan])]), index)
            draw_line(axes, curve, index, name)
        axes.set_title(attack, fontsize=9, loc="left")
        axes.set_xlabel("virtual seconds")
        axes.set_ylim(0, 1)
        plain(axes)
    panels[0].set_ylabel("top-1 accuracy on the test set")
    draw_legend(figure, panels[0])
    save_png(figure, path)


def _mean(name: str, runs: list[tuple[list[float], list[float]]], index: int) -> Curve:
    """Average runs where all have got to, at the times of the first of them."""
    last = min(seconds[-1] for seconds, _ in runs)
    times = [at for at in runs[0][0] if at <= last]
    values = [np.interp(times, seconds, accuracy) for seconds, accuracy in runs]
    return Curve(name, times, np.mean(values, axis=0).tolist(), style_of(None, index))
