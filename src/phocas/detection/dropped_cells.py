"""The cells of the matrix that a rule dropped, for a picture of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phocas.kernels import Window
from phocas.rules.base import Rule

Floats = npt.NDArray[np.float64]


def dropped_cells(rule: Rule, values: npt.ArrayLike, dropped: npt.ArrayLike) -> Floats:
    """Return how much of each cell was dropped, from 0 (it counts in full) to 1 (not at all).

    For a rule that reduces each column, the result is computed for the given columns; all given
    columns count as one block, the unit in which Heraclius measures deviations. For a rule that
    decides on whole rows, all cells of a row have the share of the row.

    Args:
        rule: the rule.
        values: some columns of the matrix, (m, columns).
        dropped: the share of each worker's values that was dropped in the whole matrix.

    >>> from phocas import Phocas
    >>> dropped_cells(Phocas(b=1), [[1.0, 0.0], [2.0, 9.0], [6.0, 8.0], [900.0, 7.0]], [0] * 4)
    array([[0., 1.],
           [0., 0.],
           [0., 0.],
           [1., 0.]])
    """
    seen = np.asarray(values, np.float64)
    if not rule.columnwise:
        shares = np.asarray(dropped, np.float64)
        return np.repeat(shares[:, None], seen.shape[1], axis=1)
    with np.errstate(all="ignore"):
        return _outside(rule.window(len(seen)), np.where(np.isnan(seen), np.inf, seen))


def _outside(window: Window, values: Floats) -> Floats:
    m = len(values)
    if window.plain:
        return np.zeros_like(values)
    ordered = np.sort(values, axis=0)
    centre_part = ordered[window.trim : m - window.trim]
    if window.drop is None:
        return _beyond(values, centre_part)
    centres = (centre_part / len(centre_part)).sum(axis=0)
    apart = _apart(ordered, centres)
    order = np.argsort(apart, axis=0, kind="stable")[: m - window.drop]
    lost = _beyond(values, np.take_along_axis(ordered, order, axis=0))
    if not window.cutoff:
        return lost
    radii = np.take_along_axis(apart, order[-1:], axis=0)[0]
    known = np.where(np.isfinite(radii), radii, 0.0)
    largest = known.max(initial=0.0) or 1.0
    spreads = np.maximum(radii, np.sqrt(np.mean((known / largest) ** 2)) * largest)
    falling = np.clip(_apart(values, centres) / (window.cutoff * spreads) - 1, 0.0, 1.0)
    return np.where(lost > 0, np.nan_to_num(falling, nan=1.0), 0.0)


def _beyond(values: Floats, kept: Floats) -> Floats:
    outside: npt.NDArray[Any] = (values < kept.min(axis=0)) | (values > kept.max(axis=0))
    return outside.astype(np.float64)


def _apart(values: Floats, centres: Floats) -> Floats:
    """Return halved distances, of which no finite one overflows."""
    halved = np.abs(values / 2 - centres / 2)
    return np.where(np.isnan(halved), np.inf, halved)
