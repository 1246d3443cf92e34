"""Check that lines of prose in Markdown are at most 100 characters long.

``python -m tools.prose`` lists longer lines. With ``--fix`` it wraps their paragraphs. Tables,
code, formulas, headings and generated pages are not changed.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 100

_VERBATIM = re.compile(r"\s*\||#|<|!\[|    |\[\^|---")
_ITEM = re.compile(r"(\s*)([-*]|\d+\.)\s+")
_CODE = re.compile(r"`[^`\n]{1,60}`|(?<!\$)\$(?! )[^$\n]{1,90}\$(?!\$)")
_TOGETHER = "\0"


def pages() -> Iterator[Path]:
    """Yield the Markdown files that are written by hand."""
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", ".github/**/*.md"):
        yield from sorted(ROOT.glob(pattern))


def paragraphs(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield paragraphs and list items as (True, lines), and all other lines as (False, [line])."""
    fenced = False
    held: list[str] = []
    for line in text.split("\n"):
        fence = line.lstrip().startswith(("```", "$$"))
        apart = fenced or fence or not line.strip() or _VERBATIM.match(line)
        inside = held and line.startswith("    ") and _ITEM.match(held[0]) and not fenced
        if (apart and not inside) or _ITEM.match(line):
            if held:
                yield True, held
            held = []
        if apart and not inside:
            yield False, [line]
        else:
            held.append(line)
        fenced = fenced != fence
    if held:
        yield True, held


def wrapped(text: str) -> str:
    """Wrap paragraphs with a line that is too long; inline code and formulas are not split.

    >>> print(wrapped("1. " + 18 * "word " + "`two words` more"))
    1. word word word word word word word word word word word word word word word word word word
       `two words` more
    >>> print(wrapped(19 * "word " + "$a + b$, more"))
    word word word word word word word word word word word word word word word word word word word
    $a + b$, more
    """
    lines = []
    for prose, part in paragraphs(text):
        if not prose or max(map(len, part)) <= WIDTH:
            lines += part
            continue
        item = _ITEM.match(part[0])
        first = item[0] if item else part[0][: len(part[0]) - len(part[0].lstrip())]
        words = " ".join([part[0][len(first) :], *(line.strip() for line in part[1:])])
        kept = textwrap.wrap(
            _CODE.sub(lambda code: code[0].replace(" ", _TOGETHER), words),
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [line.replace(_TOGETHER, " ") for line in kept]
    return "\n".join(lines)


def too_long(text: str) -> list[str]:
    """Return the lines of prose that are too long and contain a space to break at."""
    return [
        line
        for prose, part in paragraphs(text)
        if prose
        for line in part
        if len(line) > WIDTH and " " in line.strip()[2:]
    ]


def main() -> None:
    """List the lines that are too long, or wrap them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="wrap lines that are too long")
    fix = parser.parse_args().fix
    bad = 0
    for page in pages():
        text = page.read_text()
        if fix:
            page.write_text(wrapped(text))
            continue
        for line in too_long(text):
            bad += 1
            print(f"{page.relative_to(ROOT)}: {len(line)} characters: {line[:60]}...")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
