"""Convert docstrings to Markdown: examples become code blocks, roles become inline code.

mkdocstrings reads docstrings as Markdown, in which ``>>>`` would start nested quotations.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^ *>>> .*\n(?:^ *\S.*\n?)*)+", re.MULTILINE)
_ROLE = re.compile(r":(?:class|meth|func|mod|data):`([^`]+)`")


def as_markdown(text: str) -> str:
    r"""Fence the examples and remove the roles.

    >>> as_markdown("See :class:`Rule`.")
    'See `Rule`.'
    >>> as_markdown(">>> 1 + 1\n2").splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```']
    """
    plain = _ROLE.sub(r"`\1`", text)
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", plain).strip()


class Markdown(griffe.Extension):  # type: ignore[misc]  # griffe is not there where types are checked
    """A griffe extension that converts every docstring, and the declarations of settings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Reduce ``setting(3, "its help", check)`` to 3, and keep the help."""
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":
            default, text = (getattr(each, "value", each) for each in value.arguments[:2])
            attr.value = None if str(default) == "MISSING" else default
            attr.extra["setting"]["help"] = ast.literal_eval(str(text))

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """List the settings of a class, with their help, as its parameters."""
        helps = {
            name: member.extra["setting"]["help"]
            for name, member in cls.members.items()
            if "setting" in member.extra
        }
        if helps and cls.docstring is not None:
            lines = [f"    {name}: {text}" for name, text in helps.items()]
            cls.docstring.value += "\n\nArgs:\n" + "\n".join(lines)
