"""What the README shows is so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import phocas
from phocas.cli import application

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_ten_lines_run() -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert "phocas.Phocas(b=6)" in example
    exec(compile(example, "README.md", "exec"), {})


def test_the_refusal_is_worded_as_shown() -> None:
    shown = re.search(r"ValueError: (TrimmedMean .*)", README)
    assert shown is not None
    with pytest.raises(ValueError, match=re.escape(shown.group(1))):
        phocas.TrimmedMean(b=5)(np.ones((8, 3)))


def test_every_command_that_is_named_exists() -> None:
    known = {
        command.name or getattr(command.callback, "__name__", "")
        for command in application().registered_commands
    }
    named = set(re.findall(r"(?:^|`)phocas ([a-z]+)\b", README, re.MULTILINE))
    assert {"train", "audit", "bench"} <= named <= known


def test_every_document_that_is_linked_exists() -> None:
    root = Path(__file__).parents[1]
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
