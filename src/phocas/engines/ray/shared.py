"""Memory that processes of one machine share, so that vectors need not travel between them.

Ray's store takes a copy of every vector, tells several processes of it, and frees it again: half of
what a step of 2.4 million parameters costs besides its gradient. Here the trainer offers memory
with parameters that workers read where they are, and a row for each worker, who computes it there.
It has no name and goes with the processes that hold it. Where the system gives none, and in
processes of other machines or without leave to see the trainer's, Ray's way is taken.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phocas.engines.ray.values import Values

_PAGE = mmap.ALLOCATIONGRANULARITY
_MARK = 16  # bytes


@dataclass(frozen=True, eq=False)
class Memory:
    """What a process sees: some vectors of parameters, and the rows of its workers."""

    parameters: Values
    rows: Values


@dataclass(frozen=True)
class Place:
    """Where the memory is and how it is divided: all that a process needs to find it."""

    process: int
    file: int
    mark: bytes
    """What the memory begins with: the same numbers elsewhere mean another file, or none."""
    dtype: str
    d: int
    slots: int
    num_workers: int

    @property
    def stride(self) -> int:
        """The bytes from one vector to the next: whole pages, which can be mapped alone."""
        return -(-self.d * np.dtype(self.dtype).itemsize // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """The bytes in all."""
        return _PAGE + (self.slots + self.num_workers) * self.stride

    def find(self, first: int, last: int) -> Memory | None:
        """Return the memory with the rows of these workers, if it is on this machine.

        Parameters can be read only.
        """
        path = Path(f"/proc/{self.process}/fd/{self.file}")
        try:
            if path.stat().st_size != self.size:  # before it is opened: it may be anything
                return None
            file = os.open(path, os.O_RDWR)
            try:
                found = os.pread(file, _MARK, 0) == self.mark
                return self.map(file, first, last, mmap.ACCESS_READ) if found else None
            finally:
                os.close(file)
        except OSError:
            return None

    def map(self, file: int, first: int, last: int, access: int) -> Memory:
        """Return a file's memory; ``access`` is that to the parameters."""
        given = mmap.mmap(file, _PAGE + self.slots * self.stride, access=access)
        begin = _PAGE + (self.slots + first) * self.stride
        rows = mmap.mmap(file, (last - first) * self.stride, offset=begin)
        return Memory(self._vectors(given, _PAGE), self._vectors(rows, 0))

    def _vectors(self, memory: mmap.mmap, offset: int) -> Values:
        values = np.frombuffer(memory, self.dtype, offset=offset)
        return values.reshape(-1, self.stride // values.itemsize)[:, : self.d]


class Offer:
    """Memory that this process offers to others, as long as it is not closed."""

    def __init__(self, like: Values, slots: int, num_workers: int) -> None:
        file = os.memfd_create("phocas")
        self.close = weakref.finalize(self, os.close, file)
        """Let nobody find it any more; who has it keeps it."""
        mark = secrets.token_bytes(_MARK)
        self.place = Place(os.getpid(), file, mark, like.dtype.str, len(like), slots, num_workers)
        os.ftruncate(file, self.place.size)
        os.pwrite(file, mark, 0)
        self.memory = self.place.map(file, 0, num_workers, mmap.ACCESS_WRITE)

    @classmethod
    def if_possible(cls, like: Values, slots: int, num_workers: int) -> Offer | None:
        """Offer memory for vectors like this one, where the system gives it."""
        try:
            return cls(like, slots, num_workers)
        except (AttributeError, OSError):  # no files without a name, or not so large
            return None
