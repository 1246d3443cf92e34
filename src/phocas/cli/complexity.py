"""The part of ``phocas reproduce`` for studies of time complexity, which train nothing."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from phocas.experiments.reproduction.complexity import Complexity


def reproduce_complexity(
    study: Complexity, file: Path, folder: Path, *, dry_run: bool, judge: bool
) -> None:
    """Measure what is missing, or with ``judge`` nothing; draw the figure, decide the claims."""
    from phocas.experiments.reproduction.complexity import Measurements, measure
    from phocas.experiments.reproduction.growth import judge_complexity
    from phocas.files import check_writable
    from phocas.report.claims_table import claims_table
    from phocas.report.tables import show

    if dry_run:
        for m, d in study.cases():
            typer.echo(f"m = {m}, d = {d}: {', '.join(study.specs(m).values())}")
        typer.echo(f"{len(study.cases())} shapes with {study.sizes.threads} threads, into {file}")
        return
    report = importlib.import_module("phocas.report.complexity")  # it may lack something
    found = Measurements(file)
    check_writable(folder / "claims.md", "the report")
    if judge:
        typer.echo(f"judging {len(found.points)} measurements of {file}", err=True)
    else:
        check_writable(file, "the results file")
        measure(study, found, lambda line: typer.echo(line, err=True))
    if not found.points:
        raise ValueError(f"{file} has no measurements: without --judge the command makes them")
    findings = judge_complexity(study, found)
    report.draw_complexity(study, found, folder / "complexity")
    text = report.markdown(study, found, findings, shlex.join(["phocas", *sys.argv[1:]]))
    (folder / "claims.md").write_text(text, "utf-8")
    show(claims_table(findings))
    typer.echo(f"report in {folder}, from {file}")
