"""Frames from worker processes: a header that is checked, then plain bytes.

Ray unpickles what a process returns, and unpickling can run code. So nothing that a worker process
sends passes through Ray: rows, losses and errors travel in these frames over TCP, and the receiver
reads them as numbers or text.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from phocas.engines.ray.values import Values

VERSION = 1
TOKEN_BYTES = 32
BEAT_SECONDS = 1.0

_MAGIC = b"PHOC"
_HEADER = struct.Struct("<4sBBBxiiqQ")
HEADER_BYTES = _HEADER.size
_LIFELINE_SECONDS = 5.0
_DTYPES = ("none", "float32", "float64", "bfloat16", "float16")


class FrameError(ValueError):
    """Bytes that are no frame: the rest of the connection cannot be read either."""


class Kind(IntEnum):
    """The content of a frame."""

    HELLO = 1
    """The token of the sender: the first frame of a connection."""
    ROW = 2
    """The slice of a worker's row for one server."""
    IN_PLACE = 3
    """The slice is in shared memory; no bytes follow."""
    PULL = 4
    """A request for the parameters of a server."""
    PARAMETERS = 5
    """The answer to a pull."""
    REPORT = 6
    """The losses, the time and the buffers of a process."""
    FAILURE = 7
    """The text of an error of a process."""
    MOMENTUM = 8
    """The momentum of a worker."""
    READY = 9
    """The process has loaded its job."""
    ALIVE = 10
    """A sign of life."""
    NO_JOB = 11
    """The process was started again and needs its job."""
    VALUE = 12
    """The aggregate of a server, for the process that holds the copy of its columns."""
    TAKEN = 13
    """The confirmation that the aggregate of a server has arrived."""
    UNREACHED = 14
    """The text of an error: a process could not reach a server."""


@dataclass(frozen=True)
class Header:
    """The header of a frame.

    >>> Header.unpack(Header(Kind.ROW, round=3, worker=7).pack())
    Header(kind=<Kind.ROW: 2>, round=3, worker=7, server=0, dtype='none', length=0)
    """

    kind: Kind
    round: int = 0
    """The round of the values, from 0."""
    worker: int = 0
    """The worker that sends the values; in reports, the number of the request."""
    server: int = 0
    """The server whose columns they are."""
    dtype: str = "none"
    """The type of the values."""
    length: int = 0
    """The number of bytes that follow."""

    def pack(self) -> bytes:
        """Return the header as bytes."""
        dtype = _DTYPES.index(self.dtype)
        return _HEADER.pack(
            _MAGIC,
            VERSION,
            self.kind,
            dtype,
            self.worker,
            self.server,
            self.round,
            self.length,
        )

    @classmethod
    def unpack(cls, content: bytes | bytearray | memoryview) -> Header:
        """Read a header; raise FrameError if the bytes are no header."""
        magic, version, kind, dtype, worker, server, round, length = _HEADER.unpack(content)
        if magic != _MAGIC:
            raise FrameError("sent bytes that are no frame")
        if version != VERSION:
            raise FrameError(f"sent a frame of version {version} where {VERSION} was due")
        if kind not in set(Kind) or dtype >= len(_DTYPES):
            raise FrameError(f"sent a frame of unknown kind {kind} or type {dtype}")
        return cls(Kind(kind), round, worker, server, _DTYPES[dtype], length)


def dtype_name(values: Values) -> str:
    """Return the name of the type of values, as headers have it."""
    name = "bfloat16" if values.dtype == np.uint16 else values.dtype.name
    return name if name in _DTYPES else "none"


@dataclass(frozen=True)
class Address:
    """An address at which a process receives frames, and the token that it asks for."""

    host: str
    port: int
    token: bytes


class Link:
    """A connection to the mailbox of another process.

    Args:
        address: the address to connect to.
        seconds: the longest time without progress before a call raises OSError.
    """

    def __init__(self, address: Address, seconds: float) -> None:
        self._socket = socket.create_connection((address.host, address.port), seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # how long bytes may be without an answer
            timeout = int(1000 * seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        self._seconds = seconds
        self.send(Header(Kind.HELLO), address.token)

    def send(self, header: Header, content: Any = b"") -> None:
        """Send a frame; its length is that of the content."""
        view = memoryview(content).cast("B")
        head = replace(header, length=len(view)).pack()
        self._socket.settimeout(self._seconds)
        if len(view) <= 1 << 16:
            self._socket.sendall(head + bytes(view))
            return
        self._socket.sendall(head)
        self._socket.sendall(view)

    def send_packed(self, headers: bytes) -> None:
        """Send headers of frames without content."""
        self._socket.settimeout(self._seconds)
        self._socket.sendall(headers)

    def receive_into(self, kind: Kind, values: Values, round: int = 0) -> None:
        """Receive a frame of a kind and of a round into an array that has its length."""
        head = bytearray(HEADER_BYTES)
        self._fill(memoryview(head))
        header = Header.unpack(head)
        if (header.kind, header.round, header.length) != (kind, round, values.nbytes):
            due = f"{values.nbytes} bytes of {kind.name}, round {round + 1}"
            raise FrameError(f"expected {due}: got {header}")
        self._fill(values.data.cast("B"))

    def _fill(self, view: memoryview) -> None:
        self._socket.settimeout(self._seconds)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the connection was closed")
            view = view[count:]

    @property
    def alive(self) -> bool:
        """Whether the other side has not closed the connection."""
        self._socket.settimeout(0.0)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Lifeline:
    """The connection of a process to the trainer; a lost connection is opened again.

    A thread sends a sign of life every second, so that the trainer can tell a lost machine from a
    slow one.

    Args:
        address: the trainer's mailbox.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._link: Link | None = None
        self.send(Header(Kind.ALIVE))
        threading.Thread(target=self._beat, name="phocas-lifeline", daemon=True).start()

    def send(self, header: Header, content: Any = b"") -> None:
        """Send a frame; connect again if the connection is lost; raise OSError if that fails."""
        with self._lock:
            if self._link is not None:
                try:
                    self._link.send(header, content)
                except OSError:
                    self._link.close()
                    self._link = None
                else:
                    return
            self._link = Link(self._address, _LIFELINE_SECONDS)
            self._link.send(header, content)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with contextlib.suppress(OSError):
                self.send(Header(Kind.ALIVE))
