"""Matrices in host memory, which the kernels read in place.

Only rows whose values are not adjacent are copied, a block of columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.floats import to_bfloat16
from phocas.kernels import PreparedCall, Rows, SparseMix
from phocas.rules import measures
from phocas.rules.algebra import (
    Allowance,
    Floats,
    OutlierShares,
    Radii,
    Request,
    TailNorms,
    needs_double,
)
from phocas.rules.execution import ColumnRange, Counts, Execution, Matrix, Reduction
from phocas.rules.explanation import Explanation
from phocas.rules.masking import OutlierMasks
from phocas.rules.measures import Partial, rows_of

COPIED_COLUMNS = 1 << 15


@dataclass(slots=True, eq=False)
class PreparedReduction:
    """A reduction of rows at a fixed address, whose values may change.

    A call reduces the present values and overwrites the previous result.
    """

    matrix: HostMatrix
    rows: Rows
    reduction: Reduction
    execution: Execution
    """The execution, from which the smallest sum of squared radii is taken."""
    out: NDArray[Any]
    answer: Any
    """The array ``out`` in the form of the rows."""
    expected: float
    call: PreparedCall
    tallies: Counts
    """The dropped values of each row, by thread."""

    def __call__(self) -> Explanation:
        """Reduce the rows, and count the dropped values of each row."""
        threads = self.call.threads or kernels.get_num_threads()
        if len(self.tallies) == threads:
            self.tallies.fill(0)
        else:
            self.tallies = kernels.tallies_of(threads, self.matrix.m)
        self.call.run(self.tallies)
        counts = self.tallies.sum(axis=0)
        if self.reduction.tail is not None and np.count_nonzero(counts):
            self.reduction.squares = self.execution.squares
            self.matrix.keep_tail(self.reduction, None, [self.out], counts, 0)
        return Explanation(self.answer, counts / max(1, self.rows.columns), self.expected)


class HostMatrix(Matrix):
    """The m x d matrix in host memory."""

    weighs: ClassVar[bool] = True

    def __init__(
        self, pieces: list[ColumnRange], rebuild: Callable[[list[NDArray[Any]]], Any]
    ) -> None:
        self.pieces = pieces
        self.m = len(pieces[0].arrays) if pieces else 0
        self.rebuild = rebuild
        self._replaced: tuple[OutlierMasks, NDArray[np.bool_]] | None = None

    def blocks(self, piece: ColumnRange) -> Iterator[tuple[int, int, Rows]]:
        """Yield the columns of a piece as rows that kernels can read, copied if necessary."""
        return _blocks(piece) if self._replaced is None else _filtered(piece, *self._replaced)

    def measured(self, request: Request | Radii, start: int, rows: Rows) -> Partial:
        """Measure a range of columns; each granule (group of columns) has a sum of its own."""
        return measures.partial(request, start, rows)

    def block_spreads(self, reduction: Reduction) -> Mapping[int, float]:
        """Return the scales of the blocks of columns that span several pieces (column ranges).

        Kernels compute the scales of the other blocks.
        """
        if not self._cuts_blocks:
            return {}
        return self._exchanged(Radii(reduction.window, reduction.mix.weights, reduction.weighing))

    @property
    def _cuts_blocks(self) -> bool:
        """Tell whether a block of columns spans several pieces (column ranges)."""
        pieces = self.pieces
        return pieces[-1].start > 0 and any(each.start % kernels.BLOCK_COLUMNS for each in pieces)

    def _exchanged(self, request: Radii) -> Mapping[int, float]:
        """Return the scale of each split block of columns, by block number.

        A block is split if several pieces (ranges of columns) have a part of it. Its scale is the
        root mean square of the radii of its columns in all pieces.
        """
        found: Mapping[int, float] = measures.total(request, [self.partial(request)])
        return found

    def outliers(self, request: OutlierShares, start: int = 0) -> OutlierMasks:
        """Mark the cells that a filter replaces."""
        spreads = request.spreads
        if spreads is None:
            spreads = self._exchanged(request.radii(self.m)) if self._cuts_blocks else {}
        marks = OutlierMasks(self.m, request.window, spreads, start, request.rows)
        for piece in self.pieces:
            for begin, _, rows, spread in _cut(piece, spreads, start):
                marks.add(start + piece.start + begin, rows, spread)
        return marks

    def filtered(self, outliers: OutlierMasks, excluded: NDArray[np.bool_]) -> HostMatrix:
        """Return the matrix with outliers replaced by column centres, and excluded rows as NaN."""
        found = HostMatrix(list(self.pieces), self.rebuild)
        found._replaced = outliers, excluded
        return found

    def tail_partial(self, outliers: OutlierMasks, limit: float) -> Partial:
        """Measure the squared length of each tail; for split blocks, return the values instead."""
        block = kernels.BLOCK_COLUMNS
        sums, edges = [], []
        for _, _, place, rows in self._marked(outliers):
            mask = outliers.mask(place)
            whole = 0 if place % block else rows.columns // block
            rest = rows.columns - whole * block
            if whole:
                found = np.zeros((whole, self.m))
                if mask is not None:
                    found = kernels.tail_squares(rows.shifted(0, whole * block), mask, limit)
                sums.append((place // block, found))
            if rest:
                values = np.zeros((self.m, rest), kernels.compute_dtype(rows.element))
                mask = outliers.mask(place, whole * block)
                if mask is not None:
                    values = kernels.tail(rows.shifted(whole * block, rows.columns), mask, limit)
                    values[np.isnan(values)] = 0
                edges.append((place + whole * block, values))
        return Partial(self.m, tuple(sums), tuple(edges))

    def tail_squares(self, outliers: OutlierMasks, limit: float) -> Floats:
        """Return the squared length of each row's tail."""
        found: Floats = measures.total(TailNorms(limit), [self.tail_partial(outliers, limit)])
        return found

    def add_tail(
        self, outs: list[Any] | None, outliers: OutlierMasks, allowed: Allowance
    ) -> Counts:
        """Add the scaled tails to the results; return the number of lost values of each row."""
        lost = np.zeros(self.m, np.int64)
        order = allowed.order
        for number, begin, place, rows in self._marked(outliers):
            mask = outliers.mask(place)
            if mask is None:
                continue
            out = np.empty(rows.columns, kernels.compute_dtype(rows.element))
            if outs is not None:
                out = outs[number][begin : begin + rows.columns]
            ordered = replace(mask, chosen=order)
            factors = allowed.scales[order]
            lost[order] += kernels.add_tail(rows.take(order), ordered, allowed.limit, factors, out)
        return lost

    def _marked(self, outliers: OutlierMasks) -> Iterator[tuple[int, int, int, Rows]]:
        """Yield the ranges of columns that were marked.

        Each is the number of its piece, its first column in the piece and in the whole matrix, and
        its rows.
        """
        for number, piece in enumerate(self.pieces):
            for begin, _, rows, _ in _cut(piece, outliers.spreads, outliers.start):
                yield number, begin, outliers.start + piece.start + begin, rows

    def keep_tail(
        self, reduction: Reduction, spreads: Any, outs: list[Any], outside: Counts, start: int
    ) -> None:
        """Add the outliers to the result; results in half precision are rounded only once."""
        halves = [piece.element in ("float16", "bfloat16") for piece in self.pieces]
        if not any(halves):
            whole = len(self.pieces) == 1 and spreads is None and reduction.allowed is None
            rows = _in_place(self.pieces[0]) if whole else None
            if rows is None:
                super().keep_tail(reduction, spreads, outs, outside, start)
            else:
                _keep_tail(rows, reduction, outs[0], outside)
            return
        pieces = [
            _single(piece) if half else piece
            for piece, half in zip(self.pieces, halves, strict=True)
        ]
        wide = HostMatrix(pieces, list)
        counts = np.zeros_like(outside)
        found = Matrix.reduce(wide, replace(reduction, spreads=spreads), counts, start)
        outside[:] = counts
        if not reduction.mean:
            for piece, out, values in zip(self.pieces, outs, found, strict=True):
                if out is not None:
                    with np.errstate(over="ignore"):
                        out[:] = self.stored(piece, values)

    def empty(self, piece: ColumnRange, reduction: Reduction, rows: Rows) -> NDArray[Any]:
        """Return an empty array of the stored type, or of the computed type if rows are mixed."""
        if reduction.sums is not None or rows.element != piece.element:
            return np.empty(piece.columns, kernels.compute_dtype(rows.element))
        return np.empty(piece.columns, piece.arrays[0].dtype.newbyteorder("="))

    def reduce_block(
        self,
        reduction: Reduction,
        start: int,
        rows: Rows,
        out: NDArray[Any],
        counts: Counts | None,
    ) -> None:
        """Mix and reduce a range of columns.

        Whole blocks of columns take one kernel call. Each part of a split block takes another call.
        """
        if not reduction.spreads:
            _reduce(reduction, rows, out, counts, None)
            return
        for first, last, spread in _segments(start, rows.columns, reduction.spreads):
            _reduce(reduction, rows.shifted(first, last), out[first:last], counts, spread)

    def values(self, rows: Rows, weights: Floats | None) -> NDArray[np.floating]:
        """Return a copy of the mixed rows of a block in the type of the computation."""
        if weights is None:
            return kernels.values(rows)
        out = np.empty((len(weights), rows.columns), kernels.compute_dtype(rows.element))
        kernels.combine(rows, SparseMix.of(weights), out)
        return out

    def stored(self, piece: ColumnRange, values: NDArray[Any] | None) -> NDArray[Any]:
        """Round computed values to the stored type; bfloat16 is stored as its 16 bits."""
        if values is None:
            return np.empty(0, piece.arrays[0].dtype)
        if piece.element == "bfloat16":
            return to_bfloat16(values) if values.dtype == np.float32 else values
        return values.astype(piece.element, copy=False)

    def prepare(
        self, reduction: Reduction, execution: Execution, expected: float
    ) -> PreparedReduction | None:
        """Return the reduction as a prepared kernel call; None if it takes several calls."""
        if len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        rows = _in_place(piece)
        if rows is None:
            return None
        out = np.empty(piece.columns, piece.arrays[0].dtype.newbyteorder("="))
        call = kernels.prepare(rows, reduction.window, kernels.address(out), mean=reduction.mean)
        if call is None:
            return None
        answer = self.rebuild([self.stored(piece, out)])
        tallies = np.zeros((call.threads or 0, self.m), np.int64)
        return PreparedReduction(
            self, rows, reduction, execution, out, answer, expected, call, tallies
        )


