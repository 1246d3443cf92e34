"""Write the HTML report of a file."""

from __future__ import annotations

import os
from pathlib import Path

from phocas.report.page import render
from phocas.report.page.contents import Contents
from phocas.report.page.guards import GuardContents, is_report


def open_contents(path: Path) -> Contents | GuardContents:
    """Read a results file, or the JSON report or log of a guard."""
    contents = GuardContents(path) if is_report(path) else Contents(path)
    contents.read()
    return contents


def write_report(path: Path, output: Path) -> str:
    """Write the HTML report of a file and return a line about it."""
    data = open_contents(path).whole()
    page = render(data).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    # The file is replaced at once, so that a browser never reads half of it.
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    partial.write_bytes(page)
    partial.replace(output)
    what = "a guard's report" if data["guards"] else f"{len(data['runs'])} runs"
    return f"{what} in {output}, {len(page) / 1e6:.1f} MB: open it in a browser"
