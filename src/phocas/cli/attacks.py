"""``phocas attacks`` and ``phocas audit``."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from phocas.attacks.audit import Finding


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
    dimensions: Annotated[int, typer.Option(help="d of the synthetic matrix.")] = 20_000,
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
    from phocas.attacks import parse_attack
    from phocas.attacks.audit import audit as run_audit
    from phocas.rules import parse_rule

    parsed = parse_rule(rule)
    rows = None if matrix is None else load_matrix(matrix, tensor)
    if rows is not None and workers is not None and rows.shape[0] != workers:
        raise ValueError(
            f"--workers must be the rows of the matrix: got {workers} with {rows.shape[0]} rows"
        )
    findings = run_audit(
        parsed,
        rows,
        workers=20 if workers is None else workers,
        byzantine=byzantine,
        dimensions=dimensions,
        attacks=[parse_attack(text) for text in attack] if attack else None,
        rounds=rounds,
        signal=signal,
        seed=seed,
    )
    m, d = (20 if workers is None else workers, dimensions) if rows is None else rows.shape
    broken = [finding for finding in findings if finding.broken_promise]
    if as_json:
        heading = {"rule": str(parsed), "workers": m, "byzantine": byzantine, "dimensions": d}
        report = {**heading, "rounds": rounds, "findings": [_plain(item) for item in findings]}
        print(json.dumps({**report, "broken_promises": len(broken)}, indent=2))
    else:
        _show(findings, str(parsed), parsed.columnwise, f"m = {m}, q = {byzantine}, d = {d}")
    if broken:
        raise typer.Exit(1)


def load_matrix(path: Path, tensor: str | None = None) -> Any:
    """Read an (m, d) matrix from ``.npy``, or from ``.safetensors`` by its name."""
    if path.suffix == ".npy":
        import numpy as np

        return np.load(path, allow_pickle=False)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        from phocas.specs import unknown

        tensors = load_file(path)
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


def _plain(finding: Finding) -> dict[str, Any]:
    """Return a finding for JSON, which knows no infinity: null stands for it."""
    fields = dataclasses.asdict(finding)
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[key] = None
    return {**fields, "holds": finding.holds, "verdict": finding.verdict}


def _show(findings: Sequence[Finding], rule: str, columnwise: bool, size: str) -> None:
    from phocas.attacks.audit import LIMIT

    print(f"{rule} against {len(findings)} attacks: {size}")
    print()
    rows = [
        (
            finding.attack,
            str(finding.rows),
            str(finding.per_column),
            _number(finding.distance),
            _sign(finding.inner_product),
            f"{LIMIT:g} *" if finding.bound is None else _number(finding.bound),
            finding.verdict,
        )
        for finding in findings
    ]
    _table(("attack", "bad rows", "a column", "distance", "<,>", "bound", "verdict"), rows)
    unit = "bad values a column" if columnwise else "bad rows"
    print()
    print("distance  of the result from the honest mean, in honest spreads, root mean square")
    print("<,>       sign of the inner product of the result with the honest mean")
    print("bound     the paper's sqrt(Delta); * none there, so this many honest spreads")
    print(f"promise   of this rule: to hold for at most its b {unit}; an attack beyond that")
    print("          is shown and breaks no promise. label-flip acts on data and has no matrix")
    broken = sum(finding.broken_promise for finding in findings)
    breaks = sum(not finding.holds for finding in findings)
    print()
    print(f"{breaks} of {len(findings)} attacks break {rule}; broken promises: {broken}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0e}"


def _sign(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return "+" if value > 0 else "-" if value < 0 else "0"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, plain columns elsewhere."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
        for row in (heading, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*heading, header_style="bold")
    for row in rows:
        alarm = row[-1].startswith("BREAKS")
        style = "bold red" if alarm else "yellow" if row[-1].startswith("breaks") else None
        table.add_row(*map(escape, row), style=style)
    Console().print(table)
