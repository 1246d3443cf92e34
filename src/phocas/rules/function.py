"""Any function of the rows as a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from phocas.kernels import PLAIN_MEAN, Window
from phocas.rules.algebra import Decision, Function, Mix
from phocas.rules.base import Rule
from phocas.rules.promise import Tolerance
from phocas.specs import build, count, normalise


@dataclass(frozen=True)
class FunctionRule(Rule):
    """Reduce the rows by a function of an (m, d) array that returns d values.

    The function is given a copy, in float32 or float64. ``b`` is what it promises: so many wrong
    rows, and with ``columnwise``, which says that it reduces each column on its own, so many wrong
    values in every column. Without ``columnwise`` all columns must be in one place. Whose values
    it leaves out is not known, so an explanation says that nobody's are.

    Args:
        function: what makes d values of the (m, d) rows.
        b: how many wrong ones it is said to survive.
        columnwise: whether it reduces each column on its own.

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
        """Return what it is called in errors: nobody writes its class."""
        return cls.name

    @classmethod
    def adapt(cls, function: Callable[..., Any], arguments: Mapping[str, str]) -> FunctionRule:
        """Make a rule of a function and the text of its arguments."""
        return build(cls, arguments, function=function)

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: it follows from columnwise
        """Tell that all columns are needed, unless it was said that they are not."""
        return not self.columnwise

    def check(self, m: int) -> None:
        """Refuse 2b >= m: no function survives that."""
        super().check(m)
        if self.b > self.largest_b(m):
            raise ValueError(
                f"{self} needs 2b < m: got b={self.b} with m={m} workers,"
                f" the largest b is {self.largest_b(m)}"
            )

    def tolerates(self, m: int) -> Tolerance:
        """Return what the function was said to survive."""
        self.check(m)
        return Tolerance(rows=self.b, values=self.b if self.columnwise else 0)

    def window(self, m: int) -> Window:
        """Return everything: the function takes the window's place."""
        del m
        return PLAIN_MEAN

    def decision(self, mix: Mix, m: int) -> Decision:
        """Put the function in the window's place."""
        return Decision(mix, self.window(m), self.function)
