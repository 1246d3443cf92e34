"""Figures of a sweep: one curve for each rule with a band over seeds, one panel for each attack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from phocas.engines.asynchronous.policies import read_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.experiments.config import check_setting
from phocas.experiments.curves import read_curve
from phocas.report.figures import BANDS, Looks, RunCurve, crashes, panel_figure, save_figure
from phocas.report.palette import BASELINE, Palette, distinct_dashes
from phocas.report.tables import common, differing, said
from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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
    "accuracy": ("top1", "top-1 accuracy"),
    "top3": ("top3", "top-3 accuracy"),
    "loss": ("loss", "loss"),
}
CLEAN = "mean, no attack"
_NO_LINE = ("seed", "name", "rounds", "evaluate_every", "servers", "processes", "address")
"""Settings that never make a curve of their own."""
_ACROSS = 3
"""Panels in a row, at most."""


@dataclass(frozen=True)
class Choice:
    """The choice of a figure's axes, panels and curves."""

    x: Axis = "round"
    """Horizontal axis: round, seconds or virtual."""
    y: str = "accuracy"
    """Metric: accuracy, top3 or loss."""
    by: str | None = None
    """Setting with one panel for each of its values; by default the attack, if it varies."""
    lines: tuple[str, ...] = ()
    """Settings that label a curve; by default the fewest that distinguish the runs."""
    looks: Looks = field(default_factory=Looks)
    """Style, width and band."""

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown axis, metric or setting."""
        if self.x not in AXES:
            raise ValueError(unknown("axis", self.x, AXES, plural="x may be"))
        if self.y not in METRICS:
            raise ValueError(unknown("metric", self.y, METRICS, plural="y may be"))
        for key in (*([] if self.by is None else [self.by]), *self.lines):
            check_setting(key)


def plot(
    results: Results, runs: Sequence[RunRecord], paths: Sequence[Path], choice: Choice
) -> tuple[int, int]:
    """Draw runs into files and return the numbers of panels and of different curves."""
    curves = {record.id: read_curve(results, record.id) for record in runs}
    if choice.x == "virtual":
        runs = [record for record in runs if curves[record.id].virtual is not None]
        if not runs:
            raise ValueError(f"{results.path} has no runs with a virtual clock: set speeds in them")
    runs = [record for record in runs if len(_points(curves[record.id], choice)[0])]
    if not runs:
        raise ValueError(f"{results.path} has no runs that were evaluated")
    panels, number = _arranged(runs, curves, choice)
    title = _title(runs, panels, choice)
    if len(panels) == 1:
        digits = ".3g" if choice.y == "loss" else ".3f"
        panels = {key: [curve.with_final(digits) for curve in own] for key, own in panels.items()}
    held = [bool(record.config.get("validation")) for record in runs]
    judged = "validation samples" if all(held) else "test set"
    if any(held) and not all(held):
        judged = "test set or validation samples"
    label = METRICS[choice.y][1]
    looks = choice.looks
    if not looks.paper:
        label += f" on the {judged}"
    with looks.applied():
        across = 2 if looks.paper else _ACROSS
        figure = panel_figure(title, panels, label, AXES[choice.x], across=across, looks=looks)
        for axes in figure.axes:
            if choice.y == "loss":
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, 1)
        for path in paths:
            save_figure(figure, path, dpi=300 if looks.paper else 100)
    return len(panels), number


def _arranged(
    runs: Sequence[RunRecord], curves: Mapping[int, Curve], choice: Choice
) -> tuple[dict[str, list[RunCurve]], int]:
    """Return the curves of every panel by its title, and the number of different curves."""
    varying = differing([record.config for record in runs])
    by = choice.by or ("attack" if "attack" in varying else None)
    keys = choice.lines or _distinguishing(runs, by, varying)
    clean = [run for run in runs if by == "attack" and run.attack is None and _averages(run)]
    groups: dict[str, dict[str, list[RunRecord]]] = {}
    for record in runs:
        title = "" if by is None else said(record.config, by)
        groups.setdefault(title, {}).setdefault(_label(record, keys), []).append(record)
    attacked = [title for title in groups if title != said({}, "attack")]
    if clean and attacked:
        if sum(map(len, groups[said({}, "attack")].values())) == len(clean):
            groups.pop(said({}, "attack"))  # this panel would have nothing but the baseline
        for title in attacked:
            groups[title] = {CLEAN: clean, **groups[title]}
    styles = _styles([group for panel in groups.values() for group in panel.items()])
    panels = {
        title: [
            RunCurve(label, *_repeated([curves[r.id] for r in group], group, choice), styles[label])
            for label, group in panel.items()
        ]
        for title, panel in sorted(groups.items(), key=lambda item: item[0] not in attacked)
    }
    return panels, len(styles)


def _distinguishing(
    runs: Sequence[RunRecord], by: str | None, varying: Sequence[str]
) -> tuple[str, ...]:
    """Return the fewest of the varying settings, in their order, that distinguish all curves."""

    def values(keys: Sequence[str]) -> int:
        return len({tuple(said(run.config, key) for key in keys) for run in runs})

    candidates = [key for key in varying if key not in _NO_LINE and key != by]
    start = [] if by is None else [by]
    kept: list[str] = []
    for key in candidates:
        if values([*start, *kept, key]) > values([*start, *kept]):
            kept.append(key)
    return tuple(kept) or ("rule",)


def _label(record: RunRecord, keys: Sequence[str]) -> str:
    """Return a curve's label; unset settings are omitted."""
    if record.name is not None and keys == ("name",):
        return record.name
    shown = [key for key in keys if key == "attack" or record.config.get(key) is not None]
    if _uses_no_rule(record) and "asynchronous" in shown:
        shown = [key for key in shown if key != "rule"]
    return ", ".join(said(record.config, key) for key in shown) or said(record.config, "rule")


