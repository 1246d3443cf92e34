"""Splits: how the training samples are divided over the workers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from phocas.data.assignment import Assignment, Indices
from phocas.provenance import defined_in
from phocas.settings import at_least
from phocas.specs import (
    Spec,
    Table,
    check_keywords,
    checks,
    count,
    keywords_of,
    normalise,
    place_of,
    positive,
    probability,
    read_keywords,
    write_spec,
)

Labels = npt.NDArray[np.integer[Any]]


class Split(Spec, abc.ABC):
    """A method that divides the training samples over the workers, such as ``dirichlet:alpha=0.5``.

    >>> isinstance(parse_split("dirichlet:alpha=0.5"), Split), str(ByLabel(shards=2))
    (True, 'by-label:shards=2')
    """

    needs_labels: ClassVar[bool] = True
    """Whether ``parts`` uses the values of the labels, not only their number."""
    alike: ClassVar[bool] = False
    """Whether the samples of all workers have the same distribution."""

    @abc.abstractmethod
    def parts(
        self, labels: Labels, num_workers: int, rng: np.random.Generator
    ) -> Sequence[Indices] | None:
        """Return the samples of each worker, or None if each draws from all samples."""

    def kept(self, labels: Labels, rng: np.random.Generator) -> Indices | None:
        """Return the samples that the split uses, in the training or the test set; None for all."""
        del labels, rng
        return None

    def assign(
        self,
        labels: npt.ArrayLike,
        num_workers: int,
        rng: np.random.Generator,
        *,
        among: Indices | None = None,
        iid: Collection[int] = (),
    ) -> Assignment:
        """Assign samples to workers; raise ValueError if there are too few samples.

        Args:
            labels: the label of each training sample.
            num_workers: m, the number of workers.
            rng: the random generator.
            among: the samples to divide; by default all.
            iid: workers that draw from all of these samples; the others divide them.

        >>> labels = np.repeat(np.arange(2), 3)
        >>> parts = ByLabel().assign(labels, 3, np.random.default_rng(0), iid=[0])
        >>> [part.tolist() for part in parts]
        [[0, 1, 2, 3, 4, 5], [3, 4, 5], [0, 1, 2]]
        """
        classes = np.asarray(labels)
        workers = count(self.name, "num_workers", num_workers, 1)
        if classes.ndim != 1 or not np.issubdtype(classes.dtype, np.integer):
            raise TypeError(
                f"{self.name} needs one whole number a sample as labels:"
                f" got shape {classes.shape} of {classes.dtype}"
            )
        pool = np.arange(len(classes)) if among is None else np.sort(among)
        kept = self.kept(classes[pool], rng)
        pool = pool if kept is None else pool[np.sort(kept)]
        sharing = workers - len({worker for worker in iid if worker < workers})
        if len(pool) < max(1, sharing) * self.least:
            raise ValueError(
                f"{self.name} needs at least {self.least} samples a worker:"
                f" got {len(pool)} samples for {sharing} workers,"
                f" the most workers is {len(pool) // self.least}"
            )
        parts = self.parts(classes[pool], sharing, rng) if sharing else None
        if parts is None:
            return Assignment.common(pool, workers)
        own = iter([pool[part] for part in self._checked(parts, sharing, len(pool))])
        return Assignment([pool if worker in iid else next(own) for worker in range(workers)])

    def _checked(self, parts: Sequence[Any], workers: int, samples: int) -> list[Indices]:
        """Return the parts as arrays; raise ValueError unless each worker has valid indices."""
        try:
            arrays = [np.asarray(part) for part in parts]
        except TypeError:
            arrays = []
        place = f"{defined_in(self.source)}: {self}"
        if len(arrays) != workers:
            got = f"{len(arrays)} arrays" if arrays else "none"
            raise ValueError(
                f"{place} must return an array of sample indices for each of {workers} workers:"
                f" got {got}"
            )
        for worker, part in enumerate(arrays):
            if part.ndim != 1 or len(part) == 0 or part.dtype.kind not in "iu":
                raise ValueError(
                    f"{place} must return whole numbers, at least one for each worker: got"
                    f" {part.dtype} of shape {part.shape} for worker {worker}"
                )
            if part.min() < 0 or part.max() >= samples:
                raise ValueError(
                    f"{place} must return indices from 0 to {samples - 1}: got {part.min()} to"
                    f" {part.max()} for worker {worker}"
                )
        return arrays

    @property
    def source(self) -> Any:
        """Return the function that divides the samples, whose file and line errors name."""
        return type(self).parts

    @property
    def least(self) -> int:
        """Return the smallest number of samples that each worker must get."""
        return 1


@dataclass(frozen=True)
class IID(Split):
    """Every worker draws from all samples, as in the paper.

    >>> parse_split("iid").assign([0, 1, 2], 2, np.random.default_rng(0))[1]
    array([0, 1, 2])
    """

    name = "iid"
    needs_labels = False
    alike = True

    def parts(self, labels: Labels, num_workers: int, rng: np.random.Generator) -> None:
        """Return None: every worker draws from all samples."""


@dataclass(frozen=True)
class Partition(Split):
    """Every sample belongs to one worker; parts are random and of equal size.

    >>> parts = parse_split("partition").assign(range(5), 2, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [3, 2]
    """

    name = "partition"
    needs_labels = False
    alike = True

    def parts(self, labels: Labels, num_workers: int, rng: np.random.Generator) -> list[Indices]:
        """Shuffle the samples and split them into m parts whose sizes differ by at most one."""
        return np.array_split(rng.permutation(len(labels)), num_workers)


@dataclass(frozen=True)
class Dirichlet(Split):
    """Each class is divided in proportions drawn from Dirichlet(alpha).

    A worker with fewer than ``minimum`` samples gets the missing ones from the worker with most.

    Args:
        alpha: concentration; smaller values give less equal parts.
        minimum: smallest number of samples per worker.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = parse_split("dirichlet:alpha=0.1").assign(labels, 5, np.random.default_rng(0))
    >>> sum(len(part) for part in parts)
    1000
    """

    name = "dirichlet"

    alpha: float = field(metadata=checks(positive))
    minimum: int = field(default=1, metadata=checks(at_least(1)))

    @property
    def least(self) -> int:
        """Return the smallest number of samples that each worker must get."""
        return self.minimum

    def parts(self, labels: Labels, num_workers: int, rng: np.random.Generator) -> list[Indices]:
        """Split each class at the cumulative proportions of one draw."""
        owner = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            # For tiny alpha all proportions may be NaN; the last worker then gets all samples.
            shares = np.nan_to_num(rng.dirichlet(np.full(num_workers, self.alpha)))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for worker, part in enumerate(np.split(members, np.minimum(cuts, len(members)))):
                owner[part] = worker
        sizes = np.bincount(owner, minlength=num_workers)
        while sizes.min() < self.minimum:
            smallest, largest = sizes.argmin(), sizes.argmax()
            moved = min(self.minimum - sizes[smallest], sizes[largest] - self.minimum)
            owner[rng.choice(np.flatnonzero(owner == largest), moved, replace=False)] = smallest
            sizes[smallest] += moved
            sizes[largest] -= moved
        return [np.flatnonzero(owner == worker) for worker in range(num_workers)]


@dataclass(frozen=True)
class ByLabel(Split):
    """Samples are sorted by label and cut into runs; each worker gets ``shards`` random runs.

    Args:
        shards: number of runs per worker.

    >>> parts = parse_split("by-label").assign([1, 0, 1, 0], 2, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3]]
    """

    name = "by-label"
    aliases = ("label",)

    shards: int = field(default=1, metadata=checks(at_least(1)))

    @property
    def least(self) -> int:
        """Return the smallest number of samples of a worker: one per shard."""
        return self.shards

    def parts(self, labels: Labels, num_workers: int, rng: np.random.Generator) -> list[Indices]:
        """Assign m x shards runs at random, so that a worker's index implies no class."""
        shuffled = rng.permutation(len(labels))
        runs = np.array_split(
            shuffled[np.argsort(labels[shuffled], kind="stable")], num_workers * self.shards
        )
        dealt = rng.permutation(len(runs)).reshape(num_workers, self.shards)
        return [np.concatenate([runs[run] for run in hand]) for hand in dealt]


