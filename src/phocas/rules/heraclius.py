"""Heraclius, named after the successor of Phocas: a column rule that drops only outliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.deprecation import former_parameters
from phocas.kernels import Masses, Window
from phocas.rules.columnwise import Phocas, TrimmingRule
from phocas.rules.guarantee import reaching_delta, trimmed_mean_delta
from phocas.specs import normalise, number

LARGEST_CUTOFF = 1e30


@former_parameters(reach="cutoff")
@dataclass(frozen=True)
class Heraclius(TrimmingRule):
    """Average the m - b values nearest to the trimmed mean, and every other plausible value.

    T is the b-trimmed mean of a column, and r the distance from T to its (m-b)-th nearest value.
    The scale s is the larger of r and the root mean square of r over the column's block. A value u
    has the weight

        w(u) = 1                                         if |u - T| <= r,
        w(u) = 2 - |u - T| / (cutoff s), within 0 and 1,  if not,

    and Heraclius_b is the weighted mean. The m - b values of Phocas' window have the weight 1. Any
    other value has the weight 1 up to the distance ``cutoff`` s from T; beyond it, the weight falls
    to 0 at twice the distance. cutoff = 0 is Phocas; a very large cutoff is the mean of the finite
    values.

    A block has 1024 columns, counted from the first column of the matrix. Sparse columns need the
    scale of a block: where most gradients are zero, r is zero, and every honest gradient that is
    not zero would be an outlier.

    The default cutoff was chosen on MNIST as in the paper (20 workers, b = 8, means of ten
    repeats). The accuracy is 0.932 without failures and under bit flips and the gambler, and 0.934
    under Gaussian and omniscient rows. Without failures, the mean has 0.934 and Phocas 0.913.
    Honest workers lose 0.2% of their values, Gaussian workers all. A Byzantine value outside the
    window adds at most ``cutoff`` s to the weighted sum. Against attacks that adapt to
    the rule, use a smaller cutoff, or nearest-neighbour mixing (NNM) before the rule. A weight that
    drops from 1 to 0 at 6 s has the same accuracy here. Against small attacks it is worse: 0.89
    instead of 0.91 under "a little is enough" (six repeats).

    Breakdown: tolerates b Byzantine values per column, 2b < m. NaN counts as +inf.

    Limits: measured on dense gradients of equally distributed data. A value that only one worker
    has in its column, such as the gradient of a rare token, is dropped even if it is honest
    (docs/choosing.md#limits).

    Reference: this project, with its bound Delta_3 and the proof in docs/theory.md.

    Args:
        b: the number of Byzantine values per column that the rule tolerates, 2b < m.
        cutoff: the distance from T, in units of s, up to which a value has the weight 1.

    >>> import numpy as np
    >>> rows = np.array([[1.0], [2.0], [6.0], [9.0], [900.0]])
    >>> Heraclius(b=2)(rows)  # Phocas also drops the 1, because it always drops b values
    array([4.5])
    >>> Heraclius(b=2).explain(rows).dropped
    array([0., 0., 0., 0., 1.])
    """

    cutoff: float = 4.0
    name: ClassVar[str] = "heraclius"
    former_fields: ClassVar[Mapping[str, str]] = {"reach": "cutoff"}
    weighable = True

    def __post_init__(self) -> None:
        """Check b and the cutoff."""
        super().__post_init__()
        cutoff = number("Heraclius", "cutoff", self.cutoff)
        if not 0 <= cutoff <= LARGEST_CUTOFF:
            raise ValueError(
                f"Heraclius needs 0 <= cutoff <= {LARGEST_CUTOFF:g}: got cutoff={cutoff:g}"
            )
        normalise(self, cutoff=cutoff)

    def window(self, m: int) -> Window:
        """Return the window of the m - b values nearest to T and all values within the cutoff."""
        del m
        return Window(trim=self.b, drop=self.b or None, cutoff=self.cutoff if self.b else 0.0)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the weight that Phocas keeps, with the cutoff for the rest."""
        mass = self.heaviest(units)
        return Masses(trim=mass, drop=mass or None, cutoff=self.cutoff if self.b else 0.0)

    def expected(self, m: int) -> float:
        """Return 0: the values of an honest worker are within the cutoff and are not dropped."""
        return 0.0 if self.cutoff else super().expected(m)

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return Delta_3, or Delta_2 of Phocas if the cutoff or b is 0."""
        if not self.cutoff or not self.b:
            return Phocas(self.b).bound(m, q, adaptive=adaptive)
        if q > self.tolerates(m).values:
            return None
        centre = trimmed_mean_delta(m, q, self.b, adaptive=adaptive)
        return reaching_delta(self.window(m), m, q, centre, adaptive=adaptive)
