"""``phocas results``: list, show, plot, export and report what a results file has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phocas.cli import Application, reject_unused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phocas.experiments.results import Results, RunRecord

FILE = Annotated[Path, typer.Option("--results", help="Results file.")]
DEFAULT = Path("phocas.sqlite")


def register(app: typer.Typer, group: str) -> None:
    """Add the group of commands."""
    inner = Application()
    inner.callback()(results)
    for name, function in {
        "list": list_runs,
        "show": show,
        "plot": plot,
        "export": export,
        "report": report,
    }.items():
        inner.command(name)(function)
    app.add_typer(inner, name="results", rich_help_panel=group)


def results(context: typer.Context) -> None:
    """List, show, plot, export and report runs."""
    if context.invoked_subcommand is None:
        list_runs()


def list_runs(
    results: FILE = DEFAULT,
    status: Annotated[
        str | None,
        typer.Option(help="Only runs with this status: complete, interrupted, stopped, failed."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="Mean, deviation and 95% interval over seeds, grouped by settings: rule,attack,q."
        ),
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option(help="With --by: paired differences from the runs of this rule."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the runs: settings in which they differ, status, accuracy."""
    import json
    import typing

    from phocas.experiments.locks import actual_status
    from phocas.experiments.results import Results, Status, latest
    from phocas.report.statistics import grouped
    from phocas.report.tables import outcome, print_grouped, print_runs
    from phocas.specs import unknown

    statuses = (*typing.get_args(Status), "killed")
    if status is not None and status not in statuses:
        raise ValueError(unknown("status", status, statuses, plural="it may be"))
    with Results(results, read=True) as file:
        found = [(record, actual_status(record, results)) for record in file.runs()]
    found = [(record, state) for record, state in found if status in (None, state)]
    if by is None and versus is not None:
        raise ValueError("--versus has no effect without --by: write --by rule --versus mean")
    if by is not None:
        keys = _settings(by)
        records = [record for record, _ in found]
        records = latest(records) if status is None else records
        if json_:
            typer.echo(json.dumps(grouped(records, keys, versus)))
        elif records:
            print_grouped(records, keys, versus)
        else:
            typer.echo(f"no run in {results} is complete")
    elif json_:
        typer.echo(json.dumps([{**outcome(record), "status": state} for record, state in found]))
    elif found:
        print_runs([record for record, _ in found], [state for _, state in found])
    else:
        typer.echo(f"no {status + ' ' if status else ''}runs in {results}")


