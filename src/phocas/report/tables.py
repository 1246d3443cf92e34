"""Tables of runs, and the outcome of one."""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phocas.data.splits import IID, Partition
from phocas.detection.own_past import FIRST_VERDICT
from phocas.experiments.locks import state_path
from phocas.experiments.results import NUMBERED
from phocas.report.statistics import PARAMETERS, grouped, setting_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from phocas.experiments.results import RunRecord

MAIN = (
    "name",
    "dataset",
    "model",
    "rule",
    "asynchronous",
    "attack",
    "local_steps",
    "clients",
    "speeds",
    "virtual_deadline",
    "seed",
)
"""The settings that are shown for every run that has them, even if all have the same value."""
ALIKE = (IID.name, Partition.name)
"""The splits that give all workers data of one kind."""
# Settings whose values need no name beside them.
_PLAIN = ("name", "dataset", "model", "rule", "attack", "split")

# Settings that change no result.
_UNTOLD = frozenset(
    {
        "results",
        "data_dir",
        "threads",
        "checkpoint_rounds",
        "checkpoint_seconds",
        "record_matrix",
        "track",
    }
)
_GAP = 2
WIDTH = 80
"""Columns of prose."""


def outcome(record: RunRecord) -> dict[str, Any]:
    """Return the facts about a run that ``--json`` prints."""
    keys = (
        "id",
        "identity",
        "name",
        "dataset",
        "model",
        "rule",
        "attack",
        "seed",
        "status",
        "message",
        "origin",
        "rounds",
        "rounds_done",
        "final_accuracy",
        "best_accuracy",
        "final_top3",
        "best_top3",
        "test_accuracy",
        "test_top3",
        "ms_per_round",
        "nonfinite_rounds",
        "skipped_rounds",
        "lost",
        "byzantine",
    )
    found: dict[str, Any] = {key: getattr(record, key) for key in keys}
    results = record.config.get("results", "")
    state = state_path(results, record.id)
    return {
        **found,
        **{key: list(getattr(record, key)) for key in NUMBERED},
        "results": results,
        "state": str(state) if state.exists() else None,
        "config": record.config,
    }


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that tell configurations apart, the main ones first.

    >>> differing([{"seed": 0, "lr": 0.1, "rule": "mean"}, {"seed": 0, "lr": 0.2, "rule": "cge"}])
    ['rule', 'lr']
    """
    keys = dict.fromkeys([*MAIN, *(key for config in configs for key in config)])
    return [
        key
        for key in keys
        if key not in _UNTOLD and len({_value(config, key) for config in configs}) > 1
    ]


def common(configs: Sequence[Mapping[str, Any]], but: Collection[str] = ()) -> str:
    """Return the main settings that are the same in all configurations.

    >>> common([{"rule": "mean", "seed": 0}, {"rule": "mean", "seed": 1}])
    'mean'
    >>> common([{"rule": "median", "local_steps": 20, "clients": None}])
    'median, local steps 20'
    """
    told = {*differing(configs), *but}
    keys = [key for key in MAIN if key not in told and configs[0].get(key) is not None]
    return ", ".join(said(configs[0], key) for key in keys)


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the label of each configuration: the settings in which it differs from the others.

    >>> labels([{"rule": "mean", "seed": 0}, {"rule": "mean", "seed": 1}])
    ['mean, seed 0', 'mean, seed 1']
    """
    keys = differing(configs)
    if "name" in keys:
        rest = sorted(keys[1:], key=lambda key: key != "seed")
        keys = ["name"]
        while rest and len({tuple(_value(c, key) for key in keys) for c in configs}) < len(configs):
            keys.append(rest.pop(0))
    else:
        keys = list(dict.fromkeys(["rule", *keys]))
    return [", ".join(said(config, key) for key in keys) for config in configs]


