"""Rules made of a user's function of the rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from phocas.kernels import PLAIN_MEAN, Window
from phocas.rules.base import Composite
from phocas.rules.execution import Plan
from phocas.rules.guarantee import Tolerance
from phocas.specs import (
    build,
    check_keywords,
    count,
    keywords_of,
    normalise,
    place_of,
    read_keywords,
    write_spec,
)

_OFFERED = ("b", "columnwise", "rng")


@dataclass(frozen=True)
class FunctionRule(Composite):
    """A rule that reduces the rows by a function of an (m, d) array that returns d values.

    The function gets a copy of the rows in float32 or float64, and the other parameters that it
    has: those in ``options``, ``b`` and ``columnwise``, and ``rng``, a NumPy generator. Which
    values the function drops is not known: an explanation reports none.

    ``b`` is the number of wrong rows that the function is claimed to tolerate; with ``columnwise``
    it is the number of wrong values in every column as well. Without ``columnwise``, all columns
    must be on one server.

    Args:
        function: returns d values for the (m, d) rows.
        b: how many wrong rows or values the function is claimed to tolerate; None: the function's
            own default, or 0.
        columnwise: whether the function reduces each column on its own.
        options: the function's other parameters by name.

    >>> import numpy as np
    >>> def near(rows, share=0.5):
    ...     return np.quantile(rows, share, axis=0)
    >>> middle = FunctionRule(near, b=1, columnwise=True)
    >>> middle(np.array([[1.0], [2.0], [900.0]])), middle.tolerates(3)
    (array([2.]), Tolerance(rows=1, values=1))
    >>> FunctionRule(near, options={"share": 1.0})(np.array([[1.0], [2.0], [900.0]]))
    array([900.])
    """

    function: Callable[..., Any]
    b: int | None = None
    columnwise: bool = False
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    name: ClassVar[str] = "function"

    def __post_init__(self) -> None:
        """Check the function, its parameters and b."""
        if not callable(self.function):
            raise TypeError(f"FunctionRule needs a function of the rows: got {self.function!r}")
        takes = keywords_of(self.function)
        b = self.b
        if b is None and "b" in takes:
            b = takes["b"].default
            if b is inspect.Parameter.empty:
                place = place_of(self.function)
                raise ValueError(f"{place} needs b: write {place}:b=..., or FunctionRule(..., b=)")
        normalise(
            self,
            b=0 if b is None else count("FunctionRule", "b", b),
            options=tuple(sorted(dict(self.options).items())),
        )
        check_keywords(self.function, dict(self.options), _OFFERED)
        if self.columnwise and "rng" in takes:
            raise ValueError(
                f"{place_of(self.function)} must not draw at random if columnwise=True, because"
                " servers reduce their columns on their own: leave columnwise or rng out"
            )

    def __str__(self) -> str:
        told = {"b": self.b, "columnwise": self.columnwise}
        given = {key: value for key, value in told.items() if value} | dict(self.options)
        return write_spec(place_of(self.function), given)

    @classmethod
    def spelling(cls) -> str:
        """Return the name that errors print."""
        return cls.name

    @classmethod
    def adapt(cls, function: Callable[..., Any], arguments: Mapping[str, str]) -> FunctionRule:
        """Return the rule for a function and the text of its arguments."""
        own = {key: text for key, text in arguments.items() if key in ("b", "columnwise")}
        options = {key: text for key, text in arguments.items() if key not in own}
        return build(cls, own, function=function, options=read_keywords(function, options))

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: it follows from columnwise
        """Tell whether all columns are needed: not if the function is column-wise."""
        return not self.columnwise

    def check(self, m: int) -> None:
        """Raise ValueError if 2b >= m: no function tolerates that."""
        super().check(m)
        if (self.b or 0) > self.largest_b(m):
            raise ValueError(
                f"{self} needs 2b < m: got b={self.b} with m={m} workers,"
                f" the largest b is {self.largest_b(m)}"
            )

    def tolerates(self, m: int) -> Tolerance:
        """Return b, as given."""
        self.check(m)
        b = self.b or 0
        return Tolerance(rows=b, values=b if self.columnwise else 0)

    def window(self, m: int) -> Window:
        """Return the window of all values, which the function replaces."""
        del m
        return PLAIN_MEAN

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return a plan that calls the function instead of a window."""
        offered = {"b": self.b, "columnwise": self.columnwise}
        given: dict[str, Any] = {
            key: value for key, value in offered.items() if key in keywords_of(self.function)
        }
        if "rng" in keywords_of(self.function):
            given["rng"] = np.random.default_rng(0) if rng is None else rng
        return Plan(self.window(m), function=partial(self.function, **given, **dict(self.options)))
