"""``phocas attacks``: the attacks and faults that ``--attack`` accepts."""

from __future__ import annotations

from typing import Annotated

import typer


def attacks(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the attacks and faults with their parameters."""
    import json
    import textwrap

    from phocas.attacks import ATTACKS
    from phocas.report.tables import WIDTH

    if as_json:
        listing = [
            {"name": name, "parameters": cls.parameters(), "summary": cls.summary()}
            for name, cls in ATTACKS.items()
        ]
        print(json.dumps(listing, indent=2))
        return
    indent = 20
    print(f"{'attack':<{indent}}parameters, and what it does")
    for name, cls in ATTACKS.items():
        for start, text in ((name, cls.parameters()), ("", cls.summary())):
            margin = " " * indent
            print(
                textwrap.fill(
                    text, WIDTH, initial_indent=f"{start:<{indent}}", subsequent_indent=margin
                )
            )
