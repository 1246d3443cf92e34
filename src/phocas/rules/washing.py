"""What is implausible in some columns: found out once, kept, and given to kernels with the rows.

It is some words a block, and of blocks in which there is something the centre and the limit of each
column. No cleaned matrix is ever written: kernels clean what they are about to read, block by
block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import Dirt, Rows, Window
from phocas.rules.measures import Partial, rows_of


@dataclass(slots=True, eq=False)
class Marks:
    """What is implausible in some columns, by where ranges of them begin in the whole matrix."""

    window: Window
    spreads: Mapping[int, float]
    """Those of the blocks that are cut."""
    rows: int | None = None
    """How many rows are looked at, the first ones; the others are never implausible."""
    ranges: dict[int, tuple[int, NDArray[np.void]]] = field(default_factory=dict)

    def add(self, place: int, rows: Rows, spread: float | None) -> None:
        """Mark a range of columns: from the start of a block, or part of one with its spread."""
        self.ranges[place] = rows.columns, kernels.marks(rows, self.window, spread, self.rows)

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

    def of(self, place: int, rows: Rows, out: NDArray[np.bool_], stored: str) -> Rows:
        """Return a range of columns that is to be read cleaned, with those rows as NaN."""
        _, marks = self.ranges[place]
        if not out.any() and not marks["counts"].any():
            return rows
        m = len(rows)
        scale = kernels.scale_for(self.window.kept(self.rows or m))
        dirt = Dirt(marks, scale, out, np.arange(m))
        dirty = Rows(rows.addresses, rows.columns, rows.element, rows.owner, dirt)
        if rows.element == stored:
            return dirty
        # Kernels read a copy in a wider type here: what is put in is to be no finer than the rest.
        values = kernels.cleaned(dirty)
        with np.errstate(over="ignore"):
            values[:] = values.astype(stored)
        return rows_of(values, rows.element)
