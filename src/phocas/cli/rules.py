"""``phocas rules``: what can stand after ``--rule``."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rules")(rules)


def rules(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List the rules, and what may come before one, with their parameters."""
    from phocas import PRE_AGGREGATORS, RULES
    from phocas.report.tables import print_table

    kinds = {"rule": RULES.values(), "pre-aggregator": PRE_AGGREGATORS.values()}
    if as_json:
        entries = [
            {"name": c.name, "kind": kind, "parameters": c.parameters(), "summary": c.summary()}
            for kind, classes in kinds.items()
            for c in classes
        ]
        print(json.dumps(entries, indent=2))
        return
    for kind, classes in kinds.items():
        columns = {
            kind: [c.name for c in classes],
            "parameters": [c.parameters() for c in classes],
            "what it does": [c.summary() for c in classes],
        }
        print_table(columns, prose=("what it does",))
        print()
    print("written as phocas:b=6, or nnm:b=6|phocas:b=6 with a pre-aggregator")
