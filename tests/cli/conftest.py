"""The real command, as if on a terminal of 80 columns."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Protocol

import pytest

from phocas.cli import main

if TYPE_CHECKING:
    from pathlib import Path


class Phocas(Protocol):
    def __call__(self, *words: str, status: int = 0, stream: str | None = None) -> str: ...


@pytest.fixture
def phocas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Phocas:
    """Run a command in a folder of its own, and return what it prints; of a refusal, the line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(*words: str, status: int = 0, stream: str | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["phocas", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert (ended.value.code or 0) == status, errors
        return re.sub(
            r"\x1b\[[0-9;?]*[a-zA-Z]", "", errors if status and stream is None else output
        )

    return run
