"""``phocas attacks``: the attacks and faults that ``--attack`` accepts."""

from __future__ import annotations

from typing import Annotated

import typer

from phocas.cli.completion import complete_attack


def attacks(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Describe one: alie, min-max:q=3, or your own, my_attacks:push.",
            autocompletion=complete_attack,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the attacks and faults with their parameters, or describe one."""
    import json
    import textwrap

    from phocas.attacks import ATTACKS
    from phocas.report.rules_table import about_attack, print_attack
    from phocas.report.tables import WIDTH

    if name is not None:
        known = about_attack(name)
        print(json.dumps(known, indent=2)) if as_json else print_attack(known)
        return
    if as_json:
        listing = [
            {"name": name, "parameters": cls.parameters(), "summary": cls.summary()}
            for name, cls in ATTACKS.items()
        ]
        print(json.dumps(listing, indent=2))
        return
    indent = 20
    print(f"{'attack':<{indent}}parameters, and what it does")
    for cls in ATTACKS.values():
        for start, text in ((cls.name, cls.parameters()), ("", cls.summary())):
            margin = " " * indent
            print(
                textwrap.fill(
                    text, WIDTH, initial_indent=f"{start:<{indent}}", subsequent_indent=margin
                )
            )
