"""Rules made of a user's function of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from phocas.kernels import PLAIN_MEAN, Window
from phocas.rules.algebra import Function
from phocas.rules.base import Composite
from phocas.rules.execution import Plan
from phocas.rules.guarantee import Tolerance
from phocas.specs import build, count, normalise


@dataclass(frozen=True)
class FunctionRule(Composite):
    """A rule that reduces the rows by a function of an (m, d) array that returns d values.

    The function gets a copy of the rows in float32 or float64. ``b`` is the number of wrong rows
    that the function tolerates; with ``columnwise`` it is the number of wrong values in every
    column as well. Without ``columnwise``, all columns must be in one place. Which values the
    function drops is not known: an explanation reports none.

    Args:
        function: returns d values for the (m, d) rows.
        b: how many wrong rows or values the function tolerates.
        columnwise: whether the function reduces each column on its own.

    >>> import numpy as np
    >>> middle = FunctionRule(lambda rows: np.median(rows, axis=0), b=1, columnwise=True)
    >>> middle(np.array([[1.0], [2.0], [900.0]])), middle.tolerates(3)
    (array([2.]), Tolerance(rows=1, values=1))
    """

    function: Function
    b: int = 0
    columnwise: bool = False
    name: ClassVar[str] = "function"

    def __post_init__(self) -> None:
        """Check the function and b."""
        if not callable(self.function):
            raise TypeError(f"FunctionRule needs a function of the rows: got {self.function!r}")
        normalise(self, b=count("FunctionRule", "b", self.b))

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        told = {"b": self.b, "columnwise": self.columnwise}
        parts = [f"{key}={value}" for key, value in told.items() if value]
        return f"{self.function.__module__}:{name}" + (":" + ",".join(parts) if parts else "")

    @classmethod
    def spelling(cls) -> str:
        """Return the name that errors print."""
        return cls.name

    @classmethod
    def adapt(cls, function: Callable[..., Any], arguments: Mapping[str, str]) -> FunctionRule:
        """Return the rule for a function and the text of its arguments."""
        return build(cls, arguments, function=function)

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: it follows from columnwise
        """Tell whether all columns are needed: not if the function is column-wise."""
        return not self.columnwise

    def check(self, m: int) -> None:
        """Raise ValueError if 2b >= m: no function tolerates that."""
        super().check(m)
        if self.b > self.largest_b(m):
            raise ValueError(
                f"{self} needs 2b < m: got b={self.b} with m={m} workers,"
                f" the largest b is {self.largest_b(m)}"
            )

    def tolerates(self, m: int) -> Tolerance:
        """Return b, as given."""
        self.check(m)
        return Tolerance(rows=self.b, values=self.b if self.columnwise else 0)

    def window(self, m: int) -> Window:
        """Return the window of all values, which the function replaces."""
        del m
        return PLAIN_MEAN

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return a plan that calls the function instead of a window."""
        del rng
        return Plan(self.window(m), function=self.function)
