"""Access to a matrix for attacks: its numbers and their bits, in the caller's own memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from phocas.floats import Format, format_of, from_bfloat16, to_bfloat16
from phocas.rules.inputs import is_tensor


def kind_of(dtype: Any) -> Format:
    """Return the float format of a dtype, or raise if attacks do not support it."""
    return format_of(dtype, "an attack")


class WritableMatrix:
    """The m x d numbers of an array or CPU tensor; writes change the caller's memory."""

    def __init__(self, rows: Any) -> None:
        self.words = _words(rows)
        self.kind = kind_of(rows.dtype)
        self.m, self.d = self.words.shape
        name = self.kind.name
        self._floats = None if name == "bfloat16" else self.words.view(name)

    def read(self, rows: Any, columns: slice = slice(None)) -> np.ndarray:
        """Return rows (a slice, an index or an array of indices), perhaps as a view."""
        if self._floats is None:
            return from_bfloat16(self.words[rows, columns])
        floats: np.ndarray = self._floats[rows, columns]
        return floats.astype(self.kind.work, copy=False)

    def write(self, rows: Iterable[int], values: np.ndarray, columns: slice = slice(None)) -> None:
        """Write the same values into each of these rows; values that overflow become inf."""
        stored = self._stored(values)
        target = self.words if self._floats is None else self._floats
        for row in rows:
            target[row, columns] = stored

    def take(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the values of single cells for computation."""
        memory, indices = self._cells(self._floats, rows, columns)
        if self._floats is None:
            return from_bfloat16(memory[indices])
        floats: np.ndarray = memory[indices]
        return floats.astype(self.kind.work, copy=False)

    def put(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Write values into single cells; values that overflow become inf."""
        memory, indices = self._cells(self._floats, rows, columns)
        memory[indices] = self._stored(values)

    def change_bits(
        self, rows: np.ndarray, columns: np.ndarray, change: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Replace the bits of single cells, as unsigned integers, by ``change(bits)``."""
        memory, indices = self._cells(self.words, rows, columns)
        memory[indices] = change(memory[indices])

    def copy_rows(self, rows: Iterable[int], source: np.ndarray) -> None:
        """Copy the bits of ``source[row]`` into each of these rows."""
        for row in rows:
            self.words[row] = source[row]

    def _cells(
        self, memory: np.ndarray | None, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Return an array and an index into it for these cells.

        In contiguous memory one flat index is 2 to 4 times as fast as a pair of indices.
        """
        whole = self.words if memory is None else memory
        if whole.flags.c_contiguous:
            return whole.reshape(-1), rows * self.d + columns
        return whole, (rows, columns)

    def in_place(self, row: int, columns: slice) -> np.ndarray | None:
        """Return a part of a row that can be computed in place, or None if it must be converted."""
        if self._floats is None or self._floats.dtype != self.kind.work:
            return None
        part = self._floats[row, columns]
        return part if part.flags.c_contiguous else None

    def _stored(self, values: np.ndarray) -> np.ndarray:
        if self._floats is None:
            return to_bfloat16(values)
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(self._floats.dtype, copy=False)


def host_array(value: Any) -> np.ndarray:
    """Return a vector or matrix of any kind as a new float64 array."""
    if is_tensor(value):
        value = value.detach().cpu().double().numpy()
    return np.array(value, np.float64)


def _words(rows: Any) -> np.ndarray:
    """Return the bits of the matrix as unsigned integers, in the same memory."""
    if is_tensor(rows):
        if rows.device.type != "cpu":
            raise TypeError(f"an attack needs a tensor in the memory of the CPU: got {rows.device}")
        bits = kind_of(rows.dtype).bits
        array = rows.detach().view(getattr(sys.modules["torch"], f"int{bits}")).numpy()
    elif isinstance(rows, np.ndarray):
        array, bits = rows, kind_of(rows.dtype).bits
    else:
        raise TypeError(
            "an attack works in place and needs an (m, d) NumPy array or torch tensor:"
            f" got {type(rows).__name__}"
        )
    if array.ndim != 2:
        raise ValueError(
            f"an attack needs an (m, d) matrix, row i from worker i: got shape {array.shape}"
        )
    if not array.flags.writeable:
        raise ValueError("an attack works in place: got a read-only array")
    words: np.ndarray = array.view(f"uint{bits}")
    return words
