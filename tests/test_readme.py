"""What the README names is there. That its code runs and its links hold: tests/site."""

from __future__ import annotations

from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_it_is_one_screen() -> None:
    assert len(README.splitlines()) <= 70