@dataclass(frozen=True)
class GammaSimilarity(Split):
    """A share gamma of the samples is divided at random, the rest sorted by label.

    The rest is cut into m contiguous parts, which are assigned at random. With gamma = 1 workers
    have equal random parts; with gamma = 0 and as many workers as classes, one class each.

    Args:
        gamma: the share, from 0 to 1.

    >>> labels = np.repeat(np.arange(2), 4)
    >>> parts = parse_split("gamma-similarity:gamma=0").assign(labels, 2, np.random.default_rng(0))
    >>> [sorted(set(labels[part].tolist())) for part in parts]
    [[0], [1]]
    """

    name = "gamma-similarity"
    aliases = ("gamma",)

    gamma: float = field(metadata=checks(probability))

    def parts(self, labels: Labels, num_workers: int, rng: np.random.Generator) -> list[Indices]:
        """Divide the first share evenly, and the rest by label."""
        shuffled = rng.permutation(len(labels))
        alike, differing = np.split(shuffled, [round(self.gamma * len(labels))])
        ordered = differing[np.argsort(labels[differing], kind="stable")]
        runs = np.array_split(ordered, num_workers)
        # The last parts of array_split are shorter: the longer ones meet them in reverse.
        even = np.array_split(alike, num_workers)[::-1]
        order = rng.permutation(num_workers)
        return [np.concatenate([runs[worker], even[worker]]) for worker in order]


