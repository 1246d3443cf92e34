"""Base types of data sets: images and labels for training and for testing."""

from __future__ import annotations

import abc
import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phocas.data.store import DataError
from phocas.provenance import defined_in
from phocas.specs import Spec

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification problem in memory, or in memory-mapped files.

    Args:
        name: name of the data set.
        train_images: training images, (N, C, H, W) bytes.
        train_labels: training labels, (N,) integers from 0 to ``num_classes - 1``.
        test_images: test images, in the same format.
        test_labels: test labels.
        num_classes: number of classes.
        mean: mean of each channel of the training images, after the division by 255.
        std: standard deviation of each channel, after the division by 255.
        classes: names of the classes.
        scale: factor that converts bytes to floats.

    >>> import numpy as np
    >>> images, labels = np.full((2, 1, 1, 1), 255, np.uint8), np.array([0, 1])
    >>> data = Dataset("two", images, labels, images, labels, num_classes=2)
    >>> data.floats(data.train_images).ravel()
    array([1., 1.], dtype=float32)
    """

    name: str
    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.integer[Any]]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.integer[Any]]
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    scale: float = 1 / 255

    def __post_init__(self) -> None:
        for half in ("train", "test"):
            images, labels = getattr(self, f"{half}_images"), getattr(self, f"{half}_labels")
            if labels.ndim != 1 or len(images) != len(labels) or len(labels) == 0:
                raise ValueError(
                    f"{self.name} needs one label for each of its {half} images, at least"
                    f" one: got images of shape {images.shape} and labels of shape {labels.shape}"
                )
            if not np.issubdtype(labels.dtype, np.integer):
                raise TypeError(f"{self.name} needs whole numbers as labels: got {labels.dtype}")
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(
                    f"{self.name} needs {half} labels from 0 to {self.num_classes - 1}:"
                    f" got {low} to {high}"
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"{self.name} needs train and test images of one shape:"
                f" got {self.train_images.shape[1:]} and {self.test_images.shape[1:]}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: channels, height, width."""
        return self.train_images.shape[1:]

    def floats(
        self, images: npt.NDArray[np.uint8], *, standardise: bool = False
    ) -> npt.NDArray[np.float32]:
        """Convert bytes to floats divided by 255 (as in the paper), optionally standardised."""
        values = images.astype(np.float32)
        values *= np.float32(self.scale)
        if standardise:
            if not self.mean or not self.std:
                raise ValueError(f"{self.name} has no mean and std to standardise its images with")
            by_channel = (-1,) + (1,) * (len(self.shape) - 1)
            values -= np.array(self.mean, np.float32).reshape(by_channel)
            values /= np.array(self.std, np.float32).reshape(by_channel)
        return values


class DataSpec(Spec, abc.ABC):
    """A data set that has a spec: ``mnist``, ``synthetic:train=2000,seed=3``.

    >>> from phocas.data import DATASETS
    >>> DATASETS.parse("synthetic:train=100,seed=3")
    Synthetic(train=100, test=2000, classes=10, channels=1, side=28, noise=80.0, seed=3)
    """

    @abc.abstractmethod
    def load(self, folder: str | os.PathLike[str] | None = None, *, download: bool = True) -> Any:
        """Return the data set; fetch files that the folder lacks unless ``download`` is false."""


@dataclass(frozen=True)
class OwnData(DataSpec):
    """The data that a user-defined function or class returns when it is called.

    The data may be anything that a trainer accepts: a :class:`Dataset`, a pair of arrays, a torch
    Dataset, a list with one of these per worker, or a mapping with ``train`` and ``test``.

    If the function has a parameter ``worker``, every worker calls it with its number, in the
    process that computes its gradients, and gets its own training samples. With ``worker=None`` the
    function returns the test samples. A parameter ``num_workers`` gets the number of workers.

    Args:
        make: the function or class.
        arguments: names and values of the call's arguments.

    >>> OwnData.of(range, {"start": "3"})
    OwnData(make=<class 'range'>, arguments=(('start', 3),))
    """

    name = "own"

    make: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, make: Callable[..., Any], arguments: Mapping[str, str]) -> OwnData:
        """Parse the arguments of a call as Python literals, or keep them as text."""
        return cls(make, tuple((key, _literal(text)) for key, text in arguments.items()))

    def __str__(self) -> str:
        made = getattr(self.make, "func", self.make)  # of a functools.partial
        target = f"{made.__module__}:{made.__qualname__}"
        return ":".join([target, *filter(None, [",".join(f"{k}={v}" for k, v in self.arguments)])])

    def load(self, folder: str | os.PathLike[str] | None = None, *, download: bool = True) -> Any:
        """Return the data set that the user's function makes.

        ``folder`` and ``download`` are not used. If each worker loads its own data, the result is
        this description.
        """
        del folder, download
        return self if self.by_worker else self._call({})

    @property
    def by_worker(self) -> bool:
        """Whether each worker loads its own data."""
        return takes(self.make, "worker")

    def part(self, worker: int | None, num_workers: int) -> Any:
        """Return the training samples of a worker, or the test samples if ``worker`` is None.

        Raises:
            DataError: the user's function failed; the text has its error in one line.
        """
        given = {"worker": worker}
        if takes(self.make, "num_workers"):
            given["num_workers"] = num_workers
        try:
            return self._call(given)
        except Exception as error:
            whose = "the test samples" if worker is None else f"the data of worker {worker}"
            text = (str(error).strip().splitlines() or [""])[0]
            raise DataError(
                f"{self} cannot load {whose}: {type(error).__name__}: {text}"
            ) from error

    def _call(self, more: Mapping[str, Any]) -> Any:
        given = dict(self.arguments) | dict(more)
        try:
            inspect.signature(self.make).bind(**given)
        except TypeError as error:
            raise ValueError(f"{self}: {error}") from None
        made = self.make(**given)
        if made is None:
            raise ValueError(f"{defined_in(self.make)}: {self} must return a data set: got None")
        return made


def takes(make: Any, name: str) -> bool:
    """Return whether a function or class has a parameter with a name."""
    try:
        return name in inspect.signature(make).parameters
    except (TypeError, ValueError):  # not callable, or a function without a signature
        return False


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
