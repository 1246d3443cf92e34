"""What the page shows of a guard's report or log: the JSON that a DDP or FSDP job has written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phocas.integrations.reports import SCHEMA, PlacesReport, Report, SuspectReport
from phocas.report.page.contents import drawing, source


class GuardContents:
    """What is shown of a guard's report, which its job may write anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reports: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        """Read the file and return what has changed since it was last read."""
        found = read_reports(self.path)
        if found == self._reports:
            return {}
        self._reports = found
        return {"guards": found}

    def whole(self) -> dict[str, Any]:
        """Return all that the page needs."""
        return {**source(self.path), **drawing(), "runs": [], "guards": self._reports}


def is_report(path: Path) -> bool:
    """Tell whether a file begins as JSON does, and a results file never."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip()[:1] in (b"{", b"[")


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Read and check a guard's report, or its log as one report for each job.

    Numbers that are not finite become null.
    """
    try:
        text = path.read_text("utf-8")
        first, *more = text.splitlines()
        logged = first.endswith("}") and "event" in json.loads(first)
        reports = _logged([first, *more]) if logged else [json.loads(text)]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no report of a guard: {error}") from None
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no whole log of a guard: {error}") from None
    return [_checked(path, report) for report in reports]


def _logged(lines: Sequence[str]) -> list[Any]:
    """Read a line of JSON for each event; a job begins where steps or verdicts come again.

    A rank may be flagged again as another kind, which replaces the first. Events of other kinds are
    in the report of the job that each line has.
    """
    reports: list[dict[str, Any]] = []
    for line in lines:
        entry = json.loads(line)
        job = entry.pop("job")
        before = reports[-1] if reports else {**job, "suspects": []}
        new = [entry] if entry["event"] == "suspect" else []
        same = [one for one in before["suspects"] if new and one["rank"] == entry["rank"]]
        again = any(one["kind"] == entry["kind"] for one in same)
        if not reports or job["steps"] < before["steps"] or again:
            reports.append({**job, "suspects": new})
        else:
            kept = [one for one in before["suspects"] if one not in same]
            reports[-1] = {**job, "suspects": [*kept, *new]}
    return reports


def _checked(path: Path, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or "schema" not in found:
        raise ValueError(
            f"{path} is no report of a guard: guard.report() as JSON, or the file that protect or"
            " watch was given as log, is wanted"
        )
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
