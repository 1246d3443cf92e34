"""The data of the HTML report of a results file, as JSON values and thinned to a bounded size."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phocas.detection import FALSE_ALARM
from phocas.experiments.config import RECORDED, option_of
from phocas.experiments.curves import columns, cost, elapsed
from phocas.experiments.detection_tables import DroppedShares, RecordedPicture
from phocas.experiments.locks import actual_status
from phocas.experiments.results import PHASES, Results, RunRecord
from phocas.report.palette import BASELINE, STYLES, Palette, Style, distinct_dashes
from phocas.report.tables import comparison
from phocas.sharding import shard_bounds

MOST_POINTS = 250
"""Points of a curve, at most."""
MOST_BINS = 100
"""Columns of a heat map, at most; each is the mean over its rounds."""
MOST_PICTURES = 12
"""Recorded gradient matrices of one run, at most."""
MOST_PICTURES_IN_ALL = 240
"""Recorded gradient matrices of all runs, at most."""

_OF_ROUNDS = ("round", "expected_dropped", *(f"{phase}_ms" for phase in PHASES))
_OF_EVALUATIONS = ("round", "loss", "top1", "top3", "seconds")
_LOG_STEPS = 100  # codes per factor of two: the error of a value is at most 0.4%
_LOG_START = 160  # the code 0 stands for 2^-160
_LOST, _INFINITE = -32768, 32767


class Contents:
    """The data of a results file's runs; only runs that changed are read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._runs: dict[int, dict[str, Any]] = {}
        self._pictures = 0
        self._palette = Palette()

    def read(self) -> dict[str, Any]:
        """Read the file and return the runs that changed since the last call."""
        changed = []
        with Results(self.path, read=True) as results:
            for number, status, *progress in results.progress():
                record = None
                if (
                    status == "running"
                ):  # a killed process cannot change its status: check whether it lives
                    record = results.run(number)
                    status = actual_status(record, self.path)  # noqa: PLW2901 - the corrected status
                state = (status, *progress)
                if self._seen.get(number) == state:
                    continue
                record = record or results.run(number)
                self._runs[number] = run = self._run(results, record, status)
                self._seen[number] = state
                changed.append(run)
        return {"runs": changed, "rules": self._rules()} if changed else {}

    def whole(self) -> dict[str, Any]:
        """Return all data of the report."""
        return {
            **source(self.path),
            "limits": {"points": MOST_POINTS},
            **drawing(),
            "runs": list(self._runs.values()),
            "rules": self._rules(),
            "guards": [],
        }

    def _rules(self) -> dict[str, Any]:
        """Return the line style of each rule, by name.

        Rules with the same style differ in their dashes. Of these, the rule with the largest b has
        the unchanged style, which is a solid line for most rules.
        """
        runs = sorted(self._runs.values(), key=lambda run: (-(run["b"] or 0), run["id"]))
        rules = list(dict.fromkeys(run["rule"] for run in runs))
        styles = distinct_dashes([self._palette.style(rule) for rule in rules])
        return dict(zip(rules, map(_drawn, styles), strict=True))

    def _run(self, results: Results, record: RunRecord, status: str) -> dict[str, Any]:
        rounds = columns(results, "rounds", record.id, _OF_ROUNDS)
        evaluations = columns(results, "evaluations", record.id, _OF_EVALUATIONS)
        layers = results.layers(record.id)
        shares = results.shares(record.id)
        absurd = results.absurd(record.id)
        return {
            "id": record.id,
            "name": record.name,
            "rule": record.rule,
            "attack": record.attack,
            "seed": record.seed,
            "b": _b(record.rule),
            "workers": record.config.get("workers"),
            "servers": record.config.get("servers"),
            "rounds": record.rounds,
            "done": record.rounds_done,
            "status": status,
            "message": record.message,
            "origin": record.origin,
            "final": _number(record.final_accuracy),
            "best": _number(record.best_accuracy),
            "ms": _number(record.ms_per_round),
            "skipped": record.skipped_rounds,
            "suspects": list(record.suspects),
            "unusual": list(record.unusual),
            "suspect_servers": list(record.suspect_servers),
            "excluded": [str(each) for each in results.exclusions(record.id)],
            "lost": record.lost,
            "byzantine": None if record.byzantine is None else list(record.byzantine),
            "compared": comparison(record.config),
            "config": record.config,
            "command": command(record.config),
            "curve": _curve(rounds, evaluations),
            "cost": {key: _number(each) for key, each in cost(rounds, evaluations).items()},
            "blame": None if shares is None else _dropped(shares, rounds),
            "evidence": [
                [each.worker, _number(each.e_value), each.flagged, _number(each.dropped)]
                for each in results.evidence(record.id)
            ],
            "absurd": None if absurd is None else _base64(absurd),
            "layers": [list(layer) for layer in layers],
            "bounds": _bounds(layers, record.config.get("servers")),
            "pictures": self._some(list(results.pictures(record.id))),
        }

    def _some(self, pictures: list[RecordedPicture]) -> dict[str, Any]:
        """Return some of a run's recorded matrices, at even distances."""
        left = max(0, MOST_PICTURES_IN_ALL - self._pictures)
        chosen = [pictures[place] for place in _places(len(pictures), min(MOST_PICTURES, left))]
        self._pictures += len(chosen)
        return {"recorded": len(pictures), "shown": [_picture(each) for each in chosen]}


