"""``phocas rules``: the aggregation rules that ``--rule`` accepts."""

from __future__ import annotations

from typing import Annotated

import typer

from phocas.cli.completion import complete_rule
from phocas.specs import count


def rules(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Describe one: phocas, krum:b=6, 'nnm:b=6|phocas:b=6', or your own.",
            autocompletion=complete_rule,
        ),
    ] = None,
    num_workers: Annotated[int, typer.Option(help="Number of workers, m.")] = 20,
    b: Annotated[
        int | None,
        typer.Option(
            "--b", help="With NAME: b, if the name gives none.", show_default="the largest"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the aggregation rules with their guarantee and cost."""
    import json

    from phocas.report.rules_table import about, entries, print_rule, print_rules

    count("phocas rules", "--num-workers", num_workers, 1)
    if name is None:
        if b is not None:
            raise ValueError("--b is for one rule: give its name too, as in phocas rules phocas")
        if as_json:
            typer.echo(json.dumps(entries(num_workers), indent=2))
        else:
            print_rules(num_workers)
        return
    known = about(name, num_workers, b)
    if as_json:
        typer.echo(json.dumps(known, indent=2, default=str))
    else:
        print_rule(known)
