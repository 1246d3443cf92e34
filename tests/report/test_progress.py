"""What is shown while runs train: a signal may come at any moment of it."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import pytest

from phocas.report.progress import interruptible


class SignalledWrites(io.RawIOBase):
    """A stream that gets SIGTERM within its first write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written.append(bytes(data))
        if len(self.written) == 1:
            signal.raise_signal(signal.SIGTERM)
        return len(data)


def test_signal_within_a_write_stops_after_the_round(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = SignalledWrites()
    with io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with interruptible() as stop:
            print("round 1 is done", file=sys.stderr)
            assert stop.is_set()
        monkeypatch.undo()
    assert raw.written == [b"round 1 is done\n"]
    assert capfd.readouterr().err.startswith("stopping after this round")
