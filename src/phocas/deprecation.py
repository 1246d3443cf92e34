"""Former public names: they work until version 0.4, with a warning that names the new one."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C")
FORMER = "is deprecated and will be removed in version 0.4"
"""The words that every warning about a former name has."""


def warn_renamed(old: str, new: str) -> None:
    """Warn that a name was renamed, at the line outside of this package that used the name.

    Python shows a DeprecationWarning by default only if it points at the user's own script.
    """
    frame, level = sys._getframe(), 1  # noqa: SLF001 - the documented way to walk the stack
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "phocas":
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{old} {FORMER}: use {new}",
        DeprecationWarning,
        stacklevel=level,
    )


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that accepts former names: ``{old: new}``."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def former_parameters(**names: str) -> Callable[[type[C]], type[C]]:
    """Decorate a class: accept parameters and attributes by their old names, ``old="new"``."""

    def decorate(cls: type[C]) -> type[C]:
        init = cls.__init__

        @functools.wraps(init)
        def renamed_init(self: C, *args: Any, **kwargs: Any) -> None:
            for old, new in names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(
                            f"{cls.__name__} takes {new}= or its former name {old}=: got both"
                        )
                    warn_renamed(f"{cls.__name__}({old}=)", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            init(self, *args, **kwargs)

        cls.__init__ = renamed_init  # type: ignore[method-assign,assignment]
        return former_attributes(**names)(cls)

    return decorate


def former_attributes(**names: str) -> Callable[[type[C]], type[C]]:
    """Decorate a class: find attributes and methods by their old names, ``old="new"``."""

    def decorate(cls: type[C]) -> type[C]:
        for old, new in names.items():
            setattr(cls, old, _attribute(cls.__name__, old, new))
        return cls

    return decorate


def _attribute(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read)
