"""The front of rules: accuracy without failures against the worst error under attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.transforms import Bbox

from phocas.experiments.reproduction.tasks import BASELINE
from phocas.report.figures import new_figure, plain, save_png_and_svg
from phocas.report.palette import STYLES, Palette

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

    from phocas.experiments.reproduction.front import Errors
    from phocas.experiments.reproduction.outcomes import Outcomes
    from phocas.report.palette import Style

FAMILY = "Heraclius"
_BESIDE = [
    (side, across, up)
    for up in sorted(range(-43, 46, 8), key=abs)
    for side, across in (("left", 7), ("right", -7))
]
"""Positions of a name: its side, and its distance from the mark in points, nearest first."""


def quiet_accuracies(outcomes: Outcomes) -> dict[str, float]:
    """Return every rule's final accuracy without failures, by its label."""
    return {case.case.label: float(case.final.mean()) for case in outcomes.figure("none")}


@dataclass(frozen=True)
class Lowest:
    """A rule's lowest final accuracy under attack."""

    accuracy: float
    """The mean final accuracy over repeats."""
    figure: str
    """The name of the experiment, and so of the attack, with this accuracy."""
    attacks: int
    """The number of attacks that the rule was run under."""


def lowest_accuracies(outcomes: Outcomes) -> dict[str, Lowest]:
    """Return every rule's lowest final accuracy over the attacks that it was run under."""
    ends: dict[str, list[tuple[float, str]]] = {}
    for figure in outcomes.reproduction.figures:
        if figure.name != "none":
            for case in outcomes.figure(figure.name):
                if case.case.label != BASELINE:
                    end = float(case.final.mean()), figure.name
                    ends.setdefault(case.case.label, []).append(end)
    return {label: Lowest(*min(found), len(found)) for label, found in ends.items()}


def draw_front(outcomes: Outcomes, errors: Mapping[str, Errors], stem: Path) -> None:
    """Draw accuracy without failures against the worst error, and against the lowest accuracy.

    The second panel is omitted if no rule was run under an attack. The files are ``stem.png`` and
    ``stem.svg``.
    """
    quiet = quiet_accuracies(outcomes)
    lowest = lowest_accuracies(outcomes)
    weakest = {label: (low.accuracy, quiet[label]) for label, low in lowest.items()}
    repeats = sorted({len(case.seeds) for case in outcomes.figure("none")})
    shown_repeats = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    title = (
        f"{outcomes.reproduction.title}: up and to the right is better. Repeats: {shown_repeats}"
    )
    canvas = new_figure(11 if weakest else 7, 5, title)
    left, *others = canvas.subplots(1, 2 if weakest else 1, sharey=True, squeeze=False)[0]
    bounded = {label: each.worst for label, each in errors.items() if each.worst is not None}
    edge = 1.6 * max(bounded.values(), default=1.0)
    places = {label: bounded.get(label, edge) for label in errors}
    shown = {label: (x, quiet[label]) for label, x in places.items() if label in quiet}
    colours = Palette()
    styles = {label: colours.style(each.rule) for label, each in errors.items()}
    _points(left, shown, styles)
    left.set_xscale("log")
    left.invert_xaxis()  # in both panels, better is to the right
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 50, 100) if tick < edge]
    left.set_xticks([*ticks, edge], [*map(str, ticks), "no\nbound"])
    left.minorticks_off()
    left.set_xlabel("worst error under an adaptive attack, in lengths of the mean honest gradient")
    left.set_ylabel("accuracy without failures")
    for right in others:
        _points(right, weakest, styles)
        right.set_xlim(0, 1)
        right.set_xlabel("lowest accuracy under the attacks that were run")
    for axes in (left, *others):
        plain(axes)
    canvas.draw_without_rendering()  # it sets the positions that names are placed by
    _names(left, shown)
    for right in others:
        _names(right, weakest)
    save_png_and_svg(canvas, stem)


def _points(
    axes: Axes,
    places: Mapping[str, tuple[float, float]],
    styles: Mapping[str, Style],
) -> None:
    """Draw a mark for each rule, and a line through those of Heraclius with different cutoffs."""
    family = [place for label, place in places.items() if label.startswith(FAMILY)]
    if family:
        ordered = sorted(family, key=lambda place: place[1])
        colour = STYLES["heraclius"].colour
        axes.plot(*zip(*ordered, strict=True), color=colour, linewidth=1, zorder=1)
    for label, place in places.items():
        style = styles[label]
        axes.plot(*place, style.marker, color=style.colour, markersize=6)


def _names(axes: Axes, places: Mapping[str, tuple[float, float]]) -> None:
    """Write each name beside its mark, inside the axes, covering no mark and no other name."""
    spots = [axes.transData.transform(place) for place in places.values()]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in spots]
    for label, place in sorted(places.items(), key=lambda item: -item[1][1]):
        text = axes.annotate(label, place, (0, 0), textcoords="offset points", fontsize=8)
        for side, across, up in _BESIDE:
            text.set(position=(across, up), horizontalalignment=side)
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not box.count_overlaps(taken):
                break
        taken.append(box)


def front_lines(outcomes: Outcomes, errors: Mapping[str, Errors]) -> list[str]:
    """Return the front as a table in Markdown."""
    quiet, lowest = quiet_accuracies(outcomes), lowest_accuracies(outcomes)
    rounds = ", ".join(map(str, outcomes.reproduction.front))
    lines = [
        "## The front",
        "",
        "![Accuracy without failures against the worst error](front.png)",
        "",
        (
            "Errors are distances from the mean of the honest gradients, in lengths of that mean,"
            f" in rounds {rounds} of a run with the mean. 6 of 20 workers are Byzantine; they know"
            " the rule and search for the worst rows."
        ),
        "",
        "| rule | without failures | lowest | under | attacks | clean error | worst error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, each in sorted(errors.items(), key=lambda item: -quiet.get(item[0], 0)):
        low = lowest.get(label)
        under = "not run | -" if low is None else f"{low.accuracy:.3f} | {low.figure}"
        attacks = 0 if low is None else low.attacks
        rule = each.rule.replace("|", "\\|")
        worst = "no bound" if each.worst is None else f"{each.worst:.2f}"
        lines.append(
            f"| {label} (`{rule}`) | {_number(quiet.get(label))} | {under} | {attacks} |"
            f" {each.quiet:.2f} | {worst} |"
        )
    return [*lines, ""]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
