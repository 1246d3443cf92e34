"""``phocas attacks`` and ``phocas audit``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from phocas.attacks.audit import Trial
from phocas.rules import Rule


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command()(attacks)
    app.command()(audit)


def attacks(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List the attacks and faults, a line each, with their parameters."""
    from phocas.attacks import ATTACKS

    if as_json:
        listing = [
            {"name": name, "parameters": cls.parameters(), "summary": cls.summary()}
            for name, cls in ATTACKS.items()
        ]
        print(json.dumps(listing, indent=2))
        return
    rows = [(name, cls.parameters(), cls.summary()) for name, cls in ATTACKS.items()]
    _table(("attack", "parameters", "what it does"), rows)


def audit(
    rule: Annotated[str, typer.Option(help="The rule to try, as in phocas:b=6.")],
    workers: Annotated[int | None, typer.Option(help="m; 20, or the rows of the matrix.")] = None,
    byzantine: Annotated[int, typer.Option(help="q, the workers that go wrong.")] = 6,
    dims: Annotated[int, typer.Option(help="d of the synthetic matrix.")] = 20_000,
    matrix: Annotated[
        Path | None, typer.Option(help="A saved (m, d) matrix: .npy or .safetensors.")
    ] = None,
    tensor: Annotated[
        str | None, typer.Option(help="Which tensor of a .safetensors file, if there are several.")
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Try this attack only; may be given again.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds to average over.")] = 3,
    signal: Annotated[
        float, typer.Option(help="Length of the synthetic gradient, in honest spreads.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the matrices and the attacks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Run every attack against a rule; status 1 if the rule breaks what it promises."""
    from phocas.attacks.audit import audit as run_audit
    from phocas.rules import parse_rule

    parsed = parse_rule(rule)
    rows = None if matrix is None else load_matrix(matrix, tensor)
    if rows is not None and workers is not None and rows.shape[0] != workers:
        raise ValueError(
            f"--workers must be the rows of the matrix: got {workers} with {rows.shape[0]} rows"
        )
    trials = run_audit(
        parsed,
        rows,
        num_workers=20 if workers is None else workers,
        byzantine=byzantine,
        dims=dims,
        attacks=attack or None,
        rounds=rounds,
        signal=signal,
        seed=seed,
    )
    m, d = (20 if workers is None else workers, dims) if rows is None else rows.shape
    broken = [trial for trial in trials if trial.broken_promise]
    if as_json:
        tolerance = dataclasses.asdict(parsed.tolerates(m))
        heading = {"rule": str(parsed), "workers": m, "byzantine": byzantine, "dims": d}
        report = {**heading, "tolerates": tolerance, "rounds": rounds}
        report["trials"] = [_plain(trial) for trial in trials]
        print(json.dumps({**report, "broken_promises": len(broken)}, indent=2))
    else:
        _show(trials, parsed, m, f"m = {m}, q = {byzantine}, d = {d}")
    if broken:
        raise typer.Exit(1)


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
    """Return a trial for JSON, which knows no infinity: null stands for it."""
    fields = dataclasses.asdict(trial)
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[key] = None
    return {**fields, "holds": trial.holds if trial.tried else None, "verdict": trial.verdict}


def _show(trials: Sequence[Trial], rule: Rule, m: int, size: str) -> None:
    print(f"{rule} against {len(trials)} attacks: {size}")
    print()
    mark = {"paper": "", "rule": " +", "none": " *"}
    rows = [
        (
            trial.attack,
            str(trial.rows),
            str(trial.per_column),
            _number(trial.distance),
            _sign(trial.inner_product),
            _number(trial.limit) + mark[trial.source],
            "yes" if trial.promised else "no",
            trial.verdict,
        )
        if trial.tried
        else (trial.attack, *"------", trial.verdict)
        for trial in trials
    ]
    heading = ("attack", "rows", "column", "distance", "<,>", "limit", "promised", "verdict")
    _table(heading, rows, right=(1, 2, 3, 5))
    tolerance = rule.tolerates(m)
    print()
    print("rows, column  bad rows, and the most bad values in a column")
    print("distance      of the result from the honest mean, in honest spreads (RMS)")
    print("<,>           sign of the inner product of the result with the honest mean")
    print("limit         the paper's sqrt(Delta); +: what the rule itself is proven to keep;")
    print("              *: nothing is promised, so this many spreads")
    print(f"promised      the rule survives {tolerance.rows} bad rows, and {tolerance.values} bad")
    print("              values in every column; an attack that does more breaks no promise")
    if not any(trial.attack.startswith("label-flip") for trial in trials):
        print("label-flip acts on the data, before there is a matrix, and is not tried here")
    tried = [trial for trial in trials if trial.tried]
    broken = sum(trial.broken_promise for trial in trials)
    breaks = sum(not trial.holds for trial in tried)
    print()
    print(f"{breaks} of {len(tried)} attacks break {rule}; broken promises: {broken}")


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
    styles = {"breaks": "yellow", "BROKEN PROMISE": "bold red"}
    for row in rows:
        breakable = row[0].replace(",", ", ")  # still reads as the same attack
        table.add_row(escape(breakable), *map(escape, row[1:]), style=styles.get(row[-1]))
    Console().print(table)
