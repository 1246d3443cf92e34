"""Small drawings as SVG, of what rules and attacks really do to real numbers.

They are put into pages as they are, and their colours are classes of ``docs/site.css``, which has
them for light and dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import NNM, Cleaning, Heraclius, Mean, Phocas, PreAggregator, Rule, TrimmedMean
from phocas.attacks import Attack, attack_rng
from phocas.rules.algebra import Mix
from phocas.rules.inputs import open_rows

Floats = NDArray[np.float64]

LIARS = 2
CELL = 13


def svg(parts: Iterable[str], width: float, height: float, title: str) -> str:
    """Join shapes to one picture on one line, as Markdown wants it."""
    body = "".join(parts)
    return (
        f'<svg class="picture" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{body}</svg>"
    )


def cloud() -> Floats:
    """Return nine workers in the plane, of whom the first two lie."""
    rows = np.random.default_rng(11).normal((52.0, 116.0), (14.0, 11.0), size=(9, 2))
    rows[:LIARS] = [(212.0, 12.0), (226.0, 26.0)]
    return rows


def of_rule(rule: Rule) -> str:
    """Draw the workers, fainter the more was dropped of them, the mean, and the rule's result."""
    rows = cloud()
    why = rule.explain(rows)
    shapes = [_mark(rows.mean(axis=0), "mean")]
    for place, (row, dropped) in enumerate(zip(rows, why.dropped, strict=True)):
        kind = "liar" if place < LIARS else "honest"
        shapes.append(_dot(row, kind, strength=1 - 0.85 * float(dropped)))
    shapes.append(_mark(why.value, "result"))
    return svg(shapes, 240, 150, f"Nine workers, two of them wrong, and what {rule} makes of them")


def of_stage(stage: PreAggregator) -> str:
    """Draw where each row goes before a rule sees it."""
    rows = cloud()
    after = rows_after(stage, rows)
    shapes = []
    for place, row in enumerate(rows):
        kind = "liar" if place < LIARS else "honest"
        shapes.append(_dot(row, kind, strength=0.25))
    if len(after) == len(rows):
        shapes += [_line(old, new) for old, new in zip(rows, after, strict=True)]
    shapes += [_dot(row, "moved") for row in after if np.isfinite(row).all()]
    return svg(shapes, 240, 150, f"Nine rows, two of them wrong, before and after {stage}")


def rows_after(stage: PreAggregator, rows: Floats) -> Floats:
    """Return the rows that a stage gives to what follows."""
    matrix = open_rows(rows)
    decision = (stage | Mean()).decide(matrix)
    weights = np.eye(len(rows)) if decision.mix.weights is None else decision.mix.weights
    return np.array(
        [matrix.apply(replace(decision, mix=Mix(each[None])), None) for each in weights]
    )


def of_attack(attack: Attack, m: int = 8, d: int = 20) -> str:
    """Draw the matrix of a round after an attack, with what it touched."""
    if attack.acts_on_data:
        labels = np.random.default_rng(3).integers(10, size=(m, d))
        touched = attack.corrupt_labels(labels, 10, rng=attack_rng(1, 1), round=1)
        shown = labels / 4.5 - 1
    else:
        rows, before = np.random.default_rng(3).normal(0.3, 1.0, size=(2, m, d)).astype("f4")
        touched = attack.corrupt(rows, rng=attack_rng(1, 1), round=1, previous=before)
        with np.errstate(invalid="ignore"):  # some attacks leave NaN behind
            shown = rows.astype(float)
    title = f"{m} workers' rows after {attack}: what it touched is framed"
    return svg(_cells(shown, touched.mask()), d * CELL + 2, m * CELL + 2, title)


def _cells(values: Floats, framed: NDArray[np.bool_], left: float = 1, top: float = 1) -> list[str]:
    """Draw a matrix: two colours for signs, stronger for larger values, black for no number."""
    shapes = []
    for (row, column), value in np.ndenumerate(values):
        sign = "none" if np.isnan(value) else "minus" if value < 0 else "plus"
        size = 1.0 if np.isnan(value) else min(1.0, 0.12 + 0.3 * abs(value))
        frame = " framed" if framed[row, column] else ""
        shapes.append(
            f'<rect class="cell {sign}{frame}" x="{left + column * CELL:g}" '
            f'y="{top + row * CELL:g}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill-opacity="{size:.2f}"/>'
        )
    return shapes


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
    """Return a matrix with a lying row, wrong cells and a row that never came, and what is wrong.

    At most two values are wrong in a column.
    """
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(m, d))
    wrong = np.zeros((m, d), bool)
    wrong[1] = True
    for row, column in ((0, 3), (2, 9), (4, 12), (6, 17), (3, 20), (2, 22), (0, 14)):
        wrong[row, column] = True
    rows[wrong] = -9.0
    return rows, wrong


