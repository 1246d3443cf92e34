"""The matrix as an attacker sees it: numbers and their bits, in the caller's own memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Kind:
    """A floating-point format: 1 sign bit, then the exponent, then the mantissa."""

    name: str
    bits: int
    mantissa: int

    @property
    def word(self) -> np.dtype[Any]:
        """Return the unsigned integer of the same size."""
        return np.dtype(f"uint{self.bits}")

    @property
    def work(self) -> np.dtype[Any]:
        """Return the format to compute in: float64 for float64, float32 for the rest."""
        return np.dtype(np.float64 if self.bits == 64 else np.float32)

    @property
    def large(self) -> float:
        """Return a number whose square, too, is finite in this format."""
        exponent_bits = self.bits - 1 - self.mantissa
        return float(2.0 ** (2 ** (exponent_bits - 2) - 1))

    def paper_bits(self) -> tuple[int, ...]:
        """Return the bits that play the part of 22, 30, 31 and 32 in a float32.

        They are the mantissa's second bit, the exponent's first two, and the sign.

        >>> Kind("float64", 64, 52).paper_bits()
        (51, 62, 63, 64)
        """
        return (self.mantissa - 1, self.bits - 2, self.bits - 1, self.bits)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("float16", 16, 10),
        Kind("bfloat16", 16, 7),
        Kind("float32", 32, 23),
        Kind("float64", 64, 52),
    )
}


def kind_of(dtype: Any) -> Kind:
    """Return the format behind a NumPy dtype, a torch dtype or the name of one."""
    text = str(dtype) if str(dtype).startswith("torch.") else _numpy_name(dtype)
    name = text.removeprefix("torch.")
    if name not in KINDS:
        raise TypeError(f"an attack needs one of the dtypes {', '.join(KINDS)}: got {name}")
    return KINDS[name]


def _numpy_name(dtype: Any) -> str:
    if dtype == "bfloat16":  # NumPy has no such dtype of its own
        return "bfloat16"
    exact = np.dtype(dtype)
    return str(exact.name if exact.isnative else exact.str)


class Matrix:
    """The m x d numbers of an array or a CPU tensor; what is written here is written there."""

    def __init__(self, G: Any) -> None:
        self.words = _words(G)
        self.kind = kind_of(G.dtype)
        self.m, self.d = self.words.shape
        name = self.kind.name
        self._floats = None if name == "bfloat16" else self.words.view(name)

    def read(self, rows: Any, columns: slice = slice(None)) -> np.ndarray:
        """Return rows (a slice, an index or an array of them) to compute with; perhaps a view."""
        if self._floats is None:
            return _from_bfloat16(self.words[rows, columns])
        floats: np.ndarray = self._floats[rows, columns]
        return floats.astype(self.kind.work, copy=False)

    def write(self, rows: Iterable[int], values: np.ndarray, columns: slice = slice(None)) -> None:
        """Put the same values into each of these rows; what is too large becomes inf."""
        stored = self._stored(values)
        target = self.words if self._floats is None else self._floats
        for row in rows:
            target[row, columns] = stored

    def take(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return single cells to compute with."""
        memory, places = self._cells(self._floats, rows, columns)
        if self._floats is None:
            return _from_bfloat16(memory[places])
        floats: np.ndarray = memory[places]
        return floats.astype(self.kind.work, copy=False)

    def put(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Put values into single cells; what is too large becomes inf."""
        memory, places = self._cells(self._floats, rows, columns)
        memory[places] = self._stored(values)

    def change_bits(
        self, rows: np.ndarray, columns: np.ndarray, change: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Replace the words of single cells by a function of them."""
        memory, places = self._cells(self.words, rows, columns)
        memory[places] = change(memory[places])

    def copy_rows(self, rows: Iterable[int], source: np.ndarray) -> None:
        """Put the bits of ``source[row]`` into each of these rows."""
        for row in rows:
            self.words[row] = source[row]

    def _cells(
        self, memory: np.ndarray | None, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Return an array and an index into it for these cells.

        One flat index is 2 to 4 times as fast as a pair, where the memory is in one piece.
        """
        whole = self.words if memory is None else memory
        if whole.flags.c_contiguous:
            return whole.reshape(-1), rows * self.d + columns
        return whole, (rows, columns)

    def in_place(self, row: int, columns: slice) -> np.ndarray | None:
        """Return a part of a row that may be computed into directly, if there is such memory."""
        if self._floats is None or self._floats.dtype != self.kind.work:
            return None
        part = self._floats[row, columns]
        return part if part.flags.c_contiguous else None

    def _stored(self, values: np.ndarray) -> np.ndarray:
        if self._floats is None:
            return _to_bfloat16(values)
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(self._floats.dtype, copy=False)


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def host_array(value: Any) -> np.ndarray:
    """Return a vector or matrix of any kind as a float64 array of its own."""
    if is_tensor(value):
        value = value.detach().cpu().double().numpy()
    return np.array(value, np.float64)


def _words(G: Any) -> np.ndarray:
    """Return the bits of the matrix as unsigned integers, in the same memory."""
    if is_tensor(G):
        if G.device.type != "cpu":
            raise TypeError(f"an attack needs a tensor in the memory of the CPU: got {G.device}")
        bits = kind_of(G.dtype).bits
        array = G.detach().view(getattr(sys.modules["torch"], f"int{bits}")).numpy()
    elif isinstance(G, np.ndarray):
        array, bits = G, kind_of(G.dtype).bits
    else:
        raise TypeError(
            "an attack works in place and needs an (m, d) NumPy array or torch tensor:"
            f" got {type(G).__name__}"
        )
    if array.ndim != 2:
        raise ValueError(
            f"an attack needs an (m, d) matrix, row i from worker i: got shape {array.shape}"
        )
    if not array.flags.writeable:
        raise ValueError("an attack works in place: got a read-only array")
    words: np.ndarray = array.view(f"uint{bits}")
    return words


def _from_bfloat16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest, ties to even, as torch does; NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)
