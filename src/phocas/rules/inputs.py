"""The input types of rules, and the conversion of results to the same type.

NumPy arrays and torch tensors on the CPU are read in place (:mod:`phocas.rules.host`). Tensors on
other devices stay there.

Workers with several arrays each (state dicts, lists of layers) may have integer and Boolean arrays
among them, such as batch norm's counter of batches. Rules do not apply to these. Each becomes the
lower median of the workers' values, in its own type; for Boolean values this is the majority.
Explanations do not count them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.floats import FORMATS
from phocas.rules.execution import ColumnRange, Matrix
from phocas.rules.host import HostMatrix

ACCEPTED = (
    "an (m, d) array or tensor, a sequence of m vectors, or a sequence of m mappings of names to"
    " arrays or tensors, or of m lists of them"
)


def open_rows(rows: Any) -> Matrix:
    """Return the matrix of the given rows; raise TypeError or ValueError for invalid rows."""
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
        piece = ColumnRange(0, array.shape[1], array, element)
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


def with_reference(rows: Any, reference: Any) -> list[Any]:
    """Return the rows and, as the last row, a reference; raise an error if it is no finite row."""
    open_rows(rows)
    first, given = _arrays(rows[0]), _arrays(reference)
    for place in first.keys() ^ given.keys():
        what = f"it lacks {place}" if place in first else f"it has {place} too"
        raise ValueError(f"the reference must have the form of a row: {what.strip()}")
    for place, value in given.items():
        _same(value, first[place], f"the reference{', ' * bool(place)}{place}", "row 0")
        if not (_is_whole(value) or _all_finite(value)):
            raise ValueError("the reference must be finite: it has NaN or inf")
    return [*rows, reference]


def _arrays(row: Any) -> dict[str, Any]:
    """Return the arrays of a row by their place in it."""
    if isinstance(row, Mapping):
        return {f"key {key!r}": value for key, value in row.items()}
    if isinstance(row, list | tuple) and any(map(_is_array, row)):
        return {f"index {index}": value for index, value in enumerate(row)}
    return {"": row}


def _all_finite(values: Any) -> bool:
    # NumPy where it can: torch's threads go on polling, and slow down the kernels that follow.
    if is_tensor(values) and (_on_accelerator(values) or element_of(values.dtype) == "bfloat16"):
        return bool(values.isfinite().all())
    return bool(np.isfinite(on_host(values, "the reference")).all())


def _open_vectors(rows: Sequence[Any]) -> Matrix:
    first = rows[0]
    for i, row in enumerate(rows):
        if not _alike(row, first):
            _same(row, first, f"row {i}", "row 0")
    if _on_accelerator(first):
        shape = first.shape
        return _on_device([_flat(rows)], lambda answers: answers[0].reshape(shape))
    piece = _piece(0, rows, "row 0")
    return HostMatrix([piece], lambda answers: like(first, answers[0]).reshape(first.shape))


def _open_mappings(rows: Sequence[Any]) -> Matrix:
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


def _open_lists(rows: Sequence[Any]) -> Matrix:
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
) -> Matrix:
    """Return the matrix of workers with several arrays each.

    ``rebuild`` converts a list of results to the form of the input.
    """
    first = rows[0]
    for i, row in enumerate(rows):
        for value, example, place in zip(row, first, places, strict=True):
            if not _alike(value, example):  # format the names only if they are needed: it is slow
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
    pieces: list[ColumnRange] = []
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
    """Tell whether an array is of integers or Boolean values."""
    return element_of(value.dtype).startswith(("int", "uint", "bool"))


def _middle(rows: Sequence[Any], place: str) -> Any:
    """Return the lower median of integers, in their own type; of Boolean values, the majority."""
    if _on_accelerator(rows[0]):
        middle = (len(rows) - 1) // 2
        return sys.modules["torch"].stack(_flat(rows)).sort(dim=0).values[middle]
    return like(rows[0], lower_median([on_host(row, place).reshape(-1) for row in rows]))


def lower_median(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the lower median of each column; a value of more than half of the rows wins."""
    return np.asarray(np.sort(np.stack(rows), axis=0)[(len(rows) - 1) // 2])


def _piece(start: int, rows: Sequence[Any], place: str) -> ColumnRange:
    arrays = []
    element = ""
    for row in rows:
        array, element = _array(row, place)
        arrays.append(array.reshape(-1))  # without a copy if the values are contiguous
    return ColumnRange(start, arrays[0].size, arrays, element)


def _unmasked(values: Any, place: str) -> None:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{place} must not be masked: a mask would be ignored, so fill it with NaN")


def _alike(row: Any, first: Any) -> bool:
    """Tell whether two values are NumPy arrays of equal shape and type: the common case."""
    return (
        type(row) is np.ndarray
        and type(first) is np.ndarray
        and row.shape == first.shape
        and row.dtype == first.dtype
    )


def _same(row: Any, first: Any, place: str, other: str) -> None:
    """Raise an error if a row differs from the first row in kind, shape, type or device."""
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
    """Tell whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _on_accelerator(value: Any) -> bool:
    return not isinstance(value, np.ndarray) and str(value.device.type) != "cpu"


@lru_cache(maxsize=64)  # NumPy needs several microseconds for the name of a type
def element_of(dtype: Any) -> str:
    """Return the name of a dtype of NumPy or torch."""
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
    """Return an array that shares the memory of the values; bfloat16 tensors become uint16."""
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
    """Return a result as an array or a tensor, like the example."""
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


def _on_device(pieces: list[Any], rebuild: Callable[[list[Any]], Any]) -> Matrix:
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
