"""``module:callable``: models and optimisers of the user's own, imported when a run begins."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phocas.specs import unknown

_SPELLING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_foreign(text: str) -> bool:
    """Say whether a text is spelt like ``module:callable``; nothing is imported.

    >>> is_foreign("package.module:Net"), is_foreign("mlp:hidden=64"), is_foreign("mlp")
    (True, False, False)
    """
    return _SPELLING.fullmatch(text.strip()) is not None


def find_foreign(text: str) -> Callable[..., Any]:
    """Import what ``module:callable`` names; the working directory is searched too."""
    module_name, _, attribute = text.strip().partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ValueError(f"{text}: there is no Python module {error.name!r}") from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            raise ValueError(unknown(f"name in {module_name}", part, names, plural="names"))
        target = getattr(target, part)
    if not callable(target):
        raise TypeError(f"{text} must be callable: got {type(target).__name__}")
    found: Callable[..., Any] = target
    return found
