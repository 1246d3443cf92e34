"""What the README names is there. That its code runs and its links hold: tests/site."""

from __future__ import annotations

from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 82  # 70 before it had speed and a comparison
