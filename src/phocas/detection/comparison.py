"""The comparison of the rows of one round: what the detector needs of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phocas.detection.evalues import angles, products
from phocas.detection.outlier_counts import OutlierCount, count_outliers

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """Numbers that compare m rows in a sample of their columns.

    How many numbers there are depends on m and on the groups of columns, not on the columns. So a
    server that has the values can send these numbers instead.
    """

    products: Floats
    """The inner products of the rows, (m, m)."""
    sizes: Floats
    """The length of each row in each group of neighbouring columns, (m, groups)."""
    angles: Floats | None = None
    """How far each row points from a direction that was known before the round, (m,)."""
    outliers: tuple[OutlierCount, ...] = ()
    """The numbers of outliers, if requested."""


def compare(
    values: Floats,
    direction: Floats | None = None,
    *,
    momentum: float = 0.0,
    before: Floats | None = None,
    outliers: bool = False,
) -> Comparison:
    """Compare the rows of one round.

    Args:
        values: the values of a sample of the columns, (m, groups, width), or rows, (m, columns).
        direction: a direction in these columns that was known before the round.
        momentum: the momentum of the rows; only what is new in them is compared.
        before: the values of the round before in the same columns, for rows with momentum.
        outliers: whether to count the outliers of the values.

    >>> found = compare(np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([0.0, 1.0]))
    >>> found.products.tolist(), found.sizes.ravel().tolist(), found.angles.tolist()
    ([[25.0, 8.0], [8.0, 4.0]], [5.0, 2.0], [0.19999999999999996, 0.0])
    """
    new = values
    if momentum and before is not None:
        with np.errstate(all="ignore"):
            new = values - momentum * before
    return Comparison(
        products(new),
        group_sizes(new),
        None if direction is None else angles(new, direction),
        count_outliers(values) if outliers else (),
    )


def group_sizes(values: Floats) -> Floats:
    """Return the length of each row in each group of columns, (m, groups); NaN stays NaN."""
    groups = values.reshape(len(values), -1, values.shape[-1])
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(np.einsum("mrw,mrw->mr", groups, groups)))
