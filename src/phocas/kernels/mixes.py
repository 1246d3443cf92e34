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

    If the weights of every mix add up to one, the kernel adds weighted differences from a centre,
    which is one of the m rows. If no two mixes share a row, each mix has the row with its largest
    weight as its centre. Otherwise there is one centre, the row that most mixes share. A distant
    row of small weight would be a bad centre: rounding would lose the differences of near rows.

    Attributes:
        starts: the index of the first entry of each mix, and the number of all entries.
        indices: the row that each entry belongs to.
        weights: the weight of each entry.
        mode: ``PLAIN`` (no centre), ``CONVEX`` (each mix adds up to one) or ``UNIFORM`` (and all
            weights are equal), constants of :mod:`phocas.kernels.mixing`.
        centres: the rows that are centres.
        groups: the index in ``centres`` for each of the m rows, and then for each of the k mixes.
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
