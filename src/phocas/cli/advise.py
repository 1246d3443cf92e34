"""``phocas advise``: what recorded runs say about b and reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("advise")(advise)


def advise(
    results: Annotated[Path, typer.Argument(help="A file that keeps results.")] = Path(
        "phocas.sqlite"
    ),
    run: Annotated[int | None, typer.Option(help="This run; by default the last.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Tell which b a run would have needed, and what another b or reach would have cost.

    It never chooses one: what hides is not seen, and too small a b has no bound.
    """
    import json
    from dataclasses import asdict

    from phocas.experiments.advice import advise as work_out
    from phocas.experiments.results import Results
    from phocas.report.advice import print_advice

    with Results(results, read=True) as file:
        records = file.runs() if run is None else [file.run(run)]
        if not records:
            raise ValueError(f"there is no run in {results}")
        found = work_out(file, records[-1])
    if json_:
        told = asdict(found)
        record = told.pop("record")
        about = {key: record[key] for key in ("rule", "rounds", "rounds_done")}
        typer.echo(json.dumps({"run": record["id"], **about, **told}))
    else:
        print_advice(found)
