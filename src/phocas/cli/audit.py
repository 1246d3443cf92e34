"""``phocas audit``: try every attack against a rule."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from phocas.attacks import Attack
from phocas.attacks.audit import Trial
from phocas.cli import reject_unused
from phocas.cli.completion import complete_attack, complete_rule
from phocas.rules import Rule


def audit(
    context: typer.Context,
    rule: Annotated[
        str,
        typer.Option(help="Rule to try, for example phocas:b=6.", autocompletion=complete_rule),
    ],
    num_workers: Annotated[
        int | None,
        typer.Option(help="Number of workers, m.", show_default="20, or the rows of the matrix"),
    ] = None,
    byzantine: Annotated[
        int | None,
        typer.Option(
            help="Number of Byzantine workers, q.",
            show_default="as many as the rule tolerates; if none, 6 or the largest minority",
        ),
    ] = None,
    dims: Annotated[int, typer.Option(help="Columns of the synthetic matrix, d.")] = 20_000,
    matrix: Annotated[
        Path | None, typer.Option(help="Saved (m, d) matrix of gradients: .npy or .safetensors.")
    ] = None,
    tensor: Annotated[
        str | None, typer.Option(help="Name of the tensor, if a .safetensors file has several.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Try this attack only. Repeatable.", autocompletion=complete_attack),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds to average over.")] = 3,
    signal: Annotated[
        float,
        typer.Option(help="Length of the synthetic gradient, in standard deviations (RMS)."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the matrices and the attacks.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which the trial of one attack ends.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try every attack against a rule.

    The exit status is 1 if the rule breaks its guarantee, or if a trial fails.
    """
    from phocas.attacks.audit import audit as run_audit
    from phocas.attacks.audit import usual_byzantine
    from phocas.rules import parse_rule

    if matrix is None:
        reject_unused(context, ["tensor"], "without --matrix")
    else:
        reject_unused(context, ["dims", "signal"], "with --matrix")
        if matrix.suffix == ".npy":
            reject_unused(context, ["tensor"], "with a .npy file, which has one matrix")
    if attack:
        reject_unused(context, ["byzantine"], "with --attack, which gives q")
        byzantine = 0
    parsed = parse_rule(rule)
    rows = None if matrix is None else load_matrix(matrix, tensor)
    if rows is not None and num_workers is not None and rows.shape[0] != num_workers:
        raise ValueError(
            "--num-workers must be the number of rows of the matrix:"
            f" got {num_workers} with {rows.shape[0]} rows"
        )
    wanted = 20 if num_workers is None else num_workers
    trials = run_audit(
        parsed,
        rows,
        num_workers=wanted,
        byzantine=byzantine,
        dims=dims,
        attacks=attack or None,
        rounds=rounds,
        signal=signal,
        seed=seed,
        timeout=timeout,
        watch=_progress() if sys.stderr.isatty() else lambda *_: None,
    )
    m, d = (wanted, dims) if rows is None else rows.shape
    q = usual_byzantine(parsed, m) if byzantine is None else byzantine
    broken = [trial for trial in trials if trial.broken_promise]
    if as_json:
        tolerance = dataclasses.asdict(parsed.tolerates(m))
        heading = {"rule": str(parsed), "workers": m, "byzantine": None if attack else q, "dims": d}
        report = {**heading, "tolerates": tolerance, "rounds": rounds}
        report["trials"] = [_plain(trial) for trial in trials]
        print(json.dumps({**report, "broken_promises": len(broken)}, indent=2))
    else:
        size = f"m = {m}, d = {d}" if attack else f"m = {m}, q = {q}, d = {d}"
        _show(trials, parsed, m, size)
    if broken or any(trial.error for trial in trials):
        raise typer.Exit(1)


def _progress() -> Callable[[int, Sequence[Attack]], None]:
    """Return a function that shows the attack under trial on one line of the terminal."""

    def show(index: int, attacks: Sequence[Attack]) -> None:
        line = f"{index + 1}/{len(attacks)} {attacks[index]}"
        last = index + 1 == len(attacks)
        typer.echo(f"\r\x1b[K{line[:78]}", err=True, nl=False)
        if last:
            typer.echo("\r\x1b[K", err=True, nl=False)

    return show