def _averages(record: RunRecord) -> bool:
    """Return whether a run averages all rows; an asynchronous policy may drop some of them."""
    return record.rule == "mean" and record.config.get("asynchronous") in (None, "mean")


def _uses_no_rule(record: RunRecord) -> bool:
    """Return whether a run has an asynchronous policy that applies no rule."""
    text = record.config.get("asynchronous")
    policy = None if text is None else read_policy(text)
    return isinstance(policy, Policy) and not policy.uses_rule


def _styles(groups: Sequence[tuple[str, Sequence[RunRecord]]]) -> dict[str, Style]:
    """Return a style for each label; labels of the same rule differ in their dashes."""
    palette = Palette()
    found: dict[str, Style] = {}
    for label, group in groups:
        if label == CLEAN:
            found[label] = BASELINE
        elif _uses_no_rule(group[0]):
            found.setdefault(label, palette.style(group[0].config["asynchronous"]))
        else:
            found.setdefault(label, palette.style(group[0].rule))
    return dict(zip(found, distinct_dashes(list(found.values())), strict=True))


def _points(curve: Curve, choice: Choice) -> tuple[Floats, Floats]:
    """Return the points of a run on the chosen axes; values that are not finite become NaN."""
    x = getattr(curve, choice.x)
    y = getattr(curve, METRICS[choice.y][0])
    known = ~np.isnan(x)
    return x[known], np.where(np.isfinite(y[known]), y[known], np.nan)


def _repeated(
    curves: Sequence[Curve], group: Sequence[RunRecord], choice: Choice
) -> tuple[Floats, Floats]:
    """Return a common axis and the matrix (repeats, points) on it.

    The axis ends where the shortest run ends. A run with the status "stopped" does not shorten it:
    its last value is repeated.
    """
    points = [_points(curve, choice) for curve in curves]
    ends = [x[-1] for (x, _), run in zip(points, group, strict=True) if run.status != "stopped"]
    last = min(ends, default=max(x[-1] for x, _ in points))
    longest = max(points, key=lambda each: each[0][-1])[0]
    grid = longest[longest <= last]
    if not len(grid):  # a slow repeat begins after a quick one has ended
        grid = np.array([last])
    return grid, np.array([np.interp(grid, x, y) for x, y in points])


def _title(
    runs: Sequence[RunRecord], panels: Mapping[str, Sequence[RunCurve]], choice: Choice
) -> str:
    """Return the settings that all runs share, and what lines and bands mean."""
    every = [curve.repeats for curves in panels.values() for curve in curves]
    numbers = sorted({len(repeats) for repeats in every})
    seeds = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    text = f"{seeds} seed{'s' if numbers[-1] > 1 else ''} a line"
    if numbers[-1] > 1:
        text += f"; line: mean, band: {BANDS[choice.looks.band]}"
    if choice.y != "loss" and any(map(crashes, every)):
        text += "; thin: each seed, where some crash"
    return f"{common([record.config for record in runs], but=('seed', 'rule'))}\n{text}"
