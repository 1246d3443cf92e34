"""Figures of any sweep: a line a rule, a band over its seeds, a panel an attack or what varies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from phocas.engines.asynchronous.policies import read_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.experiments.config import check_setting
from phocas.experiments.curves import read_curve
from phocas.report.figures import Line, crashes, draw_band, plain, save_figure
from phocas.report.palette import BASELINE, Palette, told_apart
from phocas.report.tables import common, differing, said
from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.experiments.curves import Axis, Curve, Metric
    from phocas.experiments.results import Results, RunRecord
    from phocas.report.figures import Floats
    from phocas.report.palette import Style

AXES: dict[str, str] = {
    "round": "round",
    "seconds": "seconds of rounds and evaluations",
    "virtual": "virtual seconds",
}
METRICS: dict[str, tuple[Metric, str]] = {
    "accuracy": ("top1", "top-1 accuracy on the test set"),
    "top3": ("top3", "top-3 accuracy on the test set"),
    "loss": ("loss", "loss on the test set"),
}
CLEAN = "mean, no attack"
_NO_LINE = ("seed", "name", "rounds", "evaluate_every", "servers", "processes", "address")
_ACROSS = 3  # panels at most


@dataclass(frozen=True)
class Choice:
    """What is drawn against what, and what has a panel and a line of its own."""

    x: Axis = "round"
    y: str = "accuracy"
    by: str | None = None
    """A setting; by default the attack, if it varies."""
    lines: tuple[str, ...] = ()
    """Settings; by default as many of those that vary as tell the runs apart."""

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        if self.x not in AXES:
            raise ValueError(unknown("axis", self.x, AXES, plural="x may be"))
        if self.y not in METRICS:
            raise ValueError(unknown("metric", self.y, METRICS, plural="y may be"))
        for key in (*([] if self.by is None else [self.by]), *self.lines):
            check_setting(key)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """One line of one panel."""

    label: str
    style: Style
    x: Floats
    repeats: Floats


def plot(
    results: Results, runs: Sequence[RunRecord], paths: Sequence[Path], choice: Choice
) -> tuple[int, int]:
    """Draw runs into files and return how many panels and lines there are."""
    curves = {record.id: read_curve(results, record.id) for record in runs}
    if choice.x == "virtual":
        runs = [record for record in runs if curves[record.id].virtual is not None]
        if not runs:
            raise ValueError(f"{results.path} has no runs with a virtual clock: set speeds in them")
    runs = [record for record in runs if len(_points(curves[record.id], choice)[0])]
    if not runs:
        raise ValueError(f"{results.path} has no runs that were evaluated")
    panels, lines = _arranged(runs, curves, choice)
    down = math.ceil(len(panels) / _ACROSS)
    across = math.ceil(len(panels) / down)
    figure = Figure(figsize=(3.4 + 3.4 * across, 0.8 + 3.0 * down), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for place, (axes, (title, drawn)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        _panel(axes, title, drawn, choice)
        if place % across == 0:
            axes.set_ylabel(METRICS[choice.y][1])
        if place + across >= len(panels):
            axes.set_xlabel(AXES[choice.x])
    _legend(figure, grid.flat, panels, choice)
    figure.suptitle(_title(runs, panels, choice), x=0.01, ha="left", fontsize=10)
    for path in paths:
        save_figure(figure, path)
    return len(panels), lines


def _arranged(
    runs: Sequence[RunRecord], curves: Mapping[int, Curve], choice: Choice
) -> tuple[dict[str, list[_Drawn]], int]:
    """Return the lines of every panel, by its title, and how many different lines there are."""
    varying = differing([record.config for record in runs])
    by = choice.by or ("attack" if "attack" in varying else None)
    keys = choice.lines or _telling(runs, by, varying)
    clean = [run for run in runs if by == "attack" and run.attack is None and _averages(run)]
    groups: dict[str, dict[str, list[RunRecord]]] = {}
    for record in runs:
        title = "" if by is None else said(record.config, by)
        groups.setdefault(title, {}).setdefault(_label(record, keys), []).append(record)
    attacked = [title for title in groups if title != said({}, "attack")]
    if clean and attacked:
        if sum(map(len, groups[said({}, "attack")].values())) == len(clean):
            groups.pop(said({}, "attack"))  # it would have the baseline only
        for title in attacked:
            groups[title] = {CLEAN: clean, **groups[title]}
    styles = _styles([group for panel in groups.values() for group in panel.items()])
    panels = {
        title: [
            _Drawn(label, styles[label], *_repeated([curves[r.id] for r in group], group, choice))
            for label, group in panel.items()
        ]
        for title, panel in sorted(groups.items(), key=lambda item: item[0] not in attacked)
    }
    return panels, len(styles)


def _telling(runs: Sequence[RunRecord], by: str | None, varying: Sequence[str]) -> tuple[str, ...]:
    """Return the fewest of the settings that vary, in their order, that tell all lines apart."""

    def told(keys: Sequence[str]) -> int:
        return len({tuple(said(run.config, key) for key in keys) for run in runs})

    candidates = [key for key in varying if key not in _NO_LINE and key != by]
    start = [] if by is None else [by]
    kept: list[str] = []
    for key in candidates:
        if told([*start, *kept, key]) > told([*start, *kept]):
            kept.append(key)
    return tuple(kept) or ("rule",)


def _label(record: RunRecord, keys: Sequence[str]) -> str:
    """Say what tells a line apart; a setting that is not set is not said."""
    if record.name is not None and keys == ("name",):
        return record.name
    told = [key for key in keys if key == "attack" or record.config.get(key) is not None]
    if _decides_alone(record) and "asynchronous" in told:
        told = [key for key in told if key != "rule"]  # the mean of its one row
    return ", ".join(said(record.config, key) for key in told) or said(record.config, "rule")


def _averages(record: RunRecord) -> bool:
    """Tell whether a run steps along all rows: who refuses some has the mean for a rule too."""
    return record.rule == "mean" and record.config.get("asynchronous") in (None, "mean")


def _decides_alone(record: RunRecord) -> bool:
    """Tell whether a run goes by a policy that asks no rule."""
    text = record.config.get("asynchronous")
    policy = None if text is None else read_policy(text)
    return isinstance(policy, Policy) and not policy.uses_rule


def _styles(groups: Sequence[tuple[str, Sequence[RunRecord]]]) -> dict[str, Style]:
    palette = Palette()
    found: dict[str, Style] = {}
    for label, group in groups:
        if label == CLEAN:
            found[label] = BASELINE
        elif _decides_alone(group[0]):
            found.setdefault(label, palette.style(group[0].config["asynchronous"]))
        else:
            found.setdefault(label, palette.style(group[0].rule))
    return dict(zip(found, told_apart(list(found.values())), strict=True))


def _points(curve: Curve, choice: Choice) -> tuple[Floats, Floats]:
    x = getattr(curve, choice.x)
    y = getattr(curve, METRICS[choice.y][0])
    known = ~np.isnan(x)
    return x[known], np.where(np.isfinite(y[known]), y[known], np.nan)


def _repeated(
    curves: Sequence[Curve], group: Sequence[RunRecord], choice: Choice
) -> tuple[Floats, Floats]:
    """Put repeats on the axis of the first, as far as all have got; a run that stopped stands."""
    points = [_points(curve, choice) for curve in curves]
    ends = [x[-1] for (x, _), run in zip(points, group, strict=True) if run.status != "stopped"]
    last = min(ends, default=max(x[-1] for x, _ in points))
    longest = max(points, key=lambda each: each[0][-1])[0]
    grid = longest[longest <= last]
    return grid, np.array([np.interp(grid, x, y) for x, y in points])


def _panel(axes: Axes, title: str, drawn: Sequence[_Drawn], choice: Choice) -> None:
    for index, line in enumerate(drawn):
        draw_band(axes, line.x.tolist(), line.repeats, Line(line.label, line.style, index))
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(0, max(float(line.x[-1]) for line in drawn) or 1)
    if choice.y == "loss":
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1)
    plain(axes)


def _legend(
    figure: Figure, grid: Any, panels: Mapping[str, Sequence[_Drawn]], choice: Choice
) -> None:
    """Say once what each line is, with its end if there is one panel."""
    found: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    digits = ".3g" if choice.y == "loss" else ".3f"
    ends = {
        line.label: f"  {line.repeats[:, -1].mean():{digits}}" if len(panels) == 1 else ""
        for drawn in panels.values()
        for line in drawn
    }
    figure.legend(
        found.values(),
        [label + ends[label] for label in found],
        loc="outside right center",
        frameon=False,
        handlelength=3.5,
        fontsize=8.5,
    )


def _title(
    runs: Sequence[RunRecord], panels: Mapping[str, Sequence[_Drawn]], choice: Choice
) -> str:
    every = [line.repeats for drawn in panels.values() for line in drawn]
    numbers = sorted({len(repeats) for repeats in every})
    seeds = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    text = f"{seeds} seed{'s' if numbers[-1] > 1 else ''} a line"
    if numbers[-1] > 1:
        text += "; line: mean, band: lowest to highest"
    if choice.y != "loss" and any(map(crashes, every)):
        text += "; thin: each seed, where some crash"
    return f"{common([record.config for record in runs], but=('seed', 'rule'))}\n{text}"
