"""Convert docstrings to Markdown: examples become code blocks, roles become inline code.

mkdocstrings reads docstrings as Markdown, in which ``>>>`` would start nested quotations.
"""

from __future__ import annotations

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
    """A griffe extension that converts every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
