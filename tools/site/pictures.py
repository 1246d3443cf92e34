"""Small SVG diagrams for the documentation, computed by the rules and attacks themselves.

They are inline SVG without colours: ``docs/site.css`` has the colours of its classes, those of
``phocas.report.palette``, for light and dark pages. Curves are drawn by ``phocas.report.figures``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import (
    NNM,
    CellFilter,
    FunctionRule,
    Heraclius,
    Mean,
    Phocas,
    PreAggregator,
    Rule,
    TrimmedMean,
)
from phocas.attacks import Attack, attack_rng

Floats = NDArray[np.float64]

BYZANTINE = 2
CELL = 13


def svg(parts: Iterable[str], width: float, height: float, title: str) -> str:
    """Return shapes as one picture on one line, because Markdown ends HTML at an empty line."""
    body = "".join(parts)
    return (
        f'<svg class="picture" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{body}</svg>"
    )


def cloud() -> Floats:
    """Return the rows of nine workers in the plane, of which the first two are Byzantine."""
    rows = np.random.default_rng(11).normal((52.0, 116.0), (14.0, 11.0), size=(9, 2))
    rows[:BYZANTINE] = [(212.0, 12.0), (226.0, 26.0)]
    return rows


def of_rule(rule: Rule) -> str:
    """Draw the workers, fainter the more of them was dropped, the mean, and the rule's result."""
    rows = cloud()
    trusted = rule.needs_reference == "trusted"
    why = rule.explain(rows, reference=rows[BYZANTINE] if trusted else None)
    dots = _dots(rows, 1 - 0.85 * why.dropped)
    shapes = [_mark(rows.mean(axis=0), "mean"), *dots, _mark(why.value, "result")]
    return svg(shapes, 240, 150, f"Nine workers, two of them Byzantine, and the result of {rule}")


def of_stage(stage: PreAggregator) -> str:
    """Draw the rows before and after a stage."""
    rows = cloud()
    after = rows_after(stage, rows)
    shapes = _dots(rows, np.full(len(rows), 0.25))
    if len(after) == len(rows):
        shapes += [_line(old, new) for old, new in zip(rows, after, strict=True)]
    shapes += [_dot(row, "moved") for row in after if np.isfinite(row).all()]
    return svg(shapes, 240, 150, f"Nine rows, two of them Byzantine, before and after {stage}")


def rows_after(stage: PreAggregator, rows: Floats) -> Floats:
    """Return the rows that a stage passes on."""
    seen: list[Floats] = []

    def keep(after: Floats) -> Floats:
        seen.append(after.copy())
        return np.asarray(after[0])

    (stage | FunctionRule(keep))(rows)
    return seen[0]


def of_attack(attack: Attack, m: int = 8, d: int = 20) -> str:
    """Draw the matrix of a round after an attack, with the changed cells framed."""
    if attack.acts_on_data:
        labels = np.random.default_rng(3).integers(10, size=(m, d))
        touched = attack.corrupt_labels(labels, 10, rng=attack_rng(1, 1), round=1)
        shown = labels / 4.5 - 1
    else:
        rows, before = np.random.default_rng(3).normal(0.3, 1.0, size=(2, m, d)).astype("f4")
        touched = attack.corrupt(rows, rng=attack_rng(1, 1), round=1, previous=before)
        with np.errstate(invalid="ignore"):  # some attacks leave NaN behind
            shown = rows.astype(float)
    title = f"{m} workers' rows after {attack}: changed cells are framed"
    return svg(_cells(shown, touched.mask()), d * CELL + 2, m * CELL + 2, title)


def _cells(
    values: Floats, framed: NDArray[np.bool_] | None = None, left: float = 1, top: float = 1
) -> list[str]:
    """Draw a matrix: a colour for each sign, stronger for larger values, and grey for NaN."""
    shapes = []
    for (row, column), value in np.ndenumerate(values):
        sign = "none" if np.isnan(value) else "minus" if value < 0 else "plus"
        size = 1.0 if np.isnan(value) else min(1.0, 0.12 + 0.3 * abs(value))
        frame = "" if framed is None or not framed[row, column] else " framed"
        shapes.append(
            f'<rect class="cell {sign}{frame}" x="{left + column * CELL:g}" '
            f'y="{top + row * CELL:g}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill-opacity="{size:.2f}"/>'
        )
    return shapes


