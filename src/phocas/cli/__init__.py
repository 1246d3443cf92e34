"""The command line: every module here adds its commands to one application.

A module defines ``register(app)`` and imports what its commands need inside them, so that
``phocas --help`` stays quick.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer


def application() -> typer.Typer:
    """Build the application from the modules of this package."""
    app = typer.Typer(
        name="phocas",
        help="Training that survives bad workers.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=True,
    )
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        importlib.import_module(f"{__name__}.{module.name}").register(app)
    return app


_EXTRAS = {
    "torch": "train",
    "pydantic": "train",
    "safetensors": "train",
    "matplotlib": "report",
    "PIL": "report",
    "ray": "ray",
}


def main() -> None:
    """Run the command line; mistakes in the input end with one line and status 2."""
    try:
        application()()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        message = f"this command needs {error.name}: pip install 'phocas[{extra}]'"
        typer.echo(f"phocas: {message}", err=True)
        raise SystemExit(2) from None
    except (ValueError, TypeError, FileNotFoundError) as error:
        typer.echo(f"phocas: {error}", err=True)
        raise SystemExit(2) from None
