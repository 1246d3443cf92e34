"""Reference implementations of all rules in plain NumPy and float64: slow and simple.

``rule(rows)`` must equal ``reference(rule, rows)``, up to rounding. This module shares no code with
the fast implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.rules import reference_rows
from phocas.rules.base import Bounded, Pipeline, PreAggregator, Rule, Stage
from phocas.rules.cell_filter import CellFilter
from phocas.rules.centres import CenteredClipping, GeometricMedian
from phocas.rules.columnwise import MeaMed, Mean, Median, Phocas, TrimmedMean
from phocas.rules.directions import FLAME, FoolsGold
from phocas.rules.heraclius import Heraclius
from phocas.rules.monitor import Monitor
from phocas.rules.preaggregation import NNM, AdaptiveClipping, Bucketing, Clipping
from phocas.rules.relative import Referenced, Relative
from phocas.rules.selection import CGE, MDA, Bulyan, Krum, MoNNA, MultiKrum
from phocas.rules.signguard import SignGuard
from phocas.rules.spectral import CAF, SMEA, DnC
from phocas.rules.trust import FLTrust
from phocas.rules.weighting import Weighted

Matrix = NDArray[np.float64]
Step = TypeVar("Step", bound=Stage)


def reference(rule: Rule, rows: Any) -> Matrix:
    """Aggregate an (m, d) array by the rule's definition.

    >>> reference(Phocas(b=1), [[1.0], [2.0], [6.0], [900.0]])
    array([3.])
    """
    matrix = np.asanyarray(rows, np.float64)
    with np.errstate(all="ignore"):
        if isinstance(rule, Pipeline):
            stage, following = rule.stages[0], _without_tail(rule.following)
            return reference(following, _STAGES[type(stage)](stage, matrix, following))
        if isinstance(rule, Relative):
            inner = _without_tail(rule.rule)
            return np.asarray(matrix[-1] + reference(inner, matrix[:-1] - matrix[-1]))
        if isinstance(rule, Referenced):
            return _referenced(rule.rule, matrix[:-1], matrix[-1])
        if isinstance(rule, Weighted):
            return _weighted(_without_tail(rule.rule), matrix[rule.present], rule.units)
        if type(rule) in _CHOICES:
            return _averaged(matrix, _CHOICES[type(rule)](rule, matrix), np.ones(len(matrix)))
        return _RULES[type(rule)](rule, matrix)


def _without_tail(rule: Rule) -> Rule:
    """Return the rule for rows that are mixed, filtered or weighed, where Heraclius has no tail."""
    if isinstance(rule, Pipeline):
        return replace(rule, rule=_without_tail(rule.rule))
    return replace(rule, tail=0.0) if isinstance(rule, Heraclius) else rule


def _weighted(rule: Rule, rows: Matrix, units: NDArray[np.int64]) -> Matrix:
    """Replace every worker of weight w by w equal workers, and b by the copies of the b heaviest.

    Rules that choose rows choose among the original workers, and average the chosen by weight.
    """
    counts = units // np.gcd.reduce(units)
    if isinstance(rule, Pipeline):
        stage, following = _of_copies(rule.stages[0], counts), rule.following
        copies = _STAGES[type(stage)](stage, np.repeat(rows, counts, axis=0), following)
        last = np.cumsum(counts) - 1
        kept = copies[last]
        if isinstance(kept, Clipped) and isinstance(copies, Clipped):
            kept.lengths = None if copies.lengths is None else copies.lengths[last]
        return _weighted(following, kept, units)
    if type(rule) in _CHOICES:
        return _averaged(rows, _CHOICES[type(rule)](rule, rows), units)
    many = np.repeat(rows, counts, axis=0)
    if isinstance(rule, Heraclius) and not rule.cutoff:
        rule = Phocas(rule.b)  # only some of several equal values at the edge are kept
    return reference(_of_copies(rule, counts), many)


def _of_copies(step: Step, counts: NDArray[np.int64]) -> Step:
    """Return a step with b replaced by the number of copies of the b heaviest workers."""
    if not isinstance(step, Bounded):
        return step
    return replace(step, b=int(np.sort(counts)[len(counts) - step.b :].sum()))


def _averaged(rows: Matrix, chosen: list[int], units: NDArray[Any]) -> Matrix:
    """Average the chosen rows by weight; return NaN if no row is chosen."""
    if not chosen:
        return np.full(rows.shape[1], np.nan)
    return np.asarray(units[chosen] / units[chosen].sum() @ np.asarray(rows[chosen]))


# -- columns ---------------------------------------------------------------------------------------


def _ordered(column: Matrix) -> Matrix:
    """Sort a column; NaN counts as +inf."""
    return np.sort(np.where(np.isnan(column), np.inf, column))


def _mean(values: Matrix) -> float:
    """Average without overflow."""
    return float(np.sum(values / len(values))) if len(values) else np.nan


def trimmed(column: Matrix, b: int) -> float:
    """Average a column without its b smallest and b largest values."""
    return _mean(_ordered(column)[b : len(column) - b])


def nearest(column: Matrix, centre: float, size: int) -> float:
    """Average the values of a column nearest to a centre; the smaller value breaks ties."""
    ordered = _ordered(column)
    distance = np.abs(ordered / 2 - centre / 2)
    distance[np.isnan(distance)] = np.inf
    return _mean(ordered[np.argsort(distance, kind="stable")[:size]])


def _by_column(function: Callable[[Matrix], float], rows: Matrix) -> Matrix:
    return np.array([function(column) for column in rows.T], np.float64)


def _mean_rule(_: Mean, rows: Matrix) -> Matrix:
    return np.asarray((rows / len(rows)).sum(axis=0))


def _median(_: Median, rows: Matrix) -> Matrix:
    return _by_column(lambda column: trimmed(column, (len(column) - 1) // 2), rows)


def _trimmed_mean(rule: TrimmedMean, rows: Matrix) -> Matrix:
    return _by_column(lambda column: trimmed(column, rule.b), rows)


def _phocas(rule: Phocas, rows: Matrix) -> Matrix:
    return _by_column(
        lambda column: nearest(column, trimmed(column, rule.b), len(column) - rule.b), rows
    )


HERACLIUS_BLOCK = 1024


def _distances(rule: Heraclius, rows: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return the distances from the trimmed mean, the radii, and the cutoff of each column.

    Distances have a sign. All are halved, so that no finite distance overflows.
    """
    values = np.where(np.isnan(rows), np.inf, rows)
    centres = _by_column(lambda column: trimmed(column, rule.b), values)
    distances = values / 2 - centres / 2
    radii = np.sort(np.abs(distances), axis=0)[len(rows) - rule.b - 1]
    cutoffs = np.empty_like(radii)
    for start in range(0, rows.shape[1], HERACLIUS_BLOCK):
        block = slice(start, start + HERACLIUS_BLOCK)
        known = np.where(np.isfinite(radii[block]), radii[block], 0)
        largest = known.max() or 1.0
        spread = np.sqrt(np.mean((known / largest) ** 2)) * largest
        cutoffs[block] = rule.cutoff * np.maximum(radii[block], spread)
    return distances, radii, cutoffs


