"""What may be handed to a rule, and how its answer goes back in the same form.

NumPy arrays and torch tensors on the CPU are read where they are; only rows whose values are not
adjacent are copied, a block of columns at a time. Tensors elsewhere stay there.

Workers that have several arrays each (state dicts, lists of layers) may have arrays of whole
numbers and flags among them, such as batch norm's counter of batches. No rule applies to these:
each becomes the lower median of the workers' values, in its own type, which for flags is what more
than half of the workers say. They are not counted in anyone's blame.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.floats import FORMATS, to_bfloat16
from phocas.kernels import Rows, SparseMix, Window
from phocas.rules import measures
from phocas.rules.algebra import (
    UNMIXED,
    Clean,
    Columns,
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
ACCEPTED = (
    "an (m, d) array or tensor, a sequence of m vectors, or a sequence of m mappings of names to"
    " arrays or tensors, or of m lists of them"
)


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
            return self.apply(Decision(UNMIXED, kernels.PLAIN_MEAN), None)
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
            window, spreads = plausible.window, plausible.spreads
            if spreads is None:
                spreads = self._cut_spreads(Radii(window))
            marks = Marks(window, spreads)
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
        kernels.reduce(rows, kernels.PLAIN_MEAN, kernels.address(out))
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


# -- opening ---------------------------------------------------------------------------------------


def open_rows(rows: Any) -> Columns:
    """Return the matrix behind whatever holds the rows; refuse what is not one."""
    if isinstance(rows, np.ndarray) or is_tensor(rows):
        _unmasked(rows, "rows")
        if rows.ndim != 2:
            shape = tuple(rows.shape)
            raise ValueError(f"rows must be (m, d): got shape {shape}; pass {ACCEPTED}")
        if rows.shape[0] == 0:
            raise ValueError("there must be at least one row: got none")
        if _on_accelerator(rows):
            return _on_device([_strided(rows, "the matrix")], lambda answers: answers[0])
        array, element = _array(rows, "the matrix")
        piece = Piece(0, array.shape[1], array, element)
        return HostMatrix([piece], lambda answers: like(rows, answers[0]))
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise TypeError(f"rows must be {ACCEPTED}: got {type(rows).__name__}")
    if len(rows) == 0:
        raise ValueError("there must be at least one row: got none")
    if isinstance(rows[0], Mapping):
        return _open_mappings(rows)
    if isinstance(rows[0], list | tuple) and any(map(_is_array, rows[0])):
        return _open_lists(rows)
    return _open_vectors(rows)


def _open_vectors(rows: Sequence[Any]) -> Columns:
    first = rows[0]
    for i, row in enumerate(rows):
        if not _alike(row, first):
            _same(row, first, f"row {i}", "row 0")
    if _on_accelerator(first):
        shape = first.shape
        return _on_device([_flat(rows)], lambda answers: answers[0].reshape(shape))
    piece = _piece(0, rows, "row 0")
    return HostMatrix([piece], lambda answers: like(first, answers[0]).reshape(first.shape))


def _open_mappings(rows: Sequence[Any]) -> Columns:
    first = rows[0]
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"worker {i} must be a mapping like worker 0: got {type(row).__name__}")
        missing, extra = first.keys() - row.keys(), row.keys() - first.keys()
        if missing or extra:
            what = (
                f"lacks {min(missing, key=str)!r}"
                if missing
                else f"has {min(extra, key=str)!r} too"
            )
            raise ValueError(f"all workers must have the same keys: worker {i} {what}")
    keys = list(first)
    return _open_parts(
        [[row[key] for key in keys] for row in rows],
        [f"key {key!r}" for key in keys],
        lambda answers: dict(zip(keys, answers, strict=True)),
    )


def _open_lists(rows: Sequence[Any]) -> Columns:
    first = rows[0]
    for i, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            raise TypeError(
                f"worker {i} must be a list of arrays like worker 0: got {type(row).__name__}"
            )
        if len(row) != len(first):
            raise ValueError(
                f"all workers must have as many arrays: worker {i} has {len(row)},"
                f" worker 0 has {len(first)}"
            )
    places = [f"index {index}" for index in range(len(first))]
    return _open_parts(rows, places, list if isinstance(first, list) else tuple)


def _open_parts(
    rows: Sequence[Sequence[Any]],
    places: Sequence[str],
    rebuild: Callable[[Sequence[Any]], Any],
) -> Columns:
    """Open workers that have several arrays each; ``rebuild`` gives the answers their form."""
    first = rows[0]
    for i, row in enumerate(rows):
        for value, example, place in zip(row, first, places, strict=True):
            if not _alike(value, example):  # names take longer to write than to compare types
                _same(value, example, f"worker {i}, {place}", f"worker 0, {place}")
    elsewhere = [_on_accelerator(value) for value in first]
    if any(elsewhere) and not all(elsewhere):
        there, here = places[elsewhere.index(True)], places[elsewhere.index(False)]
        raise ValueError(f"all tensors must be on one device: {there} and {here} differ")
    by_rule = [index for index, value in enumerate(first) if not _is_whole(value)]
    if not by_rule:
        raise ValueError(
            "each worker must have at least one array of floating-point values:"
            f" worker 0 has none among {len(first)} arrays"
        )

    medians = {
        index: _middle([row[index] for row in rows], places[index])
        for index in set(range(len(first))).difference(by_rule)
    }

    def join(answers: Sequence[Any]) -> Any:
        found = medians | dict(zip(by_rule, answers, strict=True))
        return rebuild([found[index].reshape(first[index].shape) for index in range(len(first))])

    if any(elsewhere):
        return _on_device([_flat([row[index] for row in rows]) for index in by_rule], join)
    pieces: list[Piece] = []
    start = 0
    for index in by_rule:
        piece = _piece(start, [row[index] for row in rows], places[index])
        if pieces and piece.element != pieces[0].element:
            raise TypeError(
                f"all floating-point values must have one dtype: {places[by_rule[0]]} is"
                f" {pieces[0].element} and {places[index]} is {piece.element}"
            )
        pieces.append(piece)
        start += piece.columns
    return HostMatrix(
        pieces,
        lambda answers: join(
            [like(first[index], answer) for index, answer in zip(by_rule, answers, strict=True)]
        ),
    )


def _is_whole(value: Any) -> bool:
    """Tell counters, indices and flags from floating-point values."""
    return element_of(value.dtype).startswith(("int", "uint", "bool"))


def _middle(rows: Sequence[Any], place: str) -> Any:
    """Return the lower median of whole numbers, exact in their own type; of flags, the majority."""
    if _on_accelerator(rows[0]):
        middle = (len(rows) - 1) // 2
        return sys.modules["torch"].stack(_flat(rows)).sort(dim=0).values[middle]
    return like(rows[0], lower_median([on_host(row, place).reshape(-1) for row in rows]))


def lower_median(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the lower median of each column: what more than half of the rows say, if they do."""
    return np.asarray(np.sort(np.stack(rows), axis=0)[(len(rows) - 1) // 2])


def _piece(start: int, rows: Sequence[Any], place: str) -> Piece:
    arrays = []
    element = ""
    for row in rows:
        array, element = _array(row, place)
        arrays.append(array.reshape(-1))  # a view wherever the values are adjacent
    return Piece(start, arrays[0].size, arrays, element)


def _unmasked(values: Any, place: str) -> None:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{place} must not be masked: a mask would be ignored, so fill it with NaN")


def _alike(row: Any, first: Any) -> bool:
    """Tell two plain arrays of one shape and type, the common case."""
    return (
        type(row) is np.ndarray
        and type(first) is np.ndarray
        and row.shape == first.shape
        and row.dtype == first.dtype
    )


def _same(row: Any, first: Any, place: str, other: str) -> None:
    """Refuse a row that differs from the first in kind, shape, type or device."""
    _unmasked(row, place)
    if not _is_array(row):
        raise TypeError(
            f"{place} must be a NumPy array or a torch tensor: got {type(row).__name__}"
        )
    if is_tensor(row) != is_tensor(first):
        raise TypeError(
            f"rows must be all arrays or all tensors: {place} is {type(row).__name__},"
            f" {other} is {type(first).__name__}"
        )
    if tuple(row.shape) != tuple(first.shape):
        raise ValueError(
            f"all rows must have the same shape: {place} has {tuple(row.shape)},"
            f" {other} has {tuple(first.shape)}"
        )
    if row.dtype != first.dtype:
        raise TypeError(
            f"all rows must have the same dtype: {place} is {row.dtype}, {other} is {first.dtype}"
        )
    if is_tensor(row) and row.device != first.device:
        raise ValueError(
            f"all rows must be on the same device: {place} is on {row.device},"
            f" {other} on {first.device}"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: Any) -> bool:
    """Tell a torch tensor without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _on_accelerator(value: Any) -> bool:
    return not isinstance(value, np.ndarray) and str(value.device.type) != "cpu"


@lru_cache(maxsize=64)  # NumPy takes longer for a type's name than a call may take
def element_of(dtype: Any) -> str:
    """Return the name of a type of values."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _array(value: Any, place: str) -> tuple[NDArray[Any], str]:
    """Return the values as an array that shares their memory, and the name of their type."""
    name = element_of(value.dtype)
    if name not in FORMATS:
        raise TypeError(
            f"values must be {', '.join(FORMATS)}: {place} is {name};"
            " convert it, or leave it out of the mapping"
        )
    array = on_host(value, place)
    return (array.view(np.uint16) if name == "bfloat16" else array), name


def on_host(value: Any, place: str) -> NDArray[Any]:
    """Return an array that shares the memory of the values; of bfloat16 tensors, the bits."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    _strided(value, place)
    torch = sys.modules["torch"]
    detached = (value.detach() if value.requires_grad else value).resolve_neg()
    if value.dtype == torch.bfloat16:
        detached = detached.view(torch.uint16)
    array: NDArray[Any] = detached.numpy()
    return array


def like(example: Any, answer: NDArray[Any]) -> Any:
    """Return an answer in the form of the example."""
    if isinstance(example, np.ndarray):
        return answer.view(example.dtype) if element_of(example.dtype) == "bfloat16" else answer
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(answer)
    return tensor.view(torch.bfloat16) if example.dtype == torch.bfloat16 else tensor


def _flat(rows: Sequence[Any]) -> list[Any]:
    return [_strided(row).reshape(-1) for row in rows]


def _strided(tensor: Any, place: str = "a row") -> Any:
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"tensors must be dense: {place} is {tensor.layout}")
    return tensor


def _on_device(pieces: list[Any], rebuild: Callable[[list[Any]], Any]) -> Columns:
    from phocas.rules.device import open_device  # noqa: PLC0415 - needs torch

    dtypes = {str(piece[0].dtype).removeprefix("torch.") for piece in pieces}
    for name in dtypes:
        if name not in FORMATS:
            raise TypeError(f"values must be {', '.join(FORMATS)}: got {name}")
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtypes))
        raise TypeError(f"all floating-point values must have one dtype: got {names}")
    devices = sorted({str(piece[0].device) for piece in pieces})
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device: got {', '.join(devices)}")
    return open_device(pieces, rebuild)
