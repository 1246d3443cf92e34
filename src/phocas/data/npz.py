"""Arrays in files, of which each worker reads its own."""

from __future__ import annotations

import glob
from typing import Any

import numpy as np
import numpy.typing as npt

from phocas.data.store import DataError

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def npz_files(worker: int | None, num_workers: int, train: str, test: str) -> Arrays:
    """Return the inputs and targets of one worker's files.

    A file is one of ``numpy.savez(path, inputs=..., targets=...)``. Of the files that match a
    pattern, in the order of their names, worker i reads number i, i + m, i + 2m, ... With ``%``
    in the pattern, the number of the worker is written there, and the worker reads what matches.

    Args:
        worker: the number of the worker; None for the test samples.
        num_workers: m, the number of workers.
        train: the pattern of the training files: ``/data/part-*.npz`` or ``/data/part-%03d.npz``.
        test: the pattern of the test files.

    >>> import numpy, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     folder = pathlib.Path(name)
    ...     for number in range(4):
    ...         arrays = {"inputs": numpy.full((2, 3), number), "targets": numpy.zeros(2)}
    ...         numpy.savez(folder / f"part-{number}.npz", **arrays)
    ...     inputs, targets = npz_files(1, 2, f"{folder}/part-*.npz", test="")
    >>> inputs[:, 0]  # files 1 and 3 of four
    array([1, 1, 3, 3])
    """
    numbered = worker is not None and "%" in train
    pattern = test if worker is None else train % worker if numbered else train
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  a pattern may be absolute
    chosen = found if worker is None or numbered else found[worker::num_workers]
    if not chosen:
        raise DataError(
            f"a worker needs at least one file: {len(found)} match {pattern!r},"
            f" for {num_workers} workers"
        )
    parts = []
    for path in chosen:
        with np.load(path, allow_pickle=False) as file:
            if not {"inputs", "targets"} <= set(file.files):
                raise DataError(
                    f"{path} needs the arrays inputs and targets: got {', '.join(file.files)}"
                )
            parts.append((file["inputs"], file["targets"]))
    inputs, targets = zip(*parts, strict=True)
    return np.concatenate(inputs), np.concatenate(targets)
