"""FLTrust: rows weighted by their agreement with the server's own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from phocas.rules.algebra import Mix, Norms, Planning, lost, measured_norms
from phocas.rules.base import Needed
from phocas.rules.centres import WeighingRule


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
        """Measure the norms, then the distances between rows and reference at length one."""
        del rng
        squared, request = yield from measured_norms(lambda found: float(found[m]))
        lengths = np.sqrt(squared)
        if not np.isfinite(lengths[m]):
            return lost(m + 1)
        present = np.isfinite(lengths) & (lengths > 0)
        inverse = np.zeros(m + 1)
        inverse[present] = request.scale / lengths[present]
        unit = np.column_stack([np.diag(inverse[:m]), np.full(m, -inverse[m])])
        trust = np.where(present[:m], np.maximum(0.0, 1 - (yield Norms(unit)) / 2), 0.0)
        total = trust.sum()
        weights = np.zeros(m + 1)
        if total > 0:
            weights[:m] = trust / total * lengths[m] / request.scale * inverse[:m]
        return Mix(weights[None, :], fair=1 / m)