def matrix() -> str:
    """Draw a round: rows of workers, columns of servers, wrong cells, and the result."""
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
    shapes += _cells(result[None], np.zeros((1, len(result)), bool), left, below)
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
    """Draw one column under four rules: what each keeps, and what it returns."""
    values = np.array([2.1, 2.7, 3.0, 3.3, 3.8, 4.2, 4.6, 5.4, 9.2])
    rules: list[tuple[str, Rule]] = [
        ("Mean()", Mean()),
        ("TrimmedMean(b=2)", TrimmedMean(b=2)),
        ("Phocas(b=2)", Phocas(b=2)),
        ("Heraclius(b=2, reach=1.5)", Heraclius(b=2, reach=1.5)),
    ]
    left, height = 190.0, 34.0
    shapes = []
    for line, (name, rule) in enumerate(rules):
        y = 18 + line * height
        why = rule.explain(values[:, None])
        shapes.append(_text(left - 10, y + 4, name, kind="code", anchor="end"))
        shapes.append(f'<path class="axis" d="M{left:g} {y:g}h300"/>')
        for place, (value, dropped) in enumerate(zip(values, why.dropped, strict=True)):
            kind = "liar" if place == len(values) - 1 else "honest"
            at: Any = np.array([left + (value - 2) * 40, y])
            shapes.append(_dot(at, kind, strength=1 - 0.85 * float(dropped)))
        shapes.append(_mark([left + (float(why.value[0]) - 2) * 40, y], "result"))
    return svg(shapes, left + 310, 18 + len(rules) * height, "One column under four rules")


def mix() -> str:
    """Draw both steps: rows are mixed by weights from distances, then each column is reduced."""
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(6, 10))
    rows[1] = -9.0
    mixed = rows_after(NNM(b=2), rows)
    nothing = np.zeros(rows.shape, bool)
    wrong = nothing.copy()
    wrong[1] = True
    result = (NNM(b=2) | Phocas(b=1))(rows)
    top, wide = 26.0, 10.0 * CELL
    second, third = wide + 90, 2 * wide + 170
    shapes = [_TIP, *_cells(rows, wrong, 1, top), *_cells(mixed, nothing, second, top)]
    shapes += _cells(result[None], nothing[:1], third, top + 2.5 * CELL)
    shapes += [
        _arrow(wide + 8, top + 3 * CELL, second - 8, top + 3 * CELL),
        _arrow(second + wide + 6, top + 3 * CELL, third - 8, top + 3 * CELL),
        _text(wide + 45, top + 3 * CELL - 8, "mix", anchor="middle"),
        _text(wide + 45, top + 3 * CELL + 16, "W from |xᵢ - xⱼ|²", anchor="middle", kind="small"),
        _text(second + wide + 40, top + 3 * CELL - 8, "window", anchor="middle"),
        _text(1, top - 10, "G, the rows"),
        _text(second, top - 10, "W G"),
        _text(third, top - 10, "one vector"),
    ]
    title = "NNM mixes the rows, then Phocas reduces each column"
    return svg(shapes, third + wide + 6, top + 6 * CELL + 8, title)


def clean() -> str:
    """Draw wrong cells that are replaced by the centre of their column before rows are mixed."""
    rows = np.random.default_rng(5).normal(0.4, 0.9, size=(6, 10))
    wrong = np.zeros(rows.shape, bool)
    for row, column in ((0, 2), (1, 5), (2, 8), (3, 1), (4, 6), (5, 4)):
        wrong[row, column] = True
    rows[wrong] = -9e3
    cleaned = rows_after(Cleaning(b=1), rows)
    top, wide = 26.0, 10.0 * CELL
    second = wide + 90
    replaced = cleaned != rows
    shapes = [_TIP, *_cells(rows, wrong, 1, top), *_cells(cleaned, replaced, second, top)]
    shapes += [
        _arrow(wide + 8, top + 3 * CELL, second - 8, top + 3 * CELL),
        _text(wide + 45, top + 3 * CELL - 8, "clean", anchor="middle"),
        _text(1, top - 10, "a wrong cell in every row"),
        _text(second, top - 10, "their columns' centre instead"),
    ]
    title = "Cleaning replaces implausible cells, so that no row is lost"
    return svg(shapes, second + wide + 60, top + 6 * CELL + 8, title)


def shards() -> str:
    """Draw three servers that measure their columns, add up, and reduce their columns alone."""
    shapes = [_TIP]
    for place in range(3):
        x = 1.0 + place * 150
        rows = np.random.default_rng(place).normal(0.3, 0.9, size=(5, 8))
        middle = x + 4 * CELL
        shapes += _cells(rows, np.zeros(rows.shape, bool), x, 24)
        shapes.append(_text(middle, 14, f"server {place + 1}", anchor="middle"))
        shapes.append(_arrow(middle, 24 + 5 * CELL + 4, 202 + (place - 1) * 40, 132))
        shapes.append(_arrow(202 + (place - 1) * 40, 156, middle, 184))
        shapes += _cells(Phocas(b=1)(rows)[None], np.zeros((1, 8), bool), x, 188)
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
