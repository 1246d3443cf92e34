"""``phocas sweep``: a grid of runs on all cores, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep")(sweep)


def sweep(
    grid: Annotated[Path, typer.Argument(help="A TOML file: settings, and a [grid] of lists.")],
    results: Annotated[
        str | None,
        typer.Option(help="The file that keeps the results.", show_default="as in the grid"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time.", show_default="one a core")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run, and check it.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list at the end.")] = False,
) -> None:
    """Run a grid of rules, attacks and seeds; what is complete is not run again."""
    import json

    from phocas.experiments.config import expand_grid, read_toml
    from phocas.experiments.sweep import sweep as run_all
    from phocas.report.progress import SweepProgress, interruptible
    from phocas.report.tables import outcome, runs_table, show

    values = read_toml(grid)
    if results is not None:
        values["results"] = results
    configs = expand_grid(values, str(grid))
    if dry_run:
        for config in configs:
            typer.echo(f"{config.title()}, seed {config.seed}")
        typer.echo(f"{len(configs)} runs into {configs[0].results}")
        return
    with interruptible() as stop, SweepProgress(configs, quiet=json_) as progress:
        records = run_all(
            configs, processes=processes, watch=progress.show, should_stop=stop.is_set
        )
    ended = [record for record in records if record is not None]
    if json_:
        typer.echo(json.dumps([outcome(record) for record in ended]))
    else:
        show(runs_table(ended))
    left = sum(record is None or record.status in ("interrupted", "running") for record in records)
    if left:
        typer.echo(
            f"{left} of {len(configs)} runs are not done; the same command goes on", err=True
        )
        raise typer.Exit(130)
    if any(record.status == "failed" for record in ended):
        raise typer.Exit(1)
