"""Rows with their implausible values replaced, a chunk of columns at a time, where there are any.

What is implausible is found out once, and kept: some words a block, and of blocks in which there is
something the centre and the limit of each column. No cleaned matrix is ever written. Whoever reads
the rows is given a chunk after the other: rows that are as they should be are read where they are,
and the others are copied, cleaned, into memory that the next chunk uses again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.floats import FORMATS, to_bfloat16
from phocas.kernels import Rows, Window
from phocas.rules.measures import Partial

CHUNK_BYTES = 1 << 24  # of cleaned rows, which stay in the last cache until they are read
BETWEEN = 16  # values between the rows of a chunk: a power of two would crowd the cache's sets


@dataclass(slots=True, eq=False)
class Marks:
    """What is implausible in some columns, by where ranges of them begin in the whole matrix."""

    window: Window
    spreads: Mapping[int, float]
    """Those of the blocks that are cut."""
    ranges: dict[int, tuple[int, NDArray[np.void]]] = field(default_factory=dict)

    def add(self, place: int, rows: Rows, spread: float | None) -> None:
        """Mark a range of columns: from the start of a block, or part of one with its spread."""
        self.ranges[place] = rows.columns, kernels.marks(rows, self.window, spread)

    def counts(self, m: int) -> NDArray[np.int64]:
        """Return how many values of each row are implausible."""
        total = np.zeros(m, np.int64)
        for _, marks in self.ranges.values():
            total += marks["counts"].sum(axis=0)
        return total

    def partial(self, m: int) -> Partial:
        """Return the counts of blocks; of those that are cut, in the first column that is here."""
        block = kernels.BLOCK_COLUMNS
        sums, edges = [], []
        for place, (columns, marks) in self.ranges.items():
            whole = 0 if place % block else columns // block
            counts = marks["counts"]
            if whole:
                sums.append((place // block, counts[:whole].astype(np.float64)))
            rest = columns - whole * block
            if rest:
                edge = np.zeros((m, rest), np.float32)
                edge[:, 0] = counts[whole]
                edges.append((place + whole * block, edge))
        return Partial(m, tuple(sums), tuple(edges))


def washed(
    rows: Rows, place: int, marks: Marks, out: NDArray[np.bool_], stored: str
) -> Iterator[tuple[int, Rows]]:
    """Yield a marked range of columns in chunks, cleaned, with where they begin in the range.

    Each is to be read before the next is asked for. Rows that are ``out`` are NaN. Chunks end where
    the granules of measurements do. What is put in has the precision of the ``stored`` type, on
    hosts too where kernels read a copy in another.
    """
    m = len(rows)
    block = kernels.BLOCK_COLUMNS
    granule = kernels.granule_columns(m)
    kind = np.dtype(np.uint16) if rows.element == "bfloat16" else np.dtype(rows.element)
    step = max(1, CHUNK_BYTES // (m * granule * kind.itemsize)) * granule
    known = marks.ranges[place][1]
    scale = kernels.scale_for(marks.window.kept(m))
    width = min(step, rows.columns)
    nothing = _stored_nan(rows.element, width) if out.any() else None
    room: NDArray[Any] | None = None
    done = begin = 0
    while begin < rows.columns:
        end = min(rows.columns, (place + begin) // step * step + step - place)
        here = known[begin // block : -(-end // block)]
        wrong = np.flatnonzero(here["counts"].any(axis=0) & ~out)
        if len(wrong) or nothing is not None:
            if begin > done:
                yield done, rows.shifted(done, begin)
            chunk = rows.shifted(begin, end)
            if len(wrong):
                if room is None:
                    room = kernels.aligned((m, width + BETWEEN), kind)
                to = room[: len(wrong), : end - begin]
                kernels.clean(chunk, wrong, here, scale, to)
                if stored != rows.element:
                    with np.errstate(over="ignore"):
                        to[:] = to.astype(stored)
                chunk.addresses[wrong] = kernels.row_table(to)
            if nothing is not None:
                chunk.addresses[out] = kernels.address(nothing)
            yield begin, Rows(chunk.addresses, end - begin, rows.element, (rows, room, nothing))
            done = end
        begin = end
    if rows.columns > done:
        yield done, rows.shifted(done, rows.columns)


def _stored_nan(element: str, columns: int) -> NDArray[Any]:
    values = np.full(columns, np.nan, FORMATS[element].work)
    return to_bfloat16(values) if element == "bfloat16" else values.astype(element)
