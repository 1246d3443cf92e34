"""``phocas reproduce``: the paper's experiments, its figures, and its claims judged."""

from __future__ import annotations

import importlib
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phocas.cli import reject_unused
from phocas.cli.completion import complete_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phocas.cli.studies import StudyOptions
    from phocas.experiments.reproduction.outcomes import RunOutcome
    from phocas.experiments.reproduction.published import PublishedStudy
    from phocas.experiments.reproduction.tasks import Reproduction


MOST_REPEATS = 100
"""Repeats that ``--hours`` adds at most."""


def register(app: typer.Typer, group: str) -> None:
    """Add the command."""
    app.command("reproduce", rich_help_panel=group)(reproduce)


def reproduce(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="mnist, cifar10, complexity, heraclius, choosing, choosing-momentum,"
            " choosing-cifar10, rare, bucketing, byzfl, one of them with its scale, as"
            " cifar10-medium, or a TOML file.",
            autocompletion=complete_task,
        ),
    ],
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of repeats of each run.", show_default="10, or those of the scale"
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            help="Add repeats until all claims are decided, for so many hours; --repeats is then"
            " the largest number.",
            show_default="no",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="Size: paper, small for a laptop, or medium (cifar10).")
    ] = "paper",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for figures and claims.", show_default="phocas-TASK-SCALE"),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Results file, or with --judge a curves file.", show_default="in the output folder"
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(help="Only this figure or table. Repeatable.", show_default="all"),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Number of runs at the same time.", show_default="one per core"),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of the data sets.", envvar="PHOCAS_DATA", show_default="user cache"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the runs, and run nothing.")
    ] = False,
    judge: Annotated[
        bool,
        typer.Option(
            "--judge",
            help="Run nothing: judge the results or curves in the output folder, else the"
            " published curves.",
        ),
    ] = False,
) -> None:
    """Repeat the paper's experiments, draw its figures, test its claims.

    Complete runs are not repeated: the same command resumes after an
    interruption, and with more repeats it adds the missing ones.
    """
    from phocas.experiments.reproduction.complexity import is_complexity, plan_complexity
    from phocas.experiments.reproduction.published import is_published, plan_published
    from phocas.experiments.reproduction.rare.study import StudyResults, is_study, plan_study
    from phocas.experiments.reproduction.tasks import plan, task_and_scale

    task, of_task = task_and_scale(task)
    if of_task is not None:
        reject_unused(context, ["scale"], f"with {task}-{of_task}, which has a scale")
        scale = of_task
    if dry_run:
        reject_unused(context, ["judge"], "with --dry-run")
    if judge:
        reject_unused(context, ["processes"], "with --judge, which runs nothing")
    if hours is not None and not 0 < hours < math.inf:
        raise ValueError(f"--hours must be a number above 0: got {hours:g}")
    if hours is not None and (judge or dry_run):
        raise ValueError("--hours has no effect with --judge or --dry-run, which run nothing")
    only, study = tuple(figure or ()), Path(task).stem
    folder = output or Path(f"phocas-{study}-{scale}")
    if is_complexity(task):
        from phocas.cli.complexity import reproduce_complexity

        unused = ["data_dir", "figure", "repeats", "processes", "hours"]
        reject_unused(context, unused, "with a study of time, which trains nothing")
        file = _file(study, scale, folder, results, judge=judge, suffix=".jsonl")
        timed = plan_complexity(task, scale=scale)
        reproduce_complexity(timed, file, folder, dry_run=dry_run, judge=judge)
        return
    if is_study(task):
        from phocas.cli.rare import reproduce_rare

        reject_unused(context, ["hours"], "with a study of rare features, which has no claims")
        reject_unused(context, ["data_dir"], "with a study of rare features, which draws tokens")
        rare = plan_study(task, scale=scale, repeats=repeats, only=only)
        file = _file(study, scale, folder, results, judge=judge, suffix=".jsonl")
        done = StudyResults(file)
        reproduce_rare(rare, done, folder, processes, dry_run=dry_run, judge=judge)
        return
    file = _file(study, scale, folder, results, judge=judge)
    places = {"results": str(file), "data_dir": data_dir}
    tables = is_published(task)
    if tables:
        reject_unused(context, ["hours"], "with the tables of other authors, which are no claims")
    planned = (plan_published if tables else plan)(
        task, scale=scale, repeats=repeats, only=only, places=places
    )
    runs = planned.runs()
    if dry_run:
        for config in runs[: len(runs) // planned.repeats]:
            typer.echo(f"{config.name}: {config.attack or 'no attack'}" if tables else config.name)
        typer.echo(f"{len(runs)} runs, {planned.repeats} of each, into {file}")
        return
    from phocas.cli.studies import StudyOptions

    options = StudyOptions(study, file, folder, processes, data_dir, judge)
    _reproduce(planned, options, hours, repeats)


def _file(
    study: str,
    scale: str,
    folder: Path,
    given: Path | None,
    *,
    judge: bool,
    suffix: str = ".sqlite",
) -> Path:
    """Return the results file; with --judge the file to judge, whichever there is."""
    from phocas.experiments.reproduction.curves import NAME, published_curves

    path = given or folder / f"results{suffix}"
    if not judge and path.suffix == ".xz":
        raise ValueError(f"{path} is a curves file, which only --judge reads: give it too")
    if not judge or given:
        return path
    if suffix == ".sqlite":
        candidates = [path, folder / NAME, published_curves(study, scale)]
    else:
        candidates = [path, published_curves(study, scale, suffix)]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    known = f" or {NAME}" if suffix == ".sqlite" else ""
    raise ValueError(
        f"there is nothing to judge: {folder} has no {path.name}{known}, and the package has no"
        f" curves of {study} at scale {scale}; without --judge the command runs the study"
    )


def _reproduce(
    planned: Reproduction | PublishedStudy,
    options: StudyOptions,
    hours: float | None,
    repeats: int | None,
) -> None:
    """Run what is missing, or with ``judge`` nothing; report; write the curves."""
    from phocas.cli.studies import run_missing, run_until_decided
    from phocas.experiments.recording import versions
    from phocas.experiments.reproduction import curves as files
    from phocas.experiments.reproduction.outcomes import read_outcomes
    from phocas.experiments.reproduction.published import PublishedStudy
    from phocas.files import check_writable

    importlib.import_module("phocas.report.paper_figures")  # it may lack something: not after hours
    study, file, folder, judge = options.study, options.file, options.folder, options.judge
    runs, scale = planned.runs(), planned.scale
    own, failed = folder / files.NAME, list[str]()
    curves = None
    if file.suffix == ".xz":
        curves = files.read_curves(file, study, scale)
        if repeats is None and not isinstance(planned, PublishedStudy):
            planned = replace(planned, repeats=curves.repeats)
            runs = planned.runs()
        found = curves.find([config.identity() for config in runs])
        typer.echo(f"judging {len(found)} runs of {file}", err=True)
    else:
        if not judge:
            check_writable(file, "the results file")
        check_writable(own, "the curves file")
        if own.exists():
            files.read_curves(own, study, scale)  # other curves must not be overwritten
    check_writable(folder / "claims.md", "the report")
    if curves is None:
        if hours is not None and not isinstance(planned, PublishedStudy):
            planned, failed = run_until_decided(planned, options, hours, repeats or MOST_REPEATS)
            runs = planned.runs()
        elif not judge and runs:
            failed = run_missing(planned, options)
        metric = "top1" if isinstance(planned, PublishedStudy) else planned.metric
        found = read_outcomes(file, runs, metric)
    made_with = curves.versions if curves else versions()
    facts = _facts(planned, found, made_with, failed)
    errors = curves.errors if curves else None
    if isinstance(planned, PublishedStudy):
        _report_tables(planned, found, folder, facts)
    else:
        errors = _report(planned, found, folder, facts, errors)
    if curves is None:
        files.write_curves(
            own, files.Curves(study, scale, planned.repeats, made_with, found, errors or [])
        )
    typer.echo(f"report in {folder}, from {file}")
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def _report(
    reproduction: Reproduction,
    found: Mapping[str, RunOutcome],
    folder: Path,
    facts: list[str],
    errors: list[dict[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Draw the figures and judge the claims; return the worst errors of the rules, if asked for.

    ``errors`` are the known ones. If they are None, they are measured.
    """
    from dataclasses import asdict

    from phocas.experiments.reproduction.claims import CLAIMS
    from phocas.experiments.reproduction.front import known_errors, worst_errors
    from phocas.experiments.reproduction.outcomes import MissingError, collect
    from phocas.experiments.reproduction.verdicts import judge
    from phocas.report.claims_table import claims_table, markdown
    from phocas.report.front import draw_front, front_lines
    from phocas.report.paper_figures import draw
    from phocas.report.tables import show

    outcomes = collect(reproduction, found)
    for figure in reproduction.figures:
        try:
            draw(figure, outcomes, folder / figure.name)
        except MissingError as error:
            typer.echo(f"{error}: not drawn", err=True)
    findings = [judge(claim, outcomes) for claim in CLAIMS[reproduction.claims]]
    text = markdown(reproduction, outcomes, findings, command=_command(), facts=facts)
    if reproduction.front:
        try:
            by_label = (
                worst_errors(reproduction, folder / "worst.json")
                if errors is None
                else known_errors(reproduction, errors)
            )
            draw_front(outcomes, by_label, folder / "front")
            text += "\n" + "\n".join(front_lines(outcomes, by_label))
            errors = [asdict(each) for each in by_label.values()]
        except MissingError as error:
            typer.echo(f"{error}: no front", err=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "claims.md").write_text(text, "utf-8")
    show(claims_table(findings))
    return errors or []


def _report_tables(
    study: PublishedStudy, found: Mapping[str, RunOutcome], folder: Path, facts: list[str]
) -> None:
    """Print and write the verdicts on the tables of other authors: theirs beside ours."""
    from phocas.report.published import (
        counts,
        draw_tables,
        judged_tables,
        markdown,
        verdict_columns,
    )
    from phocas.report.tables import print_table

    tables = judged_tables(study, found)
    for table, judged in tables.items():
        typer.echo(f"{table.name}: {table.title}")
        print_table(verdict_columns(judged), right=("theirs", "ours"))
        typer.echo()
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(study, tables, command=_command(), facts=facts)
    (folder / "verdicts.md").write_text(text, "utf-8")
    if study.heat_map:
        draw_tables(tables, folder)
    typer.echo(f"cells by verdict: {counts(tables)}")


def _command() -> str:
    return shlex.join(["phocas", *sys.argv[1:]])


def _facts(
    planned: Reproduction | PublishedStudy,
    found: Mapping[str, RunOutcome],
    made_with: Mapping[str, str],
    failed: list[str],
) -> list[str]:
    """Return what a report says about its runs: how many, of which size, and by what."""
    from phocas.experiments.reproduction.published import PublishedStudy

    runs = planned.runs()
    size = f"{len(found)} of {len(runs)} runs"
    if isinstance(planned, PublishedStudy):
        small = "" if planned.scale == "paper" else ", which is not the published size"
        size += f" are complete; seeds: {planned.repeats}; scale {planned.scale}{small}"
    else:
        size += f" of {runs[0].rounds} rounds are complete"
        stopped = sum(run.status == "stopped" for run in found.values())
        if stopped:
            size += f", {stopped} of them stopped early at an aggregate with NaN or inf"
        size = f"scale {planned.scale}, {planned.metric} accuracy, {size}"
    return [
        size,
        ", ".join(f"{name} {version}" for name, version in made_with.items()),
        *(f"failed and left out: {line}" for line in failed),
    ]
