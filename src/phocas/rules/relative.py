"""A rule on differences to a common start, without a copy of the differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Cleanup,
    Decision,
    Distances,
    Floats,
    Function,
    Matrix,
    Mix,
    Norms,
    Planning,
    Request,
    by_function,
    select,
)
from phocas.rules.base import Rule
from phocas.rules.host import HostMatrix
from phocas.rules.promise import Tolerance

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Relative(Rule):
    """Aggregate the differences of m rows to a base, which is the last row, and add the base.

    Windows move with their values, so the base stands only where it changes the result: as a
    weight in mixes that do not add up to one (clipping), in norms, and for functions. Rules that go
    by columns get the bits that they have without it.

    Breakdown: that of the rule. NaN and inf in the base pass into the result where it has a weight.

    Args:
        rule: what aggregates the differences.

    >>> import numpy as np
    >>> from phocas import Median, Clipping
    >>> rows = np.array([[101.0], [102.0], [900.0], [100.0]])
    >>> Relative(Clipping(radius=1.5) | Median())(rows)
    array([101.5])
    """

    rule: Rule
    name: ClassVar[str] = "relative"
    outermost: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject a rule that has a base already."""
        if isinstance(self.rule, Relative):
            raise TypeError(f"{self.rule} cannot be applied to differences to a base")

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: the rule decides
        """Tell whether the rule must see all columns."""
        return self.rule.whole

    def check(self, m: int) -> None:
        """Check the rule with the rows that are not the base."""
        self.rule.check(m - 1)

    def window(self, m: int) -> Window:
        """Return the rule's window."""
        return self.rule.window(m - 1)

    def expected(self, m: int) -> float:
        """Return what the rule drops."""
        return self.rule.expected(m - 1)

    def tolerates(self, m: int) -> Tolerance:
        """Return what the rule survives, as long as the base is right."""
        return self.rule.tolerates(m - 1)

    def spreads(self, m: int, q: int) -> float | None:
        """Return the rule's distance, in the same unit."""
        return self.rule.spreads(m - 1, q)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Plan as the rule does, with its questions about differences asked of all rows."""
        planning = self.rule.planning(m - 1, rng)
        reply: Floats | None = None
        while True:
            try:
                request: Request = planning.send(reply) if reply is not None else next(planning)
            except StopIteration as stop:
                return _shifted(stop.value, m)
            if isinstance(request, Norms):
                weights = np.eye(m - 1) if request.weights is None else request.weights
                differences = np.column_stack([weights, -weights.sum(axis=1)])
                reply = yield replace(request, weights=differences)
            elif request.weights is None:
                reply = (yield request)[: m - 1, : m - 1]
            else:
                reply = yield Distances(
                    _completed(request.weights), wide=request.wide, scale=request.scale
                )

    def decide(self, matrix: Matrix, rng: np.random.Generator | None = None) -> Decision:
        """Decide as any rule does; where a base can be told from rows that are cleaned."""
        if self.cleanup(matrix.m) is not None and not isinstance(matrix, HostMatrix):
            raise TypeError(
                f"{self.rule} cleans, and with a base that needs rows in host memory: move the"
                " tensors to the CPU first"
            )
        return super().decide(matrix, rng)

    def cleanup(self, m: int) -> Cleanup | None:
        """Clean as the rule does, all but the base: what is implausible moves with its column."""
        found = self.rule.cleanup(m - 1)
        return None if found is None else replace(found, rows=m - 1)

    def decision(self, mix: Mix, m: int) -> Decision:
        """Leave it to the rule: mixed rows are in the place of the base already.

        A function is given differences, as nobody knows whether it moves with its rows.
        """
        decided = self.rule.decision(mix, m - 1)
        if decided.window.watched:
            decided.plain = Mix(select(m, np.arange(m - 1)))
        if decided.function is not None and mix.weights is not None:
            rows = np.vstack([mix.weights, np.eye(m)[-1:]])
            decided.mix = Mix(rows, mix.fair)
            decided.function = partial(_of_differences, decided.function)
        return decided


def _of_differences(function: Function, rows: NDArray[Any]) -> NDArray[Any]:
    """Reduce the differences of rows to the last of them, and add it."""
    return np.asarray(by_function(function, rows[:-1] - rows[-1]) + rows[-1])


def _shifted(mix: Mix, m: int) -> Mix:
    """Return the mix of differences as one of all rows, the base with what is missing to one."""
    weights = np.eye(m - 1) if mix.weights is None else mix.weights
    fair = np.append(np.broadcast_to(mix.fair, (m - 1,)), 1.0)
    return Mix(_completed(weights), fair)


def _completed(weights: Floats) -> Floats:
    missing = 1 - weights.sum(axis=1)
    missing[np.abs(missing) < _ROUNDING] = 0.0
    return np.column_stack([weights, missing])
