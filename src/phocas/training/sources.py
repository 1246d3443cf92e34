"""Other sources of samples: arrays, torch data sets, or one source for each worker.

A source returns samples by index. The indices are drawn elsewhere: a batch depends only on (seed,
round, worker), so a run can be resumed and every engine sees the same batches. So order, batch size
and processes of a torch DataLoader are not used.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data

Numbers = npt.NDArray[np.integer[Any]]
Batch = tuple[torch.Tensor, torch.Tensor]

KINDS = (
    "a phocas Dataset, a pair (inputs, targets) of arrays or tensors, a torch Dataset or"
    " DataLoader, a list of these (one a worker), or a mapping with 'train' and 'test'"
)

# Several threads draw samples, but a user's data set need not be thread-safe.
_READING = threading.Lock()
_READ_AT_ONCE = 256


class SampleSource(Protocol):
    """Samples that can be read by index, 0 to ``len - 1``."""

    nbytes: int
    """Bytes of the inputs in memory or in memory-mapped files."""

    def __len__(self) -> int: ...

    def take(self, numbers: Numbers) -> Batch:
        """Return the inputs and targets of (rows, n) indices, concatenated."""

    def labels(self) -> npt.NDArray[Any]:
        """Return the targets of all samples, reading them one by one if necessary."""


class Arrays:
    """A pair of arrays or tensors, read without a copy."""

    def __init__(self, inputs: Any, targets: Any, name: str) -> None:
        self.inputs, self.targets = _as_array(inputs, name), _as_array(targets, name)
        if self.inputs.ndim == 0 or self.targets.ndim == 0:
            raise ValueError(
                f"{name} needs one input and one target a sample along the first axis: got inputs"
                f" of shape {tuple(self.inputs.shape)}, targets of {tuple(self.targets.shape)}"
            )
        if len(self.inputs) != len(self.targets) or len(self.targets) == 0:
            raise ValueError(
                f"{name} needs one target for each input, and at least one of them:"
                f" got {len(self.inputs)} inputs and {len(self.targets)} targets"
            )
        self.nbytes = int(self.inputs.nbytes)

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, numbers: Numbers) -> Batch:
        """Return copies of the samples."""
        flat = numbers.reshape(-1)
        return _rows(self.inputs, flat), _rows(self.targets, flat)

    def labels(self) -> npt.NDArray[Any]:
        """Return the targets."""
        if isinstance(self.targets, torch.Tensor):
            return self.targets.float().numpy()
        return self.targets


class Items:
    """A data set whose items are read and collated when a batch is drawn.

    Torch's generator is seeded by the indices of each row before its items are read, so that a
    batch depends only on (seed, round, worker) even if transforms are random.
    """

    nbytes = 0

    def __init__(
        self, dataset: Any, name: str, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.collate = collate or torch_data.default_collate
        try:
            self.size = len(dataset)
        except TypeError:
            raise TypeError(
                f"{name} needs a data set with a length: {type(dataset).__name__} has none"
            ) from None
        if self.size == 0:
            raise ValueError(f"{name} needs at least one sample: {type(dataset).__name__} is empty")

    def __len__(self) -> int:
        return self.size

    def take(self, numbers: Numbers) -> Batch:
        """Read and collate the items, row by row."""
        items: list[Any] = []
        with _READING, torch.random.fork_rng(devices=[]):
            for row in numbers:
                torch.default_generator.manual_seed(zlib.crc32(row.astype(np.int64).tobytes()))
                items += self._read(row.tolist())
        batch = self.collate(items)
        if not (
            isinstance(batch, list | tuple)
            and len(batch) == 2
            and all(isinstance(part, torch.Tensor) and len(part) == numbers.size for part in batch)
        ):
            raise TypeError(
                f"each item of {self.name} must be a pair (input, target) of tensors, arrays or"
                f" numbers: got {type(items[0]).__name__}, collated to {type(batch).__name__};"
                " wrap the data set in one whose items are such pairs"
            )
        return batch[0], batch[1]

    def _read(self, numbers: list[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            return list(together(numbers))
        return [self.dataset[number] for number in numbers]

    def labels(self) -> npt.NDArray[Any]:
        """Return the data set's own list of classes; if it has none, read all items once."""
        if getattr(self.dataset, "target_transform", None) is None:
            for name in ("targets", "labels"):
                found = getattr(self.dataset, name, None)
                if isinstance(found, torch.Tensor | np.ndarray | list):
                    classes = np.asarray(found)
                    if classes.shape == (self.size,) and classes.dtype.kind in "iu":
                        return classes
        numbers = np.arange(self.size)
        parts = [
            self.take(numbers[None, start : start + _READ_AT_ONCE])[1]
            for start in range(0, self.size, _READ_AT_ONCE)
        ]
        return torch.cat(parts).numpy()


class Chosen:
    """Some of another source's samples, as made by ``torch.utils.data.random_split``."""

    def __init__(self, source: SampleSource, numbers: Sequence[int] | Numbers, name: str) -> None:
        self.source = source
        self.numbers = np.asarray(numbers, np.int64).reshape(-1)
        self.nbytes = source.nbytes
        if len(self.numbers) == 0:
            raise ValueError(f"{name} needs at least one sample: got an empty Subset")

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: Numbers) -> Batch:
        """Return samples of the other source."""
        return self.source.take(self.numbers[numbers])

    def labels(self) -> npt.NDArray[Any]:
        """Return the targets of these samples."""
        return self.source.labels()[self.numbers]


