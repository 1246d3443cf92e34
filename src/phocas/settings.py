"""Declarations of settings, read by Python, by configuration files and by the command line.

A setting is a field of a frozen dataclass with a default, a line of help and a check. Settings that
exclude or need each other are checked by the ``conflicts`` method of the dataclass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from phocas.specs import Check, count, number, one_of

Spelling = Callable[[str], str]
"""A function from a setting's Python name to the name that the user writes: key or option."""


class Conflict(NamedTuple):
    """A conflict between settings: the name of the setting to change, and the reason."""

    name: str
    text: str


def setting(default: Any, text: str, check: Check | None = None, *, place: bool = False) -> Any:
    """Declare a setting.

    Args:
        default: the default; ``dataclasses.MISSING`` makes the setting required.
        text: one line of help.
        check: the check of a value that is not None.
        place: whether the setting changes where and when a run computes, but not its result.
    """
    said = {"help": text, "check": check, "place": place}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata=said)
    return dataclasses.field(default=default, metadata=said)


class Settings:
    """Base class of frozen dataclasses whose fields are settings, checked on construction.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Patience(Settings):
    ...     owner = "patience"
    ...     rounds: int = setting(3, "rounds to wait", at_least(1))
    >>> Patience(rounds=0)
    Traceback (most recent call last):
        ...
    ValueError: patience needs rounds >= 1: got rounds=0
    """

    owner: ClassVar[str]

    def __post_init__(self) -> None:
        for declared in dataclasses.fields(self):  # type: ignore[arg-type]  # of its subclasses
            value, check = getattr(self, declared.name), declared.metadata["check"]
            if check is not None and value is not None:
                object.__setattr__(self, declared.name, check(self.owner, declared.name, value))


def at_least(minimum: int) -> Check:
    """Return the check that a value is a count and not below a minimum."""
    return functools.partial(count, minimum=minimum)


def nonnegative(owner: str, name: str, value: object) -> float:
    """Return a finite number that is not below 0."""
    found = number(owner, name, value)
    if not 0 <= found < float("inf"):
        raise ValueError(f"{owner} needs a finite {name} >= 0: got {name}={found}")
    return found


def below_one(owner: str, name: str, value: object) -> float:
    """Return a number that is at least 0 and less than 1."""
    found = number(owner, name, value)
    if not 0 <= found < 1:
        raise ValueError(f"{owner} needs {name} at least 0 and less than 1: got {name}={found}")
    return found


def word(*options: str) -> Check:
    """Return the check that a value is one of the given words."""
    return functools.partial(one_of, options=options)
