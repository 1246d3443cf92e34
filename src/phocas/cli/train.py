"""``phocas train``: one run, with live progress and a result that is kept.

Its options are the fields of :class:`phocas.experiments.config.RunConfig`, whose import takes
seconds; so they are added when the command is called for.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_ENVIRONMENT = {"data_dir": "PHOCAS_DATA"}
_RAY = "ray: "


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train", help=train.__doc__)(_incomplete)


def complete() -> Any:
    """Return the command with an option for every setting of a run."""
    from phocas.cli import HELP
    from phocas.experiments.config import RunConfig

    def command(**options: Any) -> None:
        settings = {key: options.pop(key) for key in offered}
        train({key: value for key, value in settings.items() if value is not None}, **options)

    offered = {
        name: _option(name, field)
        for name, field in RunConfig.model_fields.items()
        if field.annotation != dict[str, Any]  # which only TOML can write: see --set
    }
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(train, eval_str=True).parameters.values()
        if parameter.name != "settings"
    ]
    command.__signature__ = inspect.Signature([*own, *offered.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {
        parameter.name: parameter.annotation for parameter in (*offered.values(), *own)
    }
    app = typer.Typer(add_completion=False, context_settings=HELP, pretty_exceptions_enable=False)
    app.command("train", help=train.__doc__)(command)
    return typer.main.get_command(app)


def train(
    settings: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with any of these settings, and more.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of the TOML: key=value. Repeatable."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, and keep what there is as another run.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished run, as is done anyway.")
    ] = False,
    save_model: Annotated[
        Path | None, typer.Option(help="Write the trained model here, as safetensors.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")
    ] = False,
) -> None:
    """Train a model among workers of whom some may lie.

    The same command goes on with a run that was interrupted, and shows one that is complete.
    """
    from phocas.engines import EngineError
    from phocas.experiments.config import make_config, read_toml
    from phocas.experiments.runner import execute
    from phocas.report.progress import Progress, interruptible
    from phocas.report.tables import print_outcome

    if resume and restart:
        raise ValueError("--resume goes on and --restart begins anew: give one of them")
    if "faults" in settings:
        settings["faults"] = _lines(Path(settings["faults"]))
    values = {} if config is None else read_toml(config)
    values = {key.replace("-", "_"): value for key, value in values.items()}
    values |= _assignments(set_ or []) | settings
    checked = make_config(values, "command line" if config is None else str(config))
    try:
        with interruptible() as stop, Progress(checked, quiet=quiet or json_) as progress:
            record = execute(
                checked,
                restart=restart,
                watch=progress.show,
                tell=lambda line: progress.say(f"{line}; --restart begins anew"),
                warn=progress.say,
                should_stop=stop.is_set,
                model_file=save_model,
            )
    except EngineError as error:
        told = [str(error), *getattr(error, "__notes__", ())]  # what is kept, if a run had begun
        typer.echo(f"phocas: {'; '.join(told)}", err=True)
        raise typer.Exit(3) from None
    print_outcome(record, as_json=json_, model_file=save_model)
    if record.status == "interrupted":
        raise typer.Exit(130)
    if record.status == "stopped":
        raise typer.Exit(3)


def _incomplete() -> None:
    """Stand in the list of commands until the options are wanted."""


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Make an option of a setting; none given is None, so that a TOML file is asked first."""
    from rich.markup import escape

    text = field.description or ""
    kind = _kind(name, field.annotation)
    default = field.get_default(call_default_factory=True)
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=escape(text.removeprefix(_RAY)),
        envvar=_ENVIRONMENT.get(name),
        show_default=False if default in (None, []) or default is False else str(default),
        rich_help_panel="Settings of the ray engine" if text.startswith(_RAY) else "Settings",
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _kind(name: str, annotation: Any) -> type:
    """Return what the command line reads for a setting; RunConfig does the checking."""
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
    """Read ``key=value`` with the value as TOML, or as text where it is none."""
    import tomllib

    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes key=value: got {pair!r}")
        try:
            values[key.strip().replace("-", "_")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip().replace("-", "_")] = text.strip()
    return values