def load_matrix(path: Path, tensor: str | None = None) -> Any:
    """Read an (m, d) matrix from ``.npy``, or from ``.safetensors`` by its name."""
    if path.suffix == ".npy":
        import numpy as np

        return np.load(path, allow_pickle=False)
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            raise ValueError(
                f"{path} needs safetensors and torch to be read: pip install 'phocas[train]'"
            ) from None
        from phocas.specs import unknown

        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
        if tensor is None and len(tensors) == 1:
            return next(iter(tensors.values()))
        if tensor is None:
            raise ValueError(
                f"{path} has several tensors; name one with --tensor: {sorted(tensors)}"
            )
        if tensor not in tensors:
            raise ValueError(unknown("tensor", tensor, sorted(tensors)))
        return tensors[tensor]
    raise ValueError(f"--matrix must be a .npy or .safetensors file: got {path}")


def _plain(trial: Trial) -> dict[str, Any]:
    """Return a trial for JSON; infinity becomes null."""
    fields = dataclasses.asdict(trial)
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[key] = None
    return {**fields, "holds": trial.holds, "verdict": trial.verdict}


def _show(trials: Sequence[Trial], rule: Rule, m: int, size: str) -> None:
    print(f"{rule} against {len(trials)} attacks: {size}")
    print()
    mark = {"paper": "", "rule": " +", "claim": " ?", "none": " *"}
    covers = {"claim": "claimed"}
    rows = [
        (
            trial.attack,
            str(trial.rows),
            str(trial.per_column),
            _number(trial.distance),
            _sign(trial.inner_product),
            _number(trial.limit) + mark[trial.source],
            covers.get(trial.source, "yes") if trial.promised else "no",
            f"{trial.seconds:.1f}",
            f"{trial.megabytes:.1f}",
            trial.verdict,
        )
        for trial in trials
    ]
    heading = (
        *("attack", "rows", "column", "distance", "<,>", "limit", "covered", "s", "MB"),
        "verdict",
    )
    _table(heading, rows, right=(1, 2, 3, 5, 7, 8))
    for trial in trials:
        if trial.error is not None:
            print(f"{trial.attack} fails: {trial.error}")
    tolerance = rule.tolerates(m)
    print()
    print("rows, column  Byzantine rows; the most Byzantine values in a column")
    print("distance      of the aggregate from the honest mean, in standard deviations (RMS)")
    print("<,>           sign of the inner product of the aggregate with the honest mean")
    print("limit         largest distance that holds: sqrt(Delta) of the paper; +: the bound")
    print("              that the rule declares; ?: claimed without a bound, *: no guarantee, so")
    print("              this many deviations")
    said = "tolerates" if rule.proven else "claims, without a proof, to tolerate"
    print(f"covered       by the guarantee: {rule} {said} {tolerance.rows} Byzantine rows, and")
    print(f"              {tolerance.values} Byzantine values in every column")
    print("s, MB         seconds of the trial, and the most memory that it allocated at a time")
    print("not tried     label-flip, which acts on data, not on rows")
    broken = sum(trial.broken_promise for trial in trials)
    breaks = sum(not trial.holds for trial in trials)
    print()
    word = "guarantees" if rule.proven else "claims"
    print(f"{breaks} of {len(trials)} attacks break {rule}; broken {word}: {broken}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0e}"


def _sign(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return "+" if value > 0 else "-" if value < 0 else "0"


def _table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> None:
    """Print a table: drawn on a terminal, plain columns elsewhere."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
        for row in (heading, *rows):
            cells = [
                cell.rjust(width) if place in right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for place, name in enumerate(heading):
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    styles = dict.fromkeys(["breaks", "fails"], "yellow")
    styles |= dict.fromkeys(["GUARANTEE BROKEN", "CLAIM BROKEN"], "bold red")
    for row in rows:
        breakable = row[0].replace(",", ", ")  # still reads as the same attack
        table.add_row(escape(breakable), *map(escape, row[1:]), style=styles.get(row[-1]))
    Console().print(table)
