"""``phocas rules``: what can stand after ``--rule``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from phocas.rules import Rule
from phocas.rules.base import Stage
from phocas.specs import count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rules")(rules)


def rules(
    workers: Annotated[int, typer.Option(help="Of how many workers a rule may survive some.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List the rules, what they survive at the most, and what may come before one."""
    from phocas import PRE_AGGREGATORS, RULES
    from phocas.report.tables import print_table

    count("phocas rules", "workers", workers, 1)
    kinds = {"rule": RULES.values(), "pre-aggregator": PRE_AGGREGATORS.values()}
    if as_json:
        entries = [
            {
                "name": c.name,
                "kind": kind,
                "parameters": c.parameters(),
                "survives": _most(c, workers),
                "summary": c.summary(),
            }
            for kind, classes in kinds.items()
            for c in classes
        ]
        print(json.dumps(entries, indent=2))
        return
    for kind, classes in kinds.items():
        columns = {
            kind: [c.name for c in classes],
            "parameters": [c.parameters() for c in classes],
            f"of {workers}": [_most(c, workers) for c in classes],
            "what it does": [c.summary() for c in classes],
        }
        print_table(columns, prose=("what it does",))
        print()
    print(
        f"of {workers}: how many wrong values in every column, or wrong rows, a rule survives\n"
        f"among {workers} workers if it is told to survive as much as it can"
    )
    print("written as phocas:b=6, or nnm:b=6|phocas:b=6 with a pre-aggregator")


def _most(step: type[Stage], m: int) -> str:
    """Say what a rule can survive at the most; nothing of what b does not say."""
    told = step.choices(m)
    if not told or not isinstance(told[-1], Rule):
        return ""
    most = told[-1].tolerates(m)
    if most.values:
        return f"{most.values} values"
    return f"{most.rows} rows" if most.rows else "nothing"