def _keep_tail(rows: Rows, reduction: Reduction, out: NDArray[Any], outside: Counts) -> None:
    """Do what :meth:`Matrix.keep_tail` does, for all columns in one range.

    The bits are the same. It takes half of the time, which matters in every step of DDP.
    """
    tail = reduction.tail
    if tail is None:
        raise ValueError("the reduction keeps no tail")
    m, block = len(rows), kernels.BLOCK_COLUMNS
    window = tail.outliers(reduction.window, None).window
    marks = kernels.marks(rows, window)
    scale = kernels.scale_for(window.kept(m))
    widths = np.full(len(marks), block)
    widths[-1:] = rows.columns - block * (len(marks) - 1)
    with np.errstate(over="ignore"):
        squares = sum((widths * (marks["spread"] / scale) ** 2).tolist())
    limit = tail.limit(max(squares, reduction.squares))
    mask = kernels.OutlierMask(marks, scale, np.zeros(m, bool), np.arange(m))
    allowed = tail.allowance(kernels.tail_squares(rows, mask, limit).sum(axis=0), limit)
    order, scales = allowed.order, allowed.scales
    if reduction.mean:  # only the counts are wanted
        out = np.empty(rows.columns, kernels.compute_dtype(rows.element))
    lost = np.zeros(m, np.int64)
    lost[order] = kernels.add_tail(
        rows.take(order), replace(mask, chosen=order), limit, scales[order], out
    )
    outside -= np.rint(scales * np.maximum(outside - lost, 0)).astype(np.int64)


