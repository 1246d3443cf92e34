"""The columns in which rows are compared: a new sample of columns in each round."""

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
    """A sample of the columns: ``runs`` groups of ``width`` neighbouring columns each.

    The groups start at equal distances, so that every layer has columns in the sample.

    Attributes:
        start: the first column of the first group.
        runs: the number of groups.
        stride: the number of columns from the start of a group to the start of the next.
        width: the number of columns of a group.
    """

    start: int
    runs: int
    stride: int
    width: int

    @classmethod
    def draw(cls, d: int, rng: np.random.Generator) -> Sample:
        """Draw a sample of d columns: all are equally likely, except the outermost.

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
        """Return a fixed sample of about ``columns`` of d columns: groups of eight neighbours.

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
        if not isinstance(rows, np.ndarray):  # a tensor, perhaps of a type that NumPy lacks
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
        """Return the sampled columns within a range, counted from the first column of the range."""
        starts = self.start + self.stride * np.arange(self.runs)
        found = (starts[:, None] + np.arange(self.width)).ravel()
        return found[(found >= first) & (found < stop)] - first

    def joined(self, parts: Sequence[npt.NDArray[np.floating]]) -> Floats:
        """Return the result of :meth:`take`, joined from the sampled columns of all ranges."""
        whole = _doubles(np.concatenate(parts, axis=1))
        return whole.reshape(len(whole), self.runs, self.width)

    def owners(self, bounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """Return the range that contains each group of the sample, or -1 if two ranges share it."""
        starts = self.start + self.stride * np.arange(self.runs)
        stops = np.array([stop for _, stop in bounds])
        first = np.searchsorted(stops, starts, side="right")
        last = np.searchsorted(stops, starts + self.width - 1, side="right")
        return np.where(first == last, first, -1)


def _doubles(values: npt.NDArray[np.floating]) -> Floats:
    with np.errstate(invalid="ignore"):  # random bits may be signalling NaN
        return values.astype(np.float64)