def print_outcome(
    record: RunRecord, *, as_json: bool = False, model_file: Path | None = None
) -> None:
    """Print how a run ended, where its results are, and how to resume it if it is unfinished."""
    if as_json:
        print(json.dumps(outcome(record)))
    else:
        print_runs([record])
        print(_whereabouts(record, model_file))
    if record.nonfinite_rounds and not as_json:
        what = {"skip": "skipped", "stop": "stopped at", "apply": "applied"}
        print(
            f"{record.nonfinite_rounds} rounds had an aggregate with NaN or inf, and were"
            f" {what[record.config['on_nonfinite']]}: a column had more wrong values than"
            f" {record.rule} tolerates; values of late or silent workers count as wrong",
            file=sys.stderr,
        )
    if record.lost is not None and not as_json:
        print(about_loss(record.lost), file=sys.stderr)
    if comparison(record.config) == "past" and record.config["rounds"] < FIRST_VERDICT:
        if not as_json:
            print(
                "no verdict about any worker: data differ, so each worker is compared with its own"
                f" past of at least {FIRST_VERDICT} rounds",
                file=sys.stderr,
            )
    elif record.suspects and not as_json:
        print(
            f"flagged workers: {about_flags(record.suspects, record.config, record.byzantine)}",
            file=sys.stderr,
        )
    if record.status == "interrupted":
        words = [word for word in sys.argv[1:] if word != "--restart"]
        command = shlex.join(["phocas", *words])
        print(f"{record.message}; resume with:\n  {command}", file=sys.stderr)


def about_loss(lost: int) -> str:
    """Return a line about a run whose model was destroyed."""
    return f"model lost in round {lost}: evidence of later rounds is not counted"


Comparison: TypeAlias = Literal["others", "past", "unlike"]
HEADINGS: dict[Comparison, str] = {"others": "flagged", "past": "changed", "unlike": "differing"}
"""The headings of flagged workers in tables of runs."""


def comparison(config: Mapping[str, Any]) -> Comparison:
    """Return what detection compares each worker with: its own past, or the others.

    If data differ and workers are compared with one another, the others are ``unlike``, and a flag
    is no proof of a fault. This was always so up to version 0.2, which had no ``worker_data``.

    >>> comparison({"split": "by-label", "worker_data": None}), comparison({"split": "iid"})
    ('past', 'others')
    >>> comparison({"split": "by-label"})
    'unlike'
    """
    alike = config.get("split", "iid") in ALIKE
    said = config.get("worker_data") or ("alike" if alike else "differ")
    if "worker_data" in config and said == "differ":
        return "past"
    return "others" if alike else "unlike"


def about_flags(
    flagged: Sequence[int], config: Mapping[str, Any], byzantine: Sequence[int] | None
) -> str:
    """Describe flagged workers, with the Byzantine ones of a simulation.

    >>> about_flags((0, 1), {"split": "iid"}, (0, 1))
    '0, 1: wrong beyond chance; in this simulation 0, 1 are Byzantine'
    >>> of = {"split": "by-label", "worker_data": None}
    >>> for part in about_flags((0, 5), of, (0, 1)).split("; "):
    ...     print(part)
    0, 5: no longer as in their own past, which data that differ (by-label) do not explain
    in this simulation 0, 1 are Byzantine
    false alarms: 5
    >>> about_flags((3,), {"split": "iid"}, None)
    '3: wrong beyond chance'
    """
    false = [] if byzantine is None else [each for each in flagged if each not in byzantine]
    text = listing(tuple(flagged))
    compared = comparison(config)
    if compared == "past":
        text += (
            ": no longer as in their own past, which data that differ"
            f" ({config.get('split')}) do not explain"
        )
    elif compared == "unlike":
        text += f": unlike the others, as their data are ({config['split']}): no proof of a fault"
    elif not false:
        text += ": wrong beyond chance"
    if byzantine:
        verb = "is" if len(byzantine) == 1 else "are"
        text += f"; in this simulation {listing(tuple(byzantine))} {verb} Byzantine"
    elif byzantine is not None:
        text += "; in this simulation no worker is Byzantine"
    return text + (f"; false alarms: {listing(tuple(false))}" if false else "")


