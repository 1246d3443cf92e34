"""Tell by exact arithmetic whether an aggregate is one that rounding allows.

A rule that chooses rows jumps where two candidates are as near: there the twin and the kernels may
differ by more than rounding, and both be right. The judge follows the kernels' own decisions, step
by step. Each one must be right for distances and norms that are as exact as fractions, give or take
the rounding that the kernels may commit; the result must be that of the window of the rows so made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from tests.helpers import ROUNDING, TINY, Doubles, doubles

from phocas import CellFilter, Heraclius, Mean, Monitor, Pipeline, Rule
from phocas.rules.algebra import Floats, Mix, Planning, through
from phocas.rules.base import Stage, plan_of
from phocas.rules.centres import CenteredClipping
from phocas.rules.cliques import smallest_diameter
from phocas.rules.execution import Execution
from phocas.rules.inputs import open_rows
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Clipping
from phocas.rules.reference import implausible, reference, trimmed, weights
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MoNNA, MultiKrum

DOUBLE = ROUNDING["float64"]
Value: TypeAlias = Fraction | float


class Exact:
    """Rows as fractions, which are ``mix @ rows``; NaN and inf stay floats.

    Attributes:
        mix: what the kernels have made of the rows so far.
        low: the squared distances, or norms, as small as rounding can make them.
        high: those as large as rounding can make them.
    """

    def __init__(self, rows: Doubles, mix: Floats | None, unit: float) -> None:
        self.rows = rows
        self.mix = np.eye(len(rows)) if mix is None else mix
        self.d = rows.shape[1]
        self.unit = unit
        given: list[list[Value]] = [
            [Fraction(x) if math.isfinite(x) else x for x in row] for row in rows.tolist()
        ]
        self.values = [self._mixed(given, each) for each in self.mix]
        # What the values of a mixed row may be off by, in units of rounding.
        with np.errstate(all="ignore"):
            sizes = [np.where(row != 0, np.abs(row), 0) for row in self.mix]
            self.sizes = np.array(
                [
                    sum((w * np.abs(rows[j]) for j, w in enumerate(size) if w), np.zeros(self.d))
                    for size in sizes
                ]
            )

    def _mixed(self, given: list[list[Value]], weights: Floats) -> list[Value]:
        if np.isnan(weights).any():
            return [math.nan] * self.d
        used = [(Fraction(float(w)), given[j]) for j, w in enumerate(weights) if w]
        result: list[Value] = []
        for column in range(self.d):
            entries = [(w, row[column]) for w, row in used]
            lost = [float(w) * v for w, v in entries if isinstance(v, float)]
            exact = sum((w * v for w, v in entries if isinstance(v, Fraction)), Fraction())
            result.append(sum(lost) if lost else exact)
        return result

    def distance(self, i: int, j: int) -> tuple[float, float]:
        """Return the least and the largest squared distance that may be measured."""
        if i == j:
            return 0.0, 0.0
        pairs = list(zip(self.values[i], self.values[j], strict=True))
        exact = Fraction()
        for a, b in pairs:
            if isinstance(a, float) or isinstance(b, float):
                return math.inf, math.inf
            exact += (a - b) ** 2
        steps = self.d / 8 + 8
        scale = self._derived(self.mix[i] - self.mix[j])
        if scale is None:  # measured in double precision between rows that are mixed in it
            scale, unit = float(np.sum((self.sizes[i] + self.sizes[j]) ** 2)), DOUBLE
        else:
            unit = self.unit
        return _interval(exact, steps * unit * scale)

    def _derived(self, weights: Floats) -> float | None:
        """Return the sum of the sizes of all that a distance is derived from, None if none is."""
        if abs(weights.sum()) > 1e-12 or np.abs(self.mix.sum(axis=1) - 1).max() > 1e-12:
            return None
        used = np.flatnonzero(weights)
        total = 0.0
        for a in used:
            for b in used:
                apart = self.rows[a] - self.rows[b]
                total += abs(weights[a] * weights[b]) / 2 * float(np.sum(apart**2))
        return total

    def norm(self, i: int) -> tuple[float, float]:
        """Return the least and the largest squared norm that may be measured."""
        exact = Fraction()
        for value in self.values[i]:
            if isinstance(value, float):
                return math.inf, math.inf
            exact += value**2
        return _interval(exact, (self.d / 8 + 8) * DOUBLE * float(np.sum(self.sizes[i] ** 2)))

    def distances(self) -> tuple[Floats, Floats]:
        """Return all of them."""
        m = len(self.values)
        low, high = np.zeros((m, m)), np.zeros((m, m))
        for i in range(m):
            for j in range(i):
                low[i, j], high[i, j] = self.distance(i, j)
        return low + low.T, high + high.T


def _interval(exact: Fraction, slack: float) -> tuple[float, float]:
    try:
        value = float(exact)
    except OverflowError:
        return math.inf, math.inf
    return value * (1 - 4 * DOUBLE) - slack, value * (1 + 4 * DOUBLE) + slack


def admissible(rule: Rule, rows: Doubles, got: Doubles, dtype: str) -> bool:
    """Tell whether rounding allows this aggregate of rows that a type can hold."""
    rule = Mean() if isinstance(rule, Monitor) else rule
    if isinstance(rule, Pipeline) and isinstance(rule.stages[0], CellFilter):
        cleaned = _cleaned(rule, rows, dtype)
        with np.errstate(all="ignore"):
            right = _plausible(rule.stages[0], rows, cleaned, ROUNDING[dtype])
        return right and admissible(rule.following, cleaned, got, dtype)
    matrix = open_rows(rows.astype(dtype))
    mixes: list[Mix] = []
    unit = ROUNDING[dtype]
    before: Mix = Mix()
    stages: tuple[Stage, ...] = (*rule.stages, rule.rule) if isinstance(rule, Pipeline) else (rule,)
    with np.errstate(all="ignore"):
        for stage in stages:
            m = matrix.m if before.weights is None else len(before.weights)
            planning = through(before, _seen(stage.planning(m, None), mixes))
            after = _run(planning, matrix)
            if not _right(stage, Exact(rows, before.weights, unit), mixes[-1]):
                return False
            before = after
        return _window(stages[-1], Exact(rows, before.weights, unit), got, dtype)


def _seen(planning: Planning, mixes: list[Mix]) -> Planning:
    mix = yield from planning
    mixes.append(mix)
    return mix


def _run(planning: Planning, matrix: Any) -> Mix:
    reply = None
    while True:
        try:
            request = next(planning) if reply is None else planning.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = matrix.measure(request)


def _cleaned(rule: Pipeline, rows: Doubles, dtype: str) -> Doubles:
    """Return the rows as the kernels have cleaned them."""
    matrix = open_rows(rows.astype(dtype))
    execution = Execution(plan_of(rule, matrix.m), matrix.m)
    execution.measure(matrix)
    seen = execution._seen(matrix, 0)
    parts = [seen.values(part, None) for piece in seen.pieces for _, _, part in seen.blocks(piece)]
    return doubles(np.concatenate(parts, axis=1))


def _plausible(stage: CellFilter, rows: Doubles, cleaned: Doubles, unit: float) -> bool:
    """Tell whether the cells that changed are those beyond a limit that is a little off."""
    present = ~np.isnan(cleaned).all(axis=1)  # others are out
    changed = (cleaned != rows) & ~(np.isnan(cleaned) & np.isnan(rows))
    kept = np.where(changed | ~np.isfinite(rows), 0, np.abs(rows)).max(initial=0.0)
    centres = np.array([trimmed(column, stage.b) for column in rows.T])
    radii = np.sort(np.abs(rows - centres), axis=0)[len(rows) - stage.b - 1]
    spread = np.sqrt(np.mean(np.where(np.isfinite(radii), radii, 0) ** 2))
    slack = 8 * len(rows) * unit * (1 + (kept / spread if spread else 1))
    if slack > 1 / 2:
        return True
    surely = implausible(replace(stage, cutoff=stage.cutoff * (1 + slack)), rows)
    maybe = implausible(replace(stage, cutoff=stage.cutoff * (1 - slack)), rows)
    # A value that equals the centre may have been replaced.
    equal = rows == centres.astype(np.float32)
    return bool((changed | ~surely | equal)[present].all() and (maybe | ~changed)[present].all())


# -- decisions -------------------------------------------------------------------------------------


def _right(stage: Stage, exact: Exact, mix: Mix) -> bool:
    """Tell whether a decision is one that exact measurements, a little off, lead to."""
    m = len(exact.values)
    if isinstance(stage, Clipping | AdaptiveClipping):
        return mix.weights is not None and _clipped(stage, exact, mix.weights.diagonal())
    if isinstance(stage, CGE):
        low, high = np.array([exact.norm(i) for i in range(m)]).T
        return _smallest(mix, low, high, m - stage.b)
    if not isinstance(stage, NNM | Krum | MultiKrum | Bulyan | MDA | MoNNA):
        return True
    low, high = exact.distances()
    if isinstance(stage, MoNNA):
        return _smallest(mix, low[stage.trusted], high[stage.trusted], m - stage.b)
    if isinstance(stage, NNM):
        np.fill_diagonal(low, -1)
        np.fill_diagonal(high, -1)
        rows = range(m)
        return mix.weights is not None and all(
            _all_below(mix.weights[i] != 0, low[i], high[i]) for i in rows
        )
    if isinstance(stage, Krum | MultiKrum):
        number = 1 if isinstance(stage, Krum) else stage.chosen(m)
        score = partial(_scores, neighbours=m - stage.b - 2)
        return _smallest(mix, score(low), score(high), number)
    if isinstance(stage, MDA):
        best = smallest_diameter(high, m - stage.b)
        largest = high[np.ix_(best, best)].max()
        if mix.selected is None:
            return bool(np.isinf(largest))
        return bool(low[np.ix_(mix.selected, mix.selected)].max() <= largest)
    assert mix.selected is not None
    return _one_by_one(set(mix.selected.tolist()), tuple(range(m)), stage.b, low, high)


def _clipped(stage: Clipping | AdaptiveClipping, exact: Exact, factors: Floats) -> bool:
    norms = np.array([exact.norm(i) for i in range(len(factors))])
    lengths = np.sqrt(np.maximum(norms, 0))
    if isinstance(stage, Clipping):
        radii = np.array([stage.radius, stage.radius])
    else:
        radii = np.sort(lengths, axis=0)[len(factors) - 1 - stage.clipped_rows(len(factors))]
    for factor, (low, high) in zip(factors, lengths, strict=True):
        if np.isinf(low):
            if factor != 0:
                return False
            continue
        least = min(1.0, radii[0] / high) if high else 1.0
        most = min(1.0, radii[1] / low) if low > 0 else 1.0
        if not least * (1 - 8 * DOUBLE) <= factor <= most * (1 + 8 * DOUBLE):
            return False
    return True


def _smallest(mix: Mix, low: Floats, high: Floats, number: int) -> bool:
    if mix.selected is None:  # nothing to choose
        return bool(np.isinf(np.sort(high)[number - 1]))
    chosen = np.zeros(len(low), bool)
    chosen[mix.selected] = True
    return chosen.sum() == number and _all_below(chosen, low, high)


def _all_below(chosen: Any, low: Floats, high: Floats) -> bool:
    return bool(chosen.all() or low[chosen].max() <= high[~chosen].min())


def _scores(squared: Floats, neighbours: int) -> Floats:
    return np.asarray(np.sort(squared, axis=1)[:, 1 : 1 + neighbours].sum(axis=1))


def _one_by_one(wanted: set[int], left: tuple[int, ...], b: int, low: Floats, high: Floats) -> bool:
    """Tell whether some order of choices, each of a smallest score, has chosen the wanted."""
    if not wanted:
        return True
    neighbours = max(1, len(left) - b - 2)
    least, most = (_scores(each[np.ix_(left, left)], neighbours) for each in (low, high))
    return any(
        _one_by_one(wanted - {row}, tuple(other for other in left if other != row), b, low, high)
        for row, score in zip(left, least, strict=True)
        if row in wanted and score <= most.min()
    )


# -- columns ---------------------------------------------------------------------------------------


def _window(rule: Stage, exact: Exact, got: Doubles, dtype: str) -> bool:
    """Tell whether every column is the rule's window of the mixed rows, up to rounding."""
    assert isinstance(rule, Rule)
    if np.isnan(exact.mix).any():
        return bool(np.isnan(got).all())
    chooses = isinstance(rule, Krum | MultiKrum | MDA | CGE | CenteredClipping)
    m = len(exact.values)
    unit, tiny = ROUNDING[dtype], TINY[dtype]
    rows = np.array([[_float(value) for value in row] for row in exact.values])
    off = (len(exact.rows) + 8) * (unit * exact.sizes + 4 * tiny)
    off[~np.isfinite(off)] = 0.0
    if isinstance(rule, Heraclius) and rule.b and rule.cutoff:
        if rule.cutoff < 1:
            return True  # its weights jump where a value leaves the window
        with np.errstate(all="ignore"):
            wanted, kept = reference(rule, rows), weights(rule, rows) > 0
            slack = 8 * np.where(kept, off, 0).max(axis=0)
        lost = ~np.isfinite(wanted)
        near = np.abs(got - wanted) <= slack
        return bool(np.all(np.where(lost, ~np.isfinite(got), near)))
    window = rule.window(len(rows) if not isinstance(rule, Bulyan) else m + 2 * rule.b)
    trim, drop = (0, None) if chooses else (window.trim, window.drop)
    return all(
        any(_inside(got[j], *each) for each in _means(rows[:, j], off[:, j], trim, drop, unit))
        for j in range(exact.d)
    )


