"""Usual lengths of rows, and lengths that show absurd values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ABSURD = 16.0
"""A row of a parameter this many times as long as usual is no gradient."""


def middle(values: Floats) -> float:
    """Return the lower median: with a minority of faulty workers it is between honest values."""
    return float(np.sort(np.where(np.isnan(values), np.inf, values))[(len(values) - 1) // 2])


def absurd(lengths: Floats, usual: float, b: int) -> NDArray[np.bool_]:
    """Return which workers send absurd values, by the length of each worker's row of a parameter.

    A row has absurd values if it is 16 times as long as the median row of the parameter and as
    ``usual``, the usual length of a row of the whole unit. If this holds for more than b rows, no
    worker is returned: they cannot all be faulty. If both lengths are zero, as when others do not
    use the parameter, only a row that is not finite has absurd values.

    >>> absurd(np.array([1.0, 2.0, np.nan, 1.0]), usual=1.0, b=1)
    array([False, False,  True, False])
    """
    limit = ABSURD * max(middle(lengths), usual)
    found = ~(lengths <= limit) if limit else ~np.isfinite(lengths)
    return found if found.sum() <= b else np.zeros(len(lengths), bool)


def plausible(lengths: Floats) -> bool:
    """Return whether rows are so short that none can have absurd values in any parameter.

    A row of a parameter is no longer than the whole row. (Lengths between 15 and 16 times the usual
    are left to :func:`absurd`, since lengths are rounded.)

    >>> plausible(np.array([1.0, 2.0, 14.0])), plausible(np.array([1.0, np.nan, 1.0]))
    (True, False)
    """
    return bool((lengths <= 15 / 16 * ABSURD * middle(lengths)).all())


def lengths_of(rows: torch.Tensor) -> Floats:
    """Return the length of each row."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return np.asarray(lengths.double().cpu().numpy())
