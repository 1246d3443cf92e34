"""Random draws of single cells, and masks of bits within them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from phocas.floats import FORMATS, Format
from phocas.specs import count


def bernoulli(rng: np.random.Generator, size: int, probability: float) -> np.ndarray:
    """Return the indices of the successes among ``size`` independent trials, in ascending order.

    The gaps between successes are drawn from the geometric distribution, so the time is
    proportional to the number of successes, not of trials.

    >>> bernoulli(np.random.default_rng(0), 4, 1.0).tolist()
    [0, 1, 2, 3]
    """
    if probability == 0 or size == 0:
        return np.empty(0, np.int64)
    expected = size * probability
    batch = int(expected + 6 * math.sqrt(expected)) + 16
    found = []
    last = -1
    while last < size:
        # Cap each gap just beyond the end, so that sums of gaps cannot overflow.
        gaps = np.minimum(rng.geometric(probability, batch), size + 1)
        indices = last + np.cumsum(gaps)
        found.append(indices)
        last = int(indices[-1])
    indices = found[0] if len(found) == 1 else np.concatenate(found)
    return indices[: np.searchsorted(indices, size)]


def rows_and_columns(indices: np.ndarray, m: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Split ascending flat indices of an (m, width) matrix into rows and columns.

    A search is faster than one division per index.

    >>> rows_and_columns(np.array([0, 5, 6]), 3, 4)
    (array([0, 1, 1]), array([0, 1, 2]))
    """
    ends = np.searchsorted(indices, np.arange(m + 1) * width)
    rows = np.repeat(np.arange(m), np.diff(ends))
    return rows, indices - rows * width


def distinct(rng: np.random.Generator, m: int, take: int, times: int) -> np.ndarray:
    """Draw ``take`` different numbers below m, ``times`` times, as a (take, times) array.

    Floyd's algorithm: a draw that repeats an earlier one is replaced by the largest number so far.
    """
    chosen = np.empty((take, times), np.int64)
    for step, newest in enumerate(range(m - take, m)):
        chosen[step] = rng.integers(newest + 1, size=times)
        if step:
            chosen[step, (chosen[:step] == chosen[step]).any(axis=0)] = newest
    return chosen


def read_bits(owner: str, name: str, bits: Iterable[int]) -> tuple[int, ...]:
    """Return bit numbers as a tuple; raise if there are none, duplicates, or bits above 64."""
    numbers = tuple(count(owner, name.removesuffix("s"), bit, 1) for bit in bits)
    if not numbers:
        raise ValueError(f"{owner} needs at least one bit: got none, which changes nothing")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{owner} needs each bit once: got bits={numbers}")
    for problem in missing_bits(numbers, FORMATS["float64"]):
        raise ValueError(f"{owner} needs {problem}")
    return numbers


def missing_bits(bits: tuple[int, ...], kind: Format | None) -> Iterator[str]:
    """Yield a message if the format has fewer bits than the largest of these bit numbers."""
    if kind is not None and max(bits) > kind.bits:
        yield (
            f"bits in 1..{kind.bits} for {kind.name}: got bits={bits}; the paper's"
            f" bits correspond to {kind.paper_bits()}"
        )


def bit_mask(bits: tuple[int, ...], kind: Format) -> Any:
    """Return a word of the format with these bits set; bit 1 is the least significant."""
    return kind.word.type(sum(1 << (bit - 1) for bit in bits))
