"""``phocas runs`` and ``phocas export``: what has been run, as a table, as CSV, as models."""

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
    status: Annotated[
        str | None,
        typer.Option(help="Only runs that are complete, interrupted, stopped, failed, killed."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List what has been run, what tells the runs apart, and how they ended."""
    import json
    import typing

    from phocas.experiments.locks import actual_status
    from phocas.experiments.results import Results, Status
    from phocas.report.tables import outcome, print_runs
    from phocas.specs import unknown

    statuses = (*typing.get_args(Status), "killed")
    if status is not None and status not in statuses:
        raise ValueError(unknown("status", status, statuses, plural="it may be"))
    with Results(results, read=True) as file:
        found = [(record, actual_status(record, results)) for record in file.runs()]
    found = [(record, state) for record, state in found if status in (None, state)]
    if json_:
        typer.echo(json.dumps([{**outcome(record), "status": state} for record, state in found]))
    elif found:
        print_runs([record for record, _ in found], [state for _, state in found])
    else:
        typer.echo(f"no {status + ' ' if status else ''}runs in {results}")


def export(
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write a table here; - is the standard output.")
    ] = None,
    results: FILE = DEFAULT,
    table: Annotated[
        str,
        typer.Option(
            help="runs, rounds, evaluations, dropped, dropped_by_server, implausible, virtual."
        ),
    ] = "runs",
    run: Annotated[list[int] | None, typer.Option(help="Only this run. Repeatable.")] = None,
    model: Annotated[
        int | None, typer.Option(help="Write the model of this run, which must be complete.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw accuracy against virtual time here, as PNG.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the model, as safetensors.")
    ] = Path("model.safetensors"),
) -> None:
    """Write a table of the results as CSV, a figure, or the model that a run has trained."""
    import sys

    from phocas.experiments.results import Results
    from phocas.files import check_writable
    from phocas.report.tables import EXPORTS, export_csv
    from phocas.specs import unknown

    if sum(asked is not None for asked in (csv, model, figure)) != 1:
        raise ValueError(
            "phocas export needs --csv FILE for a table, --model RUN for a model, or --figure FILE"
        )
    if table not in EXPORTS:
        raise ValueError(unknown("table", table, EXPORTS))
    with Results(results, read=True) as file:
        if model is not None:
            check_writable(output, "the model")
            _export_model(results, file.run(model).id, output)
            return
        chosen = [file.run(number) for number in run] if run else file.runs()
        if figure is not None:
            from phocas.report.virtual_time import draw_virtual_time

            check_writable(figure, "the figure")
            draw_virtual_time(file, chosen, figure)
            typer.echo(f"accuracy against virtual time in {figure}")
            return
        assert csv is not None
        if str(csv) == "-":
            export_csv(file, table, chosen, sys.stdout)
            return
        check_writable(csv, "the table")
        csv.parent.mkdir(parents=True, exist_ok=True)
        with csv.open("w", newline="", encoding="utf-8") as out:
            rows = export_csv(file, table, chosen, out)
    typer.echo(f"{rows} rows in {csv}")


def _export_model(results: Path, run: int, output: Path) -> None:
    from phocas.experiments.runner import final_model
    from phocas.training.checkpoints import save_model

    tensors = final_model(results, run)
    save_model(output, tensors)
    size = sum(tensor.numel() for tensor in tensors.values())
    typer.echo(f"the model of run {run}, {size:,} values, in {output}")