def _single(piece: ColumnRange) -> ColumnRange:
    """Return a copy of a piece in single precision."""
    none = np.empty((len(piece.arrays), 0), np.float32)
    parts = [none, *(kernels.values(rows) for _, _, rows in _blocks(piece))]
    return ColumnRange(piece.start, piece.columns, np.concatenate(parts, axis=1), "float32")


def _in_place(piece: ColumnRange) -> Rows | None:
    """Return the rows of a piece without a copy, or None if kernels cannot read them in place."""
    if piece.element == "float16" and not kernels.half_supported(piece.element):
        return None
    arrays = piece.arrays
    if not isinstance(arrays, list):
        if not _adjacent(arrays):
            return None
        steps = kernels.row_steps(len(arrays), arrays.strides[0])
        addresses = steps + np.uint64(kernels.address(arrays))
    elif all(map(_adjacent, arrays)):
        addresses = np.array([kernels.address(array) for array in arrays], np.uint64)
    else:
        return None
    return Rows(addresses, piece.columns, piece.element, arrays)


def _blocks(piece: ColumnRange) -> Iterator[tuple[int, int, Rows]]:
    rows = _in_place(piece)
    if rows is not None:
        yield 0, piece.columns, rows
        return
    for begin in range(0, piece.columns, COPIED_COLUMNS):
        end = min(piece.columns, begin + COPIED_COLUMNS)
        yield begin, end, _copied(piece, begin, end)


