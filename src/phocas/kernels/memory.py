"""Rows in memory: their addresses and element type, and scratch memory for kernels."""

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
class OutlierMask:
    """Which values of rows are outliers, to be read as their column's centre.

    Attributes:
        marks: marks of the blocks, from the first column on.
        scale: scale of distances of their window.
        out: which of the marked rows are excluded; they are read as NaN.
        chosen: indices of these rows among the marked rows.
    """

    marks: NDArray[np.void]
    scale: float
    out: NDArray[np.bool_]
    chosen: NDArray[np.intp]


@dataclass(slots=True, eq=False)  # not frozen, because that costs a microsecond per object
class Rows:
    """The addresses of m rows of ``columns`` contiguous values, and the owner of their memory.

    The first column of rows with an outlier mask is the first column of a block.
    """

    addresses: NDArray[np.uint64]
    columns: int
    element: str
    owner: object
    mask: OutlierMask | None = None

    def __len__(self) -> int:
        return len(self.addresses)

    def shifted(self, start: int, stop: int) -> Rows:
        """Return a range of columns of the same rows."""
        offset = np.uint64(start * ELEMENTS[self.element].size)
        mask = self.mask
        if mask is not None:
            mask = replace(mask, marks=mask.marks[start // BLOCK_COLUMNS :])
        return Rows(self.addresses + offset, stop - start, self.element, self.owner, mask)

    def take(self, indices: NDArray[np.intp]) -> Rows:
        """Return some of the rows."""
        mask = self.mask
        if mask is not None:
            mask = replace(mask, chosen=mask.chosen[indices])
        return Rows(self.addresses[indices], self.columns, self.element, self.owner, mask)


def stored_dtype(element: str) -> np.dtype[Any]:
    """Return NumPy's dtype for an element's stored values."""
    return np.dtype(np.uint16 if element == "bfloat16" else element)


def stored_nan(element: str) -> np.generic:
    """Return NaN in the stored dtype."""
    return np.uint16(0x7FC0) if element == "bfloat16" else stored_dtype(element).type(np.nan)


def half_supported(element: str) -> bool:
    """Return whether the host converts the element's values in hardware."""
    return element != "float16" or host().has_half


def compute_dtype(element: str) -> np.dtype[np.floating]:
    """Return the dtype that an element's values are computed in."""
    return np.dtype(np.float64 if element == "float64" else np.float32)


def aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array that starts at a cache line."""
    size = math.prod(shape) * kind.itemsize
    block = np.empty(size + 64, np.uint8)
    skip = -address(block) % 64
    return block[skip : skip + size].view(kind).reshape(shape)


class Scratch(threading.local):
    """Memory that a calling thread keeps between calls.

    New memory is mapped page by page: 1000 page faults, 3.5 ms of processor time, in a Krum of 100
    rows.
    """

    block = np.empty(0, np.uint64)

    def take(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        """Return uninitialised memory, valid until the thread calls this again."""
        words = -(-math.prod(shape) * kind.itemsize // 8)
        if len(self.block) < words:
            self.block = aligned((words,), np.dtype(np.uint64))
        return self.block[:words].view(kind)[: math.prod(shape)].reshape(shape)


SCRATCH = Scratch()


def tallies_of(threads: int, size: int) -> NDArray[np.int64]:
    """Return a row of zeros for each thread, on cache lines that no other thread uses."""
    rows = aligned((threads, -(-size // 16) * 16), np.dtype(np.int64))
    rows[:] = 0
    return rows[:, :size]


def row_table(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return the address of each row of an array."""
    return row_steps(len(rows), rows.strides[0]) + np.uint64(address(rows))


@lru_cache(maxsize=256)
def row_steps(m: int, stride: int) -> NDArray[np.uint64]:
    """Return the offset of each of m rows from the first; negative ones wrap around."""
    return (np.arange(m) * stride).astype(np.uint64)
