"""What has been run: ``phocas runs``, ``phocas show``, ``phocas plot`` and ``phocas export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FILE = Annotated[Path, typer.Option("--results", help="The file that keeps the results.")]
DEFAULT = Path("phocas.sqlite")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("runs")(runs)
    app.command("show")(show)
    app.command("plot")(plot)
    app.command("export")(export)


def runs(
    results: FILE = DEFAULT,
    status: Annotated[
        str | None,
        typer.Option(help="Only runs that are complete, interrupted, stopped, failed, killed."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Mean and deviation over the seeds of runs with the same: rule,attack."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List what has been run, what tells the runs apart, and how they ended."""
    import json
    import typing

    from phocas.experiments.locks import actual_status
    from phocas.experiments.results import Results, Status, latest
    from phocas.report.tables import grouped, outcome, print_grouped, print_runs
    from phocas.specs import unknown

    statuses = (*typing.get_args(Status), "killed")
    if status is not None and status not in statuses:
        raise ValueError(unknown("status", status, statuses, plural="it may be"))
    with Results(results, read=True) as file:
        found = [(record, actual_status(record, results)) for record in file.runs()]
    found = [(record, state) for record, state in found if status in (None, state)]
    if by is not None:
        keys = _settings(by)
        records = [record for record, _ in found]
        records = latest(records) if status is None else records
        if json_:
            typer.echo(json.dumps(grouped(records, keys)))
        elif records:
            print_grouped(records, keys)
        else:
            typer.echo(f"no runs in {results} have come to their end")
    elif json_:
        typer.echo(json.dumps([{**outcome(record), "status": state} for record, state in found]))
    elif found:
        print_runs([record for record, _ in found], [state for _, state in found])
    else:
        typer.echo(f"no {status + ' ' if status else ''}runs in {results}")


def show(
    run: Annotated[
        int | None, typer.Argument(help="The number of a run.", show_default="the last")
    ] = None,
    results: FILE = DEFAULT,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show one run: its settings, its curve, where its time went, and who was wrong."""
    import json

    from phocas.experiments.results import Results
    from phocas.report.run import about_run, print_run

    with Results(results, read=True) as file:
        records = file.runs() if run is None else [file.run(run)]
        if not records:
            raise ValueError(f"there is no run in {results}")
        known = about_run(file, records[-1])
    if json_:
        typer.echo(json.dumps(known))
    else:
        print_run(known)


def plot(
    results: Annotated[Path, typer.Argument(help="The file that keeps the results.")] = DEFAULT,
    by: Annotated[
        str | None, typer.Option(help="A panel for each value.", show_default="attack, if varied")
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(help="A line for each value: rule,lr.", show_default="what tells runs apart"),
    ] = None,
    x: Annotated[str, typer.Option("--x", help="round, seconds or virtual.")] = "round",
    y: Annotated[str, typer.Option("--y", help="accuracy, top3 or loss.")] = "accuracy",
    run: Annotated[list[int] | None, typer.Option(help="Only this run. Repeatable.")] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="A .png or .svg. Repeatable.", show_default="curves.png"
        ),
    ] = None,
) -> None:
    """Draw the curves of any sweep: a line a rule, a band over its seeds, a panel an attack."""
    from phocas.experiments.results import Results, latest
    from phocas.files import check_writable
    from phocas.report.plots import Choice
    from phocas.report.plots import plot as draw

    paths = output or [Path("curves.png")]
    for path in paths:
        check_writable(path, "the figure")
    panels_by, *more = (*_settings(by), None)
    if more[1:]:
        raise ValueError(f"--by takes one setting, --lines several: got {by}")
    choice = Choice(x, y, panels_by, _settings(lines))  # type: ignore[arg-type]  # which checks x
    with Results(results, read=True) as file:
        known = [file.run(number) for number in run] if run else latest(file.runs())
        if not known:
            raise ValueError(f"{results} has no runs that have come to their end: see phocas runs")
        panels, drawn = draw(file, known, paths, choice)
    panes = f"{panels} panel{'s' if panels > 1 else ''}"
    typer.echo(f"{len(known)} runs, {drawn} lines, {panes}: {', '.join(map(str, paths))}")


def _settings(text: str | None) -> tuple[str, ...]:
    """Read the names of settings, ``rule,batch-size``, and refuse what is none."""
    from phocas.experiments.config import check_setting

    words = [word.strip().replace("-", "_") for word in (text or "").split(",")]
    return tuple(check_setting(word) for word in dict.fromkeys(words) if word)


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
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the model, as safetensors.")
    ] = Path("model.safetensors"),
) -> None:
    """Write a table of the results as CSV, or the model that a run has trained."""
    import sys

    from phocas.experiments.results import Results
    from phocas.files import check_writable
    from phocas.report.tables import EXPORTS, export_csv
    from phocas.specs import unknown

    if (csv is None) == (model is None):
        raise ValueError("phocas export needs --csv FILE for a table, or --model RUN for a model")
    if table not in EXPORTS:
        raise ValueError(unknown("table", table, EXPORTS))
    with Results(results, read=True) as file:
        if model is not None:
            check_writable(output, "the model")
            _export_model(results, file.run(model).id, output)
            return
        chosen = [file.run(number) for number in run] if run else file.runs()
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
