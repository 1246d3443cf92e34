"""Rows in memory: where they begin, what is in them, and memory for kernels to work in."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.target import host
from phocas.kernels.threads import address


@dataclass(frozen=True, slots=True, eq=False)
class Dirt:
    """What of rows is to be read as something else: implausible values as their centre.

    ``marks`` are those of the blocks from the first column on, ``scale`` that of their window.
    ``chosen`` says which of the marked rows these are; those of them that are ``out`` are NaN.
    """

    marks: NDArray[np.void]
    scale: float
    out: NDArray[np.bool_]
    chosen: NDArray[np.intp]


@dataclass(slots=True, eq=False)  # not frozen: that takes a microsecond to make
class Rows:
    """Where m rows of ``columns`` adjacent values begin, and what keeps them alive.

    With dirt in them, the rows begin where a block does.
    """

    addresses: NDArray[np.uint64]
    columns: int
    element: str
    owner: object
    dirt: Dirt | None = None

    def __len__(self) -> int:
        return len(self.addresses)

    def shifted(self, start: int, stop: int) -> Rows:
        """Return a range of columns of the same rows."""
        offset = np.uint64(start * ELEMENTS[self.element].size)
        dirt = self.dirt
        if dirt is not None:
            dirt = replace(dirt, marks=dirt.marks[start // BLOCK_COLUMNS :])
        return Rows(self.addresses + offset, stop - start, self.element, self.owner, dirt)

    def take(self, indices: NDArray[np.intp]) -> Rows:
        """Return some of the rows."""
        dirt = self.dirt
        if dirt is not None:
            dirt = replace(dirt, chosen=dirt.chosen[indices])
        return Rows(self.addresses[indices], self.columns, self.element, self.owner, dirt)


def stored_dtype(element: str) -> np.dtype[Any]:
    """Return what NumPy has an element's values as."""
    return np.dtype(np.uint16 if element == "bfloat16" else element)


def stored_nan(element: str) -> np.generic:
    """Return a NaN as it is stored."""
    return np.uint16(0x7FC0) if element == "bfloat16" else stored_dtype(element).type(np.nan)


def half_supported(element: str) -> bool:
    """Tell whether the host converts the element's values by itself."""
    return element != "float16" or host().has_half


def compute_dtype(element: str) -> np.dtype[np.floating]:
    """Return the type that an element's values are computed in."""
    return np.dtype(np.float64 if element == "float64" else np.float32)


def aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array at the start of a cache line."""
    size = math.prod(shape) * kind.itemsize
    block = np.empty(size + 64, np.uint8)
    skip = -address(block) % 64
    return block[skip : skip + size].view(kind).reshape(shape)


class Scratch(threading.local):
    """Memory that a caller's thread keeps from call to call.

    Fresh memory comes page by page: 1000 faults, 3.5 ms of processor time, in a Krum of 100 rows.
    """

    block = np.empty(0, np.uint64)

    def take(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        """Return memory whose values are anybody's, until the thread takes some again."""
        words = -(-math.prod(shape) * kind.itemsize // 8)
        if len(self.block) < words:
            self.block = aligned((words,), np.dtype(np.uint64))
        return self.block[:words].view(kind)[: math.prod(shape)].reshape(shape)


SCRATCH = Scratch()


def tallies_of(threads: int, size: int) -> NDArray[np.int64]:
    """Return a row of zeros for each thread, on lines that it shares with no other."""
    rows = aligned((threads, -(-size // 16) * 16), np.dtype(np.int64))
    rows[:] = 0
    return rows[:, :size]


def row_table(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return where each row of an array begins."""
    return _steps(len(rows), rows.strides[0]) + np.uint64(address(rows))


@lru_cache(maxsize=256)
def _steps(m: int, stride: int) -> NDArray[np.uint64]:
    """Return how far from the first each of m rows is; backwards is the long way round."""
    return (np.arange(m) * stride).astype(np.uint64)
