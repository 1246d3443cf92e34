"""The command line: each command, or group of commands, is a module of this package.

A module has a function with its own name, the command, or ``register(app, group)``, which adds a
group of commands. It imports what its commands need inside them, so that ``phocas --help`` stays
quick.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from phocas.cli.completion import option_is_asked
from phocas.deprecation import FORMER
from phocas.kernels.triton import KernelError
from phocas.provenance import describe_error, raised_in

GROUPS = {
    "Train": ("train", "sweep", "benchmark", "reproduce", "demo"),
    "Results": ("results", "advise"),
    "Rules and theory": ("rules", "attacks", "audit", "theory"),
    "Tools": ("aggregate", "bench", "data", "doctor"),
}
"""The modules of the commands, by the heading under which ``phocas --help`` lists them."""
RENAMED = {
    "runs": "results list",
    "show": "results show",
    "plot": "results plot",
    "export": "results export",
    "report": "results report",
    "serve": "results report --serve",
    "bounds": "theory bounds",
    "plan": "theory plan",
}
"""The new name of each command of version 0.2; the old name works, with a warning."""
RENAMED_OPTIONS = {
    "--workers": "--num-workers",
    "--servers": "--num-servers",
    "--liars": "--byzantine",
    "--report-only": "--judge",
}
"""The new name of each option of version 0.2; the old name works, with a warning."""
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


class Command(TyperCommand):
    """A command whose help shows flags without a type, and which accepts renamed options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            _plain_type(param)

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option ``--help``."""
        return _plain_type(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command; replace renamed options, and warn about each."""
        known = {spelling for param in self.params for spelling in param.opts}
        words = []
        for word in args:
            old, equals, value = word.partition("=")
            new = RENAMED_OPTIONS.get(old)
            if old == "--resume" and old not in known and "--restart" in known:
                _deprecate(ctx, "--resume has no effect: an unfinished run is always resumed")
            elif new in known and old not in known:
                _deprecate(ctx, f"{old} is deprecated: use {new}")
                words.append(f"{new}{equals}{value}")
            else:
                words.append(word)
        return super().parse_args(ctx, words)


class Commands(TyperGroup):
    """A group of commands; if a command's module has ``complete()``, that makes its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words name; warn if the command was renamed."""
        if ctx.parent is None and args[0] in RENAMED:
            new = RENAMED[args[0]]
            _deprecate(ctx, f"phocas {args[0]} is deprecated: use phocas {new}")
            args = [*new.split(), *args[1:]]
        name, command, rest = super().resolve_command(ctx, args)
        complete = getattr(sys.modules.get(f"{__name__}.{name}"), "complete", None)
        if ctx.resilient_parsing and not option_is_asked():
            complete = None  # the shell asks for a value: options need a slow import
        return name, complete() if complete else command, rest

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  which typer gives
        """Return the names of the commands, in the order of the help."""
        order = [name for names in GROUPS.values() for name in names]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else 0)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the commands under their headings, and the options, on one screen."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            heading = command.rich_help_panel or "Commands"
            panels.setdefault(heading, []).append((name, command.help.partition("\n")[0]))
        width = max(map(len, self.commands))
        records = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        panels["Options"] = [record for record in records if record and "--show" not in record[0]]
        console = Console(highlight=False)
        with console.capture() as captured:
            usage = f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]..."
            console.print(Text(f"{usage}\n{self.help}"))
            for heading, rows in panels.items():
                table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
                table.add_column(min_width=width, style="bold cyan")
                table.add_column()
                for name, text in rows:
                    table.add_row(name, text.partition("  [")[0])
                console.print(Text(f"\n{heading}", "bold"), table, sep="\n")
        formatter.write(captured.get().rstrip("\n"))


