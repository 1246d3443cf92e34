"""Shared memory for parameters and rows, for processes of one machine.

A server process provides memory from which workers read the parameters of its columns, and into
which each worker writes its slice of a row. In asynchronous training the trainer provides it. The
memory has no name in the file system and disappears with the processes that use it. Processes on
other machines, or without permission to open files of the process that provides the memory, cannot
map it. They send and receive the values over TCP; in asynchronous training they get the parameters
from Ray's object store.
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
class SharedMemory:
    """The mapped memory of a process: slots of parameters, and the rows of its workers."""

    parameters: Values
    rows: Values


@dataclass(frozen=True)
class Place:
    """The location and the layout of shared memory: what a process needs to map it."""

    process: int
    file: int
    mark: bytes
    """The first bytes of the memory, by which a process recognises it."""
    dtype: str
    d: int
    slots: int
    num_workers: int

    @property
    def stride(self) -> int:
        """The bytes from one vector to the next: whole pages, so that each can be mapped alone."""
        return -(-self.d * np.dtype(self.dtype).itemsize // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        """The total number of bytes."""
        return _PAGE + (self.slots + self.num_workers) * self.stride

    def find(self, first: int, last: int) -> SharedMemory | None:
        """Map the memory with the rows of these workers; return None if it is not accessible.

        The parameters are read-only.
        """
        path = Path(f"/proc/{self.process}/fd/{self.file}")
        try:
            if path.stat().st_size != self.size:  # checked before it is opened: it may be any file
                return None
            file = os.open(path, os.O_RDWR)
            try:
                found = os.pread(file, _MARK, 0) == self.mark
                return self.map(file, first, last, mmap.ACCESS_READ) if found else None
            finally:
                os.close(file)
        except OSError:
            return None

    def map(self, file: int, first: int, last: int, access: int) -> SharedMemory:
        """Map the parameters and the rows of workers ``first`` to ``last`` - 1 into memory.

        Args:
            file: descriptor of the file that contains the parameters and all rows.
            first: the first worker.
            last: the last worker + 1.
            access: mode of ``mmap`` for the parameters; the rows are always writable.
        """
        given = mmap.mmap(file, _PAGE + self.slots * self.stride, access=access)
        begin = _PAGE + (self.slots + first) * self.stride
        rows = mmap.mmap(file, (last - first) * self.stride, offset=begin)
        return SharedMemory(self._vectors(given, _PAGE), self._vectors(rows, 0))

    def _vectors(self, memory: mmap.mmap, offset: int) -> Values:
        values = np.frombuffer(memory, self.dtype, offset=offset)
        return values.reshape(-1, self.stride // values.itemsize)[:, : self.d]


class Offer:
    """Shared memory that this process provides to others until :attr:`close` is called."""

    def __init__(self, like: Values, slots: int, num_workers: int) -> None:
        file = os.memfd_create("phocas")
        self.close = weakref.finalize(self, os.close, file)
        """Close the file: no further process can map it, and existing mappings stay."""
        mark = secrets.token_bytes(_MARK)
        self.place = Place(os.getpid(), file, mark, like.dtype.str, len(like), slots, num_workers)
        os.ftruncate(file, self.place.size)
        os.pwrite(file, mark, 0)
        self.memory = self.place.map(file, 0, num_workers, mmap.ACCESS_WRITE)

    @classmethod
    def if_possible(cls, like: Values, slots: int, num_workers: int) -> Offer | None:
        """Return shared memory for vectors like this one, or None if the system has none."""
        try:
            return cls(like, slots, num_workers)
        except (AttributeError, OSError):  # not supported, or too large
            return None
