"""``phocas train``: one run, with live progress; its results are kept.

The options are the fields of :class:`phocas.experiments.config.RunConfig`. Its import takes
seconds, so the options are added when the command is called.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phocas.cli.completion import SETTINGS

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_ENVIRONMENT = {"data_dir": "PHOCAS_DATA"}
_PANELS = {
    "run": "Run",
    "task": "Task",
    "local": "Asynchronous training and virtual time",
    "ray": "Ray engine",
}


def register(app: typer.Typer, group: str) -> None:
    """Add the command."""
    app.command("train", help=train.__doc__, rich_help_panel=group)(_incomplete)


def complete() -> Any:
    """Return the command with an option for every setting of a run."""
    from phocas.cli import Application
    from phocas.experiments.config import RunConfig

    def command(**options: Any) -> None:
        settings = {key: options.pop(key) for key in offered}
        train({key: value for key, value in settings.items() if value is not None}, **options)

    offered = {
        name: _option(name, field)
        for name, field in RunConfig.model_fields.items()
        if field.annotation != dict[str, Any]  # which only TOML can write: see --set
    }
    panels = list(_PANELS.values())
    offered = dict(sorted(offered.items(), key=lambda item: panels.index(_panel(item[0]))))
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(train, eval_str=True).parameters.values()
        if parameter.name != "settings"
    ]
    command.__signature__ = inspect.Signature([*own, *offered.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {
        parameter.name: parameter.annotation for parameter in (*offered.values(), *own)
    }
    app = Application()
    app.command("train", help=train.__doc__)(command)
    return typer.main.get_command(app)


def train(
    settings: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of these settings.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting as in TOML: key=value. Repeatable."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start a new run, even if this one exists.")
    ] = False,
    save_model: Annotated[
        Path | None, typer.Option(help="Safetensors file to write the trained model to.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print only a JSON object at the end.")
    ] = False,
) -> None:
    """Train a model with workers of which some may be Byzantine.

    The same command resumes an interrupted run, and shows a complete one.
    """
    from phocas.engines import EngineError
    from phocas.experiments.config import key_of, make_config, read_toml
    from phocas.experiments.runner import execute
    from phocas.provenance import raised_in
    from phocas.report.progress import Progress, interruptible
    from phocas.report.tables import print_outcome

    if "faults" in settings:
        settings["faults"] = _lines(Path(settings["faults"]))
    values = {} if config is None else read_toml(config)
    for name, value in (_assignments(set_ or []) | settings).items():
        values = {key: kept for key, kept in values.items() if key_of(key) != key_of(name)}
        values[name] = value
    checked = make_config(values, "--set" if config is None else str(config), settings)
    try:
        with interruptible() as stop, Progress(checked, quiet=quiet or json_) as progress:
            record = execute(
                checked,
                restart=restart,
                watch=progress.show,
                tell=lambda line: progress.say(f"{line}; --restart starts a new run"),
                warn=progress.say,
                should_stop=stop.is_set,
                model_file=save_model,
            )
    except EngineError as error:
        told = [str(error), *getattr(error, "__notes__", ())]  # what is kept, if a run had begun
        typer.echo(f"phocas: {'; '.join(told)}", err=True)
        raise typer.Exit(3) from None
    except KeyboardInterrupt as error:
        place = raised_in(error)  # of code that hangs
        typer.echo(f"phocas: interrupted{f' at {place}' if place else ''}", err=True)
        raise typer.Exit(130) from None
    print_outcome(record, as_json=json_, model_file=save_model)
    if record.status == "interrupted":
        raise typer.Exit(130)
    if record.status == "stopped":
        raise typer.Exit(3)


def _incomplete(**_: Any) -> None:
    """Stand in for the command in ``phocas --help``, and where a shell completes values."""


_incomplete.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(autocompletion=values)],
        )
        for name, values in SETTINGS.items()
    ]
)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option of a setting; its default is None, so that the value in TOML counts."""
    from rich.markup import escape

    from phocas.experiments.config import option_of

    kind = _kind(name, field.annotation)
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, []) or default is False else f" [default: {default}]"
    option = typer.Option(
        option_of(name),
        help=escape(f"{field.description}{shown}"),
        autocompletion=SETTINGS.get(name),
        envvar=_ENVIRONMENT.get(name),
        show_default=False,
        rich_help_panel=_panel(name),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _panel(name: str) -> str:
    """Return the heading under which ``--help`` lists a setting."""
    from phocas.experiments.config import owners_of

    owners = owners_of(name)
    return _PANELS["local" if "local" in owners else owners[0]]


def _kind(name: str, annotation: Any) -> type:
    """Return the type that the command line parses for a setting; RunConfig checks the value."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if name == "faults":
        return Path
    return str if typing.get_origin(annotation) is Literal else annotation


def _lines(script: Path) -> list[str]:
    try:
        return script.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"the faults in {script} cannot be read: {error}") from None


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """Read ``key=value``; a value that is no TOML is text."""
    import tomllib

    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes key=value: got {pair!r}")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values