def show(
    run: Annotated[
        int | None, typer.Argument(help="Number of the run.", show_default="the last")
    ] = None,
    results: FILE = DEFAULT,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show one run: settings, accuracy, time, flagged workers."""
    import json

    from phocas.experiments.results import Results
    from phocas.report.run import about_run, print_run

    with Results(results, read=True) as file:
        known = about_run(file, file.run(run))
    if json_:
        typer.echo(json.dumps(known))
    else:
        print_run(known)


def plot(
    results: Annotated[Path, typer.Argument(help="Results file.")] = DEFAULT,
    by: Annotated[
        str | None,
        typer.Option(
            help="Setting whose values get a panel each.", show_default="attack, if it varies"
        ),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(
            help="Settings whose values get a line each: rule,lr.",
            show_default="those in which runs differ",
        ),
    ] = None,
    x: Annotated[str, typer.Option("--x", help="Horizontal axis: round, seconds, virtual.")] = (
        "round"
    ),
    y: Annotated[str, typer.Option("--y", help="Vertical axis: accuracy, top3, loss.")] = (
        "accuracy"
    ),
    run: Annotated[list[int] | None, typer.Option(help="Only this run. Repeatable.")] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="Figure to write: .png, .svg or .pdf. Repeatable.",
            show_default="curves.png",
        ),
    ] = None,
    band: Annotated[
        str, typer.Option(help="Band around the mean over seeds: range, deviation, interval.")
    ] = "range",
    style: Annotated[str, typer.Option(help="Style of the figure: screen, paper.")] = "screen",
    width: Annotated[
        float | None,
        typer.Option(help="Width of the figure in inches.", show_default="3.25 for --style paper"),
    ] = None,
) -> None:
    """Plot the curves of runs, with bands over seeds."""
    from phocas.experiments.results import Results, latest
    from phocas.files import check_writable
    from phocas.report.figures import Looks
    from phocas.report.plots import Choice
    from phocas.report.plots import plot as draw

    paths = output or [Path("curves.png")]
    for path in paths:
        check_writable(path, "the figure")
    panels_by, *more = (*_settings(by), None)
    if more[1:]:
        raise ValueError(f"--by takes one setting, --lines several: got {by}")
    looks = Looks(style, width, band)
    choice = Choice(x, y, panels_by, _settings(lines), looks)  # type: ignore[arg-type]  # checked
    with Results(results, read=True) as file:
        known = [file.run(number) for number in run] if run else latest(file.runs())
        if not known:
            raise ValueError(f"{results} has no complete runs: see phocas results list")
        panels, drawn = draw(file, known, paths, choice)
    panes = f"{panels} panel{'s' if panels > 1 else ''}"
    typer.echo(f"{len(known)} runs, {drawn} lines, {panes}: {', '.join(map(str, paths))}")


def _settings(text: str | None) -> tuple[str, ...]:
    """Read the names of settings, ``rule,batch-size``; raise for an unknown one."""
    from phocas.experiments.config import check_setting

    words = [word.strip() for word in (text or "").split(",")]
    return tuple(dict.fromkeys(check_setting(word) for word in words if word))


def export(
    context: typer.Context,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="csv or parquet; markdown or latex: means and deviations over seeds."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="The same as --format csv --output FILE.")
    ] = None,
    results: FILE = DEFAULT,
    table: Annotated[
        str,
        typer.Option(
            help="For csv and parquet: runs, rounds, evaluations, dropped, dropped_by_server,"
            " implausible, virtual."
        ),
    ] = "runs",
    by: Annotated[
        str | None,
        typer.Option(
            help="For markdown and latex: settings of a row, and last that of the columns.",
            show_default="those that vary, last attack",
        ),
    ] = None,
    value: Annotated[
        str, typer.Option(help="For markdown and latex: final_accuracy, best_accuracy, ...")
    ] = "final_accuracy",
    run: Annotated[
        list[int] | None, typer.Option(help="With a format: only this run. Repeatable.")
    ] = None,
    model: Annotated[
        int | None, typer.Option(help="Number of a complete run whose model to write.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; - is the standard output.",
            show_default="-, or model.safetensors",
        ),
    ] = None,
) -> None:
    """Write a table of the results for other programs or a paper, or the model of a run."""
    from phocas.experiments.results import Results
    from phocas.files import check_writable
    from phocas.report.exports import EXPORTS, FORMATS
    from phocas.specs import unknown

    if csv is not None:
        reject_unused(context, ["format_", "output"], "with --csv, which gives both")
        format_, output = "csv", csv
    if (format_ is None) == (model is None):
        raise ValueError(
            "an export needs --format csv, parquet, markdown or latex for a table, or --model RUN"
            " for a model"
        )
    if model is not None:
        reject_unused(context, ["table", "run", "by", "value"], "with --model")
        output = output or Path("model.safetensors")
        check_writable(output, "the model")
        with Results(results, read=True) as file:
            _export_model(results, file.run(model).id, output)
        return
    if format_ not in FORMATS:
        raise ValueError(unknown("format", format_ or "", FORMATS))
    if table not in EXPORTS:
        raise ValueError(unknown("table", table, EXPORTS))
    summary = format_ in ("markdown", "latex")
    unused = ["table"] if summary else ["by", "value"]
    reject_unused(context, unused, f"with --format {format_}")
    to_file = output is not None and str(output) != "-"
    if to_file:
        assert output is not None
        check_writable(output, "the table")
        output.parent.mkdir(parents=True, exist_ok=True)
    if format_ == "parquet" and not to_file:
        raise ValueError("--format parquet needs --output FILE")
    with Results(results, read=True) as file:
        chosen = [file.run(number) for number in run] if run else file.runs()
        if summary:
            text, rows = _summary(chosen, by, value, format_, everything=bool(run))
        else:
            text, rows = _table(file, table, chosen, None if format_ == "csv" else output)
    if not to_file:
        typer.echo(text, nl=summary)
        return
    assert output is not None
    if format_ != "parquet":
        with output.open("w", newline="", encoding="utf-8") as out:
            out.write(text + "\n" * summary)
    typer.echo(f"{rows} rows in {output}")


def _table(
    file: Results, table: str, runs: Sequence[RunRecord], path: Path | None
) -> tuple[str, int]:
    """Return a table as CSV, or write it to a path as Parquet; with its number of rows."""
    from phocas.report.exports import as_csv, export_rows, write_parquet

    rows = export_rows(file, table, runs)
    if path is None:
        return as_csv(rows), len(rows)
    write_parquet(rows, path)
    return "", len(rows)


def _summary(
    runs: Sequence[RunRecord], by: str | None, value: str, format_: str, *, everything: bool
) -> tuple[str, int]:
    """Return a summary over seeds as text, with its number of rows."""
    from phocas.experiments.results import latest
    from phocas.report.exports import as_latex, as_markdown, default_keys, summary

    records = runs if everything else latest(runs)
    if not records:
        raise ValueError("there are no complete runs: see phocas results list")
    headings, rows = summary(records, _settings(by) or default_keys(records), value)
    write = as_latex if format_ == "latex" else as_markdown
    return write(headings, rows), len(rows)


def _export_model(results: Path, run: int, output: Path) -> None:
    from phocas.experiments.runner import final_model
    from phocas.training.checkpoints import save_model

    tensors = final_model(results, run)
    save_model(output, tensors)
    size = sum(tensor.numel() for tensor in tensors.values())
    typer.echo(f"the model of run {run}, {size:,} values, in {output}")


def report(
    context: typer.Context,
    results: Annotated[
        Path, typer.Argument(help="Results file, or the JSON report or log of a guard.")
    ] = DEFAULT,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the report in a browser while runs continue.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(help="With --serve: address; any but 127.0.0.1 lets others read."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve: port; 0 takes a free one.")] = 8765,
) -> None:
    """Write or serve the HTML report, which needs no network."""
    if serve:
        reject_unused(context, ["output"], "with --serve, which writes no file")
        _serve(results, host, port)
        return
    reject_unused(context, ["host", "port"], "without --serve")
    from phocas.files import check_writable
    from phocas.report.page.writing import write_report

    check_writable(output, "the report")
    typer.echo(write_report(results, output))


def _serve(results: Path, host: str, port: int) -> None:
    """Serve the report until Ctrl+C; the results file is only read."""
    from phocas.report.page.server import PageServer

    with PageServer(results, host, port) as server:
        typer.echo(f"{results} is shown at {server.url} until Ctrl+C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("closed")
