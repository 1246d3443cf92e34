"""What the page shows of a guard's report: the JSON that a DDP or FSDP job has written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from phocas.integrations.reports import SCHEMA, PlacesReport, Report, SuspectReport
from phocas.report.page.contents import drawing, source


class GuardContents:
    """What is shown of a guard's report, which its job may write anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._report: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Read the file and return what has changed since it was last read."""
        found = read_report(self.path)
        if found == self._report:
            return {}
        self._report = found
        return {"guards": [found]}

    def whole(self) -> dict[str, Any]:
        """Return all that the page needs."""
        return {**source(self.path), **drawing(), "runs": [], "guards": [self._report]}


def is_report(path: Path) -> bool:
    """Tell whether a file begins as JSON does, and a results file never."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip()[:1] in (b"{", b"[")


def read_report(path: Path) -> dict[str, Any]:
    """Read and check a guard's report; numbers that are none become null."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no report of a guard: {error}") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise ValueError(f"{path} is no report of a guard: guard.report() as JSON is wanted")
    if found["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {found['schema']!r}, this phocas reads {SCHEMA}")
    try:
        _check(found, Report)
        for suspect in found["suspects"]:
            _check(suspect, SuspectReport)
            for places in suspect["places"].values():
                _check(places, PlacesReport)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no whole report of a guard: {error}") from None
    checked: dict[str, Any] = _finite(found)
    return checked


def _check(found: Any, kind: type) -> None:
    missing = sorted(set(kind.__annotations__) - set(found.keys()))
    if missing:
        raise KeyError(f"{kind.__name__} lacks {', '.join(missing)}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
