"""``phocas reproduce``: the paper's experiments, its figures, and its claims judged."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phocas.cli import reject_unused

if TYPE_CHECKING:
    from phocas.experiments.config import RunConfig
    from phocas.experiments.reproduction.published import PublishedStudy
    from phocas.experiments.reproduction.rare.simulation import Setting
    from phocas.experiments.reproduction.rare.study import Study, StudyResults
    from phocas.experiments.reproduction.tasks import Reproduction
    from phocas.experiments.sweep import Message


def register(app: typer.Typer, group: str) -> None:
    """Add the command."""
    app.command("reproduce", rich_help_panel=group)(reproduce)


def reproduce(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="mnist, cifar10, heraclius, choosing, choosing-cifar10, rare, bucketing, byzfl,"
            " or a TOML file."
        ),
    ],
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of repeats of each run.", show_default="10, or those of the scale"
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="Size: paper, or small for a laptop.")] = "paper",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for figures and claims.", show_default="phocas-TASK-SCALE"),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Results file.", show_default="in the output folder"),
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
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Report on the runs that are complete.")
    ] = False,
) -> None:
    """Repeat the paper's experiments, draw its figures, test its claims.

    Complete runs are not repeated: the same command resumes after an
    interruption, and with more repeats it adds the missing ones.
    """
    from phocas.experiments.reproduction.published import is_published, plan_published
    from phocas.experiments.reproduction.rare.study import StudyResults, is_study, plan_study
    from phocas.experiments.reproduction.tasks import plan
    from phocas.files import check_writable

    if dry_run:
        reject_unused(context, ["report_only"], "with --dry-run")
    if report_only:
        reject_unused(context, ["processes"], "with --report-only, which runs nothing")
    folder = output or Path(f"phocas-{Path(task).stem}-{scale}")
    if is_study(task):
        reject_unused(context, ["data_dir"], "with a study of rare features, which draws tokens")
        study = plan_study(task, scale=scale, repeats=repeats, only=tuple(figure or ()))
        done = StudyResults(results or folder / "results.jsonl")
        _study(study, done, folder, processes, dry_run=dry_run, report_only=report_only)
        return
    file = results or folder / "results.sqlite"
    places = {"results": str(file), "data_dir": data_dir}
    if is_published(task):
        tables = plan_published(
            task, scale=scale, repeats=repeats, only=tuple(figure or ()), places=places
        )
        _published(
            tables, file, folder, processes, data_dir, dry_run=dry_run, report_only=report_only
        )
        return
    reproduction = plan(task, scale=scale, repeats=repeats, only=tuple(figure or ()), places=places)
    if dry_run:
        runs = reproduction.runs()
        for config in runs[: len(runs) // reproduction.repeats]:
            typer.echo(config.name)
        typer.echo(f"{len(runs)} runs, {reproduction.repeats} of each, into {file}")
        return
    check_writable(file, "the results file")
    check_writable(folder / "claims.md", "the table of claims")
    importlib.import_module("phocas.report.paper_figures")  # it may lack something: not after hours

    failed: list[str] = []
    if not report_only:
        failed = _run(reproduction, file, processes, data_dir)
    _report(reproduction, file, folder, failed)
    if failed:
        raise typer.Exit(1)


def _published(
    study: PublishedStudy,
    file: Path,
    folder: Path,
    processes: int | None,
    data_dir: str | None,
    *,
    dry_run: bool,
    report_only: bool,
) -> None:
    """Run, or only report, a study of other authors: theirs beside ours."""
    import shlex
    import sys

    from phocas.experiments.results import ENDED
    from phocas.experiments.runner import versions
    from phocas.experiments.sweep import attempts
    from phocas.files import check_writable
    from phocas.report.published import (
        counts,
        draw_tables,
        judged_tables,
        markdown,
        verdict_columns,
    )
    from phocas.report.tables import print_table

    runs = study.runs()
    if dry_run:
        for config in runs[: len(runs) // study.repeats]:
            typer.echo(f"{config.name}: {config.attack or 'no attack'}")
        typer.echo(f"{len(runs)} runs, {study.repeats} of each, into {file}")
        return
    check_writable(file, "the results file")
    path = folder / "verdicts.md"
    check_writable(path, "the table of verdicts")
    failed = [] if report_only or not runs else _run(study, file, processes, data_dir)
    records = {
        record.identity: record
        for record in attempts(runs)
        if record is not None and record.status in ENDED
    }
    tables = judged_tables(study, records)
    for table, judged in tables.items():
        typer.echo(f"{table.name}: {table.title}")
        print_table(verdict_columns(judged), right=("theirs", "ours"))
        typer.echo()
    facts = [
        f"{len(records)} of {len(runs)} runs are complete; seeds: {study.repeats}; scale"
        f" {study.scale}"
        + ("" if study.scale == "paper" else ", which is not the published size: no comparison"),
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        *(f"failed and left out: {line}" for line in failed),
    ]
    command = shlex.join(["phocas", *sys.argv[1:]])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(study, tables, command=command, facts=facts), "utf-8")
    if study.heat_map:
        draw_tables(tables, folder)
    typer.echo(f"cells by verdict: {counts(tables)}")
    typer.echo(f"{path.name} in {folder}, results in {file}")
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def _run(
    reproduction: Reproduction | PublishedStudy,
    file: Path,
    processes: int | None,
    data_dir: str | None,
) -> list[str]:
    """Run what is missing; return what failed; leave if interrupted."""
    from phocas.data import load
    from phocas.experiments.sweep import Ended, sweep
    from phocas.report.progress import SweepProgress, interruptible

    runs = reproduction.runs()
    missing = _missing(runs)
    if len(missing) < len(runs):
        typer.echo(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already", err=True)
    if not missing:
        return []
    load(missing[0].dataset, data_dir)  # once, before all runs need it
    with interruptible() as stop, SweepProgress(missing) as progress:
        failed: dict[int, str] = {}

        def watch(news: Message) -> None:
            progress.show(news)
            if isinstance(news, Ended) and news.status == "failed":
                failed[news.index] = news.error or "no reason given"

        records = sweep(missing, processes=processes, watch=watch, should_stop=stop.is_set)
    left = sum(
        index not in failed and (record is None or record.status in ("interrupted", "running"))
        for index, record in enumerate(records)
    )
    if left:
        typer.echo(
            f"{left} of {len(runs)} runs are not complete; the same command resumes."
            f" Results are in {file}",
            err=True,
        )
        raise typer.Exit(130)
    return [
        f"{missing[index].name}, seed {missing[index].seed}: {reason}"
        for index, reason in sorted(failed.items())
    ]


def _missing(runs: list[RunConfig]) -> list[RunConfig]:
    from phocas.experiments.results import ENDED
    from phocas.experiments.sweep import attempts

    return [
        config
        for config, record in zip(runs, attempts(runs), strict=True)
        if record is None or record.status not in ENDED
    ]


def _report(reproduction: Reproduction, file: Path, folder: Path, failed: list[str]) -> None:
    """Draw the figures, judge the claims, and say where all of it is."""
    import shlex
    import sys

    from phocas.experiments.reproduction.claims import CLAIMS
    from phocas.experiments.reproduction.front import worst_errors
    from phocas.experiments.reproduction.outcomes import MissingError, collect
    from phocas.experiments.reproduction.verdicts import judge
    from phocas.report.claims_table import claims_table, markdown
    from phocas.report.front import draw_front, front_lines
    from phocas.report.paper_figures import draw
    from phocas.report.tables import show

    outcomes = collect(reproduction, file)
    for figure in reproduction.figures:
        try:
            draw(figure, outcomes, folder / figure.name)
        except MissingError as error:
            typer.echo(f"{error}: not drawn", err=True)
    findings = [judge(claim, outcomes) for claim in CLAIMS[reproduction.claims]]
    text = markdown(
        reproduction,
        outcomes,
        findings,
        command=shlex.join(["phocas", *sys.argv[1:]]),
        facts=_facts(reproduction, file, failed),
    )
    if reproduction.front:
        try:
            errors = worst_errors(reproduction, folder / "worst.json")
            draw_front(outcomes, errors, folder / "front.png")
            text += "\n" + "\n".join(front_lines(outcomes, errors))
        except MissingError as error:
            typer.echo(f"{error}: no front", err=True)
    folder.mkdir(parents=True, exist_ok=True)
    claims = folder / "claims.md"
    claims.write_text(text, "utf-8")
    show(claims_table(findings))
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    typer.echo(f"figures and {claims.name} in {folder}, results in {file}")


def _facts(reproduction: Reproduction, file: Path, failed: list[str]) -> list[str]:
    from phocas.experiments.results import Results
    from phocas.experiments.runner import versions

    runs = reproduction.runs()
    done = len(runs) - len(_missing(runs))
    size = f"{done} of {len(runs)} runs of {runs[0].rounds} rounds are complete"
    with Results(file, read=True) as results:
        wanted = {config.identity() for config in runs}
        stopped = [r for r in results.runs() if r.status == "stopped" and r.identity in wanted]
    if stopped:
        size += f", {len(stopped)} of them stopped early at an aggregate with NaN or inf"
    return [
        f"scale {reproduction.scale}, {reproduction.metric} accuracy, {size}",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        *(f"failed and left out: {line}" for line in failed),
    ]


def _study(
    study: Study,
    results: StudyResults,
    folder: Path,
    processes: int | None,
    *,
    dry_run: bool,
    report_only: bool,
) -> None:
    """Run, or only report, a study of rare features."""
    from phocas.files import check_writable

    runs = study.runs()
    missing = results.missing(runs)
    if dry_run:
        for text in dict.fromkeys(study.names().values()):
            typer.echo(text)
        typer.echo(f"{len(runs)} runs, {study.repeats} of each, into {results.path}")
        return
    check_writable(results.path, "the results file")
    check_writable(folder / "results.md", "the table of losses")
    importlib.import_module("phocas.report.rare")  # it may lack something: not after hours
    if len(missing) < len(runs):
        typer.echo(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already", err=True)
    if missing and not report_only:
        _run_study(study, results, processes)
    _report_study(study, results, folder)


def _run_study(study: Study, results: StudyResults, processes: int | None) -> None:
    """Run what is missing; leave if interrupted."""
    import time

    from phocas.experiments.reproduction.rare.study import run_all
    from phocas.report.progress import interruptible, time_left

    missing = results.missing(study.runs())
    names, started = study.names(), time.monotonic()

    def watch(setting: Setting) -> None:
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
    """Print the losses, draw the figures, and say where all of it is."""
    import shlex
    import sys

    from phocas.experiments.runner import versions
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
