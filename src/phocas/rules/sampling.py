"""Distances of rows over a sample of their columns, another one in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RUNS = 32
WIDTH = 32  # neighbouring columns: 128 bytes of a row are read as quickly as one value


@dataclass(frozen=True, slots=True)
class Sample:
    """Runs of neighbouring columns, evenly apart, so that every layer has its share of them."""

    start: int
    runs: int
    stride: int
    width: int

    @classmethod
    def draw(cls, d: int, rng: np.random.Generator) -> Sample:
        """Draw a sample of d columns: all of them come up equally often, but for the outermost.

        >>> Sample.draw(118_282, np.random.default_rng(0))
        Sample(start=3126, runs=32, stride=3696, width=32)
        """
        runs = min(RUNS, d)
        stride = d // max(1, runs)
        width = min(WIDTH, stride)
        spare = d - (runs - 1) * stride - width if runs else 0
        return cls(int(rng.integers(spare + 1)), runs, stride, width)

    @classmethod
    def even(cls, d: int, columns: int) -> Sample:
        """Return about so many of d columns, always the same: runs of eight, evenly apart.

        >>> Sample.even(118_282, 256)
        Sample(start=1844, runs=32, stride=3696, width=8)
        """
        runs = max(1, min(columns // 8, d))
        stride = d // runs
        width = min(8, stride)
        return cls((stride - width) // 2, runs, stride, width)

    def take(self, rows: Any) -> Floats:
        """Return the sampled values of an (m, d) array or tensor: (m, runs, width)."""
        begin = rows[:, self.start :]
        if not isinstance(rows, np.ndarray):  # a tensor, perhaps of a type that NumPy has not got
            row, item = begin.stride()
            seen = begin.as_strided(
                (len(rows), self.runs, self.width), (row, self.stride * item, item)
            )
            return np.asarray(seen.double().cpu().numpy())
        row, item = begin.strides
        seen = np.lib.stride_tricks.as_strided(
            begin,
            (len(rows), self.runs, self.width),
            (row, self.stride * item, item),
            writeable=False,
        )
        return _doubles(seen)

    def columns(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sampled columns of a range, counted from its first."""
        starts = self.start + self.stride * np.arange(self.runs)
        found = (starts[:, None] + np.arange(self.width)).ravel()
        return found[(found >= first) & (found < stop)] - first

    def joined(self, parts: Sequence[npt.NDArray[np.floating]]) -> Floats:
        """Put together what :meth:`take` would return from the sampled columns of all ranges."""
        whole = _doubles(np.concatenate(parts, axis=1))
        return whole.reshape(len(whole), self.runs, self.width)

    def owners(self, bounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """Return the range of columns that each run lies in, or -1 if it lies in two."""
        starts = self.start + self.stride * np.arange(self.runs)
        stops = np.array([stop for _, stop in bounds])
        first = np.searchsorted(stops, starts, side="right")
        last = np.searchsorted(stops, starts + self.width - 1, side="right")
        return np.where(first == last, first, -1)


def _doubles(values: npt.NDArray[np.floating]) -> Floats:
    with np.errstate(invalid="ignore"):  # random bits are signalling NaN at times
        return values.astype(np.float64)


def products(sample: Floats) -> Floats:
    """Return the products of m rows with one another, (m, m); those of column ranges add up."""
    flat = sample.reshape(len(sample), -1)
    with np.errstate(all="ignore"):
        return np.asarray(flat @ flat.T)


def views(products: Floats) -> Floats:
    """Return how far m rows are from one another in two ways, (2, m, m), from their products.

    These are squared distances, which show what is large, and 1 minus the cosine of the angle,
    which shows what points elsewhere. What is not finite, or overflows when it is squared, is
    infinitely far from everything. In double precision, products tell float32 rows apart that
    differ in their last bit.
    """
    squares = np.diagonal(products)
    found = np.empty((2, *products.shape))
    with np.errstate(all="ignore"):
        np.add(squares[:, None], squares[None, :], out=found[0])
        found[0] -= 2.0 * products
        lengths = np.sqrt(squares)
        np.subtract(1.0, products / lengths[:, None] / lengths[None, :], out=found[1])
    np.maximum(found, 0.0, out=found)  # keeps NaN
    found[np.isnan(found)] = np.inf
    m = len(products)
    found[:, np.arange(m), np.arange(m)] = 0.0
    return found


def astray(sample: Floats, course: Floats) -> Floats:
    """Return how far each of m rows points from a course: 1 minus the cosine of the angle.

    From a course that leads nowhere, everyone is infinitely far.

    >>> astray(np.array([[3.0, 0.0], [-1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 0.0]))
    array([0., 2., 1.])
    """
    rows, way = sample.reshape(len(sample), -1), course.reshape(-1)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("mc,mc->m", rows, rows))
        apart = 1.0 - rows @ way / lengths / np.sqrt(way @ way)
    apart[np.isnan(apart)] = np.inf
    return np.asarray(np.maximum(apart, 0.0))
