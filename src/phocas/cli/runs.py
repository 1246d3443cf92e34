"""``phocas runs`` and ``phocas export``: what has been run, how it ended, and all of it as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FILE = Annotated[Path, typer.Option("--results", help="The file that keeps the results.")]
DEFAULT = Path("phocas.sqlite")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("runs")(runs)
    app.command("export")(export)


def runs(
    results: FILE = DEFAULT,
    status: Annotated[str | None, typer.Option(help="Only runs that ended so.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List what has been run, and how it ended."""
    import json

    from phocas.experiments.locks import actual_status
    from phocas.experiments.results import Results
    from phocas.report.tables import outcome, runs_table, show

    with Results(results, must_exist=True) as file:
        found = [(record, actual_status(record, results)) for record in file.runs()]
    found = [(record, state) for record, state in found if status in (None, state)]
    if json_:
        typer.echo(json.dumps([{**outcome(record), "status": state} for record, state in found]))
    elif found:
        show(runs_table([record for record, _ in found], [state for _, state in found]))
    else:
        typer.echo(f"no runs in {results}")


def export(
    csv: Annotated[Path, typer.Option("--csv", help="Where to write; - is the standard output.")],
    results: FILE = DEFAULT,
    table: Annotated[
        str, typer.Option(help="runs, rounds, evaluations, dropped or dropped_by_server.")
    ] = "runs",
    run: Annotated[list[int] | None, typer.Option(help="Only this run. Repeatable.")] = None,
) -> None:
    """Write a table of the results as CSV."""
    import sys

    from phocas.experiments.results import Results
    from phocas.report.tables import EXPORTS, export_csv
    from phocas.specs import unknown

    if table not in EXPORTS:
        raise ValueError(unknown("table", table, EXPORTS))
    with Results(results, must_exist=True) as file:
        chosen = [file.run(number) for number in run] if run else file.runs()
        if str(csv) == "-":
            export_csv(file, table, chosen, sys.stdout)
            return
        with csv.open("w", newline="", encoding="utf-8") as out:
            rows = export_csv(file, table, chosen, out)
    typer.echo(f"{rows} rows in {csv}")