def _share(owner: str, name: str, value: object) -> float:
    share = probability(owner, name, value)
    if share == 0:
        raise ValueError(f"{owner} needs 0 < {name} <= 1: got {name}=0.0")
    return share


@dataclass(frozen=True)
class LongTail(Split):
    """Class i keeps a share factor^i of its samples, in the training and in the test set.

    The training samples that remain are divided by another split. Every class keeps at least one
    sample.

    Args:
        factor: ratio of the shares of consecutive classes, above 0 and at most 1.
        split: the split of the samples that remain.

    >>> labels = np.repeat(np.arange(3), 8)
    >>> parts = parse_split("long-tail:factor=0.5").assign(labels, 1, np.random.default_rng(0))
    >>> np.bincount(labels[parts[0]]).tolist()
    [8, 4, 2]
    """

    name = "long-tail"

    factor: float = field(default=0.5, metadata=checks(_share))
    split: Split = field(default=IID())

    def __post_init__(self) -> None:
        super().__post_init__()
        normalise(self, split=SPLITS.of(self.split, self.name))

    @property
    def source(self) -> Any:
        """Return the function of the other split."""
        return self.split.source

    @property
    def least(self) -> int:
        """Return the smallest number of samples that the other split gives to a worker."""
        return self.split.least

    def kept(self, labels: Labels, rng: np.random.Generator) -> Indices:
        """Return the samples that remain, drawn at random."""
        found = []
        for rank, label in enumerate(np.unique(labels)):
            members = rng.permutation(np.flatnonzero(labels == label))
            found.append(members[: max(1, round(len(members) * self.factor**rank))])
        return np.sort(np.concatenate(found))

    def parts(
        self, labels: Labels, num_workers: int, rng: np.random.Generator
    ) -> Sequence[Indices] | None:
        """Divide the remaining samples by the other split."""
        return self.split.parts(labels, num_workers, rng)


@dataclass(frozen=True)
class FunctionSplit(Split):
    """A split by a function of the labels that returns the indices of each worker's samples.

    The function gets the label of each training sample, an array that it cannot change, and those
    of these parameters that it has: ``num_workers``, ``rng``, and its own ``options``.

    Args:
        function: returns an array of sample indices for each worker.
        options: the function's other parameters by name.

    >>> def in_turn(labels, num_workers, block=1):
    ...     return [np.flatnonzero(np.arange(len(labels)) // block % num_workers == worker)
    ...             for worker in range(num_workers)]
    >>> parts = FunctionSplit(in_turn).assign([0, 0, 0, 1, 1], 2, np.random.default_rng(0))
    >>> [part.tolist() for part in parts]
    [[0, 2, 4], [1, 3]]
    """

    name: ClassVar[str] = "function"
    function: Callable[..., Any]
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Check the function and its parameters."""
        if not callable(self.function):
            raise TypeError(f"FunctionSplit needs a function of labels: got {self.function!r}")
        normalise(self, options=tuple(sorted(dict(self.options).items())))
        check_keywords(self.function, dict(self.options), _OFFERED)

    def __str__(self) -> str:
        return write_spec(place_of(self.function), dict(self.options))

    @classmethod
    def adapt(cls, function: Callable[..., Any], arguments: Mapping[str, str]) -> FunctionSplit:
        """Return the split for a function and the text of its arguments."""
        return cls(function, read_keywords(function, arguments))

    @property
    def source(self) -> Any:
        """Return the user's function."""
        return self.function

    def parts(
        self, labels: Labels, num_workers: int, rng: np.random.Generator
    ) -> Sequence[Indices]:
        """Return what the function returns."""
        takes = keywords_of(self.function)
        offered = {"num_workers": num_workers, "rng": rng}
        given = {key: value for key, value in offered.items() if key in takes}
        seen = labels.view()
        seen.flags.writeable = False
        found: Sequence[Indices] | None = self.function(seen, **given, **dict(self.options))
        return () if found is None else found


_OFFERED = ("num_workers", "rng")

SPLITS: Table[Split] = Table(
    "split",
    [IID, Partition, Dirichlet, ByLabel, GammaSimilarity, LongTail],
    base=Split,
    adapt=FunctionSplit.adapt,
)


def parse_split(text: str) -> Split:
    """Parse a split, for example ``dirichlet:alpha=0.5``.

    Args:
        text: the split's spec as on the command line.

    >>> parse_split("by-label:shards=2")
    ByLabel(shards=2)
    """
    return SPLITS.parse(text)
