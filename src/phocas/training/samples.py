"""Training and test samples as tensors.

:class:`Samples` takes the user's data in any accepted form, and returns batches in the model's
dtype. :class:`Images` is the source of samples for a :class:`Dataset`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from phocas.data import IID, Assignment, Dataset, OwnData, Split
from phocas.training.sources import (
    KINDS,
    Batch,
    Chosen,
    Joined,
    Numbers,
    SampleSource,
    as_tensor,
    open_foreign,
)


class Samples:
    """Inputs and targets for training and for testing.

    Floating-point inputs and targets are converted to the model's dtype. Integers become int64, as
    embeddings and classes need them. The bytes of a :class:`Dataset` become numbers from 0 to 1.

    >>> samples = Samples((np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])))
    >>> samples.draw(np.array([[2, 0]]))
    (tensor([[[4., 5.],
             [0., 1.]]]), tensor([[1, 0]]))

    Args:
        data: a :class:`Dataset`; a pair (inputs, targets) of arrays or tensors; a torch Dataset
            (not an iterable one) or DataLoader; a list with one of these per worker; or a mapping
            with the keys ``train`` and ``test``.
        test: test samples, of the same kinds; a :class:`Dataset` contains its own.
        standardise: subtract a Dataset's mean and divide by its standard deviation.
        dtype: the model's dtype.
    """

    def __init__(
        self,
        data: Any,
        test: Any = None,
        *,
        standardise: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if isinstance(data, Mapping):
            if set(data) != {"train", "test"}:
                raise ValueError(
                    "a mapping of data must have the keys 'train' and 'test' and no other:"
                    f" got {', '.join(map(repr, data)) or 'none'}"
                )
            if test is not None:
                raise ValueError("test samples are given twice: in data['test'] and by test=")
            data, test = data["train"], data["test"]
        if data is None:
            raise TypeError(f"data must be {KINDS}: got None")
        self.dtype = dtype
        self.standardise = standardise
        self.parts: OwnData | None = None
        """The description of training samples that workers load: ``train`` is a stand-in."""
        self.train = open_source(data, "data", standardise=standardise)
        judged = data if test is None and isinstance(data, Dataset) else test
        self.test: SampleSource | None = None
        if judged is not None:
            self.test = open_source(judged, "test", standardise=standardise, test=True)
            self._check_kinds()
        self.validation: SampleSource | None = None
        self.free: npt.NDArray[np.int64] = np.arange(len(self.train))
        """The training samples that are not held out."""
        sets = data if isinstance(data, list) else [data]
        known = [each.num_classes for each in sets if isinstance(each, Dataset)]
        self._known_classes = max(known) if len(known) == len(sets) else None

    @classmethod
    def described(cls, parts: OwnData, num_workers: int, test: Any = None, **options: Any) -> Self:
        """Return test samples, and the description of training samples that workers load.

        Until :meth:`load_parts`, the test samples are the training samples too: a trainer takes
        the shape of inputs and the number of classes from them.
        """
        judged = parts.part(None, num_workers) if test is None else test
        samples = cls(judged, None if isinstance(judged, Dataset | Mapping) else judged, **options)
        _ = samples.num_classes  # the same in every process
        samples.parts = parts
        return samples

    def load_parts(self, num_workers: int, first: int, last: int) -> tuple[Self, Assignment]:
        """Return samples with those of workers first to last - 1, and their assignment to workers.

        A worker whose samples are elsewhere has the first sample of all, which is never drawn.
        """
        assert self.parts is not None
        sources = []
        for worker in range(first, last):
            part, name = self.parts.part(worker, num_workers), f"the data of worker {worker}"
            sources.append(open_source(part, name, standardise=self.standardise))
        loaded = copy.copy(self)
        loaded.train = Joined(sources, f"the data of workers {first} to {last - 1}")
        loaded.free = np.arange(len(loaded.train))
        numbers = np.split(loaded.free, loaded.train.ends[:-1])
        own = dict(zip(range(first, last), numbers, strict=True))
        return loaded, Assignment(
            [own.get(worker, loaded.free[:1]) for worker in range(num_workers)]
        )

    def __len__(self) -> int:
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input."""
        return tuple(self.draw(np.zeros((1, 1), np.int64))[0].shape[2:])

    @property
    def nbytes(self) -> int:
        """Return the bytes of the training inputs in memory; 0 if they are read on demand."""
        return self.train.nbytes

    @functools.cached_property
    def num_classes(self) -> int:
        """Return the number of classes, or 0 if targets are not integers; may read all targets."""
        if self._known_classes is not None:
            return self._known_classes
        labels = self.train.labels()
        return int(labels.max()) + 1 if np.issubdtype(labels.dtype, np.integer) else 0

    def hold_out(self, share: float, rng: np.random.Generator) -> None:
        """Make a share of the training samples, drawn at random, the validation samples.

        Call this before :meth:`assign`, which then assigns the other samples only.
        """
        number = round(share * len(self))
        if not 1 <= number < len(self):
            raise ValueError(
                "validation must hold out at least one training sample and leave at least one:"
                f" got validation={share} of {len(self)} samples, which holds out {number}"
            )
        held, self.free = map(np.sort, np.split(rng.permutation(len(self)), [number]))
        source = copy.copy(self.train)
        if isinstance(source, Images):
            source.reuse = False  # threads evaluate several batches at the same time
        self.validation = Chosen(source, held, "validation")

    def trusted(self, number: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw samples that the server keeps; :meth:`assign` then assigns the other samples only.

        Raise ValueError if no others would be left.
        """
        if number >= len(self.free):
            raise ValueError(
                f"trusted samples are taken out of {len(self.free)} training samples, and some must"
                f" be left: got trusted={number}"
            )
        kept = np.sort(rng.choice(self.free, number, replace=False))
        self.free = np.setdiff1d(self.free, kept)
        return kept

    def assign(
        self,
        split: Split | None,
        num_workers: int,
        rng: np.random.Generator,
        *,
        iid: Collection[int] = (),
    ) -> Assignment:
        """Assign samples to workers: by the split, or by the data set of each worker.

        The test samples that the split does not use are removed. The workers in ``iid`` draw from
        all samples, and the others divide them.
        """
        if isinstance(self.train, Joined):
            if split is not None and not isinstance(split, IID):
                raise ValueError(
                    f"one data set a worker is a split already: leave split={str(split)!r} out, or"
                    " give one data set for all"
                )
            sizes = self.train.sizes
            if len(sizes) != num_workers:
                raise ValueError(
                    f"data needs one data set for each of the {num_workers} workers:"
                    f" got {len(sizes)}"
                )
            if iid:
                raise ValueError(
                    "one data set a worker is a split already: leave byzantine_data='iid' out, or"
                    " give one data set for all"
                )
            parts = np.split(np.arange(len(self)), np.cumsum(sizes)[:-1])
            return Assignment([np.intersect1d(part, self.free) for part in parts])
        split = split or IID()
        labels = self.train.labels() if split.needs_labels else np.zeros(len(self), np.int64)
        assignment = split.assign(labels, num_workers, rng, among=self.free, iid=iid)
        if self.test is not None and split.needs_labels:
            kept = split.kept(self.test.labels(), rng)
            self.test = self.test if kept is None else Chosen(self.test, kept, "test")
        return assignment

    def draw(self, indices: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (m, n, ...) and targets of indices (m, n), valid until the next draw."""
        inputs, targets = map(self._typed, self.train.take(indices))
        return (
            inputs.reshape(*indices.shape, *inputs.shape[1:]),
            targets.reshape(*indices.shape, *targets.shape[1:]),
        )

    def for_evaluation(self) -> Self:
        """Return the samples with the validation samples, if there are any, as test samples."""
        if self.validation is None:
            return self
        seen = copy.copy(self)
        seen.test = self.validation
        return seen

    def test_parts(self, size: int) -> list[npt.NDArray[np.int64]]:
        """Return the indices of the test samples in order, in parts of ``size``."""
        numbers = np.arange(len(self._judged()))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def test_batch(self, part: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the test samples with these indices."""
        inputs, targets = map(self._typed, self._judged().take(part[None]))
        return inputs, targets

    def _check_kinds(self) -> None:
        trained = self.draw(np.zeros((1, 1), np.int64))
        judged = self.test_batch(np.zeros(1, np.int64))
        for part, first, second in zip(("inputs", "targets"), trained, judged, strict=True):
            if first.dtype != second.dtype:
                raise TypeError(
                    f"test must have {part} of the kind that data has: got {second.dtype} for"
                    f" {first.dtype}; bytes are made floats only in a phocas Dataset"
                )

    def _judged(self) -> SampleSource:
        if self.test is None:
            raise ValueError(
                "evaluation needs test samples: pass test=, of any kind that data may have"
            )
        return self.test

    def without_test(self) -> Self:
        """Return the samples without those for evaluation, which workers do not need."""
        lean = copy.copy(self)
        lean.test = lean.validation = None
        if lean.parts is not None:
            del lean.train, lean.free  # of a stand-in
        return lean

    def _typed(self, values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point() or values.dtype == torch.bool:
            return values.to(self.dtype)
        return values if values.is_complex() else values.to(torch.int64)


class Images:
    """The training or test half of a :class:`Dataset`.

    Bytes are converted to numbers from 0 to 1 when they are drawn, so that all processes share a
    memory-mapped file. With ``reuse`` a batch is valid until the next one is drawn.
    """

    def __init__(
        self,
        dataset: Dataset,
        images: npt.NDArray[Any],
        labels: npt.NDArray[Any],
        *,
        standardise: bool,
        reuse: bool,
    ) -> None:
        # Without the other half, which would be sent to remote workers for nothing.
        self.dataset = replace(
            dataset,
            train_images=images,
            train_labels=labels,
            test_images=images[:1],
            test_labels=labels[:1],
        )
        self.standardise = standardise
        self.reuse = reuse
        self.nbytes = images.nbytes
        self._labels = labels.astype(labels.dtype.newbyteorder("="), copy=False)
        self._batch = torch.empty(0)

    def __len__(self) -> int:
        return len(self.dataset.train_labels)

    def take(self, numbers: Numbers) -> Batch:
        """Return floats for bytes; other numbers are not converted."""
        flat = numbers.reshape(-1)
        values = np.take(self.dataset.train_images, flat, axis=0)
        targets = torch.from_numpy(self._labels[flat])
        if self.standardise:
            return as_tensor(self.dataset.floats(values, standardise=True)), targets
        if values.dtype != np.uint8:
            return as_tensor(values), targets
        # The same bits as Dataset.floats in a third of its time: 0.1 ms for the paper's 640 images.
        floats = self._buffer(values.shape).copy_(torch.from_numpy(values))
        return floats.mul_(self.dataset.scale), targets

    def _buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.reuse:
            return torch.empty(shape)
        if self._batch.shape != shape:
            self._batch = torch.empty(shape)  # new memory pages in every round would cost 0.2 ms
        return self._batch

    def labels(self) -> npt.NDArray[Any]:
        """Return the labels."""
        return self.dataset.train_labels


def open_source(
    data: Any, name: str, *, standardise: bool = False, test: bool = False
) -> SampleSource:
    """Return the source of the user's data; ``test`` selects the test half of a Dataset."""
    if isinstance(data, Dataset):
        images, labels = (
            (data.test_images, data.test_labels) if test else (data.train_images, data.train_labels)
        )
        return Images(data, images, labels, standardise=standardise, reuse=not test)
    if isinstance(data, list):
        if not data:
            raise ValueError(f"{name} needs at least one data set in its list: got none")
        sources = [
            open_source(each, f"{name}[{index}]", standardise=standardise, test=test)
            for index, each in enumerate(data)
        ]
        return Joined(sources, name)
    if standardise:
        raise ValueError(
            f"standardise needs a phocas Dataset, which knows its mean and std: {name} is"
            f" {type(data).__name__}; standardise its inputs beforehand"
        )
    return open_foreign(data, name)
