"""Watch: the mean, and the blame of a rule that would have survived more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from phocas.kernels import Window
from phocas.rules.algebra import Cleanup, Planning
from phocas.rules.base import Randomness, Rule
from phocas.rules.columnwise import Mean
from phocas.specs import normalise


@dataclass(frozen=True)
class Watch(Rule):
    """Average everything, to the bit of the mean, and say whom a rule would have dropped.

    For those who may not change their training and want to know who is wrong.

        Watch(rule) = Mean

    Breakdown: one wrong value in a column, as for the mean. NaN and inf pass into the result.

    Args:
        rule: whose blame is wanted.

    >>> import numpy as np
    >>> from phocas import Phocas
    >>> rows = np.array([[1.0, 1.0], [2.0, 3.0], [6.0, 5.0], [900.0, 99.0]])
    >>> why = Watch(Phocas(b=1)).explain(rows)
    >>> why.value, why.dropped
    (array([227.25,  27.  ]), array([0., 0., 0., 1.]))
    """

    name: ClassVar[str] = "watch"
    outermost: ClassVar[bool] = True
    rule: Rule

    def __post_init__(self) -> None:
        """Check that there is a rule to go by; it is column-wise if that is."""
        if not isinstance(self.rule, Rule):
            raise TypeError(f"Watch needs a rule to go by: got {self.rule!r}")
        normalise(self, columnwise=self.rule.columnwise)

    def check(self, m: int) -> None:
        """Check the rule."""
        self.rule.check(m)

    def cleanup(self, m: int) -> Cleanup | None:
        """Clean as the rule does, for its blame."""
        return self.rule.cleanup(m)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Plan as the rule does."""
        return (yield from self.rule.planning(m, rng))

    def window(self, m: int) -> Window:
        """Return the rule's window, to be watched only."""
        return replace(self.rule.window(m), watched=True)

    def liars(self, m: int) -> int:
        """Return what the rule allows for: the blame is its own, though not the value."""
        return self.rule.liars(m)

    def expected(self, m: int) -> float:
        """Return what an honest worker expects to lose by the rule."""
        return self.rule.expected(m)

    def __call__(
        self, rows: Any, *, rng: Randomness = None, weights: Any = None, max_share: Any = None
    ) -> Any:
        """Average: nobody has asked whom the rule would drop."""
        if weights is not None or max_share is not None:
            return self.weighted(weights, max_share)(rows, rng=rng)
        return Mean()(rows)
