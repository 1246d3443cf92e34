"""``phocas advise``: which b and cutoff a recorded run needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def advise(
    results: Annotated[Path, typer.Argument(help="Results file.")] = Path("phocas.sqlite"),
    run: Annotated[
        int | None, typer.Option(help="Number of the run.", show_default="the last")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show which b a run needed, and the error bounds of other choices.

    Attacks that stay within the honest distribution are not counted: the
    b of a rule remains the user's decision.
    """
    import json
    from dataclasses import asdict

    from phocas.experiments.advice import advise as compute
    from phocas.experiments.results import Results
    from phocas.report.advice import print_advice

    with Results(results, read=True) as file:
        found = compute(file, file.run(run))
    if json_:
        told = asdict(found)
        record = told.pop("record")
        about = {key: record[key] for key in ("rule", "rounds", "rounds_done")}
        typer.echo(json.dumps({"run": record["id"], **about, **told}))
    else:
        print_advice(found)
