"""A table of the samples that each worker holds, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from phocas.data.assignment import Indices


def holdings(
    assignment: Sequence[Indices], labels: npt.ArrayLike, num_classes: int | None = None
) -> npt.NDArray[np.int64]:
    """Count the samples of each class that each worker holds, as an (m, classes) array.

    Args:
        assignment: the samples of each worker.
        labels: the class of each sample.
        num_classes: number of classes; by default the largest label + 1.

    >>> holdings([np.array([0, 1]), np.array([2])], [0, 1, 1])
    array([[1, 1],
           [0, 1]])
    """
    of = np.asarray(labels)
    width = int(of.max()) + 1 if num_classes is None else num_classes
    return np.stack([np.bincount(of[part], minlength=width) for part in assignment])


def picture(
    assignment: Sequence[Indices], labels: npt.ArrayLike, classes: Sequence[str] = ()
) -> Table:
    """Draw workers x classes as a heat map; brighter cells hold more samples.

    If all workers draw from the whole set, they are one row.

    Args:
        assignment: the samples of each worker.
        labels: the class of each sample.
        classes: names of the classes.

    >>> picture([np.array([0, 1]), np.array([2])], [0, 1, 1]).row_count
    2
    """
    from rich.table import Table  # noqa: PLC0415  not needed for training
    from rich.text import Text  # noqa: PLC0415

    shared = bool(getattr(assignment, "shared", False))
    counts = holdings(assignment[:1] if shared else assignment, labels, len(classes) or None)
    table = Table(title="samples by worker and class", box=None, padding=(0, 0))
    table.add_column("worker ", justify="right")
    width = max(len(f"{counts.max():,}"), 4) + 1
    for column in range(counts.shape[1]):
        name = classes[column] if classes else str(column)
        table.add_column(name[: width - 1] + " ", justify="right", min_width=width, no_wrap=True)
    table.add_column("  in all", justify="right")
    most = counts.max()
    for worker, row in enumerate(counts):
        cells = [
            Text(f"{cell:,} ".rjust(width), style=_shade(cell / most)) for cell in row.tolist()
        ]
        name = f"all {len(assignment)} " if shared else f"{worker} "
        table.add_row(name, *cells, f"  {row.sum():,}")
    return table


def _shade(share: float) -> str:
    """Return a style from black (nothing) over blue to yellow (the most), with readable text."""
    low, middle, high = (24, 24, 32), (32, 104, 160), (248, 216, 72)
    start, end, fraction = (
        (low, middle, share * 2) if share < 0.5 else (middle, high, share * 2 - 1)
    )
    red, green, blue = (round(a + (b - a) * fraction) for a, b in zip(start, end, strict=True))
    return f"{'black' if share > 0.7 else 'white'} on rgb({red},{green},{blue})"
