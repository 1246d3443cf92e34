"""The study of rare features: tables of losses by frequency of the token, and figures."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table

from phocas.experiments.reproduction.rare.simulation import FAULTS, HONEST, octaves
from phocas.experiments.reproduction.rare.study import BINS
from phocas.report.figures import RunCurve, panel_figure, save_png_and_svg
from phocas.report.palette import BASELINE, Palette

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phocas.experiments.reproduction.rare.study import (
        Losses,
        Study,
        StudyCase,
        StudyPart,
        StudyResults,
    )

OVERVIEW = "parts"
"""Name of the figure that has a panel for each part, without a fault."""
LOWEST = 1e-6
"""Smaller losses are drawn at this value, because the axis is logarithmic."""


def loss_table(part: StudyPart, study: Study, results: StudyResults) -> Table:
    """Lay out the losses of a part for a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", overflow="fold")
    for heading in ("loss", "/mean", *_ranges(part, short=True), "/mean"):
        table.add_column(heading, justify="right", no_wrap=True)
    for fault in part.faults:
        table.add_row(f"[bold]{fault}[/]")
        for case in _cases(part, fault):
            table.add_row(f"  {case.label}", *_numbers(case, part, study, results))
    return table


def markdown(study: Study, results: StudyResults, *, command: str, facts: Sequence[str]) -> str:
    """Write the report: how it was made, ratios to the mean, and a table for each part."""
    lines = [
        f"# {study.title}",
        "",
        f"Made by `{command}`.",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        (
            "Token k of the vocabulary is drawn in proportion to 1 / (k + 1). The model predicts"
            " its image under a random permutation. The loss is that after the last step, for"
            " tokens drawn by their frequency, or for a range of tokens. `/mean` is the loss"
            " divided by that of the mean without a fault; the last column is this ratio for the"
            " rarest range. NaN: the model was lost. A dash: not run. The last rank is faulty in"
            " every step:"
        ),
        "",
        *(f"- {name}: {text}" for name, text in FAULTS.items() if name != HONEST),
        "",
        "## Loss divided by that of the mean without a fault",
        "",
        *summary(study, results),
    ]
    for part in study.parts:
        lines += ["", f"## {part.name}: {part.title}", ""]
        if _panels(part, study, results):
            lines += [f"![Loss by frequency of the token]({part.name}.png)", ""]
        lines += _rows(["fault", "rule", "loss", "/mean", *_ranges(part, short=False), "/mean"])
        for fault in part.faults:
            for case in _cases(part, fault):
                numbers = _numbers(case, part, study, results)
                lines.append(_row([fault, _rule(case), *numbers]))
    return "\n".join(lines) + "\n"


def summary(study: Study, results: StudyResults) -> list[str]:
    """Return two tables in Markdown: the first part under each fault, and the other parts.

    The second has the rules of the first, without a fault, and the ratio for the rarest tokens in
    brackets.
    """
    first, *others = study.parts
    faults = first.faults
    lines = _rows([first.title, *faults])
    for case in _cases(first, faults[0]):
        row = []
        for fault in faults:
            same = [each for each in _cases(first, fault) if each.label == case.label]
            row.append(_ratios(same[0], first, study, results)[0] if same else "")
        lines.append(_row([_rule(case), *row]))
    others = [part for part in others if _compares_rules(part)]
    if others:
        lines += ["", *_rows(["without a fault", *(part.title for part in (first, *others))])]
        labels = [case.label for part in (first, *others) for case in _cases(part, HONEST)]
        for label in dict.fromkeys(labels):
            row = []
            for part in (first, *others):
                same = [each for each in _cases(part, HONEST) if each.label == label]
                if not same:
                    row.append("")
                    continue
                whole, rarest = _ratios(same[0], part, study, results)
                row.append("-" if whole == "-" else f"{whole} ({rarest})")
            lines.append(_row([label, *row]))
    return lines


def draw_study(study: Study, results: StudyResults, folder: Path) -> list[Path]:
    """Draw a figure for each part, and one of all parts without a fault; return the files.

    The figure of a part has a panel for each fault.
    """
    drawn = {}
    for part in study.parts:
        panels = _panels(part, study, results)
        if panels:
            drawn[part.name] = (f"{study.title}. {part.title}", panels)
    overview = {
        f"{part.name}: {part.title}": _curves(part, HONEST, study, results)
        for part in study.parts
        if _compares_rules(part)
    }
    overview = {name: curves for name, curves in overview.items() if curves}
    if len(overview) > 1:
        drawn[OVERVIEW] = (f"{study.title}. Without a fault", overview)
    paths = []
    for name, (title, panels) in drawn.items():
        figure = panel_figure(
            title, panels, "loss", "frequency rank of the token", by_round=False, across=4
        )
        for axes in figure.axes:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            if high > 100 * low:  # enough ticks without the minor ones, half of the time to draw
                axes.minorticks_off()
            ticks = [8**k for k in range(6) if 8**k < axes.get_xlim()[1]]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
        paths += save_png_and_svg(figure, folder / name)
    return paths


