"""The server of the live HTML report: read-only, and by default for this machine only.

It answers two paths: the report itself, and the stream of changes. One thread follows the file and
computes each change once for all browsers.
"""

from __future__ import annotations

import json
import queue
import secrets
import socket
import socketserver
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from phocas.report.page import policy, render
from phocas.report.page.writing import open_contents

POLL_SECONDS = 0.2
_SHARE = 20  # pause for 20 times as long as the last read took, so that training is not slowed
_LONGEST_REST = 5.0
_STREAMS = 64
_WAITING = 100  # changes that a browser may lag behind before it must reconnect
_ALIVE_SECONDS = 10.0
_OWN = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of the stream."""

    version: str
    """The state of the data after this event."""
    kind: str
    """whole, changed or problem."""
    body: str
    """The data, as JSON text."""


class Feed:
    """Follow a file and send its changes to all listeners."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents = open_contents(path)
        self._boot = secrets.token_hex(4)
        self._version = 0
        self._lock = threading.Lock()
        self._listeners: set[queue.Queue[StreamEvent | None]] = set()
        self._closing = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._watch, name="phocas-page", daemon=True)

    def start(self) -> None:
        """Start to follow the file."""
        self._thread.start()

    def close(self) -> None:
        """Stop following, and end all streams."""
        self._closing.set()
        with self._lock:
            for listener in self._listeners:
                with suppress(queue.Full):
                    listener.put_nowait(None)
        self._thread.join()

    def page(self) -> bytes:
        """Return the HTML report with the present data."""
        with self._lock:
            data = {**self.contents.whole(), "version": self._stamp()}
        return render(data, live=True).encode()

    def listen(self, after: str) -> queue.Queue[StreamEvent | None] | None:
        """Return a queue of the events after a version; None if there are too many listeners."""
        found: queue.Queue[StreamEvent | None] = queue.Queue(_WAITING)
        with self._lock:
            if len(self._listeners) >= _STREAMS:
                return None
            if after != self._stamp():
                found.put(self._event("whole", self.contents.whole()))
            if self._problem is not None:
                found.put(self._event("problem", self._problem))
            self._listeners.add(found)
        return found

    def leave(self, listener: queue.Queue[StreamEvent | None]) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.discard(listener)

    def _stamp(self) -> str:
        """Return the present version; it differs between two servers of the same file."""
        return f"{self._boot}-{self._version}"

    def _event(self, kind: str, body: Any) -> StreamEvent:
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        return StreamEvent(self._stamp(), kind, text)

    def _watch(self) -> None:
        seen: tuple[Any, ...] = ()
        asked = rest = 0.0
        while not self._closing.wait(max(POLL_SECONDS, rest)):
            state, now = _state(self.path), time.monotonic()
            # A killed run changes no file, so runs are also checked at intervals.
            if state == seen and now - asked < _LONGEST_REST:
                continue
            with self._lock:
                self._refresh()
            seen, asked = state, now
            rest = min(_LONGEST_REST, _SHARE * (time.monotonic() - now))

    def _refresh(self) -> None:
        try:
            changed = self.contents.read()
            problem = None
        except (ValueError, OSError, sqlite3.DatabaseError) as error:
            changed, problem = {}, str(error)
        if changed:
            self._version += 1
            self._tell(self._event("changed", changed))
        if problem != self._problem:
            self._problem = problem
            self._tell(self._event("problem", problem))

    def _tell(self, event: StreamEvent) -> None:
        for listener in list(self._listeners):
            try:
                listener.put_nowait(event)
            except queue.Full:  # a suspended browser: when it reconnects, it gets all data
                self._listeners.discard(listener)
                with suppress(queue.Empty):
                    listener.get_nowait()
                listener.put_nowait(None)


class PageServer(ThreadingHTTPServer):
    """Server of the HTML report of a results file or of a guard's report, while it is written."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, path: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        """Read the file and listen; raise ValueError if either is impossible."""
        self.feed = Feed(path)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}, port {port}: {error.strerror}; --port 0 takes a free one"
            ) from error
        except OverflowError:
            raise ValueError(f"a port is 0 to 65535: got {port}") from None
        self.feed.start()

    def server_bind(self) -> None:
        """Bind without looking up the name of this machine, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        """The address to open."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/"

    def knows(self, host: str) -> bool:
        """Return whether the Host header of a request names this server.

        A server of this machine only accepts local names, which prevents DNS rebinding: a foreign
        site whose name resolves to this machine sends its own name.
        """
        if self.server_name not in _OWN:
            return True
        return urlsplit(f"//{host}").hostname in ("localhost", *_OWN)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about browsers that disconnect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server_close()
        self.feed.close()


class _Handler(BaseHTTPRequestHandler):
    """Handler of the report and of the stream."""

    server: PageServer
    server_version = "phocas"
    sys_version = ""
    timeout = 30.0
    headers_: ClassVar[dict[str, str]] = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }

    def do_GET(self) -> None:
        """Send the report or the stream."""
        path, _, query = self.path.partition("?")
        if not self.server.knows(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._send("text/html; charset=utf-8", self.server.feed.page())
        elif path == "/events":
            self._stream(self.headers.get("Last-Event-ID") or query.removeprefix("after="))
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _refuse(self, status: HTTPStatus) -> None:
        self._send("text/plain; charset=utf-8", f"{status.phrase}\n".encode(), status)

    def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'")
        for name, value in self.headers_.items():
            self.send_header(name, value)

    def _stream(self, after: str) -> None:
        listener = self.server.feed.listen(after)
        if listener is None:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"retry: 1000\n\n")
            while True:
                try:
                    event = listener.get(timeout=_ALIVE_SECONDS)
                except queue.Empty:
                    self.wfile.write(b": alive\n\n")
                    continue
                if event is None:
                    return
                name = f"id: {event.version}\nevent: {event.kind}\n"
                self.wfile.write(f"{name}data: {event.body}\n\n".encode())
        finally:
            self.server.feed.leave(listener)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base
        """Print nothing about requests."""


def _state(path: Path) -> tuple[Any, ...]:
    """Return a value that changes when a file or its write-ahead log is written."""
    found: list[tuple[int, ...] | None] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = each.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
