"""``phocas rules``: what can stand after ``--rule``."""

from __future__ import annotations

from typing import Annotated

import typer

from phocas.specs import count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rules")(rules)


def rules(
    name: Annotated[
        str | None,
        typer.Argument(help="All about one: phocas, krum:b=6, 'nnm:b=6|phocas:b=6', or your own."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Of how many workers a rule may survive some.")] = 20,
    b: Annotated[
        int | None,
        typer.Option("--b", help="With NAME: what it is told.", show_default="the largest"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List the rules, what they survive at the most and cost, and what may come before one."""
    import json

    from phocas.report.rules_table import about, entries, print_rule, print_rules

    count("phocas rules", "workers", workers, 1)
    if name is None:
        if b is not None:
            raise ValueError("--b is for one rule: give its name too, as in phocas rules phocas")
        if as_json:
            typer.echo(json.dumps(entries(workers), indent=2))
        else:
            print_rules(workers)
        return
    known = about(name, workers, b)
    if as_json:
        typer.echo(json.dumps(known, indent=2, default=str))
    else:
        print_rule(known)
