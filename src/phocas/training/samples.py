"""What workers learn from: batches of a data set, or of arrays of the user's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phocas.data import Dataset

Pair = tuple[Any, Any]


class Samples:
    """Inputs and targets to train on and to be judged by; a :class:`Dataset` or arrays.

    Data sets stay bytes until a batch is drawn, so that a mapped file is shared by all processes.
    """

    def __init__(
        self,
        data: Dataset | Pair,
        test: Pair | None = None,
        *,
        standardise: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dataset = data if isinstance(data, Dataset) else None
        self.standardise = standardise
        self._batch: torch.Tensor | None = None  # new pages every round would cost 0.2 ms
        self.dtype = dtype
        if isinstance(data, Dataset):
            self.inputs, self.targets = data.train_images, data.train_labels
            self.test: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = (
                data.test_images,
                data.test_labels,
            )
        else:
            self.inputs, self.targets = _pair(data, "data")
            self.test = None
        if test is not None:
            self.test = _pair(test, "test")
        whole = np.issubdtype(self.targets.dtype, np.integer)
        self.num_classes = (
            data.num_classes
            if isinstance(data, Dataset)
            else int(self.targets.max()) + 1
            if whole
            else 0
        )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.inputs.shape[1:]

    def classes(self) -> npt.NDArray[np.integer]:
        """Return a label for each sample to split by; all 0 where targets are no classes."""
        if self.num_classes and self.targets.ndim == 1:
            return self.targets
        return np.zeros(len(self), np.int64)

    def draw(self, indices: npt.NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs (m, n, ...) and targets of indices (m, n), good until the next draw."""
        flat = indices.reshape(-1)
        size = flat.size * math.prod(self.shape)
        if self._batch is None or self._batch.numel() != size:
            self._batch = torch.empty(size)
        values = np.take(self.inputs, flat, axis=0)
        inputs = self._tensor(values, self._batch).view(*indices.shape, *self.shape)
        targets = self._targets(self.targets[flat])
        return inputs, targets.view(*indices.shape, *targets.shape[1:])

    def test_parts(self, size: int) -> list[slice]:
        """Return the test samples in order, so many at a time, to be read by ``test_batch``."""
        if self.test is None:
            raise ValueError("evaluation needs test samples: pass test=(inputs, targets)")
        return [slice(start, start + size) for start in range(0, len(self.test[1]), size)]

    def test_batch(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some of the test samples."""
        assert self.test is not None
        inputs, targets = self.test
        return self._tensor(np.array(inputs[part])), self._targets(targets[part])

    def _tensor(self, values: npt.NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        if self.dataset is not None and self.standardise:
            values = self.dataset.floats(values, standardise=True)
        elif self.dataset is not None and values.dtype == np.uint8:
            # The bits of Dataset.floats in a third of its time: 0.1 ms for the paper's 640 images.
            bytes_ = torch.from_numpy(np.asarray(values, order="C"))
            floats = torch.empty(bytes_.shape) if out is None else out.view(bytes_.shape)
            return floats.copy_(bytes_).mul_(self.dataset.scale).to(self.dtype)
        return torch.from_numpy(np.array(values, order="C")).to(self.dtype)

    def _targets(self, values: npt.NDArray[Any]) -> torch.Tensor:
        whole = np.issubdtype(values.dtype, np.integer)
        tensor = torch.from_numpy(np.array(values))
        return tensor.to(torch.int64 if whole else self.dtype)


def _pair(pair: Pair, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    inputs, targets = (np.asarray(part) for part in pair)
    if len(inputs) != len(targets) or len(targets) == 0:
        raise ValueError(
            f"{name} needs one target for each input, and at least one of them:"
            f" got {len(inputs)} inputs and {len(targets)} targets"
        )
    return inputs, targets
