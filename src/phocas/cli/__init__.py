"""The command line: every module here adds its commands to one application.

A module defines ``register(app)`` and imports what its commands need inside them, so that
``phocas --help`` stays quick.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sqlite3
import sys
import sysconfig
import traceback
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phocas.kernels.triton import KernelError

HELP = {"help_option_names": ["-h", "--help"]}
TRACEBACK = "PHOCAS_TRACEBACK"
_EXTRAS = {
    "torch": "train",
    "pydantic": "train",
    "safetensors": "train",
    "matplotlib": "report",
    "PIL": "report",
    "ray": "ray",
}
_EXPECTED = (ValueError, TypeError, OSError, sqlite3.DatabaseError, KernelError)


class Commands(TyperGroup):
    """The commands; one whose module has ``complete()`` gets its options when it is called for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, and put the complete one in its place."""
        name, command, rest = super().resolve_command(ctx, args)
        complete = getattr(sys.modules.get(f"{__name__}.{name}"), "complete", None)
        return name, complete() if complete else command, rest


def application(command: str | None = None) -> typer.Typer:
    """Build the application from the modules of this package, or from that of one command."""
    app = typer.Typer(
        name="phocas",
        cls=Commands,
        context_settings=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    app.callback()(_common)
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in [command] if command in names else names:
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


def main() -> None:
    """Run the command line; what a user can cause ends with one line and status 2."""
    try:
        application(*sys.argv[1:2])(prog_name="phocas")  # python -m phocas is the same command
    except Exception as error:
        line = None if os.environ.get(TRACEBACK) else explain(error)
        if line is None:
            raise
        typer.echo(f"phocas: {line}", err=True)
        raise SystemExit(2) from None


def explain(error: Exception) -> str | None:
    """Say in a line what a user can mend; None is a mistake of ours, whose traceback is wanted."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        if extra is not None:
            return f"this command needs {package}: pip install 'phocas[{extra}]'"
    place = _foreign(error)
    if place is not None:
        what = f"{place}: {type(error).__name__}: {error}".rstrip(": ")
        return f"{what} ({TRACEBACK}=1, or phocas --traceback, shows the way there)"
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names, error.strerror[:1].lower() + error.strerror[1:]])
    if isinstance(error, _EXPECTED):
        return str(error)
    return None


def _foreign(error: Exception) -> str | None:
    """Return the line of the user's own code that raised an error, if we called such code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parent.parent)
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    inside = False
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(ours):
            inside = True
        elif inside and not file.startswith((*libraries, "<")):
            place = f"{file}:{line}"
    return place


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phocas {metadata.version('phocas')}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar=TRACEBACK, help="Show where in the code errors arise."),
    ] = False,
) -> None:
    """Training that survives bad workers."""
    del version
    if traceback:
        os.environ[TRACEBACK] = "1"
