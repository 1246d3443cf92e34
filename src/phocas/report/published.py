"""Report of a study of other authors: their figures beside ours, cell by cell."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from phocas.experiments.attack_benchmark import judge_cell
from phocas.experiments.reproduction.published import VERDICTS, judge
from phocas.report.figures import save_png_and_svg
from phocas.report.heatmap import HeatMap, heatmap_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from phocas.experiments.attack_benchmark import Accuracy, CellResult
    from phocas.experiments.reproduction.outcomes import RunOutcome
    from phocas.experiments.reproduction.published import (
        PublishedCell,
        PublishedStudy,
        PublishedTable,
        Verdict,
    )

Judged = tuple["PublishedCell", "CellResult | None", "Verdict"]


def judged_tables(
    study: PublishedStudy, records: Mapping[str, RunOutcome]
) -> dict[PublishedTable, list[Judged]]:
    """Return each cell with our result and the verdict.

    Args:
        study: the study.
        records: finished runs, by identity.
    """
    found: dict[PublishedTable, list[Judged]] = {}
    for table in study.tables:
        found[table] = []
        for cell in table.cells:
            result = None if cell.cell is None else judge_cell(cell.cell, records)
            found[table].append((cell, result, judge(cell, result, study.tolerance)))
    return found


def verdict_columns(judged: Sequence[Judged]) -> dict[str, list[str]]:
    """Return the columns of a table for the terminal."""
    columns: dict[str, list[str]] = {
        "row": [cell.row for cell, _, _ in judged],
        "column": [cell.column for cell, _, _ in judged],
        "theirs": [_accuracy(cell.published) for cell, _, _ in judged],
        "ours": [_accuracy(None if found is None else found.accuracy) for _, found, _ in judged],
        "verdict": [verdict for _, _, verdict in judged],
    }
    return columns


def counts(tables: Mapping[PublishedTable, Sequence[Judged]]) -> str:
    """Return how many cells have each verdict, as text."""
    number = Counter(verdict for judged in tables.values() for _, _, verdict in judged)
    return ", ".join(f"{verdict}: {number[verdict]}" for verdict in VERDICTS)


def markdown(
    study: PublishedStudy,
    tables: Mapping[PublishedTable, Sequence[Judged]],
    *,
    command: str,
    facts: Sequence[str],
) -> str:
    """Write the report: how it was made, the number of verdicts, and every table."""
    lines = [
        f"# {study.title}",
        "",
        f"Made by `{command}`. Published in: {study.source}.",
        "",
        *(f"- {fact}" for fact in facts),
        f"- cells by verdict: {counts(tables)}",
        "",
        (
            "A cell has the published accuracy in percent, ours, and the verdict. Accuracies agree"
            f" if they differ by at most {100 * study.tolerance:g} points. Ours is better or worse"
            " if the 95% interval of the difference excludes 0, and not decided otherwise."
        ),
    ]
    for table, judged in tables.items():
        lines += ["", f"## {table.title}", ""]
        if study.heat_map:
            lines += [f"![Accuracy under the worst attack]({table.name}.png)", ""]
        lines.append("| | " + " | ".join(table.columns) + " |")
        lines.append("|---" * (len(table.columns) + 1) + "|")
        width = len(table.columns)
        for number, row in enumerate(table.rows):
            texts = [_text(*each) for each in judged[number * width : (number + 1) * width]]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        reasons = dict.fromkeys(cell.reason for cell, _, _ in judged if cell.reason)
        if reasons:
            lines += ["", *(f"- Not run: {reason}." for reason in reasons)]
        noted = [f"- {cell.row}, {cell.column}: {cell.note}" for cell, _, _ in judged if cell.note]
        if noted:
            lines += ["", *noted]
    return "\n".join(lines) + "\n"


def draw_tables(tables: Mapping[PublishedTable, Sequence[Judged]], folder: Path) -> list[Path]:
    """Draw each table as two heat maps, theirs beside ours, and return the files."""
    paths = []
    for table, judged in tables.items():
        width = len(table.columns)
        theirs = [None if cell.published is None else cell.published.mean for cell, _, _ in judged]
        ours = [None if found is None else found.accuracy.mean for _, found, _ in judged]
        maps = [
            HeatMap(
                title,
                table.rows,
                table.columns,
                [values[start : start + width] for start in range(0, len(values), width)],
            )
            for title, values in (("published", theirs), ("ours", ours))
        ]
        figure = heatmap_figure(maps, title=table.title, x="")
        paths += save_png_and_svg(figure, folder / table.name)
    return paths


def _text(cell: PublishedCell, found: CellResult | None, verdict: Verdict) -> str:
    if found is None:
        return f"{_accuracy(cell.published)}; {verdict}"
    return f"{_accuracy(cell.published)}; {_accuracy(found.accuracy)}: {verdict}"


def _accuracy(value: Accuracy | None) -> str:
    if value is None:
        return "-"
    text = f"{100 * value.mean:.1f}"
    return text if value.deviation is None else f"{text} +- {100 * value.deviation:.1f}"
