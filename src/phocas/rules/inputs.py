"""What may be handed to a rule, and how its answer goes back in the same form.

NumPy arrays and torch tensors on the CPU are read where they are; only rows whose values are not
adjacent are copied, a block of columns at a time. Tensors elsewhere stay there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.floats import FORMATS, to_bfloat16
from phocas.kernels import Rows, SparseMix
from phocas.rules import measures
from phocas.rules.algebra import Decision, Floats, Request

COPIED_COLUMNS = 1 << 15
ACCEPTED = (
    "an (m, d) array or tensor, a sequence of m vectors, or a sequence of m mappings of names to"
    " arrays or tensors"
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
        rows = self._in_place()
        if rows is not None:
            yield 0, rows
            return
        for begin in range(0, self.columns, COPIED_COLUMNS):
            end = min(self.columns, begin + COPIED_COLUMNS)
            yield begin, self._copied(begin, end)

    def _in_place(self) -> Rows | None:
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


class HostMatrix:
    """The m x d matrix in this machine's memory."""

    def __init__(self, pieces: list[Piece], rebuild: Callable[[list[NDArray[Any]]], Any]) -> None:
        self.pieces = pieces
        self.m = len(pieces[0].arrays) if pieces else 0
        self.rebuild = rebuild

    @property
    def d(self) -> int:
        """Return the number of columns."""
        return sum(piece.columns for piece in self.pieces)

    def measure(self, request: Request) -> Floats:
        """Answer a rule's question about whole rows."""
        return measures.total(request, [self.partial(request)])

    def partial(self, request: Request, start: int = 0) -> measures.Partial:
        """Return what these columns contribute, if they begin at column ``start`` of more."""
        m = self.m if request.weights is None else len(request.weights)
        result = measures.Partial(m)
        for piece in self.pieces:
            for begin, rows in piece.blocks():
                result += measures.partial(request, start + piece.start + begin, rows)
        return result

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None) -> Any:
        """Mix and reduce; count what was dropped of each mixed row."""
        answers = []
        for piece in self.pieces:
            out: NDArray[Any] | None = None
            for begin, rows in piece.blocks():
                if out is None:
                    out = np.empty(piece.columns, _answer_dtype(decision, rows, piece))
                _apply(decision, rows, out[begin : begin + rows.columns], counts)
            if out is None:
                out = np.empty(0, piece.arrays[0].dtype)
            answers.append(_stored(out, piece.element))
        return self.rebuild(answers)


def _answer_dtype(decision: Decision, rows: Rows, piece: Piece) -> np.dtype[Any]:
    """Return what the kernels write: stored values, or computed ones after arithmetic on rows."""
    mixed = decision.mix.weights is not None and decision.mix.selected is None
    if mixed or rows.element != piece.element:
        return kernels.compute_dtype(rows.element)
    return piece.arrays[0].dtype.newbyteorder("=")


def _apply(
    decision: Decision, rows: Rows, out: NDArray[Any], counts: NDArray[np.int64] | None
) -> None:
    weights = decision.mix.weights
    chosen = decision.mix.selected
    if weights is None or chosen is not None:
        rows = rows if chosen is None else rows.take(chosen)
        kernels.reduce(rows, decision.window, kernels.address(out), counts)
    elif len(weights) == 1:
        kernels.combine(rows, SparseMix.of(weights), out[None, :])
    else:
        kernels.mix_reduce(rows, SparseMix.of(weights), decision.window, out, counts)


def _stored(values: NDArray[Any], element: str) -> NDArray[Any]:
    """Round computed values to the stored type; bfloat16 is stored as its 16 bits."""
    if element != "bfloat16":
        return values.astype(element, copy=False)
    if values.dtype != np.float32:
        return values
    return to_bfloat16(values)


# -- opening ---------------------------------------------------------------------------------------


def open_rows(rows: Any) -> Any:
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
        return HostMatrix([piece], lambda answers: _like(rows, answers[0]))
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise TypeError(f"rows must be {ACCEPTED}: got {type(rows).__name__}")
    if len(rows) == 0:
        raise ValueError("there must be at least one row: got none")
    if isinstance(rows[0], Mapping):
        return _open_mappings(rows)
    return _open_vectors(rows)