def _dots(rows: Floats, strengths: Floats) -> list[str]:
    """Draw the rows of ``cloud``."""
    kinds = ["byzantine" if place < BYZANTINE else "honest" for place in range(len(rows))]
    return [_dot(*each) for each in zip(rows, kinds, strengths, strict=True)]


def _dot(place: Floats, kind: str, strength: float = 1.0) -> str:
    x, y = place
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4" opacity="{strength:.2f}"/>'


def _mark(place: Sequence[float] | Floats, kind: str) -> str:
    x, y = place
    return f'<path class="{kind}" d="M{x - 6:.1f} {y:.1f}h12M{x:.1f} {y - 6:.1f}v12" fill="none"/>'


def _line(start: Floats, stop: Floats) -> str:
    if not np.isfinite(stop).all():
        return ""
    (x, y), (u, v) = start, stop
    return f'<path class="way" d="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}" fill="none"/>'


def _text(x: float, y: float, words: str, kind: str = "words", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def _arrow(x: float, y: float, u: float, v: float) -> str:
    return f'<path class="arrow" d="M{x:g} {y:g}L{u:g} {v:g}" marker-end="url(#tip)" fill="none"/>'


_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def _example(m: int = 7, d: int = 24) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a matrix with a Byzantine row and wrong cells, and the mask of its wrong values."""
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(m, d))
    wrong = np.zeros((m, d), bool)
    wrong[1] = True
    for row, column in ((0, 3), (2, 9), (4, 12), (6, 17), (3, 20), (2, 22), (0, 14)):
        wrong[row, column] = True
    rows[wrong] = -9.0
    return rows, wrong


def matrix() -> str:
    """Draw a round as a matrix: rows of workers, columns of servers, and the result."""
    rows, wrong = _example()
    shards = [(0, 8), (8, 16), (16, 24)]
    left, top = 92.0, 20.0
    shapes = [_TIP, *_cells(rows, wrong, left, top)]
    shapes += [
        _text(left - 8, top + row * CELL + 10, f"worker {row + 1}", anchor="end")
        for row in range(len(rows))
    ]
    result = Phocas(b=2)(rows)
    below = top + len(rows) * CELL + 26
    shapes += _cells(result[None], None, left, below)
    shapes.append(_text(left - 8, below + 10, "Phocas(b=2)", anchor="end"))
    for place, (start, stop) in enumerate(shards):
        middle = left + (start + stop) / 2 * CELL
        shapes.append(_text(middle, top - 8, f"server {place + 1}", anchor="middle"))
        shapes.append(_arrow(middle, below - 22, middle, below - 4))
        if place:
            x = left + start * CELL - 0.5
            shapes.append(f'<path class="cut" d="M{x:g} {top - 14:g}V{below + CELL:g}"/>')
    return svg(shapes, left + 24 * CELL + 10, below + CELL + 6, "One round as a matrix")


def window() -> str:
    """Draw one column under four rules: the values that each keeps, and its result."""
    values = np.array([2.1, 2.7, 3.0, 3.3, 3.8, 4.2, 4.6, 5.4, 9.2])
    rules: list[tuple[str, Rule]] = [
        ("Mean()", Mean()),
        ("TrimmedMean(b=2)", TrimmedMean(b=2)),
        ("Phocas(b=2)", Phocas(b=2)),
        ("Heraclius(b=2, cutoff=1.5)", Heraclius(b=2, cutoff=1.5)),
    ]
    left, height = 190.0, 34.0
    shapes = []
    for line, (name, rule) in enumerate(rules):
        y = 18 + line * height
        why = rule.explain(values[:, None])
        shapes.append(_text(left - 10, y + 4, name, kind="code", anchor="end"))
        shapes.append(f'<path class="axis" d="M{left:g} {y:g}h300"/>')
        for place, (value, dropped) in enumerate(zip(values, why.dropped, strict=True)):
            kind = "byzantine" if place == len(values) - 1 else "honest"
            at: Any = np.array([left + (value - 2) * 40, y])
            shapes.append(_dot(at, kind, strength=1 - 0.85 * float(dropped)))
        shapes.append(_mark([left + (float(why.value[0]) - 2) * 40, y], "result"))
    return svg(shapes, left + 310, 18 + len(rules) * height, "One column under four rules")


def _steps(
    matrices: Sequence[tuple[str, Floats, NDArray[np.bool_] | None]],
    arrows: Sequence[tuple[str, str]],
    title: str,
) -> str:
    """Draw matrices from left to right, with an arrow and its two labels between two of them."""
    top, step = 26.0, 10 * CELL + 85.0
    middle = top + 3 * CELL
    shapes = [_TIP]
    for place, (label, values, framed) in enumerate(matrices):
        left = 1 + place * step
        shapes += _cells(values, framed, left, middle - len(values) / 2 * CELL)
        shapes.append(_text(left, top - 10, label))
    for place, (above, below) in enumerate(arrows):
        end = (place + 1) * step
        shapes.append(_arrow(end - 78, middle, end - 8, middle))
        shapes.append(_text(end - 43, middle - 8, above, anchor="middle"))
        shapes.append(_text(end - 43, middle + 16, below, anchor="middle", kind="small"))
    return svg(shapes, len(matrices) * step - 25, top + 6 * CELL + 8, title)


def mix() -> str:
    """Draw both steps: rows are mixed by weights from distances, then each column is reduced."""
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(6, 10))
    rows[1] = -9.0
    result = (NNM(b=2) | Phocas(b=1))(rows)
    matrices = [
        ("G, the rows", rows, rows == -9.0),
        ("W G", rows_after(NNM(b=2), rows), None),
        ("one vector", result[None], None),
    ]
    arrows = [("mix", "W from |xᵢ - xⱼ|²"), ("window", "")]
    return _steps(matrices, arrows, "NNM mixes the rows, then Phocas reduces each column")


def clean() -> str:
    """Draw a cell filter: outlying cells are replaced by the centre of their column."""
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(6, 10))
    rows[range(6), [2, 5, 8, 1, 6, 4]] = -9e3
    cleaned = rows_after(CellFilter(b=1), rows)
    matrices = [
        ("a wrong cell in every row", rows, rows == -9e3),
        ("the columns' centres instead", cleaned, cleaned != rows),
    ]
    title = "The cell filter replaces outlying cells, so that no row is lost"
    return _steps(matrices, [("filter", "")], title)


def shards() -> str:
    """Draw three servers, which add up distances and reduce their own columns."""
    shapes = [_TIP]
    for place in range(3):
        x = 1.0 + place * 150
        rows = np.random.default_rng(place).normal(0.3, 0.9, size=(5, 8))
        middle = x + 4 * CELL
        shapes += _cells(rows, None, x, 24)
        shapes.append(_text(middle, 14, f"server {place + 1}", anchor="middle"))
        shapes.append(_arrow(middle, 24 + 5 * CELL + 4, 202 + (place - 1) * 40, 132))
        shapes.append(_arrow(202 + (place - 1) * 40, 156, middle, 184))
        shapes += _cells(Phocas(b=1)(rows)[None], None, x, 188)
    shapes.append('<rect class="box" x="122" y="134" width="160" height="22" rx="4"/>')
    shapes.append(_text(202, 149, "sums of distances", anchor="middle", kind="small"))
    title = "Servers add up their parts of the distances, and reduce their own columns"
    return svg(shapes, 408, 206, title)


CONCEPTS = {
    "matrix": matrix,
    "window": window,
    "mix": mix,
    "clean": clean,
    "shards": shards,
}
