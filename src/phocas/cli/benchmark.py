"""``phocas benchmark``: rules compared by their worst attack, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phocas.cli import reject_unused

if TYPE_CHECKING:
    from phocas.experiments.attack_benchmark import Benchmark, CellResult


def benchmark(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help=r"TOML file: settings, and \[benchmark] with rules, attacks, byzantine, splits."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Figure of the heat maps: a .png or .svg file.")
    ] = None,
    results: Annotated[
        str | None, typer.Option(help="Results file.", show_default="that of the file")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Number of runs at the same time.", show_default="one per core"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and count the runs, and run nothing.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list at the end.")] = False,
) -> None:
    """Compare rules by their worst attack, with a heat map.

    Settings are chosen on validation data. The same command resumes.
    """
    import json

    if dry_run:
        reject_unused(context, ["json_", "output"], "with --dry-run")
    if not json_:
        typer.echo(f"reading {file}", err=True)  # the imports below take seconds

    from phocas.experiments.attack_benchmark import plan_benchmark
    from phocas.experiments.config import read_toml
    from phocas.experiments.results import ENDED
    from phocas.experiments.sweep import attempts, sweep
    from phocas.files import check_writable
    from phocas.report.progress import SweepProgress, interruptible
    from phocas.report.tables import print_table

    values = read_toml(file)
    if results is not None:
        values["results"] = results
    plan = plan_benchmark(values, str(file))
    configs = plan.configs()
    place = configs[0].results
    if dry_run:
        ended = sum(record is not None and record.status in ENDED for record in attempts(configs))
        typer.echo(f"{len(plan.cells)} cells")
        typer.echo(f"{len(configs)} runs into {place}, {len(configs) - ended} of them to be run")
        return
    if output is not None and output.suffix not in (".png", ".svg"):
        raise ValueError(f"a figure is written as .png or .svg: got {output}")
    check_writable(Path(place), "the results file")
    with interruptible() as stop, SweepProgress(configs, quiet=json_) as progress:
        records = sweep(configs, processes=processes, watch=progress.show, should_stop=stop.is_set)
    outcomes = _outcomes(plan, [record for record in records if record is not None])
    if json_:
        typer.echo(json.dumps(outcomes))
    else:
        print_table(_columns(outcomes), right=("f", "accuracy", "+-", "validation"))
    if output is not None:
        _draw(plan, outcomes, output, file.name)
        typer.echo(f"heat maps in {output}", err=True)
    left = [record for record in records if record is None or record.status not in ENDED]
    if left:
        failed = sum(record is not None and record.status == "failed" for record in left)
        typer.echo(
            f"{len(left)} of {len(configs)} runs are not complete, {failed} of them failed; the"
            f" same command resumes. Results are in {place}",
            err=True,
        )
        raise typer.Exit(1 if failed == len(left) else 130)


def _outcomes(plan: Benchmark, records: list[Any]) -> list[dict[str, Any]]:
    """Return the result of each cell as JSON data; a cell that is not complete has none."""
    from phocas.experiments.attack_benchmark import judge_cell

    by_identity = {record.identity: record for record in records}
    return [
        {
            "rule": cell.rule,
            "split": cell.split,
            "byzantine": cell.byzantine,
            **_result(judge_cell(cell, by_identity)),
        }
        for cell in plan.cells
    ]


def _result(found: CellResult | None) -> dict[str, Any]:
    from dataclasses import asdict

    if found is None:
        return dict.fromkeys(("choice", "worst", "accuracy", "validation", "by_attack"))
    return asdict(found)


def _columns(outcomes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the columns of the table in the terminal."""
    columns = {
        "rule": [each["rule"] for each in outcomes],
        "split": [each["split"] for each in outcomes],
        "f": [str(each["byzantine"]) for each in outcomes],
        "accuracy": [_number(each["accuracy"], "mean") for each in outcomes],
        "+-": [_number(each["accuracy"], "deviation") for each in outcomes],
        "validation": [_number(each, "validation") for each in outcomes],
        "worst attack": [each["worst"] or "not complete" for each in outcomes],
        "chosen": [each["choice"] or "" for each in outcomes],
    }
    return {name: texts for name, texts in columns.items() if any(texts)}


def _number(values: dict[str, Any] | None, key: str) -> str:
    return "" if values is None or values[key] is None else f"{values[key]:.3f}"


def _draw(plan: Benchmark, outcomes: list[dict[str, Any]], path: Path, title: str) -> None:
    from phocas.report.figures import save_figure
    from phocas.report.heatmap import HeatMap, heatmap_figure

    found = {
        (each["rule"], each["split"], each["byzantine"]): each["accuracy"] for each in outcomes
    }
    rules, splits, numbers = (
        list(dict.fromkeys(getattr(cell, key) for cell in plan.cells))
        for key in ("rule", "split", "byzantine")
    )
    maps = []
    for rule in rules:
        cells = [[found[rule, split, f] for f in numbers] for split in splits]
        values = [[None if cell is None else cell["mean"] for cell in row] for row in cells]
        maps.append(HeatMap(rule, splits, list(map(str, numbers)), values))
    title = f"{title}: accuracy under the worst attack"
    save_figure(heatmap_figure(maps, title=title, x="Byzantine f"), path)
