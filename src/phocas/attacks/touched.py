"""The set of cells that an attack touched, stored without a boolean for each of m x d cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Touched:
    """A set of whole rows and of single cells in other rows; ``np.asarray`` gives a boolean mask.

    Args:
        shape: shape of the matrix.
        whole_rows: rows of which every cell was touched.
        cell_rows: rows of the single cells.
        cell_columns: columns of the single cells.

    >>> touched = Touched((3, 4), whole_rows=np.array([1]))
    >>> touched.count, touched.rows.tolist(), touched.most_per_column
    (4, [1], 1)
    """

    shape: tuple[int, int]
    whole_rows: np.ndarray = field(default_factory=_none)
    cell_rows: np.ndarray = field(default_factory=_none)
    cell_columns: np.ndarray = field(default_factory=_none)

    @property
    def count(self) -> int:
        """Return the number of touched cells."""
        return len(self.whole_rows) * self.shape[1] + len(self.cell_rows)

    @property
    def rows(self) -> np.ndarray:
        """Return the workers with at least one touched cell, in ascending order."""
        whole = self.whole_rows if self.shape[1] else _none()
        return np.union1d(whole, self.cell_rows)

    def of_row(self, row: int) -> int:
        """Return the number of touched cells in one row."""
        if row in self.whole_rows:
            return self.shape[1]
        return int((self.cell_rows == row).sum())

    @property
    def most_per_column(self) -> int:
        """Return the largest number of touched cells in one column, the paper's q."""
        if not self.shape[1]:
            return 0
        cells = np.unique(self.cell_columns, return_counts=True)[1].max(initial=0)
        return len(self.whole_rows) + int(cells)

    def mask(self) -> np.ndarray:
        """Return the boolean (m, d) array: true where a cell was touched."""
        mask = np.zeros(self.shape, bool)
        mask[self.whole_rows] = True
        mask[self.cell_rows, self.cell_columns] = True
        return mask

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.mask() if dtype is None else self.mask().astype(dtype)

    def __repr__(self) -> str:
        return f"Touched({self.count} of {self.shape[0]} x {self.shape[1]} cells)"
