"""Measurements of rows as sums over columns, with the same bits however the columns are split.

Columns are summed in granules of fixed size (see :mod:`phocas.kernels.distances`). A
:class:`Partial` is the measurement of a range of columns: the sums of the whole granules inside the
range, and the values of its outermost columns, which belong to granules that extend beyond the
range. Partials add up in any order. When all columns are there, :func:`total` completes the split
granules and adds all granules in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import Rows
from phocas.rules.algebra import (
    Floats,
    Mix,
    Norms,
    OutlierShares,
    Radii,
    Request,
    Signs,
    SquaredRadii,
    TailNorms,
    of_pairs,
    wants_double,
)

MIXED_GRANULES = 16  # granules that are mixed at a time; fewer if there are more than 64 rows
VECTOR = 16  # columns that kernels measure at a time


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """The measurement of some columns.

    Attributes:
        m: the number of rows.
        sums: the sums of consecutive granules, with the number of the first granule.
        edges: the values of columns in split granules, with the number of the first column.
    """

    m: int
    sums: tuple[tuple[int, Floats], ...] = ()
    edges: tuple[tuple[int, NDArray[np.floating]], ...] = ()

    def __add__(self, other: Partial) -> Partial:
        if self.m != other.m:
            raise ValueError(f"partials must be of the same rows: got {self.m} and {other.m}")
        return Partial(self.m, self.sums + other.sums, self.edges + other.edges)


def partial(request: Request | Radii, start: int, rows: Rows) -> Partial:
    """Measure a range of columns that begins at column ``start`` of the whole matrix."""
    if isinstance(request, Radii):
        return _edge_radii(request, start, rows)
    if request.weights is None and request.scale == 1:
        return _measure(request, start, rows)
    weights = np.eye(len(rows)) if request.weights is None else request.weights
    mix = kernels.SparseMix.of(weights)
    granule = kernels.granule_columns(len(mix))
    # The weights are double too: a factor from 3e38 to 1e-9 is too small for single precision.
    kind = np.dtype(np.float64) if wants_double(request) else kernels.compute_dtype(rows.element)
    together = max(2, MIXED_GRANULES * 64 // max(64, len(mix)))
    result = Partial(len(mix))
    begin = 0
    while begin < rows.columns:
        # Blocks end at granules, so that only the outermost columns are edges.
        place = start + begin
        end = min(rows.columns, (place // granule + together) * granule - start)
        mixed = np.empty((len(mix), end - begin), kind)
        kernels.combine(rows.shifted(begin, end), mix, mixed)
        if request.scale != 1:
            with np.errstate(over="ignore"):
                mixed *= request.scale
        result += _measure(request, place, rows_of(mixed))
        begin = end
    return result


def _measure(request: Request, start: int, rows: Rows) -> Partial:
    m = len(rows)
    return of_columns(
        m,
        start,
        rows.columns,
        lambda begin, end: _sums(request, rows.shifted(begin, end), kernels.granule_columns(m)),
        lambda begin, end: kernels.values(rows.shifted(begin, end)),
    )


def of_columns(
    m: int,
    start: int,
    columns: int,
    sums: Callable[[int, int], Floats],
    values: Callable[[int, int], NDArray[np.floating]],
) -> Partial:
    """Measure columns that begin at column ``start`` of the whole matrix.

    ``sums`` returns the sums of whole granules of a range of columns, as
    :func:`phocas.kernels.pair_sums` or ``square_sums`` does. ``values`` returns the values of a
    range of columns in the type of the computation.
    """
    granule = kernels.granule_columns(m)
    first = -(-start // granule)
    last = max(first, (start + columns) // granule)
    head = min(columns, first * granule - start)
    tail = max(head, min(columns, last * granule - start))
    edges = tuple(
        (start + begin, values(begin, end))
        for begin, end in ((0, head), (tail, columns))
        if end > begin
    )
    return Partial(m, ((first, sums(head, tail)),) if tail > head else (), edges)


def total(
    request: Request | Radii | OutlierShares | SquaredRadii | TailNorms,
    partials: Iterable[Partial],
    columns: int | None = None,
) -> Any:
    """Return the answer to a request from the partials of all columns.

    The answer is the m x m squared distances of whole rows, or m from one of them, the m squared
    norms, the numbers of their signs, the scales of split blocks by block number, or the share of
    replaced cells of each row. ``columns`` is the expected number of columns; without it, missing
    last columns are not detected.
    """
    parts = _checked(partials)
    if isinstance(request, Radii):
        return _spreads(parts, columns)
    if isinstance(request, OutlierShares):
        return _shares(parts, columns)
    if isinstance(request, SquaredRadii):
        return _squared_radii(parts, columns)
    if isinstance(request, TailNorms):
        return _tail_norms(parts, columns)
    m = parts[0].m
    granule = kernels.granule_columns(m)
    blocks, edges = _covering(parts, granule, columns)
    whole = dict(blocks)
    for number, values in _complete(edges, m, granule).items():
        whole[number] = _sums(request, rows_of(values), granule)
    if not whole:
        rows = m if of_pairs(request) else 3 if isinstance(request, Signs) else None
        return np.zeros(m if rows is None else (rows, m))
    added = _in_order([whole[number] for number in sorted(whole)])
    if isinstance(request, Signs):
        width = sum(len(sums) for _, sums in blocks) * granule
        width += sum(values.shape[1] for _, values in edges)
        positive, negative = added.reshape(2, -1)[:, :m]
        return np.stack([positive, width - positive - negative, negative])
    return kernels.pair_matrix(added, m) if of_pairs(request) else added[:m]


def _edge_radii(request: Radii, start: int, rows: Rows) -> Partial:
    """Measure the radii of the columns in split blocks; record the numbers of whole blocks."""
    block = kernels.BLOCK_COLUMNS
    first, last = -(-start // block), (start + rows.columns) // block
    head = min(rows.columns, first * block - start)
    tail = max(head, min(rows.columns, last * block - start))
    selected = None if request.weights is None else Mix(request.weights).selected
    mix = None
    if selected is not None:
        rows = rows.take(selected)
    elif request.weights is not None:
        mix = kernels.SparseMix.of(request.weights)
    edges = tuple(
        (start + begin, _radii(request, rows.shifted(begin, end), mix)[None])
        for begin, end in ((0, head), (tail, rows.columns))
        if end > begin
    )
    whole = ((first, np.zeros(((tail - head) // block, 0))),) if tail > head else ()
    return Partial(len(rows) if mix is None else len(mix), whole, edges)


def _radii(request: Radii, rows: Rows, mix: kernels.SparseMix | None) -> NDArray[np.floating]:
    return kernels.radii(rows, request.window, mix, request.weighing)


def _spreads(parts: list[Partial], columns: int | None) -> dict[int, float]:
    """Return the scale of every split block of columns, by block number.

    The scale is the root mean square of the radii of the columns in all parts of the block.
    """
    block = kernels.BLOCK_COLUMNS
    _, edges = _covering(parts, block, columns)
    end = max((start + values.shape[1] for start, values in edges), default=0)
    return {
        number: float(kernels.spread(radii[0, : end - number * block]))
        for number, radii in _complete(edges, 1, block).items()
    }


def _shares(parts: list[Partial], columns: int | None) -> Floats:
    """Return the share of replaced cells of each row, from the counts of all blocks."""
    blocks, edges = _covering(parts, kernels.BLOCK_COLUMNS, columns)
    counts = np.zeros(parts[0].m)
    width = 0
    for _, sums in blocks:
        counts += sums.sum(axis=0)
        width += len(sums) * kernels.BLOCK_COLUMNS
    for _, values in edges:
        counts += values.sum(axis=1)
        width += values.shape[1]
    return counts / max(1, width)


def _squared_radii(parts: list[Partial], columns: int | None) -> float:
    """Return the sum of squared radii, from the mean square of each block of columns."""
    block = kernels.BLOCK_COLUMNS
    blocks, edges = _covering(parts, block, columns)
    means = {first + i: float(each[0]) for first, sums in blocks for i, each in enumerate(sums)}
    end = max((start + values.shape[1] for start, values in edges), default=0)
    total = {number: block * mean for number, mean in means.items()}
    for start, values in edges:
        number = start // block
        total[number] = min(block, end - number * block) * float(values[0, 0])
    return float(sum(total[number] for number in sorted(total)))


def _tail_norms(parts: list[Partial], columns: int | None) -> Floats:
    """Return the squared length of each row's tail, from the sums of all blocks of columns."""
    m = parts[0].m
    blocks, edges = _covering(parts, kernels.BLOCK_COLUMNS, columns)
    whole = dict(blocks)
    for number, values in _complete(edges, m, kernels.BLOCK_COLUMNS).items():
        whole[number] = kernels.tail_square_sums(values)[None]
    return _in_order([whole[number] for number in sorted(whole)]) if whole else np.zeros(m)


