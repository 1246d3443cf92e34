"""A report as one file."""

from __future__ import annotations

import os
from pathlib import Path

from phocas.report.page import render
from phocas.report.page.contents import Contents


def write_report(source: Path, output: Path) -> tuple[int, int | None]:
    """Write the page of a results file; return its size in bytes and the number of runs."""
    contents = Contents(source)
    contents.read()
    data = contents.whole()
    runs = len(data["runs"])
    page = render(data).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    # Never half a page: a report that is open in a browser is replaced in one go.
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    partial.write_bytes(page)
    partial.replace(output)
    return len(page), runs
