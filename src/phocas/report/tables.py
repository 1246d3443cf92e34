"""Tables of runs, and the outcome of one."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phocas.experiments.results import Results, RunRecord

EXPORTS = ("runs", "rounds", "evaluations", "dropped", "dropped_by_server")


def outcome(record: RunRecord) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    keys = (
        "id",
        "identity",
        "dataset",
        "model",
        "rule",
        "attack",
        "seed",
        "status",
        "message",
        "rounds",
        "rounds_done",
        "final_accuracy",
        "best_accuracy",
        "final_top3",
        "best_top3",
        "ms_per_round",
        "nonfinite_rounds",
        "skipped_rounds",
    )
    found: dict[str, Any] = {key: getattr(record, key) for key in keys}
    return {**found, "suspects": list(record.suspects), "results": record.config["results"]}


def print_outcome(record: RunRecord, *, as_json: bool) -> None:
    """Print how a run ended, and how to go on with it if it did not."""
    if as_json:
        print(json.dumps(outcome(record)))
    else:
        show(runs_table([record]))
    if record.nonfinite_rounds and not as_json:
        what = {"skip": "skipped", "stop": "stopped at", "apply": "applied"}
        print(
            f"{record.nonfinite_rounds} rounds had an aggregate that was not finite, and were"
            f" {what[record.config['on_nonfinite']]}: more lies in a column than {record.rule}"
            " survives",
            file=sys.stderr,
        )
    if record.suspects and record.config["split"] != "iid" and not as_json:
        print(
            f"workers hold different data ({record.config['split']}): a suspect is a worker that"
            " differs from the others, and need not be wrong",
            file=sys.stderr,
        )
    if record.status == "interrupted":
        words = [word for word in sys.argv[1:] if word != "--resume"]
        command = shlex.join(["phocas", *words, "--resume"])
        print(f"{record.message}; go on with:\n  {command}", file=sys.stderr)


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


def show(table: Table) -> None:
    """Print a table; where there is no terminal, as wide as it likes."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def runs_table(records: Sequence[RunRecord], states: Sequence[str] | None = None) -> Table:
    """Lay out runs: what was run, and how it ended."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "task", "rule", "attack", "seed", "status"):
        table.add_column(heading, overflow="fold")
    for heading in ("rounds", "final", "best", "ms/round"):
        table.add_column(heading, justify="right")
    table.add_column("suspects")
    for record, state in zip(records, states or [r.status for r in records], strict=True):
        table.add_row(
            str(record.id),
            f"{record.dataset} {record.model}",
            record.rule,
            record.attack or "none",
            str(record.seed),
            state + (f" ({record.skipped_rounds} skipped)" if record.skipped_rounds else ""),
            f"{record.rounds_done}/{record.rounds}",
            _share(record.final_accuracy),
            _share(record.best_accuracy),
            "" if record.ms_per_round is None else f"{record.ms_per_round:.1f}",
            listing(record.suspects),
        )
    return table


def export_csv(results: Results, table: str, runs: Iterable[RunRecord], file: TextIO) -> int:
    """Write one table of the results as CSV and return the number of rows."""
    rows: list[dict[str, Any]] = []
    for record in runs:
        if table == "runs":
            rows.append({**outcome(record), "suspects": " ".join(map(str, record.suspects))})
        else:
            about = {"rule": record.rule, "attack": record.attack, "seed": record.seed}
            rows += [{**row, **about} for row in results.table(table, record.id)]
    if rows:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