def _checked(partials: Iterable[Partial]) -> list[Partial]:
    """Return the partials as a list; raise ValueError if it is empty or the rows differ."""
    parts = list(partials)
    if not parts:
        raise ValueError("there must be at least one partial: got none")
    rows = sorted({part.m for part in parts})
    if len(rows) > 1:
        raise ValueError(f"partials must be of the same rows: got {rows}")
    return parts


Blocks: TypeAlias = list[tuple[int, Floats]]
Edges: TypeAlias = list[tuple[int, NDArray[np.floating]]]


def _covering(parts: list[Partial], granule: int, columns: int | None) -> tuple[Blocks, Edges]:
    """Return all sums, and all edges in order; raise ValueError for repeated or missing columns."""
    blocks = [item for part in parts for item in part.sums]
    edges = sorted((item for part in parts for item in part.edges), key=lambda item: item[0])
    pieces = sorted(
        [(first * granule, (first + len(sums)) * granule) for first, sums in blocks]
        + [(start, start + values.shape[1]) for start, values in edges]
    )
    expected = 0
    for begin, end in pieces:
        if begin != expected:
            raise ValueError(
                f"columns must be measured once each, from 0 on: got a piece that begins at column"
                f" {begin} where {expected} was expected"
            )
        expected = end
    if columns is not None and expected != columns:
        raise ValueError(
            f"all {columns} columns must be measured: got none from column {expected} on"
            if expected < columns
            else f"there must be {columns} columns: got {expected}"
        )
    return blocks, edges


