"""Add pages whose files are outside of ``docs``, and rewrite the links between pages."""

from __future__ import annotations

import ast
import posixpath
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/ray_cluster.md": "examples/ray_cluster.md",
    "examples/ddp_mnist.py": "examples/ddp_mnist.md",
    "examples/fsdp_language_model.py": "examples/fsdp_language_model.md",
    "examples/flower/app.py": "examples/flower.md",
}
"""Files outside of ``docs``, and the page of each."""

_SCRIPT = re.compile(r"^(docs/tutorials/\w+)\.py$")
_CODE = re.compile(r"`[^`\n]+`")
_CELL = re.compile(r"(<t[dh][^>]*>)(.*?)(?=</t[dh]>)", re.DOTALL)
_CELL_CODE = re.compile(r"(?<=<code>)[^<]+")
_PRAGMA = re.compile(r"^# ruff: .*\n|  # (?:type: ignore|noqa).*", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def pages_from_elsewhere() -> dict[str, str]:
    """Return the pages of files outside of ``docs``, with rewritten links."""
    pages = {}
    for file, page in ELSEWHERE.items():
        text = (ROOT / file).read_text()
        if file.endswith(".py"):
            text = f"# `{file}`\n\n```python\n{without_pragmas(text).rstrip()}\n```\n"
        pages[page] = turned(text, file, page)
    return pages


def turned(text: str, file: str, page: str) -> str:
    """Rewrite the links of a file from paths in the repository to paths in the site.

    >>> turned("[choosing](docs/choosing.md#few)", "ARCHITECTURE.md", "architecture.md")
    '[choosing](choosing.md#few)'
    >>> turned("[rooms](../ARCHITECTURE.md)", "docs/training.md", "training.md")
    '[rooms](architecture.md)'
    """

    def turn(found: re.Match[str]) -> str:
        target, mark, heading = found[1].partition("#")
        if not target or ":" in target:
            return found[1]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        there = ELSEWHERE.get(place, _SCRIPT.sub(r"\1.md", place).removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(page) or ".") + mark + heading

    return _LINK.sub(turn, text)


def bare_bars(text: str) -> str:
    r"""Replace ``\|`` by ``|`` in inline code: only code hosts need the escape in tables.

    >>> print(bare_bars(r"| adversaries | `nnm:b=6\|phocas:b=6` |"))
    | adversaries | `nnm:b=6|phocas:b=6` |
    """
    return _CODE.sub(lambda found: found[0].replace(r"\|", "|"), text)


def breakable(page: str) -> str:
    """Let inline code in the tables of an HTML page break after the separators of a rule or path.

    >>> breakable("<td><code>nnm:b=6|phocas:b=6</code></td>, <code>nnm:b=6</code>")
    '<td><code>nnm:<wbr>b=6|<wbr>phocas:<wbr>b=6</code></td>, <code>nnm:b=6</code>'
    """

    def marked(cell: re.Match[str]) -> str:
        code = _CELL_CODE.sub(lambda found: re.sub(r"(?<=[|/:])(?=\w)", "<wbr>", found[0]), cell[2])
        return cell[1] + code

    return _CELL.sub(marked, page)


def without_pragmas(script: str) -> str:
    r"""Remove the comments of a script that are for linters.

    >>> without_pragmas("# ruff: noqa: INP001\nimport os  # noqa: F401\nx = 1  # a number\n")
    'import os\nx = 1  # a number\n'
    """
    return _PRAGMA.sub("", script)


def tutorials() -> dict[str, str]:
    """Return the page of every tutorial: a script and its output, which a test compares."""
    return {
        f"tutorials/{script.stem}.md": tutorial(script.read_text(), printed(script).read_text())
        for script in sorted((ROOT / "docs/tutorials").glob("*.py"))
    }


def printed(script: Path) -> Path:
    """Return the file with the output of a tutorial."""
    return script.with_suffix(".txt")


def tutorial(script: str, output: str) -> str:
    r"""Convert a script to a page: comments without indentation become text, the rest is code.

    >>> print(tutorial('"A title."\n\n# Add.\nprint(1 + 1)\n', "2\n"))
    # A title
    <BLANKLINE>
    Add.
    <BLANKLINE>
    ```python
    print(1 + 1)
    ```
    <BLANKLINE>
    ## What it prints
    <BLANKLINE>
    ```text
    2
    ```
    <BLANKLINE>
    """
    head = ast.parse(script)
    docstring = ast.get_docstring(head) or ""
    title, _, introduction = docstring.partition("\n")
    body = script.split("\n")[head.body[0].end_lineno :]
    parts = [f"# {title.rstrip('.')}"]
    if introduction.strip():
        parts.append(introduction.strip())
    for comment, lines in groupby(body, key=lambda line: line.startswith("#")):
        text = "\n".join(lines).strip("\n")
        if not text:
            continue
        if comment:
            parts.append("\n".join(line.removeprefix("#").strip() for line in text.split("\n")))
        else:
            parts.append(f"```python\n{text}\n```")
    parts.append(f"## What it prints\n\n```text\n{output.rstrip()}\n```\n")
    return "\n\n".join(parts)