def source(path: Path) -> dict[str, Any]:
    """Return the name and path of the file, and the time of reading."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return {"source": {"name": path.name, "path": str(path), "made": made}}


def drawing() -> dict[str, Any]:
    """Return the styles of curves, and the false alarm probability at which workers are flagged."""
    return {
        "styles": {name: _drawn(style) for name, style in STYLES.items()},
        "baseline": _drawn(BASELINE),
        "alarm": FALSE_ALARM,
    }


def command(config: dict[str, Any]) -> str:
    """Return the command line that repeats a run; it has every setting, also those at defaults.

    >>> print(command({"lr": 0.1, "standardise": True, "name": None, "faults": ["nan 3 @ 5"]}))
    phocas train --lr 0.1 --standardise --set 'faults=["nan 3 @ 5"]' --restart
    """
    words = ["phocas", "train"]
    for key, value in config.items():
        if value is None or value is False or value in ([], {}) or key in RECORDED:
            continue
        if value is True:
            words.append(option_of(key))
        elif isinstance(value, list | dict):
            words += ["--set", f"{key}={_toml(value)}"]
        else:
            words += [option_of(key), str(value)]
    return shlex.join([*words, "--restart"])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _drawn(style: Style) -> dict[str, Any]:
    """Return a style in the words of SVG."""
    dashes = [] if isinstance(style.dash, str) else [2 * length for length in style.dash[1]]
    return {"colour": style.colour, "dash": dashes, "marker": style.marker}


def _b(rule: str) -> int | None:
    """Return the last b of a rule's text."""
    found = re.findall(r"\bb=(\d+)", rule)
    return int(found[-1]) if found else None


def _number(value: float | None) -> float | None:
    """Return a number rounded to five digits, or None if it is not finite."""
    return float(f"{value:.5g}") if value is not None and np.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(float(value)) for value in values]


def _places(size: int, most: int) -> list[int]:
    """Return at most ``most`` indices at even distances, including the first and the last."""
    if size <= most:
        return list(range(size))
    return sorted({round(place) for place in np.linspace(0, size - 1, most)}) if most > 1 else []


def _curve(rounds: dict[str, Any], evaluations: dict[str, Any]) -> dict[str, Any]:
    seconds = elapsed(rounds, evaluations)
    chosen = _places(len(seconds), MOST_POINTS)
    return {
        "points": len(seconds),
        "round": [int(number) for number in evaluations["round"][chosen]],
        "seconds": _numbers(seconds[chosen]),
        **{key: _numbers(evaluations[key][chosen]) for key in ("top1", "top3", "loss")},
    }


def _dropped(shares: DroppedShares, rounds: dict[str, Any]) -> dict[str, Any]:
    starts = np.array(_places(len(shares.rounds) + 1, MOST_BINS + 1)[:-1])
    ends = np.append(starts[1:], len(shares.rounds))
    means = np.add.reduceat(shares.workers.astype(np.float64), starts, axis=0)
    means /= (ends - starts)[:, None]
    expected = np.nan_to_num(rounds["expected_dropped"])
    return {
        "kept": len(shares.rounds),
        "from": [int(number) for number in shares.rounds[starts]],
        "to": [int(number) for number in shares.rounds[ends - 1]],
        "expected": _number(float(expected.mean())) if len(expected) else 0.0,
        "workers": _coded(means),
        "servers": None if shares.servers is None else _coded(shares.servers),
    }


def _bounds(layers: Sequence[tuple[str, int]], servers: int | None) -> list[list[int]]:
    d = sum(size for _, size in layers)
    return [list(bounds) for bounds in shard_bounds(d, servers)] if d and servers else []


def _picture(picture: RecordedPicture) -> dict[str, Any]:
    sample = picture.sample
    return {
        "round": picture.round,
        "columns": [sample.start, sample.runs, sample.stride, sample.width],
        "values": _base64(_logarithms(picture.values)),
        "lost": _base64(picture.lost),
    }


def _logarithms(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Encode values of any size by sign and logarithm in two bytes, with an error of 0.4%."""
    wide = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.rint((np.log2(np.abs(wide)) + _LOG_START) * _LOG_STEPS)
        codes = np.sign(wide) * np.clip(sizes, 1, _INFINITE - 1)
    codes = np.where(wide == 0, 0, np.where(np.isinf(wide), np.sign(wide) * _INFINITE, codes))
    return np.where(np.isnan(wide), _LOST, codes).astype("<i2")


def _coded(shares: npt.NDArray[np.floating[Any]]) -> str:
    """Encode shares in two bytes each; one byte is too coarse for Heraclius, which drops 0.1%."""
    return _base64(np.rint(np.clip(np.nan_to_num(shares), 0, 1) * 65535).astype("<u2"))


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
