"""The trainer's receiver: frames of worker processes become events."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phocas.engines.ray.mailbox import Peer
from phocas.engines.ray.values import Values, kind
from phocas.engines.ray.wire import FrameError, Header, Kind, dtype_name
from phocas.engines.ray.worker import WorkerReply

_TEXT = 1024  # bytes of an error's text
_EXCESS = 8  # times the due length: content that is longer is not read
_EVENTS = 32  # unread events of a process; an honest one has one for each request or connection
_NEWS = 16  # lines about rejected frames of a process between two of its answers


@dataclass(eq=False)
class Host:
    """One worker process, with the workers ``first`` to ``last`` - 1."""

    actor: Any
    first: int
    last: int
    node: str = ""
    """The node on which it runs."""
    asked: tuple[int, float, int] | None = None
    """The round, the time and the number of the request that is not answered yet."""
    late: int = -9
    """The last round in which its row was late."""
    until: float = 0.0
    """The time at which its row of the current round is late."""
    requests: int = 0
    """The number of requests so far."""
    again: bool = False
    """Whether the next request asks for all rows of the round again, even if they were sent."""
    connected: bool = False
    """Whether the process is connected to the trainer."""
    ready: bool = False
    """Whether the process has its job, as far as the trainer knows."""
    moved: bool = False
    """Whether it has connected since the trainer last looked up its node."""
    rejections: int = 0
    """The number of its connections that were closed for its frames since its last answer."""
    failure: str = ""
    """The kind of its failure, as long as it sends no row: ``dead``, ``late``, ``raised``."""
    reason: str = ""
    """The reason for it, in a sentence."""

    @property
    def workers(self) -> range:
        """The workers of the process."""
        return range(self.first, self.last)

    def report_failure(self, news: list[str], kind: str, reason: str) -> None:
        """Report a failure once, not in every round until the process is back."""
        self.reason = reason
        if self.failure != kind:
            self.failure = kind
            news.append(f"{self} {reason}")

    def note_answer(self, news: list[str]) -> None:
        """Note that the process answered."""
        self.ready = True
        self.rejections = 0
        if self.failure:
            self.failure = ""
            news.append(f"{self} is back")

    def note_event(self, event: Event, news: list[str]) -> None:
        """Note that the process connected, was lost, or failed."""
        if event.kind == "opened":
            self.connected, self.ready, self.asked = True, False, None
            self.moved = True
        elif event.kind == "closed":
            if self.connected:
                self.report_failure(news, "dead", "died, and is started again")
            self.connected, self.ready, self.asked = False, False, None
        elif event.kind == "rejected":
            self.rejections += 1
            if self.rejections <= _NEWS:
                news.append(f"{self} {event.text}: connection closed")
        elif event.kind == Kind.NO_JOB:
            self.ready = False
        elif event.kind == Kind.FAILURE:
            self.failure = ""  # report each of its failures
            self.report_failure(news, "raised", event.text)

    def __str__(self) -> str:
        if len(self.workers) == 1:
            return f"worker {self.first}"
        return f"the process of workers {self.first} to {self.last - 1}"


@dataclass(frozen=True, eq=False)
class Event:
    """Something that a worker process did or sent."""

    host: Host
    kind: Kind | Literal["opened", "closed", "rejected"]
    header: Header | None = None
    text: str = ""
    reply: WorkerReply | None = None


class Desk:
    """The receiver of the trainer's mailbox: it makes events of frames.

    If too many events of a process are not read, they are dropped and its connection is closed.

    Args:
        buffers: the types and shapes of the model's buffers, if workers change them.
        like: the parameters.
        rows: memory for rows, (m, d), if training is asynchronous: then a report is of one row.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
        like: Values,
        rows: Values | None = None,
    ) -> None:
        self.hosts: dict[Peer, Host] = {}
        self._rows = rows
        self._single = rows is not None
        self._like = like
        self._buffers = [
            (dtype, shape, dtype.itemsize * int(np.prod(shape))) for dtype, shape in buffers
        ]
        self._heard: dict[Peer, float | None] = {}
        self._events: deque[Event] = deque()
        self._unread: Counter[Host] = Counter()
        self._changed = threading.Condition()

    def register(self, peer: Peer, host: Host | None = None) -> None:
        """Accept frames of a process, and count its silence from now on."""
        if host is not None:
            self.hosts[peer] = host
        self._heard[peer] = time.monotonic()

    def silent(self, peer: Peer, polled: float) -> float | None:
        """Return how long a process has been silent; None if it is gone.

        Args:
            peer: the process.
            polled: the time at which the mailbox had read everything. A pause of this process
                does not count as silence of the others.
        """
        heard = self._heard.get(peer)
        return None if heard is None else polled - heard

    def wait(self, seconds: float) -> list[Event]:
        """Return the events so far; wait for one if there is none."""
        with self._changed:
            if not self._events and seconds > 0:
                self._changed.wait(seconds)
            found = list(self._events)
            self._events.clear()
            self._unread.clear()
            return found

    @contextmanager
    def receiving(self, rows: Values) -> Iterator[None]:
        """Receive rows of workers into an (m, d) array, until the end of the block."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def _add(self, host: Host | None, kind: Any, **details: Any) -> None:
        """Add an event of a worker process; events of server processes are not needed.

        Raises:
            FrameError: the process has sent too many frames that are not read yet.
        """
        with self._changed:
            if host is not None:
                full = self._unread[host] >= _EVENTS
                if full:
                    self._events = deque(e for e in self._events if e.host is not host)
                    self._unread[host] = 0
                if full and isinstance(kind, Kind):
                    raise FrameError(f"sent {_EVENTS} frames before the trainer read them")
                self._events.append(Event(host, kind, **details))
                self._unread[host] += 1
            self._changed.notify_all()

    def opened(self, peer: Peer) -> None:
        """Note that a process has connected."""
        self._heard[peer] = time.monotonic()
        self._add(self.hosts.get(peer), "opened")

    def closed(self, peer: Peer) -> None:
        """Note that a process is gone."""
        self._heard[peer] = None
        self._add(self.hosts.get(peer), "closed")

    def rejected(self, peer: Peer, reason: str) -> None:
        """Note that a process sent something that cannot be read."""
        self._add(self.hosts.get(peer), "rejected", text=reason)

    def room(self, peer: Peer, header: Header) -> memoryview | None:
        """Return the memory for the content of a frame."""
        host = self.hosts.get(peer)
        due = 0
        if host is not None and header.kind == Kind.REPORT:
            due = self._report_bytes(host, header)
        elif host is not None and header.kind in {Kind.FAILURE, Kind.UNREACHED}:
            due = min(header.length, _TEXT)
        elif host is not None and header.kind in {Kind.ROW, Kind.MOMENTUM}:
            return self._row(host, header)
        elif header.kind not in {Kind.ALIVE, Kind.READY, Kind.NO_JOB}:
            raise FrameError(f"sent {header.kind.name}, which the trainer does not take")
        return memoryview(bytearray(due))

    def _row(self, host: Host, header: Header) -> memoryview | None:
        """Return the memory for a row; None, and an event with the reason, if it cannot be used."""
        due, worker = self._like, header.worker
        if header.length > _EXCESS * due.nbytes + _TEXT:
            raise FrameError(f"sent {header.length} bytes where {due.nbytes} was due")
        if self._rows is None or worker not in host.workers:
            raise FrameError(f"sent a row for worker {worker}")
        if header.dtype != dtype_name(due):
            problem = f"sent {header.dtype} where {kind(due)} was due"
        elif header.length != due.nbytes:
            length = header.length / due.itemsize
            problem = f"sent shape ({length:g},) where {due.shape} was due"
        else:
            return memoryview(self._rows[worker]).cast("B")
        self._add(host, header.kind, header=header, text=problem)
        return None

    def _report_bytes(self, host: Host, header: Header) -> int:
        if header.dtype not in {"float32", "float64"}:
            raise FrameError(f"sent losses as {header.dtype}")
        each = np.dtype(header.dtype).itemsize + sum(size for *_, size in self._buffers)
        return 8 + (1 if self._single else len(host.workers)) * each

    def arrived(self, peer: Peer, header: Header, content: memoryview) -> list[Any]:
        """Make an event of a frame."""
        self._heard[peer] = time.monotonic()
        host = self.hosts.get(peer)
        if host is None or header.kind in {Kind.ALIVE, Kind.ROW, Kind.MOMENTUM}:
            return []
        reply, text = None, ""
        if header.kind == Kind.REPORT:
            reply = self._reply(host, header, content)
        elif header.kind in {Kind.FAILURE, Kind.UNREACHED}:
            text = " ".join(bytes(content).decode("utf-8", "replace").split())
        self._add(host, header.kind, header=header, text=text, reply=reply)
        return []

    def _reply(self, host: Host, header: Header, content: memoryview) -> WorkerReply:
        seconds = float(np.frombuffer(content[:8], np.float64)[0])
        m, dtype = 1 if self._single else len(host.workers), np.dtype(header.dtype)
        losses = np.frombuffer(content[8 : 8 + m * dtype.itemsize], dtype)
        rest = content[8 + m * dtype.itemsize :]
        changed = []
        for _ in range(m if self._buffers else 0):
            values = []
            for dtype, shape, size in self._buffers:
                values.append(np.frombuffer(rest[:size], dtype).reshape(shape))
                rest = rest[size:]
            changed.append(values)
        return WorkerReply(losses, changed, seconds)
