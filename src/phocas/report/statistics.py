"""Statistics over seeds: means, deviations, 95% intervals, and paired differences of rules."""

from __future__ import annotations

import json
import math
import statistics
from typing import TYPE_CHECKING, Any

from phocas.specs import split, split_arguments, split_place, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phocas.experiments.results import RunRecord

AVERAGED = (
    "final_accuracy",
    "best_accuracy",
    "final_top3",
    "best_top3",
    "test_accuracy",
    "ms_per_round",
)
"""The numbers of a run that are averaged over seeds."""
PARAMETERS = {"b": "rule", "q": "attack"}
"""Parameters by which runs are grouped like settings, and the settings whose text has them."""
_NOT_PAIRED = ("rule", "name", "code", "results", "threads", "track", "record_matrix")


def setting_of(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a run, or the b of its rule or the q of its attack.

    In a pipeline, it is the b of the last stage that has one.

    >>> setting_of({"rule": "nnm:b=3|phocas:b=2", "attack": None}, "b")
    2
    """
    if key not in PARAMETERS:
        return config.get(key)
    for text in reversed(split(config.get(PARAMETERS[key]) or "", "|")):
        place = split_place(text)
        arguments = text.partition(":")[2]
        if place is not None and "=" not in place[0]:
            arguments = text[len(place[0]) + 1 :]
        value = split_arguments(arguments, text).get(key) if "=" in arguments else None
        if value is not None:
            return int(value) if value.isdigit() else value
    return None


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean, the deviation of a sample (n - 1), and the 95% interval of the mean.

    All but the mean are None for one value. The interval is by Student's t.

    >>> spread([1.0, 2.0, 3.0, None])["deviation"]
    1.0
    """
    from phocas.experiments.reproduction.verdicts import interval  # noqa: PLC0415 - loads torch

    known = [value for value in values if value is not None and math.isfinite(value)]
    several = len(known) > 1
    found = interval(known) if several else None
    return {
        "mean": statistics.fmean(known) if known else None,
        "deviation": statistics.stdev(known) if several else None,
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
    }


def grouped(
    records: Sequence[RunRecord], keys: Sequence[str], versus: str | None = None
) -> list[dict[str, Any]]:
    """Return statistics over seeds of runs that share the settings ``keys``.

    Args:
        records: the runs.
        keys: settings, or ``b`` and ``q``.
        versus: a rule; each group then has the difference of its final accuracy from that of runs
            with this rule and otherwise the same settings and seeds.
    """
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        told = json.dumps([setting_of(record.config, key) for key in keys])
        groups.setdefault(told, []).append(record)
    others = None if versus is None else _by_pair(records, versus)
    return [
        {
            **{key: setting_of(group[0].config, key) for key in keys},
            "runs": [record.id for record in group],
            "seeds": sorted({record.seed for record in group}),
            **{name: spread([getattr(each, name) for each in group]) for name in AVERAGED},
            **({} if others is None else {"difference": _difference(group, others)}),
        }
        for group in groups.values()
    ]


def _by_pair(records: Sequence[RunRecord], rule: str) -> dict[str, RunRecord]:
    found = {_pair(record): record for record in records if record.rule == rule}
    if not found:
        known = dict.fromkeys(record.rule for record in records)
        raise ValueError(unknown("rule of these runs", rule, known, plural="rules"))
    return found


def _pair(record: RunRecord) -> str:
    """Return the settings that a run shares with its pair under another rule, as text."""
    kept = {key: value for key, value in record.config.items() if key not in _NOT_PAIRED}
    return json.dumps(kept, sort_keys=True)


def _difference(
    group: Sequence[RunRecord], others: Mapping[str, RunRecord]
) -> dict[str, float | int | None]:
    """Return the mean of the paired differences, its interval, and the number of pairs."""
    found = []
    for record in group:
        other = others.get(_pair(record))
        if other is not None and record.id != other.id:
            pair = (record.final_accuracy, other.final_accuracy)
            if pair[0] is not None and pair[1] is not None:
                found.append(pair[0] - pair[1])
    return {**spread(found), "pairs": len(found)}
