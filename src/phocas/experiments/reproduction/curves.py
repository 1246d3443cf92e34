"""Curves files: the numbers of runs that a study is judged by, in a small file without models.

A curves file has the accuracy by round of every finished run, and the few other numbers that claims
are about. ``phocas reproduce`` writes one beside its results. ``phocas reproduce --judge`` reads
it, or the one of the published study, which the package has.
"""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phocas.experiments.reproduction.outcomes import RunOutcome
from phocas.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
NAME = "curves.json.xz"
"""Name of the curves file in the folder of a study."""
_KEY = 12
"""Digits of a run's identity in the file; whole identities would take most of its bytes."""


@dataclass(frozen=True)
class Curves:
    """The runs of a study at a scale.

    Attributes:
        study: name of the study.
        scale: its scale.
        repeats: number of repeats that were asked for.
        versions: versions of the packages that made the runs.
        runs: the finished runs, by their identity or its first digits.
        errors: worst errors for the front of rules, if the study has a front, as in worst.json.
    """

    study: str
    scale: str
    repeats: int
    versions: Mapping[str, str]
    runs: Mapping[str, RunOutcome]
    errors: list[dict[str, Any]] = field(default_factory=list)

    def find(self, identities: list[str]) -> dict[str, RunOutcome]:
        """Return the runs with these identities; raise ValueError if there is none."""
        found = {each: self.runs[each[:_KEY]] for each in identities if each[:_KEY] in self.runs}
        if not found:
            raise ValueError(
                f"none of the {len(self.runs)} runs in these curves belongs to {self.study} at"
                f" scale {self.scale} as it is now: settings, or the version of results, changed"
            )
        return found


def published_curves(study: str, scale: str, suffix: str = ".json.xz") -> Path:
    """Return the path of a study's curves in the package; the file need not exist."""
    folder = resources.files("phocas.experiments.reproduction") / "results"
    return Path(str(folder / f"{study}-{scale}{suffix}"))


def write_curves(path: Path, curves: Curves) -> None:
    """Write a curves file; runs that only the earlier file at this path has are kept."""
    runs = {key[:_KEY]: run for key, run in curves.runs.items()}
    errors = {each["rule"]: each for each in curves.errors}
    repeats = curves.repeats
    if path.exists():
        before = read_curves(path, curves.study, curves.scale)
        runs = {**before.runs, **runs}
        repeats = max(before.repeats, repeats)
        errors = {**{each["rule"]: each for each in before.errors}, **errors}
    content = {
        "format": FORMAT,
        "study": curves.study,
        "scale": curves.scale,
        "repeats": repeats,
        "versions": dict(curves.versions),
        "errors": list(errors.values()),
        "runs": {key: _written(run) for key, run in runs.items()},
    }
    text = json.dumps(content, separators=(",", ":"))
    write_atomically(path, lzma.compress(text.encode(), preset=9))


def read_curves(path: Path, study: str, scale: str) -> Curves:
    """Read the curves of a study; raise ValueError for a damaged file or that of another study."""
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        if (found := content["format"]) == FORMAT:
            curves = Curves(
                str(content["study"]),
                str(content["scale"]),
                int(content["repeats"]),
                dict(content["versions"]),
                {key: _read(run) for key, run in content["runs"].items()},
                list(content["errors"]),
            )
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no curves file, or is damaged ({type(error).__name__}): take a whole copy,"
            " or delete it and run the study again"
        ) from None
    if found != FORMAT:
        raise ValueError(
            f"{path} has format {found} of curves: this version of phocas reads format {FORMAT}"
        )
    if (curves.study, curves.scale) != (study, scale):
        raise ValueError(
            f"{path} must have the curves of {study} at scale {scale}: it has those of"
            f" {curves.study} at scale {curves.scale}"
        )
    return curves


def _written(run: RunOutcome) -> list[Any]:
    """Return a run as a short list; accuracies over 10,000 samples are exact."""
    shares = (run.distance, run.aggregate_ms, run.dropped_of_byzantine, run.dropped_of_honest)
    return [
        run.status,
        list(run.rounds),
        [_short(each, 8) for each in run.accuracy],
        *(_short(each, 5) for each in shares),
        run.nonfinite,
        *(_short(each, 8) for each in (run.final_accuracy, run.test_accuracy)),
    ]


def _short(value: float | None, digits: int) -> float | None:
    """Return a number with so many significant digits; None stands for NaN."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _read(values: list[Any]) -> RunOutcome:
    status, rounds, accuracy, *shares, nonfinite, final, test = values
    if status not in ("complete", "stopped") or len(rounds) != len(accuracy) or not rounds:
        raise ValueError("a run needs a status and an accuracy for each of its rounds")
    distance, milliseconds, byzantine, honest = (
        math.nan if each is None else float(each) for each in shares
    )
    return RunOutcome(
        status=status,
        rounds=tuple(map(int, rounds)),
        accuracy=tuple(math.nan if each is None else float(each) for each in accuracy),
        distance=distance,
        aggregate_ms=milliseconds,
        dropped_of_byzantine=byzantine,
        dropped_of_honest=honest,
        nonfinite=int(nonfinite),
        final_accuracy=final,
        test_accuracy=test,
    )
