"""The part of ``phocas reproduce`` for studies of rare features, whose results are losses."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from phocas.experiments.reproduction.rare.simulation import SimulationSettings
    from phocas.experiments.reproduction.rare.study import Study, StudyResults


def reproduce_rare(
    study: Study,
    results: StudyResults,
    folder: Path,
    processes: int | None,
    *,
    dry_run: bool,
    judge: bool,
) -> None:
    """Run, or only judge, a study of rare features."""
    from phocas.files import check_writable

    runs = study.runs()
    missing = results.missing(runs)
    if dry_run:
        for text in dict.fromkeys(study.names().values()):
            typer.echo(text)
        typer.echo(f"{len(runs)} runs, {study.repeats} of each, into {results.path}")
        return
    if not judge:
        check_writable(results.path, "the results file")
    check_writable(folder / "results.md", "the table of losses")
    importlib.import_module("phocas.report.rare")  # it may lack something: not after hours
    if len(missing) < len(runs):
        typer.echo(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already", err=True)
    if missing and not judge:
        _run_study(study, results, processes)
    _report_study(study, results, folder)


def _run_study(study: Study, results: StudyResults, processes: int | None) -> None:
    """Run what is missing; leave if interrupted."""
    import time

    from phocas.experiments.reproduction.rare.study import run_all
    from phocas.report.progress import interruptible, time_left

    missing = results.missing(study.runs())
    names, started = study.names(), time.monotonic()

    def watch(setting: SimulationSettings) -> None:
        left = len(results.missing(missing))
        done = len(missing) - left
        text = time_left((time.monotonic() - started) / done * left)
        typer.echo(f"[{done}/{len(missing)}] {names[setting]}: complete; {text} left", err=True)

    typer.echo(f"{len(missing)} runs are starting", err=True)
    with interruptible() as stop:
        run_all(missing, results, processes=processes, watch=watch, should_stop=stop.is_set)
    left = results.missing(missing)
    if left:
        typer.echo(
            f"{len(left)} of {len(study.runs())} runs are not complete; the same command resumes."
            f" Results are in {results.path}",
            err=True,
        )
        raise typer.Exit(130)


def _report_study(study: Study, results: StudyResults, folder: Path) -> None:
    """Print the losses, draw the figures, and print the paths of all files."""
    import shlex
    import sys

    from phocas.experiments.recording import versions
    from phocas.report.rare import draw_study, loss_table, markdown
    from phocas.report.tables import show

    runs = study.runs()
    done = len(runs) - len(results.missing(runs))
    facts = [
        f"{done} of {len(runs)} runs are complete; repeats of each: {study.repeats}",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
    ]
    for part in study.parts:
        typer.echo(f"{part.name}: {part.title}")
        show(loss_table(part, study, results))
        typer.echo()
    draw_study(study, results, folder)
    command = shlex.join(["phocas", *sys.argv[1:]])
    path = folder / "results.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(study, results, command=command, facts=facts), "utf-8")
    typer.echo(f"figures and {path.name} in {folder}, results in {results.path}")