class Application(typer.Typer):
    """A group to which modules add commands."""

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {
            "cls": Commands,
            "context_settings": HELP,
            "add_completion": False,
        }
        settings |= {"invoke_without_command": True, "pretty_exceptions_enable": False}
        super().__init__(**{**settings, **options})

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Return the decorator that adds a command."""
        return super().command(name, **{"cls": Command, **options})


def _plain_type(param: Any) -> Any:
    """Show no type for a flag, and the type of one value for a parameter with several."""
    if getattr(param, "is_flag", False):
        param.metavar = ""
    elif getattr(param, "multiple", False) or param.nargs == -1:
        shown = param.display_type(None)
        param.metavar = f"<{shown.removeprefix('<list[').removesuffix(']>')}>"
    return param


def _deprecate(ctx: Any, text: str) -> None:
    """Print a line about an old spelling, unless the shell only asks for completions."""
    if not ctx.resilient_parsing:
        typer.echo(f"phocas: {text}", err=True)


def require_command(context: typer.Context) -> None:
    """Print the help of a group and end with status 2 if no command was given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def reject_unused(context: typer.Context, options: Iterable[str], why: str) -> None:
    """Raise if one of these options was given: with the others it has no effect.

    Args:
        context: of the command.
        options: the names of the command's parameters.
        why: the end of the sentence, "without --rule".
    """
    for name in given(context, options):
        raise ValueError(f"{name} has no effect {why}")


def given(context: typer.Context, options: Iterable[str]) -> Iterator[str]:
    """Yield the options among ``options`` that the user gave, spelled as ``--option``."""
    wanted = set(options)
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in wanted and source is not None and source.name == "COMMANDLINE":
            yield param.opts[0]


def application(command: str | None = None) -> typer.Typer:
    """Build the application from the modules of this package, or from that of one command."""
    app = Application(name="phocas", add_completion=True)
    app.callback()(_common)
    wanted = RENAMED.get(command or "", command or "").partition(" ")[0]
    every = [name for names in GROUPS.values() for name in names]
    for heading, names in GROUPS.items():
        for name in names:
            if wanted in (name, "") or wanted not in every:
                module = importlib.import_module(f"{__name__}.{name}")
                if hasattr(module, "register"):
                    module.register(app, heading)
                else:
                    app.command(name, rich_help_panel=heading)(getattr(module, name))
    return app


def main() -> None:
    """Run the command line; an error of the user ends with one line and status 2."""
    _show_former_names()
    try:
        application(*sys.argv[1:2])(prog_name="phocas")  # python -m phocas is the same command
    except Exception as error:
        line = None if os.environ.get(TRACEBACK) else explain(error)
        if line is None:
            raise
        typer.echo(f"phocas: {line}", err=True)
        raise SystemExit(2) from None


def _show_former_names() -> None:
    """Print a line on stderr for each former name that a command line or a file uses."""
    show = warnings.showwarning

    def as_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category is DeprecationWarning and FORMER in str(message):
            typer.echo(f"phocas: {message}", err=True)
        else:
            show(message, category, *place, **more)

    warnings.showwarning = as_line
    warnings.filterwarnings("once", f".*{FORMER}", DeprecationWarning)


def explain(error: Exception) -> str | None:
    """Return one line about an error of the user, or None for a defect, which needs a traceback."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        if extra is not None:
            return f"this command needs {package}: pip install 'phocas[{extra}]'"
    if raised_in(error) is not None:
        return (
            f"{describe_error(error)} ({TRACEBACK}=1, or phocas --traceback, shows the traceback)"
        )
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return ": ".join([*names, error.strerror[:1].lower() + error.strerror[1:]])
    if isinstance(error, _EXPECTED):
        return str(error)
    return None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phocas {metadata.version('phocas')}")
        raise typer.Exit


def _common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar=TRACEBACK, help="Show the Python traceback of errors."),
    ] = False,
) -> None:
    """Train models with Byzantine workers: robust rules, attacks, guarantees."""
    del version
    if traceback:
        os.environ[TRACEBACK] = "1"
    require_command(context)
