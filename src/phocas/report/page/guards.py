"""The data of the HTML report of a DDP or FSDP guard, read from its JSON report or log."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phocas.integrations.reports import SCHEMA, PlacesReport, Report, SuspectReport
from phocas.report.page.contents import drawing, source


class GuardContents:
    """The data of a guard's report; the file may be replaced while its job runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reports: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        """Read the file and return its reports if they changed since the last call."""
        found = read_reports(self.path)
        if found == self._reports:
            return {}
        self._reports = found
        return {"guards": found}

    def whole(self) -> dict[str, Any]:
        """Return all data of the report."""
        return {**source(self.path), **drawing(), "runs": [], "rules": {}, "guards": self._reports}


def is_report(path: Path) -> bool:
    """Return whether a file starts like JSON; a results file never does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip()[:1] in (b"{", b"[")


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Read and check a guard's report, or its log with one report for each job.

    Numbers that are not finite become None.
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
    """Return one report for each job of a log, which has one line of JSON for each event.

    A new job starts where the step count falls, or where a rank is flagged again as the same kind.
    A rank that is flagged as another kind replaces its earlier entry. Events that flag no rank are
    in the job's report, which every line contains.
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
    """Return a report with all its fields, or raise ValueError."""
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


def _check(found: Any, kind: Any) -> None:
    """Raise KeyError if required fields of a typed dictionary are missing."""
    missing = sorted(kind.__required_keys__ - set(found.keys()))
    if missing:
        raise KeyError(f"{kind.__name__} lacks {', '.join(missing)}")


def _finite(value: Any) -> Any:
    """Replace all numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