def _open_vectors(rows: Sequence[Any]) -> Any:
    first = rows[0]
    for i, row in enumerate(rows):
        _same(row, first, f"row {i}", "row 0")
    if _on_accelerator(first):
        shape = first.shape
        return _on_device([_flat(rows)], lambda answers: answers[0].reshape(shape))
    piece = _piece(0, rows, "row 0")
    return HostMatrix([piece], lambda answers: _like(first, answers[0]).reshape(first.shape))


def _open_mappings(rows: Sequence[Any]) -> Any:
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
        for key in first:
            _same(row[key], first[key], f"worker {i}, key {key!r}", f"worker 0, key {key!r}")
    keys = list(first)
    on_device = [key for key in keys if _on_accelerator(first[key])]
    if on_device and len(on_device) < len(keys):
        other = next(key for key in keys if key not in on_device)
        raise ValueError(
            f"all tensors must be on one device: {on_device[0]!r} and {other!r} differ"
        )
    if on_device:
        shapes = [first[key].shape for key in keys]
        return _on_device(
            [_flat([row[key] for row in rows]) for key in keys],
            lambda answers: {
                key: answer.reshape(shape)
                for key, answer, shape in zip(keys, answers, shapes, strict=True)
            },
        )
    pieces: list[Piece] = []
    start = 0
    for key in keys:
        piece = _piece(start, [row[key] for row in rows], f"key {key!r}")
        if pieces and piece.element != pieces[0].element:
            raise TypeError(
                f"all tensors must have one dtype: key {keys[0]!r} is {pieces[0].element} and"
                f" key {key!r} is {piece.element}"
            )
        pieces.append(piece)
        start += piece.columns
    if not pieces:
        raise ValueError("mappings must have at least one key: worker 0 has none")
    return HostMatrix(
        pieces,
        lambda answers: {
            key: _like(first[key], answer).reshape(first[key].shape)
            for key, answer in zip(keys, answers, strict=True)
        },
    )


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


def _same(row: Any, first: Any, place: str, other: str) -> None:
    """Refuse a row that differs from the first in kind, shape, type or device."""
    _unmasked(row, place)
    if not (isinstance(row, np.ndarray) or is_tensor(row)):
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


def is_tensor(value: Any) -> bool:
    """Tell a torch tensor without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _on_accelerator(value: Any) -> bool:
    return not isinstance(value, np.ndarray) and str(value.device.type) != "cpu"


@lru_cache(maxsize=64)  # NumPy takes longer for a type's name than a call may take
def _element(dtype: Any) -> str:
    """Return the name of a type of values."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _array(value: Any, place: str) -> tuple[NDArray[Any], str]:
    """Return the values as an array that shares their memory, and the name of their type."""
    name = _element(value.dtype)
    if name not in FORMATS:
        raise TypeError(
            f"values must be {', '.join(FORMATS)}: {place} is {name};"
            " convert it, or leave it out of the mapping"
        )
    if isinstance(value, np.ndarray):
        raw = value.view(np.uint16) if name == "bfloat16" else value
        return np.asarray(raw), name
    _strided(value, place)
    detached = (value.detach() if value.requires_grad else value).resolve_neg()
    if name == "bfloat16":
        return detached.view(sys.modules["torch"].uint16).numpy(), name
    return detached.numpy(), name


def _like(example: Any, answer: NDArray[Any]) -> Any:
    """Return an answer in the form of the example."""
    if isinstance(example, np.ndarray):
        return answer.view(example.dtype) if _element(example.dtype) == "bfloat16" else answer
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(answer)
    return tensor.view(torch.bfloat16) if example.dtype == torch.bfloat16 else tensor


def _flat(rows: Sequence[Any]) -> list[Any]:
    return [_strided(row).reshape(-1) for row in rows]


def _strided(tensor: Any, place: str = "a row") -> Any:
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"tensors must be dense: {place} is {tensor.layout}")
    return tensor


def _on_device(pieces: list[Any], rebuild: Callable[[list[Any]], Any]) -> Any:
    from phocas.rules.device import open_device  # noqa: PLC0415 - needs torch

    dtypes = {str(piece[0].dtype).removeprefix("torch.") for piece in pieces}
    for name in dtypes:
        if name not in FORMATS:
            raise TypeError(f"values must be {', '.join(FORMATS)}: got {name}")
    if len(dtypes) > 1:
        raise TypeError(f"all tensors must have one dtype: got {', '.join(sorted(dtypes))}")
    devices = sorted({str(piece[0].device) for piece in pieces})
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device: got {', '.join(devices)}")
    return open_device(pieces, rebuild)