class Joined:
    """One source per worker, with consecutive indices."""

    def __init__(self, sources: Sequence[SampleSource], name: str) -> None:
        self.sources = sources
        self.sizes = [len(source) for source in sources]
        self.ends = np.cumsum(self.sizes)
        self.nbytes = sum(source.nbytes for source in sources)
        kinds = [
            [(tuple(part.shape[1:]), part.is_floating_point()) for part in source.take(_FIRST)]
            for source in sources
        ]
        for worker, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"all data sets in {name} must have inputs and targets of one shape and kind:"
                    f" number {worker} has {_describe(kind)}, number 0 has {_describe(kinds[0])}"
                )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, numbers: Numbers) -> Batch:
        """Read the samples of each source in one call."""
        flat = numbers.reshape(-1)
        owners = np.searchsorted(self.ends, flat, side="right")
        order = np.argsort(owners, kind="stable")
        parts = [
            source.take((flat[owners == owner] - (self.ends[owner] - self.sizes[owner]))[None])
            for owner, source in enumerate(self.sources)
            if (owners == owner).any()
        ]
        positions = torch.from_numpy(np.argsort(order, kind="stable"))
        inputs, targets = (torch.cat(part)[positions] for part in zip(*parts, strict=True))
        return inputs, targets

    def labels(self) -> npt.NDArray[Any]:
        """Return the targets of all sources."""
        return np.concatenate([source.labels() for source in self.sources])


_FIRST = np.zeros((1, 1), np.int64)


def open_foreign(data: Any, name: str) -> SampleSource:
    """Return the source of a pair of arrays, a torch Dataset or a DataLoader."""
    if isinstance(data, tuple) and len(data) == 2:
        return Arrays(*data, name)
    if isinstance(data, torch_data.DataLoader):
        return _of_loader(data, name)
    return _of_torch(data, name)


def _of_torch(data: Any, name: str) -> SampleSource:
    if isinstance(data, torch_data.IterableDataset):
        raise TypeError(
            f"{name} needs samples that can be had by their number, since batches are drawn by"
            " (seed, round, worker) and a run can be resumed: got an IterableDataset; read it into"
            " a list of pairs and wrap that in a torch Dataset, or into two arrays"
        )
    if type(data) is torch_data.TensorDataset and len(data.tensors) == 2:
        return Arrays(*data.tensors, name)
    if type(data) is torch_data.Subset:
        return Chosen(_of_torch(data.dataset, name), data.indices, name)
    array = isinstance(data, np.ndarray | torch.Tensor | str | bytes | tuple | dict)
    if array or not hasattr(data, "__getitem__"):
        raise TypeError(f"{name} must be {KINDS}: got {type(data).__name__}")
    return Items(data, name)


def _of_loader(loader: torch_data.DataLoader[Any], name: str) -> SampleSource:
    """Use the loader's data set and collate function; raise if it has a sampler of its own."""
    source = _of_torch(loader.dataset, name)
    plain = (torch_data.SequentialSampler, torch_data.RandomSampler)
    batches = loader.batch_sampler
    if type(loader.sampler) not in plain or type(batches) not in (
        torch_data.BatchSampler,
        type(None),
    ):
        chosen = batches if type(loader.sampler) in plain else loader.sampler
        raise ValueError(
            f"{name}: batches are drawn evenly from a worker's samples, by (seed, round, worker),"
            f" so the loader's {type(chosen).__name__} would have no effect; pass a data set with"
            " the samples that it would choose (torch.utils.data.Subset), or a list of data sets,"
            " one a worker"
        )
    own = loader.collate_fn not in (torch_data.default_collate, torch_data.default_convert)
    return Items(loader.dataset, name, loader.collate_fn) if own else source


def _as_array(part: Any, name: str) -> npt.NDArray[Any] | torch.Tensor:
    """Return an array in the same memory; a tensor only if NumPy has no such dtype."""
    tensor = part.detach().cpu() if isinstance(part, torch.Tensor) else None
    if tensor is not None and tensor.dtype == torch.bfloat16:
        return tensor
    try:
        values = np.asarray(part if tensor is None else tensor)
    except ValueError as error:
        raise ValueError(
            f"{name} must be {KINDS}: got a pair with a part of {type(part).__name__}: {error}"
        ) from None
    if values.dtype.kind not in "biufc":
        raise TypeError(
            f"{name} must be {KINDS}: got a pair with a part of {type(part).__name__}, which holds"
            f" {values.dtype}"
        )
    return values


def _rows(values: npt.NDArray[Any] | torch.Tensor, numbers: Numbers) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values[torch.from_numpy(numbers)]
    return as_tensor(np.take(values, numbers, axis=0))


def as_tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor, without a copy if it is contiguous and in native order."""
    return torch.from_numpy(
        np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(values.shape)
    )


def _describe(kind: list[tuple[tuple[int, ...], bool]]) -> str:
    (inputs, first), (targets, second) = kind
    words = {True: "floating-point", False: "whole"}
    return f"inputs {inputs} ({words[first]} numbers) and targets {targets} ({words[second]})"