def _cases(part: StudyPart, fault: str) -> list[StudyCase]:
    return [case for case in part.cases if case.setting.fault == fault]


def _compares_rules(part: StudyPart) -> bool:
    return len({case.setting.rule for case in part.cases}) > 1


def _rule(case: StudyCase) -> str:
    spec = case.setting.rule.replace("|", "\\|")
    return f"{case.label} (`{spec}`)"


def _ranges(part: StudyPart, *, short: bool) -> list[str]:
    """Return the names of the ranges of tokens that are columns of a part's tables.

    A name is ``1024-2048``, or ``1k-2k`` if ``short`` is set.
    """
    ends = [*_lower_ends(part), part.reference.setting.vocabulary]
    names = [f"{end // 1024}k" if short and end % 1024 == 0 and end else str(end) for end in ends]
    return [f"{low}-{high}" for low, high in pairwise(names)]


def _lower_ends(part: StudyPart) -> list[int]:
    return [low for low in BINS if low < part.reference.setting.vocabulary]


def _numbers(case: StudyCase, part: StudyPart, study: Study, results: StudyResults) -> list[str]:
    """Return loss, ratio, loss by range and ratio of the rarest range, as text."""
    found = results.losses(case, study.repeats)
    if found is None:
        return ["-"] * (len(_lower_ends(part)) + 3)
    whole, rarest = _ratios(case, part, study, results)
    return [_loss(found.total), whole, *map(_loss, found.bins.values()), rarest]


def _ratios(
    case: StudyCase, part: StudyPart, study: Study, results: StudyResults
) -> tuple[str, str]:
    """Return the loss divided by the reference's, of all tokens and of the rarest range."""
    found = results.losses(case, study.repeats)
    plain = results.losses(part.reference, study.repeats)
    if found is None or plain is None:
        return "-", "-"
    rarest = list(found.bins)[-1]
    return (
        _ratio(found.total, plain.total),
        _ratio(found.bins[rarest], plain.bins[rarest]),
    )


def _loss(value: float) -> str:
    """Write a loss in at most six characters.

    >>> _loss(0.00054), _loss(0.0321), _loss(12.34), _loss(math.nan)
    ('5.4e-4', '0.032', '12.3', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    return (
        _short(value) if 0 < value < 0.001 or value >= 1e4 else f"{value:.{3 - (value >= 10) * 2}f}"
    )


def _ratio(value: float, reference: float) -> str:
    """Write a ratio in at most six characters.

    >>> _ratio(0.021, 0.02), _ratio(3, 0.02), _ratio(30, 1e-4), _ratio(math.nan, 1)
    ('1.05', '150', '3.0e5', 'NaN')
    """
    ratio = value / reference if reference else math.nan
    if math.isnan(ratio):
        return "NaN"
    return _short(ratio) if ratio >= 1e4 else f"{ratio:.{2 if ratio < 10 else 0}f}"


def _short(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _rows(headings: Sequence[str]) -> list[str]:
    return [_row(headings), "|" + "---|" * len(headings)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _panels(part: StudyPart, study: Study, results: StudyResults) -> dict[str, list[RunCurve]]:
    """Return the curves of each fault, by the title of its panel, where there are any."""
    found = {
        _panel_title(part, fault, study, results): _curves(part, fault, study, results)
        for fault in part.faults
    }
    return {title: curves for title, curves in found.items() if curves}


def _curves(part: StudyPart, fault: str, study: Study, results: StudyResults) -> list[RunCurve]:
    """Return the loss by frequency for each rule that kept the model, and the reference."""
    palette = Palette()
    curves = []
    for case in _cases(part, fault):
        style = (
            palette.style(case.setting.rule) if "," not in case.label else palette.named(case.label)
        )
        found = results.losses(case, study.repeats)
        if found is not None and math.isfinite(found.total):
            curves.append(_curve(case.label, found, style))
    plain = results.losses(part.reference, study.repeats)
    if curves and plain is not None and fault != HONEST and math.isfinite(plain.total):
        curves.append(_curve("Mean without fault", plain, BASELINE))
    return curves


def _curve(label: str, found: Losses, style: object) -> RunCurve:
    middles = [math.sqrt((low + 1) * high) for low, high in octaves(found.setting.vocabulary)]
    values = [[max(loss, LOWEST) for loss in repeat] for repeat in found.repeats]
    return RunCurve(label, middles, values, style)  # type: ignore[arg-type]


def _panel_title(part: StudyPart, fault: str, study: Study, results: StudyResults) -> str:
    """Return the fault, and the rules whose model was lost."""
    lost = []
    for case in _cases(part, fault):
        found = results.losses(case, study.repeats)
        if found is not None and not math.isfinite(found.total):
            lost.append(case.label)
    return f"{fault}; NaN: {', '.join(lost)}" if lost else fault
