"""Mixes of rows: sparse matrices of weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import columns, mixing


@dataclass(frozen=True, slots=True)
class SparseMix:
    """A k x m matrix of weights, stored as its nonzero entries, row by row.

    If the weights of every row sum to one, rows are mixed around a row of ``centres``. ``groups``
    gives the index of the centre for each of the m rows and then for each of the k mixes. If no two
    mixes share a row, each mix is a group of its own. Otherwise the centre is the row that most
    mixes share: around a distant row of small weight, near rows would be lost to rounding.
    """

    starts: NDArray[np.int64]
    indices: NDArray[np.int64]
    weights: NDArray[np.float64]
    mode: int
    centres: NDArray[np.intp]
    groups: NDArray[np.int64]

    @staticmethod
    def of(matrix: NDArray[np.float64]) -> SparseMix:
        """Return the mix of a dense matrix."""
        k, m = matrix.shape
        rows, indices = np.nonzero(matrix)
        weights = matrix[rows, indices]
        starts = np.searchsorted(rows, np.arange(k + 1))
        mode = mixing.PLAIN
        if np.all(np.abs(matrix.sum(axis=1) - 1) < 1e-12):
            even = len(weights) > 0 and weights.min() == weights.max()
            mode = mixing.UNIFORM if even else mixing.CONVEX
        centres, groups = np.zeros(1, np.intp), np.zeros(m + k, np.int64)
        if mode != mixing.PLAIN:
            sharing = np.bincount(indices, minlength=m)
            heaviest = np.abs(matrix)
            if sharing.max() == 1:
                centres = heaviest.argmax(axis=1)
                groups[indices], groups[m:] = rows, np.arange(k)
            else:
                most = np.where(sharing == sharing.max(), heaviest.sum(axis=0), -1)
                centres = np.array([most.argmax()])
        return SparseMix(starts, np.append(indices, 0), weights, mode, centres, groups)

    def scales(self) -> tuple[float, float]:
        """Return the scale of distances that prevents overflow, and the factor of their sums."""
        if self.mode == mixing.PLAIN:
            return 1.0, 1.0
        if self.mode == mixing.CONVEX:
            return 0.5, 2.0
        scale = columns.scale_for(int(self.starts[1]))
        return scale, float(self.weights[0]) / scale

    def __len__(self) -> int:
        return len(self.starts) - 1


@lru_cache(maxsize=64)
def identity(m: int) -> SparseMix:
    """Return the mix (matrix of weights) that leaves m rows unchanged."""
    indices = np.arange(m + 1)
    groups = np.zeros(2 * m, np.int64)
    return SparseMix(indices, indices, np.ones(m), mixing.PLAIN, np.zeros(1, np.intp), groups)
