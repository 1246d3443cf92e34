"""Small HTML tables, which notebooks show for rules, explanations, rounds and results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(headings: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """Return a small HTML table; texts are escaped, and numbers have four digits.

    Args:
        headings: the headings of the columns; none: a table of facts without them.
        rows: the cells of each row; None is an empty cell.
        caption: the line above the table.

    >>> html_table(["a"], [[0.25], ["<b>"]])
    '<table><tr><th>a</th></tr><tr><td>0.25</td></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """

    def cell(value: object) -> str:
        if value is None:
            return ""
        return escape(f"{value:.4g}" if isinstance(value, float) else str(value))

    lines = [f"<th>{escape(each)}</th>" for each in headings]
    body = ["".join(f"<td>{cell(value)}</td>" for value in row) for row in rows]
    every = [*(["".join(lines)] if lines else []), *body]
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{''.join(f'<tr>{line}</tr>' for line in every)}</table>"
