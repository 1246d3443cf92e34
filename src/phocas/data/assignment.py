"""The samples of each worker, and the batches drawn from them.

A batch depends only on (seed, round, worker), so every engine, and a run that was killed and
resumed, sees the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from phocas.specs import count

Indices = npt.NDArray[np.int64]

# Counter that no other stream with the key (seed, round) uses, so that batches are independent.
_BATCHES = np.array([0, 0, 0, 0x62617463686573], np.uint64)


class Assignment(Sequence[Indices]):
    """The samples of each worker: a sequence of m sorted, non-empty index arrays.

    Args:
        parts: the indices of each worker's samples.

    >>> parts = Assignment([np.array([0, 2]), np.array([1])])
    >>> len(parts), parts[0]
    (2, array([0, 2]))
    """

    def __init__(self, parts: Sequence[npt.ArrayLike]) -> None:
        arrays = [np.sort(np.asarray(part, np.int64).ravel()) for part in parts]
        if not arrays:
            raise ValueError("an assignment needs at least one worker: got none")
        for worker, part in enumerate(arrays):
            if len(part) == 0:
                raise ValueError(
                    f"every worker needs at least one sample: worker {worker} has none"
                )
            if part[0] < 0:
                raise ValueError(f"indices must not be negative: worker {worker} has {part[0]}")
        self._set(np.concatenate(arrays), np.array([len(part) for part in arrays]), shared=False)

    @classmethod
    def everything(cls, num_samples: int, num_workers: int) -> Assignment:
        """Return an assignment in which every worker draws from all samples, as in the paper."""
        samples = count("an assignment", "num_samples", num_samples, 1)
        return cls.common(np.arange(samples), num_workers)

    @classmethod
    def common(cls, indices: Indices, num_workers: int) -> Assignment:
        """Return an assignment in which every worker draws from the same samples.

        Args:
            indices: the samples.
            num_workers: m, the number of workers.
        """
        workers = count("an assignment", "num_workers", num_workers, 1)
        samples = count("an assignment", "num_samples", len(indices), 1)
        same = cls.__new__(cls)
        same._set(np.sort(indices), np.full(workers, samples), shared=True)  # noqa: SLF001  a second constructor
        return same

    def _set(self, indices: Indices, sizes: Indices, *, shared: bool) -> None:
        indices.flags.writeable = False
        self.shared = shared
        self.sizes = sizes
        self._indices = indices
        self._ends = np.cumsum(sizes)
        # Precomputed for batch_indices, with one row per worker.
        self._widths = sizes.astype(np.uint64)[:, None]
        starts = np.zeros_like(sizes) if shared else self._ends - sizes
        self._starts = starts.astype(np.uint64)[:, None]
        # Whether index i is sample i, so that nothing has to be looked up.
        self._plain = shared and int(indices[-1]) == len(indices) - 1

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, worker: int) -> Indices: ...
    @overload
    def __getitem__(self, worker: slice) -> list[Indices]: ...
    def __getitem__(self, worker: int | slice) -> Indices | list[Indices]:
        if isinstance(worker, slice):
            return [self[index] for index in range(*worker.indices(len(self)))]
        if self.shared:
            range(len(self))[worker]  # raises IndexError for a worker that does not exist
            return self._indices
        end = self._ends[worker]
        return self._indices[end - self.sizes[worker] : end]


def sample(part: Indices, number: int, rng: np.random.Generator) -> Indices:
    """Draw samples from one worker's part, with replacement.

    Args:
        part: the indices of a worker's samples.
        number: number of samples to draw.
        rng: the random generator.

    >>> sample(np.array([3, 5]), 4, np.random.default_rng(0)).tolist()
    [5, 5, 5, 3]
    """
    return part[rng.integers(len(part), size=number)]


def batch_indices(
    assignment: Sequence[Indices],
    num_workers: int,
    batch_size: int,
    seed: int,
    round: int,
) -> Indices:
    r"""Draw the batches of a round, with replacement: (m, n) indices into the training samples.

    Row i belongs to worker i and depends only on (seed, round, i), the batch size and the worker's
    part. The Philox generator is keyed by (seed, round). Its raw words :math:`u < 2^{32}` are used
    because NumPy guarantees never to change them. Worker i takes sample number :math:`\lfloor u s_i
    / 2^{32} \rfloor` of its :math:`s_i` samples.

    Args:
        assignment: the samples of each worker.
        num_workers: m, the number of batches.
        batch_size: n, the number of samples per batch.
        seed: seed of the run.
        round: number of the round, from 0.

    >>> whole = Assignment.everything(60000, num_workers=20)
    >>> batch_indices(whole, 20, 32, seed=1, round=0).shape
    (20, 32)
    """
    parts = assignment if isinstance(assignment, Assignment) else Assignment(assignment)
    if num_workers != len(parts):
        raise ValueError(f"needs an assignment for {num_workers} workers: got one for {len(parts)}")
    if not (0 <= seed < 1 << 64 and 0 <= round < 1 << 64 and batch_size > 0):
        raise ValueError(
            "batches need 0 <= seed, round < 2^64 and a batch size of at least 1:"
            f" got seed={seed}, round={round}, batch_size={batch_size}"
        )
    stream = np.random.Philox(key=np.array([seed, round], np.uint64), counter=_BATCHES)
    words = stream.random_raw(num_workers * batch_size).reshape(num_workers, batch_size)
    words >>= np.uint64(32)
    words *= parts._widths  # noqa: SLF001
    words >>= np.uint64(32)
    if parts._plain:  # noqa: SLF001
        return words.view(np.int64)
    words += parts._starts  # noqa: SLF001
    return parts._indices[words.view(np.int64)]  # noqa: SLF001