def _in_order(blocks: list[Floats]) -> Floats:
    """Add all rows of several arrays one after the other, as if they were one array."""
    total = blocks[0].sum(axis=0)
    for block in blocks[1:]:
        total = np.concatenate([total[None], block]).sum(axis=0)
    return np.asarray(total)


def _complete(
    edges: list[tuple[int, NDArray[np.floating]]], m: int, granule: int
) -> dict[int, NDArray[np.floating]]:
    """Join edge columns to granules; pad the last granule with zeros to a whole vector."""
    joined: dict[int, NDArray[np.floating]] = {}
    last = max((start + values.shape[1] for start, values in edges), default=0)
    # Tensors of different types may share a granule, which then has the wider type.
    kind = np.result_type(*{values.dtype for _, values in edges}) if edges else np.dtype("f4")
    for start, values in edges:
        done = 0
        while done < values.shape[1]:
            number, offset = divmod(start + done, granule)
            size = min(granule - offset, values.shape[1] - done)
            if number not in joined:
                width = min(granule, -(-(last - number * granule) // VECTOR) * VECTOR)
                joined[number] = np.zeros((m, width), kind)
            block = joined[number]
            block[:, offset : offset + size] = values[:, done : done + size]
            done += size
    return joined


def _sums(request: Request, rows: Rows, granule: int) -> Floats:
    if isinstance(request, Norms):
        return kernels.square_sums(rows, granule)
    if isinstance(request, Signs):
        return kernels.sign_counts(rows, granule)
    if request.origin is not None:
        return kernels.origin_sums(rows, granule, request.origin, request.wide)
    return kernels.pair_sums(rows, granule, request.wide)


def rows_of(values: NDArray[np.generic], element: str | None = None) -> Rows:
    """Return the rows of an array whose last axis has adjacent values."""
    name = element or values.dtype.name
    return Rows(kernels.row_table(values), values.shape[1], name, values)