def weights(rule: Heraclius, rows: Matrix) -> Matrix:
    """Return the weight of each value in a window with a cutoff."""
    signed, radii, cutoffs = _distances(rule, rows)
    near = np.abs(signed)
    falling = np.clip(2 - near / cutoffs, 0, 1)
    return np.asarray(np.where(near <= radii, 1, np.nan_to_num(falling)))


def _heraclius(rule: Heraclius, rows: Matrix) -> Matrix:
    values = np.where(np.isnan(rows), np.inf, rows)
    kept = weights(rule, rows)
    share = kept / kept.sum(axis=0)  # NaN if all weights of a column are 0
    core = np.asarray(np.where(kept == 0, 0 * share, share * values).sum(axis=0))
    return core + _tail(rule, rows) if rule.keeps_tail and (kept == 0).any() else core


def _tail(rule: Heraclius, rows: Matrix) -> Matrix:
    """Return what the tails add to the result: distances times 1 - w, each row's scaled down.

    Distances are halved, so that no finite one overflows.
    """
    m = len(rows)
    distances, radii, cutoffs = _distances(rule, rows)
    limit = rule.tail * np.sqrt(np.sum(radii[np.isfinite(radii)] ** 2))
    limit = min(limit, np.finfo(np.float64).max)
    edges = np.maximum(radii, cutoffs)
    outside = ~(np.abs(distances) <= edges)
    lost = outside & ~(np.abs(distances) <= limit)
    share = np.minimum(np.abs(distances) / edges - 1, 1)
    tails = np.where(outside & ~lost, distances * share, 0)
    lengths = np.sqrt(np.sum(tails**2, axis=1))
    longest = min(limit, np.sort(lengths)[m - rule.b - 1])
    scales = np.where(lengths > longest, longest / lengths, 1.0)
    total = (scales[:, None] * tails).sum(axis=0)
    return np.asarray(2 * (total / np.maximum(m - lost.sum(axis=0), 1)))


def _monitor(_: Monitor, rows: Matrix) -> Matrix:
    return _mean_rule(Mean(), rows)


