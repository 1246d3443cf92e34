"""Matrices in the memory of this machine, which the kernels read where they are.

Only rows whose values are not adjacent are copied, a block of columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.floats import to_bfloat16
from phocas.kernels import Rows, SparseMix, Window
from phocas.rules import measures
from phocas.rules.algebra import (
    UNMIXED,
    Clean,
    Decision,
    Floats,
    Function,
    Plausible,
    Radii,
    Request,
    by_function,
    needs_double,
)
from phocas.rules.washing import Marks

COPIED_COLUMNS = 1 << 15


@dataclass(slots=True, eq=False)
class Piece:
    """A range of columns of all m rows: ``arrays`` is one (m, n) array, or m of n values."""

    start: int
    columns: int
    arrays: NDArray[Any] | list[NDArray[Any]]
    element: str

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yield the columns as rows that kernels can read, with where they begin in the piece."""
        rows = self.in_place()
        if rows is not None:
            yield 0, rows
            return
        for begin in range(0, self.columns, COPIED_COLUMNS):
            end = min(self.columns, begin + COPIED_COLUMNS)
            yield begin, self._copied(begin, end)

    def in_place(self) -> Rows | None:
        """Return all columns as rows where they are, if kernels can read them there."""
        if not kernels.half_supported(self.element):
            return None
        arrays = self.arrays
        if isinstance(arrays, list):
            if not all(map(_adjacent, arrays)):
                return None
            addresses = np.array([kernels.address(array) for array in arrays], np.uint64)
            return Rows(addresses, self.columns, self.element, arrays)
        return measures.rows_of(arrays, self.element) if _adjacent(arrays) else None

    def _copied(self, begin: int, end: int) -> Rows:
        kind = self.arrays[0].dtype.newbyteorder("=")
        element = self.element
        if not kernels.half_supported(element):
            kind, element = np.dtype(np.float32), "float32"
        values = np.empty((len(self.arrays), end - begin), kind)
        for i, array in enumerate(self.arrays):
            values[i] = array[begin:end]
        return measures.rows_of(values, element)


def _adjacent(array: NDArray[Any]) -> bool:
    """Tell whether kernels can read the last axis where it is."""
    return (
        (array.strides[-1] == array.itemsize or array.shape[-1] <= 1)
        and array.dtype.isnative
        and array.flags.aligned
    )


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """Rows that stay where they are while their values change, and where their window goes."""

    rows: Rows
    window: Window
    out: NDArray[Any]
    answer: Any

    def apply(self, counts: NDArray[np.int64] | None) -> Any:
        """Reduce the rows as they are now, over what was the answer before."""
        kernels.reduce(self.rows, self.window, kernels.address(self.out), counts)
        return self.answer


class HostMatrix:
    """The m x d matrix in this machine's memory."""

    def __init__(self, pieces: list[Piece], rebuild: Callable[[list[NDArray[Any]]], Any]) -> None:
        self.pieces = pieces
        self.m = len(pieces[0].arrays) if pieces else 0
        self.rebuild = rebuild
        self.marks: Marks | None = None
        """What is implausible here, once that was asked for: it is found out but once."""

    @property
    def d(self) -> int:
        """Return the number of columns."""
        return sum(piece.columns for piece in self.pieces)

    def measure(self, request: Request | Plausible) -> Floats:
        """Answer a rule's question about whole rows."""
        partials = [self.partial(request)]
        if isinstance(request, Plausible):
            return measures.shares(partials)
        return measures.total(request, partials)

    def partial(self, request: Request | Radii | Plausible, start: int = 0) -> measures.Partial:
        """Return what these columns contribute, if they begin at column ``start`` of more."""
        if isinstance(request, Plausible):
            return self._marked(request, start).partial(self.m)
        m = self.m if request.weights is None else len(request.weights)
        result = measures.Partial(m)
        for piece in self.pieces:
            for begin, rows in self._blocks(piece, request.clean, start):
                place = start + piece.start + begin
                if isinstance(request, Radii):
                    result += measures.edge_radii(request, place, rows)
                else:
                    result += measures.partial(request, place, rows)
        return result

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None, start: int = 0) -> Any:
        """Clean, mix and reduce; count what was dropped of each mixed row.

        With spreads of blocks that are cut, the columns begin at column ``start`` of more.
        """
        if decision.function is not None:
            return self._by_function(decision, decision.function, start)
        if decision.clean is not None and decision.window.watched:
            if counts is not None:
                window = replace(decision.window, watched=False)
                self.apply(replace(decision, window=window), counts, start)
            return self.apply(Decision(decision.plain or UNMIXED, kernels.PLAIN_MEAN), None)
        clean, spreads = decision.clean, decision.spreads
        origin = start
        if spreads is None:
            origin, spreads = 0, self._cut_spreads(decision.radii())
        answers = []
        for piece in self.pieces:
            out: NDArray[Any] | None = None
            for begin, rows in self._blocks(piece, clean, start):
                if out is None:
                    out = np.empty(piece.columns, _answer_dtype(decision, rows, piece))
                place = origin + piece.start + begin
                for first, last, spread in _segments(place, rows.columns, spreads):
                    part = rows if last - first == rows.columns else rows.shifted(first, last)
                    _apply(decision, part, out[begin + first : begin + last], counts, spread)
            if out is None:
                out = np.empty(0, piece.arrays[0].dtype)
            answers.append(_stored(out, piece.element))
        return self.rebuild(answers)

    def standing(self, decision: Decision) -> Standing | None:
        """Return what :meth:`apply` does if it is one call of a kernel, for rows that stay."""
        other = (decision.function, decision.spreads, decision.clean, decision.weighing)
        if len(self.pieces) != 1 or any(
            part is not None for part in (decision.mix.weights, *other)
        ):
            return None
        (piece,) = self.pieces
        rows = piece.in_place()
        if rows is None:
            return None
        out = np.empty(piece.columns, piece.arrays[0].dtype.newbyteorder("="))
        return Standing(rows, decision.window, out, self.rebuild([_stored(out, piece.element)]))

    def _by_function(self, decision: Decision, function: Function, start: int) -> Any:
        """Give all mixed rows to a function at once, in a copy that it may change."""
        mixed = [
            _mixed(rows, decision.mix.weights)
            for piece in self.pieces
            for _, rows in self._blocks(piece, decision.clean, start)
        ]
        values = by_function(function, np.concatenate(mixed, axis=1))
        ends = np.cumsum([piece.columns for piece in self.pieces])
        parts = np.split(values, ends[:-1])
        return self.rebuild(
            [_stored(part, piece.element) for part, piece in zip(parts, self.pieces, strict=True)]
        )

    def _blocks(self, piece: Piece, clean: Clean | None, start: int) -> Iterator[tuple[int, Rows]]:
        """Yield the columns of a piece as :class:`Piece` does, to be read cleaned.

        The columns begin at column ``start`` of more.
        """
        if clean is None:
            yield from piece.blocks()
            return
        marks = self._marked(clean.plausible, start)
        for begin, rows in piece.blocks():
            place = start + piece.start + begin
            for first, last, _ in _segments(place, rows.columns, marks.spreads):
                part = rows.shifted(first, last)
                yield begin + first, marks.of(place + first, part, clean.out, piece.element)

    def _marked(self, plausible: Plausible, start: int) -> Marks:
        if self.marks is None:
            spreads = plausible.spreads
            if spreads is None:
                spreads = self._cut_spreads(plausible.radii(self.m))
            marks = Marks(plausible.window, spreads, plausible.rows)
            for piece in self.pieces:
                for begin, rows in piece.blocks():
                    place = start + piece.start + begin
                    for first, last, spread in _segments(place, rows.columns, spreads):
                        marks.add(place + first, rows.shifted(first, last), spread)
            self.marks = marks
        return self.marks

    def _cut_spreads(self, radii: Radii) -> Mapping[int, float]:
        """Return the spreads of blocks that lie in more than one piece."""
        cut = any(piece.start % kernels.BLOCK_COLUMNS for piece in self.pieces)
        return measures.spreads([self.partial(radii)]) if cut and radii.window.reach else {}


