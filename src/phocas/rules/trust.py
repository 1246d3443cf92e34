"""FLTrust: rows weighted by their agreement with the server's own gradient."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from phocas.rules.algebra import (
    Distances,
    Floats,
    Mix,
    Norms,
    Planning,
    Request,
    lost,
    measured_norms,
)
from phocas.rules.base import Needed
from phocas.rules.centres import WeighingRule

# If the length of a row is more than this many lengths of the reference, or less than its inverse,
# the cosine would be less than the rounding of their squared distance. Then all rows are scaled to
# the length one before they are measured, which takes three times as long.
COMPARABLE = 1e4


@dataclass(frozen=True)
class FLTrust(WeighingRule):
    """Weight the rows by their cosine with a trusted vector, at the length of that vector.

        FLTrust = sum of w_i x_i |r| / |x_i| over the sum of w_i,  w_i = max(0, cos(x_i, r))

    The reference vector r is the server's own gradient on a few trusted samples. If no cosine is
    positive, the result is zero.

    Breakdown: whatever any number of rows are, the result is no longer than r, its angle to r is at
    most 90 degrees, and its distance from r is at most 1.42 times the length of r. There is no
    bound in standard deviations of the honest rows. A row with NaN or inf has weight zero.

    Reference: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping" (2021).

    >>> import numpy as np
    >>> rows = np.array([[3.0, 4.0], [900.0, 0.0], [-5.0, 0.0]])
    >>> FLTrust()(rows, reference=np.array([0.0, 5.0]))
    array([3., 4.])
    """

    name: ClassVar[str] = "fl-trust"
    needs_reference: ClassVar[Needed] = "trusted"  # type: ignore[misc]  # the same for all of them

    @classmethod
    def choices(cls, m: int) -> list[Self]:
        """Return nothing: the rule cannot be applied without a reference."""
        del m
        return []

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: the bound is relative to the reference, not to the honest rows."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Raise ValueError: there is no reference."""
        del m, rng
        yield from ()
        raise ValueError(
            "fl-trust needs a reference, the gradient on trusted samples: pass reference=, or set"
            " trusted=100 in training"
        )

    def referenced_planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Measure the norms and the distances from the reference, which give the cosines."""
        del rng
        squared, request = yield from measured_norms(lambda found: float(found[m]))
        lengths = np.sqrt(squared)
        if not np.isfinite(lengths[m]):
            return lost(m + 1)
        used = np.flatnonzero(np.isfinite(lengths[:m]) & (lengths[:m] > 0) & (lengths[m] > 0))
        weights = np.zeros(m + 1)
        if len(used):
            trust = np.maximum(0.0, (yield from _cosines(lengths, used, request.scale)))
            shares = trust / (trust.sum() or 1.0)
            weights[used] = shares * (lengths[m] / lengths[used])
        return Mix(weights[None, :], fair=1 / m)


def _cosines(
    lengths: Floats, used: NDArray[np.intp], scale: float
) -> Generator[Request, Floats, Floats]:
    """Return the cosines of the used rows with the reference, which is the last row.

    Args:
        lengths: the norms of all rows, times ``scale``.
        used: the indices of rows that are finite and not zero.
        scale: the factor of the norms, a power of two.
    """
    ratio = lengths[used] / lengths[-1]
    m = len(lengths) - 1
    if np.all((ratio > 1 / COMPARABLE) & (ratio < COMPARABLE)):
        squared = (yield Distances(wide=True, scale=scale, origin=m))[used]
        return np.asarray((ratio + 1 / ratio - squared / lengths[used] / lengths[-1]) / 2)
    unit = np.zeros((m, m + 1))
    unit[used, used] = scale / lengths[used]
    unit[used, m] = -scale / lengths[-1]
    return np.asarray(1 - (yield Norms(unit))[used] / 2)
