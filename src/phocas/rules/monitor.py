"""Monitor: the mean of all rows, with a report of what another rule would have dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from phocas.kernels import Window
from phocas.rules.algebra import Planning
from phocas.rules.base import Composite, Needed, Rule, plan_of
from phocas.rules.execution import Plan
from phocas.specs import normalise


@dataclass(frozen=True)
class Monitor(Composite):
    """Return the plain mean, bit for bit, and report what another rule would have dropped.

    The report serves to detect faulty workers without changing the training.

        Monitor(rule) = Mean

    Breakdown: one Byzantine value in a column, as for the mean. NaN and inf enter the result.

    Args:
        rule: the rule whose dropped values are reported.

    >>> import numpy as np
    >>> from phocas import Phocas
    >>> rows = np.array([[1.0, 1.0], [2.0, 3.0], [6.0, 5.0], [900.0, 99.0]])
    >>> why = Monitor(Phocas(b=1)).explain(rows)
    >>> why.value, why.dropped
    (array([227.25,  27.  ]), array([0., 0., 0., 1.]))
    """

    name: ClassVar[str] = "monitor"
    former_name: ClassVar[str] = "watch"
    outermost: ClassVar[bool] = True
    rule: Rule

    def __post_init__(self) -> None:
        """Check that a rule is given; the monitor is column-wise if the rule is."""
        if not isinstance(self.rule, Rule):
            raise TypeError(f"Monitor needs a rule to go by: got {self.rule!r}")
        normalise(self, columnwise=self.rule.columnwise)

    def check(self, m: int) -> None:
        """Check the rule."""
        self.rule.check(m)

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return a plan that counts what the rule drops, and returns the mean of all rows."""
        plan = plan_of(self.rule, m, rng)
        plan.monitored, plan.function = m, None
        return plan

    @property
    def needs_reference(self) -> Needed | None:  # type: ignore[override]  # the rule decides
        """Return the reference vector that the monitored rule needs."""
        return self.rule.needs_reference

    def referenced_planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the mix of the monitored rule."""
        return self.rule.referenced_planning(m, rng)

    def window(self, m: int) -> Window:
        """Return the rule's window, which defines the dropped values."""
        return self.rule.window(m)

    def max_byzantine(self, m: int) -> int:
        """Return ``max_byzantine`` of the rule whose dropped values are reported."""
        return self.rule.max_byzantine(m)

    def expected(self, m: int) -> float:
        """Return the expected share of an honest worker's values that the rule drops."""
        return self.rule.expected(m)