def _meamed(rule: MeaMed, rows: Matrix) -> Matrix:
    return _by_column(
        lambda column: nearest(
            column, trimmed(column, (len(column) - 1) // 2), len(column) - rule.b
        ),
        rows,
    )


# -- rows ------------------------------------------------------------------------------------------


def squared_distances(rows: Matrix) -> Matrix:
    """Return |x_i - x_j|^2; a row with NaN or inf is infinitely far from every other."""
    m = len(rows)
    result = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            if i != j:
                total = float(np.sum((rows[i] - rows[j]) ** 2))
                result[i, j] = np.inf if np.isnan(total) else total
    return result


def scores(squared: Matrix, neighbours: int) -> Matrix:
    """Return each row's sum of squared distances to its nearest other rows."""
    m = len(squared)
    return np.array(
        [np.sum(np.sort(np.delete(squared[i], i))[:neighbours]) for i in range(m)], np.float64
    )


def _smallest(values: Matrix, number: int) -> list[int]:
    """Return the indices of the smallest values; an empty list if one of them is infinite."""
    best = np.argsort(values, kind="stable")[:number]
    return [int(row) for row in best] if np.isfinite(values[best]).all() else []


def _krum(rule: Krum, rows: Matrix) -> list[int]:
    return _smallest(scores(squared_distances(rows), len(rows) - rule.b - 2), 1)


def _multi_krum(rule: MultiKrum, rows: Matrix) -> list[int]:
    found = scores(squared_distances(rows), len(rows) - rule.b - 2)
    return _smallest(found, rule.chosen(len(rows)))


def _bulyan(rule: Bulyan, rows: Matrix) -> Matrix:
    left = list(range(len(rows)))
    chosen = []
    for _ in range(len(rows) - 2 * rule.b):
        neighbours = max(1, len(left) - rule.b - 2)
        best = left[int(np.argmin(scores(squared_distances(rows[left]), neighbours)))]
        chosen.append(best)
        left.remove(best)
    return _meamed(MeaMed(2 * rule.b), rows[chosen])


def _mda(rule: MDA, rows: Matrix) -> list[int]:
    squared = squared_distances(rows)

    def diameter(members: tuple[int, ...]) -> float:
        return float(squared[np.ix_(members, members)].max())

    best = min(combinations(range(len(rows)), len(rows) - rule.b), key=diameter)
    return list(best) if np.isfinite(diameter(best)) else []


class Clipped(np.ndarray[Any, np.dtype[np.float64]]):
    """Rows with exact norms: all clipped rows have the same norm, however their values round."""

    lengths: Matrix | None = None


def _lengths(rows: Matrix) -> Matrix:
    if isinstance(rows, Clipped) and rows.lengths is not None:
        return rows.lengths
    lengths = np.sqrt(np.sum(rows**2, axis=1))
    return np.where(np.isnan(lengths), np.inf, lengths)


def _cge(rule: CGE, rows: Matrix) -> list[int]:
    return _smallest(_lengths(rows), len(rows) - rule.b)


def _smoothed_median(rule: GeometricMedian, rows: Matrix) -> Matrix:
    point = np.zeros(rows.shape[1])
    for _ in range(rule.iterations):
        weights = 1 / np.maximum(_lengths(rows - point), rule.smoothing)
        point = weights @ rows / weights.sum()
    return point


def _geometric_median(rule: GeometricMedian, rows: Matrix) -> Matrix:
    rows = rows[np.isfinite(rows).all(axis=1)]
    if rule.smoothing:
        return _smoothed_median(rule, rows)
    # Do not start from the median: the iteration cannot leave a row on which it starts.
    middle = np.median(rows, axis=0)
    point = rows[np.argsort(_lengths(rows - middle))[: len(rows) // 2 + 1]].mean(axis=0)
    for _ in range(10_000):
        distances = np.maximum(_lengths(rows - point), 1e-300)
        weights = (1 / distances) / np.sum(1 / distances)
        following = weights @ rows
        if np.array_equal(point, following):
            break
        point = following
    return np.asarray(point)


def _centered_clipping(rule: CenteredClipping, rows: Matrix) -> Matrix:
    return _clipped_from(rule, rows, np.zeros(rows.shape[1]))


# -- rows beside a reference vector ----------------------------------------------------------------


def _referenced(rule: Rule, rows: Matrix, vector: Matrix) -> Matrix:
    if isinstance(rule, Pipeline):
        stage, following = rule.stages[0], rule.following
        return _referenced(following, _STAGES[type(stage)](stage, rows, following), vector)
    if isinstance(rule, Monitor):
        return _mean_rule(Mean(), rows)
    return _REFERENCED[type(rule)](rule, rows, vector)


def _clipped_from(rule: CenteredClipping, rows: Matrix, start: Matrix) -> Matrix:
    radius = rule.radius
    if isinstance(radius, str):
        radius = float(np.sort(_lengths(rows - start))[(len(rows) - 1) // 2])
        if np.isinf(radius):
            return np.full(rows.shape[1], np.nan)
    point = start
    for _ in range(rule.iterations):
        step = np.zeros_like(point)
        for row in rows:
            if np.isfinite(row).all():
                length = np.sqrt(np.sum((row - point) ** 2))
                step += (row - point) * min(1.0, radius / length if length else 1.0)
        point = point + step / len(rows)
    return point


def _fl_trust(_: FLTrust, rows: Matrix, vector: Matrix) -> Matrix:
    length = np.sqrt(np.sum(vector**2))
    total, result = 0.0, np.zeros_like(vector)
    for row in rows:
        if np.isfinite(row).all() and row.any() and vector.any():
            unit = row / np.sqrt(np.sum(row**2))
            trust = max(0.0, float(unit @ vector / length))
            total, result = total + trust, result + trust * length * unit
    return result / total if total else result


# -- pre-aggregations ------------------------------------------------------------------------------


def implausible(rule: CellFilter, rows: Matrix) -> NDArray[np.bool_]:
    """Return which values are replaced: those that Heraclius drops at half the cutoff."""
    if not rule.b:
        return np.zeros(rows.shape, bool)
    return np.asarray(weights(Heraclius(rule.b, rule.cutoff / 2), rows) == 0)


def _cell_filter(rule: CellFilter, rows: Matrix, following: Rule) -> Matrix:
    wrong = implausible(rule, rows)
    centres = _by_column(lambda column: trimmed(column, rule.b), rows)
    result = np.where(wrong, centres, rows)
    share = wrong.mean(axis=1)
    worst = np.argsort(-share, kind="stable")[: following.tolerates(len(rows)).rows]
    for row in worst:
        if share[row] > 1 / 2:
            result[row] = np.nan
    return result


def _nnm(rule: NNM, rows: Matrix, _: Rule) -> Matrix:
    squared = squared_distances(rows)
    np.fill_diagonal(squared, -1)
    nearest_rows = np.argsort(squared, axis=1, kind="stable")[:, : len(rows) - rule.b]
    return np.array([rows[members].mean(axis=0) for members in nearest_rows])


def _bucketing(rule: Bucketing, rows: Matrix, _: Rule) -> Matrix:
    starts = range(0, len(rows), rule.size)
    return np.array([rows[start : start + rule.size].mean(axis=0) for start in starts])


def _clip(rows: Matrix, radius: float) -> Matrix:
    lengths = _lengths(rows)
    result = np.zeros(rows.shape).view(Clipped)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if np.isfinite(length):
            result[i] = row * (radius / length) if length > radius else row
    result.lengths = np.where(np.isfinite(lengths), np.minimum(lengths, radius), 0.0)
    return result


def _clipping(rule: Clipping, rows: Matrix, _: Rule) -> Matrix:
    return _clip(rows, rule.radius)


def _adaptive_clipping(rule: AdaptiveClipping, rows: Matrix, _: Rule) -> Matrix:
    longest_first = np.sort(_lengths(rows))[::-1]
    clipped = int(np.floor(2 * (rule.b / len(rows)) * (len(rows) - rule.b) + 1e-9))
    return _clip(rows, float(longest_first[clipped]))


_RULES: dict[type[Rule], Callable[[Any, Matrix], Matrix]] = {
    Mean: _mean_rule,
    Median: _median,
    TrimmedMean: _trimmed_mean,
    Phocas: _phocas,
    Heraclius: _heraclius,
    MeaMed: _meamed,
    Bulyan: _bulyan,
    GeometricMedian: _geometric_median,
    CenteredClipping: _centered_clipping,
    CAF: reference_rows.caf,
    SignGuard: reference_rows.signguard,
    FLAME: reference_rows.flame,
    FoolsGold: reference_rows.foolsgold,
    Monitor: _monitor,
}
_CHOICES: dict[type[Rule], Callable[[Any, Matrix], list[int]]] = {
    Krum: _krum,
    MultiKrum: _multi_krum,
    MDA: _mda,
    CGE: _cge,
    MoNNA: reference_rows.monna,
    SMEA: reference_rows.smea,
    DnC: reference_rows.dnc,
}
"""Rules that average the rows that they choose."""
_REFERENCED: dict[type[Rule], Callable[[Any, Matrix, Matrix], Matrix]] = {
    CenteredClipping: _clipped_from,
    FLTrust: _fl_trust,
}
"""Rules of rows and a reference vector."""
_STAGES: dict[type[PreAggregator], Callable[[Any, Matrix, Rule], Matrix]] = {
    CellFilter: _cell_filter,
    NNM: _nnm,
    Bucketing: _bucketing,
    Clipping: _clipping,
    AdaptiveClipping: _adaptive_clipping,
}