def _cut(
    piece: ColumnRange, spreads: Mapping[int, float], start: int
) -> Iterator[tuple[int, int, Rows, float | None]]:
    """Yield the blocks of a piece, each in the ranges that :func:`_segments` makes of it."""
    for begin, end, rows in _blocks(piece):
        for first, last, spread in _segments(start + piece.start + begin, end - begin, spreads):
            yield begin + first, begin + last, rows.shifted(first, last), spread


def _filtered(
    piece: ColumnRange, marks: OutlierMasks, excluded: NDArray[np.bool_]
) -> Iterator[tuple[int, int, Rows]]:
    for begin, end, rows, _ in _cut(piece, marks.spreads, marks.start):
        place = marks.start + piece.start + begin
        yield begin, end, marks.of(place, rows, excluded, piece.element)


def _adjacent(array: NDArray[Any]) -> bool:
    """Tell whether kernels can read the last axis in place."""
    return (
        (array.strides[-1] == array.itemsize or array.shape[-1] <= 1)
        and array.dtype.isnative
        and array.flags.aligned
    )


def _copied(piece: ColumnRange, begin: int, end: int) -> Rows:
    kind, element = piece.arrays[0].dtype.newbyteorder("="), piece.element
    if not kernels.half_supported(element):
        kind, element = np.dtype(np.float32), "float32"
    values = np.empty((len(piece.arrays), end - begin), kind)
    for i, array in enumerate(piece.arrays):
        values[i] = array[begin:end]
    return rows_of(values, element)


def _segments(
    start: int, columns: int, spreads: Mapping[int, float]
) -> Iterator[tuple[int, int, float | None]]:
    """Yield ranges of columns for one kernel call each; a part of a block comes with its scale."""
    block = kernels.BLOCK_COLUMNS
    head = min(columns, -start % block) if spreads else 0
    if head and start // block not in spreads:
        raise ValueError(f"columns must begin where they were measured: got start={start}")
    if head:
        yield 0, head, spreads[start // block]
    last = (start + columns) // block
    tail = max(head, last * block - start) if last in spreads else columns
    if tail > head:
        yield head, tail, None
    if columns > tail:
        yield tail, columns, spreads[last]


def _reduce(
    reduction: Reduction,
    rows: Rows,
    out: NDArray[Any],
    counts: Counts | None,
    spread: float | None,
) -> None:
    """Mix and reduce columns: whole blocks, or a part of one block with its scale."""
    window, weights, weighing = reduction.window, reduction.sums, reduction.weighing
    if weights is None:
        chosen = reduction.mix.selected
        rows = rows if chosen is None else rows.take(chosen)
        address = kernels.address(out)
        kernels.reduce(rows, window, address, counts, spread, weighing, mean=reduction.mean)
        return
    sparse = SparseMix.of(weights)
    wide = out.dtype == np.float32 and needs_double(weights)
    answer = np.empty(len(out)) if wide else out
    if len(sparse) == 1:
        kernels.combine(rows, sparse, answer[None, :])
    else:
        kernels.mix_reduce(rows, sparse, window, answer, counts, spread, weighing)
    if wide:
        with np.errstate(over="ignore", under="ignore"):
            out[:] = answer
