"""The tutorials run, and print what their pages show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.site.sources import printed, tutorials

SCRIPTS = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.py"))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(each, id=each.stem, marks=[pytest.mark.slow] * (each.stem == "protect"))
        for each in SCRIPTS
    ],
)
def test_a_tutorial_prints_what_its_page_shows(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed(script).read_text()


def test_every_tutorial_has_a_page_with_code_text_and_output() -> None:
    pages = tutorials()
    assert set(pages) == {f"tutorials/{script.stem}.md" for script in SCRIPTS}
    for page in pages.values():
        assert page.startswith("# ")
        assert page.count("```python") >= 3
        assert "## What it prints" in page