def _inside(value: float, low: float, high: float) -> bool:
    if math.isfinite(low) and math.isfinite(high):
        return low <= value <= high
    return not math.isfinite(value) or low <= value <= high


def _float(value: Value) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _means(
    column: Doubles, off: Doubles, trim: int, drop: int | None, unit: float
) -> Iterator[tuple[float, float]]:
    """Yield bounds of the means of all windows that rounding allows."""
    known = np.where(np.isnan(column), np.inf, column)
    low, high = np.sort(known - off), np.sort(known + off)
    m = len(column)

    def mean(begin: int, size: int) -> tuple[float, float]:
        kept = low[begin : begin + size], high[begin : begin + size]
        slack = (m + 4) * unit * max(abs(kept[0][0]), abs(kept[1][-1]))
        return float(np.sum(kept[0] / size)) - slack, float(np.sum(kept[1] / size)) + slack

    least, most = mean(trim, m - 2 * trim)
    if drop is None:
        yield least, most
        return
    size = m - drop
    bounds = []
    for begin in range(drop + 1):
        first, last = (low[begin], high[begin]), (low[begin + size - 1], high[begin + size - 1])
        nearest = max(least - first[1], last[0] - most) / 2
        farthest = max(most - first[0], last[1] - least) / 2
        bounds.append((nearest, farthest, begin))
    reach = min(farthest for _, farthest, _ in bounds)
    for nearest, _, begin in bounds:
        if not nearest > reach:
            yield mean(begin, size)
