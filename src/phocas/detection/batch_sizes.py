"""Rows that are means over batches of different sizes, made comparable."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def equalised(rows: Floats, sizes: Floats) -> Floats:
    r"""Mix rows that are means over batches of known sizes, so that their noise is the same.

    Let row i be mu plus noise of covariance S / n_i, independent of the other rows. Let a be the
    unit vector along (sqrt(n_1), ..., sqrt(n_m)), e the unit vector along (1, ..., 1), n the mean
    size and Q the rotation in the plane of a and e that turns a into e. The mixed rows
    Q diag(sqrt(n_i / n)) rows then have the mean mu, and their noise is uncorrelated, of covariance
    S / n each: Gaussian rows are independent draws of one distribution, as if all batches had the
    size n. If all sizes are equal, Q is the identity.

    A row that is not finite stays as it is, and is left out of the others.

    Args:
        rows: the rows, (m, columns).
        sizes: the size of the batch of each row, positive.

    >>> equalised(np.array([[1.0], [1.0], [1.0]]), np.array([32.0, 32.0, 8.0])).round(12).tolist()
    [[1.0], [1.0], [1.0]]
    """
    finite = np.isfinite(rows).all(axis=1)
    if not finite.any():
        return rows
    n = sizes[finite]
    a = np.sqrt(n / n.sum())
    e = np.full(len(n), 1 / np.sqrt(len(n)))
    both = a + e
    turn = np.eye(len(n)) - np.outer(both, both) / (1 + a @ e) + 2 * np.outer(e, a)
    mixed = rows.copy()
    with np.errstate(all="ignore"):
        mixed[finite] = (turn * np.sqrt(n / n.mean())) @ rows[finite]
    return mixed
