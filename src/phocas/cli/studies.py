"""The runs of ``phocas reproduce``: those that are missing, or as many as the claims need."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from phocas.experiments.config import RunConfig
    from phocas.experiments.reproduction.published import PublishedStudy
    from phocas.experiments.reproduction.tasks import Reproduction
    from phocas.experiments.sweep import Message


@dataclass(frozen=True)
class StudyOptions:
    """The options of ``phocas reproduce`` that say where and how to run a study."""

    study: str
    file: Path
    folder: Path
    processes: int | None
    data_dir: str | None
    judge: bool


def run_until_decided(
    planned: Reproduction, options: StudyOptions, hours: float, most: int
) -> tuple[Reproduction, list[str]]:
    """Add repeats until all claims are decided or the hours are over; return the last plan.

    A repeat has the same seeds for all rules. Claims about figures that the scale leaves out do not
    count.
    """
    from phocas.experiments.reproduction.claims import CLAIMS
    from phocas.experiments.reproduction.outcomes import collect, read_outcomes
    from phocas.experiments.reproduction.verdicts import judge

    deadline = time.monotonic() + 3600 * hours
    failed: list[str] = []
    for repeats in range(1, most + 1):
        planned = replace(planned, repeats=repeats)
        failed = run_missing(planned, options, deadline)
        outcomes = collect(planned, read_outcomes(options.file, planned.runs(), planned.metric))
        findings = [judge(claim, outcomes) for claim in CLAIMS[planned.claims]]
        open_ = [f.claim.name for f in findings if f.checks and f.verdict == "not decided"]
        if not open_:
            typer.echo(f"all claims are decided by {repeats} repeats", err=True)
            break
        typer.echo(f"repeat {repeats}: {len(open_)} claims are not decided", err=True)
        if time.monotonic() >= deadline:
            typer.echo(f"{hours:g} hours are over; the same command adds repeats", err=True)
            break
    return planned, failed


def run_missing(
    reproduction: Reproduction | PublishedStudy, options: StudyOptions, deadline: float = math.inf
) -> list[str]:
    """Run what is missing until the deadline; return what failed; leave if interrupted."""
    from phocas.data import load
    from phocas.experiments.sweep import Ended, sweep
    from phocas.report.progress import SweepProgress, interruptible

    runs = reproduction.runs()
    missing = _missing(runs)
    if len(missing) < len(runs):
        typer.echo(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already", err=True)
    if not missing:
        return []
    load(missing[0].dataset, options.data_dir)  # once, before all runs need it
    with interruptible() as stop, SweepProgress(missing) as progress:
        failed: dict[int, str] = {}

        def watch(news: Message) -> None:
            progress.show(news)
            if isinstance(news, Ended) and news.status == "failed":
                failed[news.index] = news.error or "no reason given"

        def should_stop() -> bool:
            return stop.is_set() or time.monotonic() >= deadline

        records = sweep(missing, processes=options.processes, watch=watch, should_stop=should_stop)
    left = sum(
        index not in failed and (record is None or record.status in ("interrupted", "running"))
        for index, record in enumerate(records)
    )
    if left and (stop.is_set() or deadline == math.inf):
        typer.echo(
            f"{left} of {len(runs)} runs are not complete; the same command resumes."
            f" Results are in {options.file}",
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