def _mixed(rows: Rows, weights: Floats | None) -> NDArray[Any]:
    if weights is None:
        return kernels.values(rows)
    out = np.empty((len(weights), rows.columns), kernels.compute_dtype(rows.element))
    kernels.combine(rows, SparseMix.of(weights), out)
    return out


def _segments(
    start: int, columns: int, spreads: Mapping[int, float]
) -> Iterator[tuple[int, int, float | None]]:
    """Yield ranges of columns that a kernel may take at once: parts of blocks have their spread."""
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


def _answer_dtype(decision: Decision, rows: Rows, piece: Piece) -> np.dtype[Any]:
    """Return what the kernels write: stored values, or computed ones after arithmetic on rows."""
    mixed = decision.mix.weights is not None and decision.mix.selected is None
    if (mixed and not decision.window.watched) or rows.element != piece.element:
        return kernels.compute_dtype(rows.element)
    return piece.arrays[0].dtype.newbyteorder("=")


def _apply(
    decision: Decision,
    rows: Rows,
    out: NDArray[Any],
    counts: NDArray[np.int64] | None,
    spread: float | None,
) -> None:
    weights = decision.mix.weights
    chosen = decision.mix.selected
    window = decision.window
    if window.watched and weights is not None:
        everyone = rows
        if decision.plain is not None and decision.plain.selected is not None:
            everyone = rows.take(decision.plain.selected)
        kernels.reduce(everyone, kernels.PLAIN_MEAN, kernels.address(out))
        if counts is None:
            return
        window = replace(window, watched=False)
        out = np.empty(rows.columns, kernels.compute_dtype(rows.element))
    if weights is None or chosen is not None:
        rows = rows if chosen is None else rows.take(chosen)
        kernels.reduce(rows, window, kernels.address(out), counts, spread, decision.weighing)
    elif out.dtype == np.float32 and needs_double(weights):
        wide = np.empty(len(out))
        _mix(decision, SparseMix.of(weights), rows, wide, counts, spread)
        with np.errstate(over="ignore", under="ignore"):
            out[:] = wide
    else:
        _mix(decision, SparseMix.of(weights), rows, out, counts, spread)


def _mix(
    decision: Decision,
    mix: SparseMix,
    rows: Rows,
    out: NDArray[Any],
    counts: NDArray[np.int64] | None,
    spread: float | None,
) -> None:
    if len(mix) == 1:
        kernels.combine(rows, mix, out[None, :])
    else:
        window = replace(decision.window, watched=False)
        kernels.mix_reduce(rows, mix, window, out, counts, spread, decision.weighing)


def _stored(values: NDArray[Any], element: str) -> NDArray[Any]:
    """Round computed values to the stored type; bfloat16 is stored as its 16 bits."""
    if element != "bfloat16":
        return values.astype(element, copy=False)
    if values.dtype != np.float32:
        return values
    return to_bfloat16(values)
