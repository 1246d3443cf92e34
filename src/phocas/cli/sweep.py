"""``phocas sweep``: a grid of runs on all cores, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phocas.cli import reject_unused


def sweep(
    context: typer.Context,
    grid: Annotated[
        Path, typer.Argument(help=r"TOML file: settings, and a \[grid] of lists to combine.")
    ],
    results: Annotated[
        str | None, typer.Option(help="Results file.", show_default="that of the grid")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Number of runs at the same time.", show_default="one per core"),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Experiment tracker: tensorboard:DIR, wandb, mlflow or module:Name."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the runs, and run nothing.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list at the end.")] = False,
) -> None:
    """Run a grid of settings on all cores; complete runs are kept."""
    import json

    if dry_run:
        reject_unused(context, ["json_"], "with --dry-run")
    if not json_:
        typer.echo(f"reading {grid}", err=True)  # the imports below take seconds

    from phocas.experiments.config import expand_grid, read_toml
    from phocas.experiments.sweep import attempts
    from phocas.experiments.sweep import sweep as run_all
    from phocas.files import check_writable
    from phocas.report.progress import SweepProgress, interruptible
    from phocas.report.tables import labels, outcome, print_runs

    values = read_toml(grid)
    if "grid" not in values:
        raise ValueError(
            f"{grid} has no [grid]: it is one run, which phocas train --config {grid} runs"
        )
    if results is not None:
        values["results"] = results
    if track:
        values["track"] = track
    configs = expand_grid(values, str(grid))
    place = configs[0].results
    if dry_run:
        states = [attempt.status if attempt else "to run" for attempt in attempts(configs)]
        for label, state in zip(
            labels([config.model_dump() for config in configs]), states, strict=True
        ):
            typer.echo(f"{state:<11} {label}")
        left = sum(state not in ("complete", "stopped") for state in states)
        typer.echo(f"{len(configs)} runs into {place}, {left} of them to be run")
        return
    check_writable(Path(place), "the results file")
    with interruptible() as stop, SweepProgress(configs, quiet=json_) as progress:
        records = run_all(
            configs, processes=processes, watch=progress.show, should_stop=stop.is_set
        )
    ended = [record for record in records if record is not None]
    if json_:
        typer.echo(json.dumps([outcome(record) for record in ended]))
    elif ended:
        print_runs(ended)
        typer.echo(
            f"results in {place}; the model of a run:"
            " phocas results export --model RUN --output model.safetensors"
            + (f" --results {place}" if place != "phocas.sqlite" else "")
        )
    left = sum(record is None or record.status in ("interrupted", "running") for record in records)
    if left:
        typer.echo(
            f"{left} of {len(configs)} runs are not complete; the same command resumes."
            f" Results are in {place}",
            err=True,
        )
        raise typer.Exit(130)
    if any(record.status == "failed" for record in ended):
        raise typer.Exit(1)
