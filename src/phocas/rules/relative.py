"""Rules of rows of which the last has a role of its own: a base, or a reference vector.

A base is a row such as the parameters from which all workers started: the differences of the other
rows from it are aggregated, without copying them. A reference vector is one more row that a rule
compares the others with. With both, the reference comes before the base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Floats,
    Function,
    Mix,
    Norms,
    Planning,
    Request,
    Signs,
    by_function,
    of_pairs,
)
from phocas.rules.base import Composite, Rule, plan_of
from phocas.rules.execution import Plan
from phocas.rules.guarantee import Tolerance

_ROUNDING = 1e-12


class LastRowRule(Composite):
    """A rule applied to all rows but the last, which is no worker's row.

    ``m`` counts the last row.
    """

    rule: Rule
    outermost: ClassVar[bool] = True

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: the rule decides
        """Tell whether the rule needs all columns on one server."""
        return self.rule.whole

    def check(self, m: int) -> None:
        """Check the rule with the number of the other rows."""
        self.rule.check(m - 1)

    def window(self, m: int) -> Window:
        """Return the rule's window."""
        return self.rule.window(m - 1)

    def expected(self, m: int) -> float:
        """Return the expected share that the rule drops."""
        return self.rule.expected(m - 1)

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of the rule among the other rows; the last row must be correct."""
        return self.rule.tolerates(m - 1)

    @property
    def proven(self) -> bool:
        """Return whether the wrapped rule has an error bound of its own."""
        return self.rule.proven

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the error bound of the rule."""
        return self.rule.error_bound(m - 1, q)

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the rule's plan for the other rows; a cell filter does not change the last row."""
        plan = plan_of(self.rule, m - 1, rng)
        if plan.filtering is not None and plan.filtering.request.rows is None:
            request = replace(plan.filtering.request, rows=m - 1)
            plan.filtering = replace(plan.filtering, request=request)
        return plan


@dataclass(frozen=True)
class Referenced(LastRowRule):
    """Aggregate rows beside a reference vector, which is the last row.

    ``rule(rows, reference=vector)`` applies it. Servers that each hold a range of columns use it
    as a rule of m + 1 rows: ``ShardedAggregation(Referenced(rule), m + 1)``.

    Breakdown: that of the rule. The result is not finite if the reference is not.

    Args:
        rule: a rule that needs a reference.

    >>> import numpy as np
    >>> from phocas import CenteredClipping
    >>> rule = Referenced(CenteredClipping(radius=2.0, start="previous"))
    >>> rule(np.array([[101.0], [102.0], [900.0], [100.0]]))  # the last row is the reference
    array([101.66666667])
    """

    rule: Rule
    name: ClassVar[str] = "referenced"

    def __post_init__(self) -> None:
        """Reject a rule that needs no reference."""
        if self.rule.needs_reference is None:
            raise TypeError(f"{self.rule} needs no reference: leave the reference out")

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the rule's execution plan for m - 1 rows and the reference."""
        plan = super().plan(m, rng)
        plan.planning = self.rule.referenced_planning(m - 1, rng)
        return plan


@dataclass(frozen=True)
class Relative(LastRowRule):
    """Aggregate the differences of rows from a base, which is the last row, and add the base.

    If all values of a column shift, the mean of a window shifts with them, so a base does not
    change the result of a column rule, to the bit. The base matters for mixes whose weights do not
    add up to one (clipping), for norms, and for users' functions.

    Breakdown: that of the rule. NaN and inf in the base enter the result if the base has a weight.

    Args:
        rule: the rule that aggregates the differences.

    >>> import numpy as np
    >>> from phocas import Median, Clipping
    >>> rows = np.array([[101.0], [102.0], [900.0], [100.0]])
    >>> Relative(Clipping(radius=1.5) | Median())(rows)
    array([101.5])
    """

    rule: Rule
    name: ClassVar[str] = "relative"

    def __post_init__(self) -> None:
        """Reject a rule that has a base already."""
        if isinstance(self.rule, Relative):
            raise TypeError(f"{self.rule} cannot be applied to differences to a base")

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the rule's execution plan, changed to run on all m rows.

        The last row is the base. The plan of the rule is for the m - 1 differences from the base.
        Each mix of differences becomes a mix of rows, in which the base has the weight that makes
        the sum of the weights one. A rule made of a user's function gets the differences
        themselves, because the function need not return a result that shifts when all rows shift.
        """
        plan = super().plan(m, rng)
        plan.planning = _planning(plan.planning, m)
        if plan.function is not None:
            plan.planning = _with_base(plan.planning, m)
            plan.function = partial(_of_differences, plan.function)
        return plan


def _planning(planning: Planning | None, m: int) -> Planning:
    """Compute the mix of m - 1 differences; rewrite the requests as measurements of the m rows."""
    reply: Floats | None = None
    while planning is not None:
        try:
            request: Request = planning.send(reply) if reply is not None else next(planning)
        except StopIteration as stop:
            return _shifted(stop.value, m)
        if isinstance(request, Norms | Signs):
            weights = np.eye(m - 1) if request.weights is None else request.weights
            differences = np.column_stack([weights, -weights.sum(axis=1)])
            reply = yield replace(request, weights=differences)
        elif request.weights is None:
            reply = (yield request)[(slice(m - 1),) * (1 + of_pairs(request))]
        else:
            completed = _completed(request.weights)
            # A base that stays in the rows is larger than they, and rounds them.
            wide = request.wide or bool(completed[:, -1].any())
            reply = yield replace(request, weights=completed, wide=wide)
    return _shifted(Mix(), m)


def _with_base(planning: Planning, m: int) -> Planning:
    """Compute the mix of another planning generator, and append the base as the last row."""
    mix = yield from planning
    weights = np.eye(m)[:-1] if mix.weights is None else mix.weights
    return Mix(np.vstack([weights, np.eye(m)[-1:]]), mix.fair)


def _of_differences(function: Function, rows: NDArray[Any]) -> NDArray[Any]:
    """Reduce the differences of rows from the last row, and add the last row."""
    return np.asarray(by_function(function, rows[:-1] - rows[-1]) + rows[-1])


def _shifted(mix: Mix, m: int) -> Mix:
    """Return a mix of differences as a mix of all rows.

    The base gets the weight that makes the sum of each mix's weights one.
    """
    weights = np.eye(m - 1) if mix.weights is None else mix.weights
    fair = np.append(np.broadcast_to(mix.fair, (m - 1,)), 1.0)
    return Mix(_completed(weights), fair)


def _completed(weights: Floats) -> Floats:
    missing = 1 - weights.sum(axis=1)
    missing[np.abs(missing) < _ROUNDING] = 0.0
    return np.column_stack([weights, missing])
