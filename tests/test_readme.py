"""What the README names is there. That its code runs and its links hold: tests/site."""

from __future__ import annotations

import re
from pathlib import Path

from phocas import RULES
from phocas.attacks import ATTACKS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_it_is_one_screen() -> None:
    assert len(README.splitlines()) <= 70


def test_rules_and_attacks_are_counted_right() -> None:
    counts = re.search(r"(\d+) rules, (\d+) attacks", README)
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(RULES), len(ATTACKS))
