"""Tables of results as files: CSV, Parquet, and summaries over seeds in Markdown and LaTeX."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from typing import TYPE_CHECKING, Any

from phocas.experiments.results import NUMBERED, TABLES
from phocas.report.statistics import AVERAGED, grouped, setting_of
from phocas.report.tables import differing, outcome, said
from phocas.results import as_frame, columns_of
from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phocas.experiments.results import Results, RunRecord

EXPORTS = ("runs", *TABLES)
"""The tables that can be exported."""
FORMATS = ("csv", "parquet", "markdown", "latex")
"""The formats of an export; the last two are summaries over seeds."""
_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_ESCAPES |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


def export_rows(results: Results, table: str, runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the rows of one table of the results, with the settings that tell runs apart."""
    told = dict.fromkeys(["rule", "attack", "seed", *differing([r.config for r in runs])])
    rows: list[dict[str, Any]] = []
    for record in runs:
        if table == "runs":
            about = outcome(record)
            config = about.pop("config")
            about |= {key: " ".join(map(str, about[key])) for key in NUMBERED}
            rows.append({**about, **{k: v for k, v in config.items() if k not in about}})
        else:
            about = {key: record.config.get(key) for key in told}
            rows += [{**row, **about} for row in results.table(table, record.id)]
    return rows


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV with a line of headings; no rows are an empty text."""
    if not rows:
        return ""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as Parquet, by pyarrow or polars; lists and mappings become JSON.

    Raises:
        ValueError: neither package is installed.
    """
    columns = {
        name: [json.dumps(value) if isinstance(value, list | dict) else value for value in column]
        for name, column in columns_of(rows).items()
    }
    if importlib.util.find_spec("pyarrow") is not None:
        arrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    elif importlib.util.find_spec("polars") is not None:
        as_frame(columns, "polars").write_parquet(path)
    else:
        raise ValueError(
            "Parquet needs pyarrow or polars: pip install pyarrow, or take --format csv"
        )


def summary(
    records: Sequence[RunRecord], keys: Sequence[str], value: str
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table of means and deviations over seeds.

    Each value of the last key has a column of its own. The values of the other keys are the first
    cells of a row.

    Args:
        records: the runs.
        keys: the settings by which runs are grouped.
        value: the number to average, one of ``AVERAGED``.
    """
    if value not in AVERAGED:
        raise ValueError(unknown("value", value, AVERAGED))
    *before, last = keys if len(keys) > 1 else (*keys, "")
    digits = 1 if value == "ms_per_round" else 3
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    across: dict[str, None] = {}
    for group in grouped(records, keys):
        row = tuple("none" if group[key] is None else str(group[key]) for key in before)
        column = said(group, last) if last else value.replace("_", " ")
        across[column] = None
        found = group[value]
        text = "" if found["mean"] is None else f"{found['mean']:.{digits}f}"
        if found["deviation"] is not None:
            text += f" ± {found['deviation']:.{digits}f}"
        cells.setdefault(row, {})[column] = text
    headings = [*(key.replace("_", " ") for key in before), *across]
    ranks = [list(dict.fromkeys(column)) for column in zip(*cells, strict=True)]

    def rank(row: tuple[str, ...]) -> list[int]:
        return [values.index(value) for values, value in zip(ranks, row, strict=True)]

    return headings, [
        [*row, *(cells[row].get(column, "") for column in across)]
        for row in sorted(cells, key=rank)
    ]


def as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(as_markdown(["rule", "none"], [["mean", "0.9 ± 0.1"]]))
    | rule | none |
    |---|---|
    | mean | 0.9 ± 0.1 |
    """
    lines = [headings, ["---"] * len(headings), *rows]
    texts = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    rule = "|" + "---|" * len(headings)
    return "\n".join(
        rule if index == 1 else f"| {' | '.join(line)} |" for index, line in enumerate(texts)
    )


def as_latex(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Return a table in LaTeX, for the package booktabs.

    >>> print(as_latex(["rule", "none"], [["nnm:b=1|mean_1", "0.9 ± 0.1"]]))
    \begin{tabular}{lr}
    \toprule
    rule & none \\
    \midrule
    \texttt{nnm:b=1|mean\_1} & $0.9 \pm 0.1$ \\
    \bottomrule
    \end{tabular}
    """
    texts = [all(map(_is_text, column)) for column in zip(*rows, strict=True)]
    lines = [[_latex(cell, text) for cell, text in zip(row, texts, strict=True)] for row in rows]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{''.join('l' if text else 'r' for text in texts)}}}",
            r"\toprule",
            " & ".join(_escaped(each) for each in headings) + r" \\",
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _is_text(cell: str) -> bool:
    return bool(cell) and not cell.replace(".", "").partition(" ")[0].isdigit()


def _latex(cell: str, text: bool) -> str:
    if text:
        return rf"\texttt{{{_escaped(cell)}}}"
    return f"${cell.replace('±', chr(92) + 'pm')}$" if cell else ""


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def default_keys(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return the settings by which a summary groups runs: those that vary, the attack last."""
    varying = [
        key
        for key in differing([record.config for record in records])
        if key not in ("seed", "name", "attack", "rounds", "code")
    ]
    attacks = {setting_of(record.config, "attack") for record in records}
    return (*(varying or ["rule"]), *(["attack"] if len(attacks) > 1 else []))
