"""The rows of one server in a round, as worker processes send them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from phocas.engines.ray.mailbox import Peer
from phocas.engines.ray.shared import Offer, Place
from phocas.engines.ray.values import Values, holds, kind
from phocas.engines.ray.wire import FrameError, Header, Kind, dtype_name

_SLOTS = 2  # versions of the parameters: a late worker may still read those of the round before
_EXCESS = 8  # times the due length: content that is longer is not read
_NEWS = 16  # lines a round, so that a process cannot fill memory and screen with its wrong frames


@dataclass(eq=False)
class Delivery:
    """The rows of a round that a server may use."""

    rows: list[Values | None]
    """The slice of each worker; None if it is missing."""
    problems: dict[int, str]
    """For each worker whose slice is due and cannot be used, the reason."""
    late: set[int]
    """Workers that sent a row of an earlier round."""
    news: list[str]
    """Descriptions of anything else that a process sent and must not send."""


@dataclass(eq=False)
class _Round:
    arrived: set[int] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    news: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        if len(self.news) < _NEWS:
            self.news.append(text)


class Inbox:
    """Memory for the slices of all workers, and for the parameters that they read.

    The memory is shared with worker processes of the same machine, which write their slices into
    it. Slices of other machines are received into the same memory. A worker has one slice in a
    round: a second one is dropped, as is one of another round, worker, type or length.

    Args:
        like: the parameters.
        num_workers: the number of workers.
        round: the number of the first round, from 0.
    """

    def __init__(self, like: Values, num_workers: int, round: int) -> None:
        self._offer = Offer.if_possible(like, _SLOTS, num_workers)
        if self._offer is None:
            self._rows = np.zeros((num_workers, len(like)), like.dtype)
            self._parameters = np.zeros((_SLOTS, len(like)), like.dtype)
        else:
            self._rows = self._offer.memory.rows
            self._parameters = self._offer.memory.parameters
        self._changed = threading.Condition()
        self.begin(round, like)

    @property
    def place(self) -> Place | None:
        """The location of the shared memory, for processes of this machine."""
        return None if self._offer is None else self._offer.place

    def begin(self, round: int, parameters: Values) -> None:
        """Begin a round: provide its parameters, and expect its rows."""
        with self._changed:
            self.round = round
            self._parameters[round % _SLOTS][:] = parameters
            self._now = _Round()

    def parameters(self, round: int) -> Values:
        """Return the memory with the parameters of the current round, or of the one before."""
        found: Values = self._parameters[round % _SLOTS]
        return found

    def room(self, peer: Peer, header: Header) -> memoryview | None:
        """Return the memory for a slice; None if it must be dropped.

        Raises:
            FrameError: the content is too long to be read at all.
        """
        due = self._rows[0]
        if header.length > _EXCESS * due.nbytes + 1024:
            raise FrameError(f"sent {header.length} bytes where {due.nbytes} was due")
        with self._changed:
            if not self._acceptable(peer, header):
                self._changed.notify_all()
                return None
            if header.kind == Kind.IN_PLACE:
                return memoryview(b"")
            room: memoryview = memoryview(self._rows[header.worker]).cast("B")
            return room

    def _acceptable(self, peer: Peer, header: Header) -> bool:
        now, worker, due = self._now, header.worker, self._rows[0]
        if worker not in peer.workers:
            now.tell(f"{peer.name} sent a row for worker {worker}: dropped")
        elif header.round < self.round:
            now.late.add(worker)
        elif header.round > self.round:
            now.problems[worker] = f"sent a row of round {header.round + 1}"
        elif worker in now.arrived:
            now.tell(f"worker {worker} sent a second row: dropped")
        elif header.kind == Kind.IN_PLACE:
            if header.length == 0:
                return True
            now.problems[worker] = "sent values beside the shared memory"
        elif header.dtype != dtype_name(due):
            now.problems[worker] = f"sent {header.dtype} where {kind(due)} was due"
        elif header.length != due.nbytes:
            length = header.length / due.itemsize
            now.problems[worker] = f"sent shape ({length:g},) where {due.shape} was due"
        else:
            return True
        return False

    def arrived(self, header: Header, content: memoryview) -> None:
        """Note that a slice is complete, unless its content is not in the memory of this inbox."""
        with self._changed:
            if header.round == self.round and holds(self._rows, content):
                self._now.arrived.add(header.worker)
                self._now.problems.pop(header.worker, None)
            self._changed.notify_all()

    def rejected(self, peer: Peer, reason: str) -> None:
        """Note that the connection of a process was closed because of what it sent."""
        with self._changed:
            self._now.tell(f"{peer.name} {reason}: connection closed")
            for worker in peer.workers:
                if worker not in self._now.arrived:
                    self._now.problems.setdefault(worker, reason)
            self._changed.notify_all()

    def forget(self, workers: Collection[int]) -> None:
        """Drop the slices of workers, so that they can be sent again in this round."""
        with self._changed:
            self._now.arrived.difference_update(workers)
            for worker in workers:
                self._now.problems.pop(worker, None)

    def deliver(self, due: Collection[int], patience: float) -> Delivery:
        """Wait for the slices of workers, and return those that are there in time.

        Args:
            due: the workers that report to have sent their rows.
            patience: the longest wait in seconds.
        """
        until = time.monotonic() + patience
        with self._changed:
            now = self._now
            while any(worker not in now.arrived | now.problems.keys() for worker in due):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            rows: list[Values | None] = [None] * len(self._rows)
            problems = {}
            for worker in due:
                if worker in now.arrived:
                    rows[worker] = self._rows[worker]
                else:
                    late = f"did not deliver its values within {patience:g} s"
                    problems[worker] = now.problems.get(worker, late)
            return Delivery(rows, problems, set(now.late), list(now.news))

    def close(self) -> None:
        """Close the shared memory."""
        if self._offer is not None:
            self._offer.close()
