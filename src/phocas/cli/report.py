"""``phocas report`` and ``phocas serve``: what is in a results file, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FILE = Annotated[Path, typer.Argument(help="A results file, or the JSON report or log of a guard.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("report")(report)
    app.command("serve")(serve)


def report(
    results: FILE = Path("phocas.sqlite"),
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one page with all that there is to see: it opens in a browser, without a network."""
    from phocas.files import check_writable
    from phocas.report.page.writing import write_report

    check_writable(output, "the report")
    typer.echo(write_report(results, output))


def serve(
    results: FILE = Path("phocas.sqlite"),
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than your own can then read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes one that is free.")] = 8765,
) -> None:
    """Show the page while runs go on: it follows the file, and changes nothing."""
    from phocas.report.page.server import PageServer

    with PageServer(results, host, port) as server:
        typer.echo(f"{results} is shown at {server.url} until Ctrl+C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("closed")
