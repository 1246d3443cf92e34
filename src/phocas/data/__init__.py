"""Data sets, their verified download, and their division over workers.

>>> import numpy as np
>>> data = load("synthetic:train=500,test=100")
>>> split = parse_split("dirichlet:alpha=0.5")
>>> parts = split.assign(data.train_labels, 5, np.random.default_rng(0))
>>> batch_indices(parts, 5, 32, seed=1, round=0).shape
(5, 32)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phocas.data.assignment import Assignment, batch_indices, sample
from phocas.data.dataset import Dataset, DataSpec, OwnData
from phocas.data.fetching import Fetched, fetch_published
from phocas.data.npz import npz_files
from phocas.data.picture import holdings, picture
from phocas.data.published import CIFAR10, MNIST, FashionMNIST, Published
from phocas.data.splits import (
    IID,
    SPLITS,
    ByLabel,
    Dirichlet,
    FunctionSplit,
    GammaSimilarity,
    LongTail,
    Partition,
    Split,
    parse_split,
)
from phocas.data.store import DataError, data_folder
from phocas.data.synthetic import Synthetic
from phocas.specs import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

__all__ = [
    "CIFAR10",
    "DATASETS",
    "IID",
    "MNIST",
    "SPLITS",
    "Assignment",
    "ByLabel",
    "DataError",
    "DataSpec",
    "Dataset",
    "Dirichlet",
    "FashionMNIST",
    "Fetched",
    "FunctionSplit",
    "GammaSimilarity",
    "LongTail",
    "OwnData",
    "Partition",
    "Published",
    "Split",
    "Synthetic",
    "batch_indices",
    "data_folder",
    "fetch",
    "holdings",
    "load",
    "npz_files",
    "parse_split",
    "picture",
    "sample",
]

DATASETS: Table[DataSpec] = Table(
    "dataset",
    [MNIST, FashionMNIST, CIFAR10, Synthetic],
    base=DataSpec,
    adapt=OwnData.of,
)


def load(
    name: str | DataSpec | Callable[[], Any],
    folder: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> Any:
    """Return a data set by name (``mnist``, ``synthetic:train=2000``); fetch missing files.

    A data set by name is a :class:`Dataset`. A user-defined function may return any data that a
    trainer accepts. A function with a parameter ``worker`` is not called yet: workers load their
    own data.

    Args:
        name: the data set's spec as on the command line, or a function that returns the data.
        folder: the data folder; by default the user's cache.
        download: whether missing files may be fetched.

    >>> load("mnits")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: unknown dataset 'mnits'; did you mean 'mnist'? datasets: mnist, ...
    """
    if isinstance(name, str):
        name = DATASETS.parse(name)
    spec = name if isinstance(name, DataSpec) else OwnData(name)
    return spec.load(folder, download=download)


def fetch(
    name: str | DataSpec,
    folder: str | os.PathLike[str] | None = None,
    *,
    sources: Sequence[str] = (),
    progress: bool | None = None,
) -> Fetched:
    """Fetch and verify a published data set; keep intact files and replace damaged ones.

    Args:
        name: the data set's spec as on the command line.
        folder: the data folder; by default the user's cache.
        sources: origins to try instead of the default ones.
        progress: whether to draw a progress bar; by default only on a terminal.

    Returns:
        The folder, the origin and the time that fetching took.

    Raises:
        ValueError: if the data set is generated, so that there is nothing to fetch.
    """
    spec = DATASETS.parse(name) if isinstance(name, str) else name
    if not isinstance(spec, Published):
        raise ValueError(f"{spec.name} is generated: there is nothing to fetch")  # noqa: TRY004
    return fetch_published(spec, folder, sources=sources, progress=progress)
