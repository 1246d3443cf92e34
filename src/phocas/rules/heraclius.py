"""Heraclius, named after the successor of Phocas: a column rule that drops only outliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.deprecation import former_parameters
from phocas.kernels import Masses, Window
from phocas.rules.algebra import Tail
from phocas.rules.base import Composite
from phocas.rules.columnwise import Phocas, TrimmingRule
from phocas.rules.execution import Plan
from phocas.rules.guarantee import reaching_delta, trimmed_mean_delta, window_spreads
from phocas.specs import normalise, number

LARGEST_CUTOFF = 1e30


@former_parameters(reach="cutoff")
@dataclass(frozen=True)
class Heraclius(TrimmingRule, Composite):
    """Average the m - b values nearest to the trimmed mean, and every other plausible value.

    T is the b-trimmed mean of a column, and r the distance from T to its (m-b)-th nearest value.
    The scale s is the larger of r and the root mean square of r over the column's block. A value u
    has the weight

        w(u) = 1                                         if |u - T| <= r,
        w(u) = 2 - |u - T| / (cutoff s), within 0 and 1,  if not,

    and the core of the result is the weighted mean. The m - b values of Phocas' window have the
    weight 1. A block has 1024 columns, counted from the first column of the matrix.

    **Tail.** A value that only one worker has, such as the gradient of a rare token, is an outlier
    in its column even if it is honest. So outliers are not dropped at once. The tail of a row is
    the vector of (1 - w) (u - T) over all columns. Let L be ``tail`` times the root of the sum of
    r^2 over all columns. A value farther than L from T is dropped. Each tail is scaled down to the
    length L, and to the length of the (b+1)-th longest tail. The sum of the tails, divided by the
    number of values that are not dropped, is added to the core. If no value is beyond twice the
    cutoff, nothing is added.

    If no row is Byzantine, all tails have about the same length, and the result is nearly the mean.
    A Byzantine row adds at most one tail as long as some honest worker's. If workers are Byzantine
    in single values anywhere, the tails together add at most m L / (m - b). tail = 0 drops all
    outliers; cutoff = 0 is Phocas. Rows that are mixed, filtered or weighed before have no tail.

    On Zipf-distributed tokens the loss of an honest run is 0.99 to 1.11 times that of the mean, and
    over 1000 times with tail = 0 (docs/costs.md).
    The default cutoff was chosen on MNIST as in the paper (20 workers, b = 8). Against attacks that
    adapt to the rule, use a smaller cutoff, or nearest-neighbour mixing (NNM) before the rule.

    Breakdown: tolerates b Byzantine values per column, 2b < m. NaN counts as +inf.

    Reference: this project, with its bound Delta_3 and the proof in docs/theory.md.

    Args:
        b: the number of Byzantine values per column that the rule tolerates, 2b < m.
        cutoff: the distance from T, in units of s, up to which a value has the weight 1.
        tail: the largest length of a row's tail, in units of the root of the sum of r^2.

    >>> import numpy as np
    >>> rows = np.array([[1.0], [2.0], [6.0], [9.0], [900.0]])
    >>> Heraclius(b=2)(rows)  # Phocas also drops the 1, because it always drops b values
    array([4.5])
    >>> Heraclius(b=2).explain(rows).dropped
    array([0., 0., 0., 0., 1.])
    >>> rare = np.zeros((5, 40))
    >>> rare[:, 0] = [0.9, 1.0, 1.0, 1.1, 1.2]  # a feature of all workers
    >>> rare[np.arange(5), np.arange(1, 6)] = 1.0  # a feature of each worker alone
    >>> Heraclius(b=1)(rare)[1:6], Heraclius(b=1, tail=0)(rare)[1:6]
    (array([0.2, 0.2, 0.2, 0.2, 0.2]), array([0., 0., 0., 0., 0.]))
    """

    cutoff: float = 4.0
    tail: float = 16.0
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
        tail = number("Heraclius", "tail", self.tail)
        if not 0 <= tail <= LARGEST_CUTOFF:
            raise ValueError(f"Heraclius needs 0 <= tail <= {LARGEST_CUTOFF:g}: got tail={tail:g}")
        normalise(self, cutoff=cutoff, tail=tail)

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the plan of the window, with the tail if there is one."""
        del rng
        return Plan(self.window(m), tail=Tail(self.tail, self.b) if self.keeps_tail else None)

    @property
    def keeps_tail(self) -> bool:
        """Tell whether outliers are added to the result, up to a limit."""
        return self.tail > 0 and self.cutoff > 0 and self.b > 0

    def window(self, m: int) -> Window:
        """Return the window of the m - b values nearest to T and all values within the cutoff."""
        del m
        return Window(trim=self.b, drop=self.b or None, cutoff=self.cutoff if self.b else 0.0)

    def masses(self, units: NDArray[np.int64]) -> Masses:
        """Return the window of Phocas with weights, and with the cutoff for other values."""
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
        return reaching_delta(self.window(m), m, q, centre, adaptive=adaptive, tail=self.tail)

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the error bound of the window with its tail, in honest standard deviations."""
        if q > self.tolerates(m).values:
            return None
        return window_spreads(self.window(m), m, q, honest=m - q, tail=self.tail)