def _whereabouts(record: RunRecord, model_file: Path | None) -> str:
    results = record.config["results"]
    text = f"run {record.id} is in {results}"
    if model_file is not None:
        return f"{text}, its model in {model_file}"
    if not state_path(results, record.id).exists():
        return text
    command = ["phocas", "results", "export", "--model", str(record.id)]
    command += ["--output", "model.safetensors"]
    if results != "phocas.sqlite":
        command += ["--results", results]
    return f"{text}; its model: {shlex.join(command)}"


def listing(workers: tuple[int, ...]) -> str:
    """Write worker numbers short.

    >>> listing((0, 1, 2, 3, 7, 9))
    '0-3, 7, 9'
    """
    runs: list[list[int]] = []
    for worker in workers:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def print_table(
    columns: Mapping[str, Sequence[str]],
    *,
    right: Collection[str] = (),
    prose: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table by its columns, at most as wide as the terminal or as COLUMNS.

    Only columns of prose are wrapped. If the table is too wide, optional columns are left out in
    their order, and a line says which; then the widest column is cut.
    """
    console = Console()
    widths = {heading: max(len(heading), *map(len, cells), 1) for heading, cells in columns.items()}
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=sum(widths.values()) + _GAP * len(widths), soft_wrap=True)
    fixed = {heading: width for heading, width in widths.items() if heading not in prose}
    left_out: list[str] = []
    for heading in optional:
        if sum(fixed.values()) + _GAP * (len(widths) - 1) <= console.width:
            break
        if heading in fixed:
            del fixed[heading], widths[heading]
            left_out.append(heading)
    excess = sum(fixed.values()) + _GAP * (len(widths) - 1) - console.width
    widest = max(fixed, key=lambda heading: fixed[heading])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in widths:
        table.add_column(
            heading,
            max_width=max(1, fixed[widest] - excess) if heading == widest and excess > 0 else None,
            justify="right" if heading in right else "left",
            no_wrap=heading not in prose,
            overflow="fold" if heading in prose else "ellipsis",
        )
    for row in zip(*(columns[heading] for heading in widths), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    if left_out:
        console.print(Text(f"not shown at this width: {', '.join(left_out)}", style="dim"))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print the facts that are not empty, each wrapped beside its name, in 80 columns."""
    told = {name: text for name, text in facts.items() if text}
    margin = max(map(len, told), default=0) + _GAP
    for name, text in told.items():
        print(
            textwrap.fill(
                text,
                WIDTH,
                initial_indent=name.ljust(margin),
                subsequent_indent=" " * margin,
                break_on_hyphens=False,
            )
        )


def show(table: Table) -> None:
    """Print a table, in 200 columns if there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def print_runs(records: Sequence[RunRecord], states: Sequence[str] | None = None) -> None:
    """Print the settings that all runs share in a line, and those that differ in a table."""
    configs = [record.config for record in records]
    told = [key for key in differing(configs) if key != "rounds"]  # a column has those done too
    shared = common(configs)
    if shared:
        print(shared)
    columns: dict[str, list[str]] = {"run": [str(record.id) for record in records]}
    columns |= {key: [_value(config, key) for config in configs] for key in told}
    columns["status"] = list(states or [record.status for record in records])
    if any(record.skipped_rounds for record in records):
        columns["skipped"] = [str(record.skipped_rounds) for record in records]
    columns["rounds"] = [f"{record.rounds_done}/{record.rounds}" for record in records]
    columns["final"] = [_number(record.final_accuracy, 3) for record in records]
    columns["best"] = [_number(record.best_accuracy, 3) for record in records]
    if any(record.test_accuracy is not None for record in records):
        columns["test"] = [_number(record.test_accuracy, 3) for record in records]
    columns["ms/round"] = [_number(record.ms_per_round, 1) for record in records]
    shown: dict[str, list[tuple[int, ...]]] = {
        heading: [
            record.suspects if comparison(record.config) == compared else () for record in records
        ]
        for compared, heading in HEADINGS.items()
    }
    shown["unusual"] = [_besides(record.unusual, record.suspects) for record in records]
    for heading, numbers in shown.items():
        if any(numbers):
            columns[heading] = list(map(listing, numbers))
    if any(record.origin for record in records):
        columns["resumed from"] = [record.origin or "" for record in records]
    print_table(
        columns,
        right=("skipped", "rounds", "final", "best", "test", "ms/round"),
        optional=(
            "unusual",
            "ms/round",
            "best",
            "resumed from",
            "name",
            "differing",
            "flagged",
        ),
    )
    print_facts(
        {
            "model lost": _by_run(
                {r.id: "" if r.lost is None else f"round {r.lost}" for r in records}
            ),
            "flagged servers": _by_run({r.id: listing(r.suspect_servers) for r in records}),
        }
    )


def _by_run(texts: Mapping[int, str]) -> str:
    """Return the texts that are not empty, each with the runs that it is about.

    >>> _by_run({1: "round 1", 2: "", 3: "round 8", 4: "round 8", 5: "round 8"})
    'run 1: round 1; runs 3-5: round 8'
    """
    about: dict[str, list[int]] = {}
    for run, text in texts.items():
        if text:
            about.setdefault(text, []).append(run)
    return "; ".join(
        f"run{'s' * (len(runs) > 1)} {listing(tuple(runs))}: {text}" for text, runs in about.items()
    )


def print_grouped(
    records: Sequence[RunRecord], keys: Sequence[str], versus: str | None = None
) -> None:
    """Print means over seeds; a line names other settings in which averaged runs differ.

    Args:
        records: the runs.
        keys: the settings by which runs are grouped.
        versus: the rule for paired differences, if any.
    """
    shared = common([record.config for record in records], but=(*keys, "seed"))
    if shared:
        print(shared)
    groups = grouped(records, keys, versus)
    columns = {key: [_value(group, key) for group in groups] for key in keys}
    columns["seeds"] = [str(len(group["seeds"])) for group in groups]
    for heading, name, digits in (
        ("final", "final_accuracy", 3),
        ("best", "best_accuracy", 3),
        ("test", "test_accuracy", 3),
        ("ms/round", "ms_per_round", 1),
    ):
        if heading == "test" and all(group[name]["mean"] is None for group in groups):
            continue
        columns[heading] = [_number(group[name]["mean"], digits) for group in groups]
        if heading != "ms/round":
            columns[f"+- {heading}"] = [
                _number(group[name]["deviation"], digits) for group in groups
            ]
        if heading == "final":
            columns["95% interval"] = [_interval(group[name]) for group in groups]
    if versus is not None:
        columns[f"minus {versus}"] = [_signed(group["difference"]["mean"]) for group in groups]
        columns["its 95% interval"] = [_interval(group["difference"], "+") for group in groups]
        columns["pairs"] = [str(group["difference"]["pairs"]) for group in groups]
    print_table(
        columns,
        right=[heading for heading in columns if heading not in keys],
        optional=("ms/round", "+- best", "best", "+- final"),
    )
    by_id = {record.id: record.config for record in records}
    mixed = {
        key: None
        for group in groups
        for key in differing([by_id[run] for run in group["runs"]])
        if key not in ("seed", "name", *(PARAMETERS[each] for each in keys if each in PARAMETERS))
    }
    if mixed:
        print("runs of one row differ in more than their seed; to separate them use")
        print(f"  --by {','.join([*keys, *mixed])}")


def _interval(found: Mapping[str, float | None], sign: str = "") -> str:
    low, high = found["low"], found["high"]
    return "" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _value(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key) if key in config else setting_of(config, key)
    if value is None:
        return "" if key == "name" else "none"
    return value if isinstance(value, str) else json.dumps(value)


def said(config: Mapping[str, Any], key: str) -> str:
    """Return the value of a setting as text, with its name unless the value is clear alone."""
    value = _value(config, key)
    if key == "attack":
        return "no attack" if value == "none" else value
    return value if key in _PLAIN else f"{key.replace('_', ' ')} {value}"


def _besides(workers: tuple[int, ...], told: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(worker for worker in workers if worker not in told)
