"""The cells that a filter replaces, found once and passed to the kernels together with the rows.

A block without such a cell takes a few bytes. A block with such cells stores the centre and the
limit of each of its columns. No filtered copy of the matrix is written: kernels replace cells as
they read them, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import OutlierMask, Rows, Window
from phocas.rules.measures import Partial, rows_of


@dataclass(slots=True, eq=False)
class OutlierMasks:
    """The cells of some columns that a filter replaces.

    Attributes:
        m: the number of rows.
        window: the window; cells farther than twice its cutoff are replaced.
        spreads: the scales of split blocks of columns, by block number.
        start: the first column, counted from the first column of the whole matrix.
        rows: the number of rows to consider, from the first; None: all rows.
        ranges: the number of columns and the marks of each range, by its first column.
    """

    m: int
    window: Window
    spreads: Mapping[int, float]
    start: int
    rows: int | None = None
    ranges: dict[int, tuple[int, NDArray[np.void]]] = field(default_factory=dict)

    def add(self, place: int, rows: Rows, spread: float | None) -> None:
        """Mark the outliers of a range of columns.

        The range starts at a block boundary, or is a part of one block, whose scale is given.
        """
        self.ranges[place] = rows.columns, kernels.marks(rows, self.window, spread, self.rows)

    def counts(self) -> NDArray[np.int64]:
        """Return how many cells of each row are replaced."""
        total = np.zeros(self.m, np.int64)
        for _, marks in self.ranges.values():
            total += marks["counts"].sum(axis=0)
        return total

    def partial(self) -> Partial:
        """Return the replaced cells of each row by block of columns.

        The counts of a split block are stored at the first of its columns in this range.
        """
        return self._by_block(lambda marks: marks["counts"].astype(np.float64))

    def squared_radii(self) -> Partial:
        """Return the mean of the squared radii of each block of columns.

        The mean of a split block is stored at the first of its columns in this range.
        """
        scale = kernels.scale_for(self.window.kept(self.rows or self.m))
        with np.errstate(over="ignore"):
            return self._by_block(lambda marks: ((marks["spread"] / scale) ** 2)[:, None])

    def _by_block(self, of: Callable[[NDArray[np.void]], NDArray[np.float64]]) -> Partial:
        block = kernels.BLOCK_COLUMNS
        sums, edges = [], []
        for place, (columns, marks) in self.ranges.items():
            whole = 0 if place % block else columns // block
            found = of(marks)
            if whole:
                sums.append((place // block, found[:whole]))
            rest = columns - whole * block
            if rest:
                edge = np.zeros((found.shape[1], rest))
                edge[:, 0] = found[whole]
                edges.append((place + whole * block, edge))
        return Partial(self.m, tuple(sums), tuple(edges))

    def mask(self, place: int, begin: int = 0) -> OutlierMask | None:
        """Return the outliers of a range from its column ``begin``, the first column of a block.

        None: the range has no outliers.
        """
        here = self.ranges[place][1][begin // kernels.BLOCK_COLUMNS :]
        if not here["counts"].any():
            return None
        scale = kernels.scale_for(self.window.kept(self.rows or self.m))
        return OutlierMask(here, scale, np.zeros(self.m, bool), np.arange(self.m))

    def of(self, place: int, rows: Rows, excluded: NDArray[np.bool_], stored: str) -> Rows:
        """Return a range of columns that kernels read filtered, with excluded rows as NaN."""
        _, marks = self.ranges[place]
        if not excluded.any() and not marks["counts"].any():
            return rows
        scale = kernels.scale_for(self.window.kept(self.rows or self.m))
        mask = OutlierMask(marks, scale, excluded, np.arange(self.m))
        masked = Rows(rows.addresses, rows.columns, rows.element, rows.owner, mask)
        if rows.element == stored:
            return masked
        # Kernels read a copy in a wider type here: what is put in is to be no finer than the rest.
        values = kernels.cleaned(masked)
        with np.errstate(over="ignore"):
            values[:] = values.astype(stored)
        return rows_of(values, rows.element)
