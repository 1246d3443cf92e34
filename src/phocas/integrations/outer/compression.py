"""Compressed updates: a row of float32 values as bytes of a known length, and back.

The length depends on the number of values alone. So all peers send messages of one length, and a
peer cannot make the others allocate memory.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.specs import Spec, Table, normalise, probability

Row = NDArray[np.float32]

_BLOCK = 1024  # values with one scale


class Compression(Spec):
    """A way to send a row of d values as bytes.

    >>> [COMPRESSIONS.parse(text).size(1000) for text in ("float32", "int8", "top-k:share=0.02")]
    [4000, 1004, 160]
    """

    @abstractmethod
    def size(self, d: int) -> int:
        """Return the number of bytes of an encoded row of d values."""

    @abstractmethod
    def encode(self, row: Row) -> bytes:
        """Return a row as bytes."""

    @abstractmethod
    def decode(self, body: bytes, d: int) -> Row:
        """Return the row of d values that some bytes encode; raise ValueError for other bytes.

        ``body`` has the right length. Everything else about it may be wrong.
        """


@dataclass(frozen=True)
class Float32(Compression):
    """All values, as they are.

    >>> Float32().decode(Float32().encode(np.array([1.5, -2.0], np.float32)), 2)
    array([ 1.5, -2. ], dtype=float32)
    """

    name: ClassVar[str] = "float32"

    def size(self, d: int) -> int:
        """Return four bytes a value."""
        return 4 * d

    def encode(self, row: Row) -> bytes:
        """Return the bytes of the values."""
        return row.astype("<f4").tobytes()

    def decode(self, body: bytes, d: int) -> Row:
        """Return the values."""
        del d
        return np.frombuffer(body, "<f4").astype(np.float32)


@dataclass(frozen=True)
class Int8(Compression):
    """Each value as one byte: a multiple of its block's scale, for blocks of 1024 values.

    The scale of a block is its largest absolute value, divided by 127.

    >>> Int8().decode(Int8().encode(np.array([1.0, -127.0, 3.2], np.float32)), 3)
    array([   1., -127.,    3.], dtype=float32)
    """

    name: ClassVar[str] = "int8"

    def size(self, d: int) -> int:
        """Return one byte a value, and four a block."""
        return d + 4 * -(-d // _BLOCK)

    def encode(self, row: Row) -> bytes:
        """Return the scales of all blocks, then the values."""
        blocks = _blocks(row)
        with np.errstate(all="ignore"):  # values that are not finite make a scale that is not
            scales: Row = (np.abs(blocks).max(axis=1, initial=0.0) / 127).astype("<f4")
            units = blocks / np.where(scales > 0, scales, 1)[:, None]
            values = np.rint(np.clip(units, -127, 127)).astype(np.int8).ravel()
        return scales.tobytes() + values[: len(row)].tobytes()

    def decode(self, body: bytes, d: int) -> Row:
        """Return the values times the scale of their block."""
        scales = np.frombuffer(body, "<f4", -(-d // _BLOCK))
        blocks = _blocks(np.frombuffer(body, np.int8, d, scales.nbytes).astype(np.float32))
        with np.errstate(all="ignore"):
            row: Row = (blocks * scales[:, None]).astype(np.float32).ravel()[:d]
        return row


@dataclass(frozen=True)
class TopK(Compression):
    """The values that are farthest from zero, with their indices; all others are zero.

    Args:
        share: the share of the values that is sent, more than 0 and at most 1.

    >>> row = np.array([0.1, -5.0, 2.0, 0.3], np.float32)
    >>> TopK(share=0.5).decode(TopK(share=0.5).encode(row), 4)
    array([ 0., -5.,  2.,  0.], dtype=float32)
    """

    share: float
    name: ClassVar[str] = "top-k"

    def __post_init__(self) -> None:
        """Raise ValueError unless the share is greater than 0 and at most 1."""
        normalise(self, share=probability("TopK", "share", self.share))
        if self.share == 0:
            raise ValueError("TopK needs share > 0: got 0")

    def kept(self, d: int) -> int:
        """Return how many of d values are sent."""
        return min(d, max(1, round(self.share * d)))

    def size(self, d: int) -> int:
        """Return eight bytes for a value that is sent."""
        if d > np.iinfo(np.uint32).max:
            raise ValueError(f"TopK needs fewer than 2**32 values: got {d}")
        return 8 * self.kept(d)

    def encode(self, row: Row) -> bytes:
        """Return the indices in ascending order, then the values."""
        k = self.kept(len(row))
        # A value that is not finite is sent, so that the others drop the row.
        sizes = np.where(np.isfinite(row), np.abs(row), np.inf)
        largest = np.sort(np.argpartition(-sizes, k - 1)[:k]) if k else np.zeros(0, np.int64)
        return largest.astype("<u4").tobytes() + row[largest].astype("<f4").tobytes()

    def decode(self, body: bytes, d: int) -> Row:
        """Return the row with zeros between the values that were sent."""
        k = self.kept(d)
        indices = np.frombuffer(body, "<u4", k).astype(np.int64)
        if k and (indices[-1] >= d or (np.diff(indices) <= 0).any()):
            raise ValueError(f"indices must be ascending and less than {d}: these are not")
        row = np.zeros(d, np.float32)
        row[indices] = np.frombuffer(body, "<f4", k, 4 * k)
        return row


COMPRESSIONS: Table[Compression] = Table("compression", [Float32, Int8, TopK], Compression)
"""The compressions by name."""


def _blocks(row: Row) -> Row:
    """Return a row as a matrix of blocks, the last of which is filled with zeros."""
    padded = np.zeros(-(-len(row) // _BLOCK) * _BLOCK, np.float32)
    padded[: len(row)] = row
    return padded.reshape(-1, _BLOCK)
