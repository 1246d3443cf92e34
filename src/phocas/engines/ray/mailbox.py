"""The mailbox of a process: a thread that receives the frames of other processes."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from phocas.engines.ray.wire import HEADER_BYTES, TOKEN_BYTES, FrameError, Header, Kind

_CHUNKS = 8  # reads of one connection before the others have their turn
_STRANGERS = 64  # connections without a token that are kept open at a time
_HELLO_SECONDS = 10.0
_REASON = 200  # characters of the text of an error
_BUFFER = 4 << 20  # bytes in the kernel for each connection
_OUTGOING = 4096  # buffers of answers that a process has not read: two for each server it may ask


@dataclass(frozen=True)
class Peer:
    """A process that may send frames."""

    name: str
    """Its name in messages: ``worker 3``."""
    workers: range = range(0)
    """The workers whose rows it may send."""
    alone: bool = True
    """Whether a new connection replaces the older one."""


class Receiver(Protocol):
    """The owner of a mailbox. The thread of the mailbox calls its methods."""

    def opened(self, peer: Peer) -> None:
        """Called when a process has connected."""

    def closed(self, peer: Peer) -> None:
        """Called when the connection of a process is closed."""

    def room(self, peer: Peer, header: Header) -> memoryview | None:
        """Return the memory for the content of a frame, or None to drop the content.

        Raise FrameError to close the connection.
        """

    def arrived(self, peer: Peer, header: Header, content: memoryview) -> list[Any]:
        """Take a frame; return the buffers to answer with.

        Raise FrameError to close the connection.
        """

    def rejected(self, peer: Peer, reason: str) -> None:
        """Called when a connection was closed because the process sent invalid bytes."""


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    since: float
    peer: Peer | None = None
    header: Header | None = None
    head: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    room: memoryview | None = None  # the memory for the content; None if it is dropped
    got: int = 0  # bytes of the header, or of the content
    outgoing: deque[memoryview] = field(default_factory=deque)
    writing: bool = False  # whether the selector reports when more can be sent


class Mailbox:
    """A listening socket and the thread that serves its connections.

    A connection begins with a token, which says which process sends. Without it nothing is read.
    A new connection of a process replaces its older one, unless several processes share the token.
    A connection is closed if its frames are invalid, if the receiver raises an error, or if too
    many answers to it are not read. The other connections are not affected.

    Args:
        host: the address of the interface to listen on.
        peers: the process of each token.
        receiver: the object that takes the frames.
    """

    def __init__(self, host: str, peers: Mapping[bytes, Peer], receiver: Receiver) -> None:
        self.peers = dict(peers)
        self.received = 0
        """The number of bytes received."""
        self.polled = time.monotonic()
        """The last time at which everything that had arrived was read."""
        self._receiver = receiver
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: dict[Any, _Connection] = {}
        self._scratch = memoryview(bytearray(1 << 18))
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="phocas-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections."""
        self._closing = True
        with contextlib.suppress(OSError):  # wakes the thread
            socket.create_connection((self.host, self.port), 1.0).close()
        self._thread.join(5.0)
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(1.0):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                connection = self._connections.get(key.fileobj)
                if connection is not None:
                    self._serve(connection, events)
            self._drop_strangers()
            self.polled = time.monotonic()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._connections[connected] = _Connection(connected, time.monotonic())
            self._selector.register(connected, selectors.EVENT_READ)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for _ in range(_CHUNKS):
                    if not self._read(connection):
                        break
            self._write(connection)
        except BlockingIOError:
            pass
        except FrameError as error:
            self._reject(connection, str(error))
        except OSError:
            self._drop(connection)
        except Exception as error:  # noqa: BLE001 - a frame must never end this thread
            text = f"sent a frame that raised {type(error).__name__}: {error}"
            self._reject(connection, text[:_REASON])

    def _read(self, connection: _Connection) -> bool:
        """Read the bytes of a header or content that have arrived; return False if none have."""
        header = connection.header
        if header is None:
            room = memoryview(connection.head)[connection.got :]
        elif connection.room is None:
            room = self._scratch[: header.length - connection.got]
        else:
            room = connection.room[connection.got :]
        try:
            count = connection.socket.recv_into(room)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError
        self.received += count
        connection.got += count
        if header is None and connection.got == HEADER_BYTES:
            self._open_frame(connection, Header.unpack(connection.head))
        elif header is not None and connection.got == header.length:
            self._close_frame(connection, header)
        return True

    def _open_frame(self, connection: _Connection, header: Header) -> None:
        connection.header, connection.got = header, 0
        if connection.peer is None:
            if header.kind != Kind.HELLO or header.length != TOKEN_BYTES:
                raise FrameError("the first frame must be a token")
            connection.room = memoryview(bytearray(TOKEN_BYTES))
        else:
            connection.room = self._receiver.room(connection.peer, header)
            if connection.room is not None and len(connection.room) != header.length:
                raise FrameError(f"sent {header.length} bytes where {len(connection.room)} was due")
        if not header.length:
            self._close_frame(connection, header)

    def _close_frame(self, connection: _Connection, header: Header) -> None:
        room, connection.room, connection.header, connection.got = connection.room, None, None, 0
        if connection.peer is None:
            assert room is not None
            connection.peer = self._peer(bytes(room))
            if connection.peer is None:
                raise FrameError("unknown token")
            for older in list(self._connections.values()):
                same = older.peer is connection.peer and older is not connection
                if same and connection.peer.alone:
                    self._drop(older, silently=True)
            self._receiver.opened(connection.peer)
        elif room is not None:
            answer = self._receiver.arrived(connection.peer, header, room)
            connection.outgoing.extend(memoryview(each).cast("B") for each in answer)
            if len(connection.outgoing) > _OUTGOING:
                raise FrameError(f"did not read {_OUTGOING // 2} answers")

    def _peer(self, token: bytes) -> Peer | None:
        for known, peer in list(self.peers.items()):
            if hmac.compare_digest(known, token):
                return peer
        return None

    def _write(self, connection: _Connection) -> None:
        waiting = connection.outgoing
        try:
            while waiting:
                count = connection.socket.send(waiting[0])
                waiting[0] = waiting[0][count:]
                if not waiting[0]:
                    waiting.popleft()
        finally:
            if connection.writing != bool(waiting):
                connection.writing = bool(waiting)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
                self._selector.modify(connection.socket, events)

    def _reject(self, connection: _Connection, reason: str) -> None:
        """Report why a connection is closed, and close it."""
        if connection.peer is not None:
            self._receiver.rejected(connection.peer, reason)
        self._drop(connection)

    def _drop(self, connection: _Connection, *, silently: bool = False) -> None:
        self._selector.unregister(connection.socket)
        del self._connections[connection.socket]
        connection.socket.close()
        if connection.peer is not None and not silently:
            self._receiver.closed(connection.peer)

    def _drop_strangers(self) -> None:
        """Close connections that have sent no token in time, the oldest first."""
        strangers = [each for each in self._connections.values() if each.peer is None]
        late = time.monotonic() - _HELLO_SECONDS
        for number, connection in enumerate(strangers):
            if connection.since < late or len(strangers) - number > _STRANGERS:
                self._drop(connection)
