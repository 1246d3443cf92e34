"""The paper's three propositions: matrices that break a rule with one Byzantine value per column.

Each function takes the matrix of honest gradients, row i for worker i, and returns a corrupted
copy.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


def against_mean(rows: Array, gradient: Array) -> Array:
    """Return rows whose mean is ``-g/m``, which points uphill (Proposition 1).

    The last worker sends ``-g`` minus the sum of all others. The error of the mean is ``(1 + 1/m)
    ||g||``, which no constant independent of g bounds.

    Args:
        rows: an (m, d) matrix of honest gradients.
        gradient: the true gradient g.

    >>> against_mean(np.array([[3.0, 5.0], [1.0, 1.0]]), np.array([2.0, 2.0])).mean(axis=0)
    array([-1., -1.])
    """
    rows = _matrix(rows).copy()
    rows[-1] = -np.asarray(gradient, np.float64) - rows[:-1].sum(axis=0)
    return rows


def against_selection(rows: Array, size: float = 1e20, per_column: int = 1) -> Array:
    """Return rows with one value of every row replaced, at most ``per_column`` per column.

    Every row then contains ``-size``, and so does the output of a rule that selects a row
    (Proposition 2). This needs ``d per_column >= m``, which the proposition does not state. With
    fewer columns, a rule that outputs one of its rows can be resilient, such as the median of an
    odd number of scalars.

    Args:
        rows: an (m, d) matrix of honest gradients.
        size: minus the value that is written.
        per_column: largest number of replaced values per column.

    >>> against_selection(np.ones((2, 3)), size=9.0)
    array([[-9.,  1.,  1.],
           [ 1., -9.,  1.]])
    """
    rows = _matrix(rows).copy()
    m, d = rows.shape
    if d * per_column < m:
        raise ValueError(
            f"spoiling every row needs d * per_column >= m: got d={d} and"
            f" per_column={per_column} with m={m} workers, the smallest d is {-(-m // per_column)}"
        )
    rows[np.arange(m), np.arange(m) % d] = -size
    return rows


def against_krum(m: int, d: int, size: float = 1e20) -> tuple[Array, Array]:
    """Return a gradient of ones and a matrix on which Krum moves against it (Proposition 3).

    Krum outputs a row, so this is Proposition 2 with all honest rows equal to the gradient. Every
    row has the same inner product with the gradient, ``d - 1 - size``.

    Args:
        m: number of workers.
        d: number of columns, at least m.
        size: minus the value that is written.

    >>> gradient, rows = against_krum(m=5, d=6, size=100.0)
    >>> rows @ gradient
    array([-95., -95., -95., -95., -95.])
    """
    gradient = np.ones(d)
    return gradient, against_selection(np.tile(gradient, (m, 1)), size)


def _matrix(rows: Array) -> Array:
    rows = np.asarray(rows, np.float64)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"rows must be an m x d matrix: got an array of shape {rows.shape}")
    return rows
