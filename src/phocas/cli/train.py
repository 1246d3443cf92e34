"""``phocas train``: one run, with live progress and a result that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with any of these settings, and more.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="mnist, fashion-mnist, cifar10, synthetic.", show_default="mnist"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="mlp, cnn, softmax, module:callable.", show_default="mlp")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="m workers.", show_default="20")] = None,
    servers: Annotated[int | None, typer.Option(help="s servers.", show_default="20")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.", show_default="500")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples a worker and round.", show_default="32")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.1")] = None,
    rule: Annotated[
        str | None, typer.Option(help="The aggregation rule.", show_default="phocas:b=8")
    ] = None,
    attack: Annotated[
        str | None, typer.Option(help="What goes wrong, for example gambler.", show_default="none")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed.", show_default="0")] = None,
    split: Annotated[
        str | None, typer.Option(help="Who holds which samples.", show_default="iid")
    ] = None,
    on_nonfinite: Annotated[
        str | None,
        typer.Option(help="skip, stop or apply a step that is not finite.", show_default="skip"),
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Rounds between evaluations.", show_default="10")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Cores to use.", show_default="all")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Where rounds run: local, ray.", show_default="local")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="ray: auto or host:port of a cluster.", show_default="none: this machine alone"
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="ray: processes that workers share.", show_default="cores")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="ray: seconds until a worker is late.", show_default="60")
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(help="ray: a script of what goes wrong, one fault a line.")
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Where data sets are kept.", envvar="PHOCAS_DATA", show_default="user cache"
        ),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(help="The file that keeps the results.", show_default="phocas.sqlite"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other key of the TOML: key=value. Repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    save_model: Annotated[
        Path | None, typer.Option(help="Write the trained model here, as safetensors.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")
    ] = False,
) -> None:
    """Train a model among workers of whom some may lie."""
    from phocas.engines import EngineError
    from phocas.experiments.config import make_config, read_toml
    from phocas.experiments.locks import RunTakenError
    from phocas.experiments.runner import execute
    from phocas.report.progress import Progress, interruptible
    from phocas.report.tables import print_outcome

    flags: dict[str, Any] = {
        "dataset": dataset,
        "model": model,
        "workers": workers,
        "servers": servers,
        "rounds": rounds,
        "batch_size": batch_size,
        "lr": lr,
        "rule": rule,
        "attack": attack,
        "seed": seed,
        "split": split,
        "on_nonfinite": on_nonfinite,
        "evaluate_every": evaluate_every,
        "threads": threads,
        "engine": engine,
        "address": address,
        "processes": processes,
        "deadline": deadline,
        "faults": None if faults is None else _lines(faults),
        "data_dir": data_dir,
        "results": results,
    }
    values = {} if config is None else read_toml(config)
    values = {key.replace("-", "_"): value for key, value in values.items()}
    values |= _settings(set_ or [])
    values |= {key: value for key, value in flags.items() if value is not None}
    checked = make_config(values, "command line" if config is None else str(config))
    try:
        with interruptible() as stop, Progress(checked, quiet=quiet or json_) as progress:
            record = execute(
                checked,
                resume=resume,
                watch=progress.show,
                should_stop=stop.is_set,
                model_file=save_model,
            )
    except RunTakenError as error:
        raise ValueError(str(error)) from None
    except EngineError as error:
        typer.echo(f"phocas: {error}", err=True)
        raise typer.Exit(3) from None
    print_outcome(record, as_json=json_)
    if record.status == "interrupted":
        raise typer.Exit(130)
    if record.status == "stopped":
        raise typer.Exit(3)


def _lines(script: Path) -> list[str]:
    try:
        return script.read_text("utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"the faults in {script} cannot be read: {error.strerror}") from None


def _settings(pairs: list[str]) -> dict[str, Any]:
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
