"""Download one file over HTTP with resumption, a time limit and a digest check."""

from __future__ import annotations

import hashlib
import http.client
import queue
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Time limit in seconds for name lookup, connection, handshake and first byte together. It is short
# so that the next origin is tried soon when there is no internet.
ANSWER_SECONDS = 4.0
SILENCE_SECONDS = 20.0  # time limit between two parts of a response
BREAKS = 8  # largest number of interruptions after which a download is resumed
PIECE = 1 << 16


class OriginError(Exception):
    """An origin that cannot provide the files; the next origin is tried."""


def download(
    url: str, path: Path, *, size: int, md5: str, report: Callable[[int], object] = lambda _: None
) -> None:
    """Download the URL to the path and verify size and digest; raise OriginError otherwise.

    A partial file at the path is continued. It stays there if the connection breaks and is deleted
    if its digest is wrong.
    """
    resumed = path.exists()
    _complete(url, path, size, report)
    wrong = _mismatch(path, md5)
    if wrong and resumed:  # the old part may be damaged: download again from the start
        _complete(url, path, size, report)
        wrong = _mismatch(path, md5)
    if wrong:
        raise OriginError(f"{url} {wrong}")


def _complete(url: str, path: Path, size: int, report: Callable[[int], object]) -> None:
    """Request the rest of the file until it is complete; raise if a request brings no bytes."""
    have = path.stat().st_size if path.exists() else 0
    for _ in range(BREAKS):
        if have == size:
            return
        if have > size:
            path.unlink()
            have = 0
        before, reason = have, "the connection was closed"
        try:
            have = _receive(url, path, have, size, report)
        except (OSError, http.client.HTTPException, ValueError) as error:
            have = path.stat().st_size if path.exists() else 0
            reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        if have <= before and have != size:
            raise OriginError(f"{url}: {reason}, after {have:,} of {size:,} bytes")
    if have != size:
        raise OriginError(
            f"{url}: was interrupted {BREAKS} times, after {have:,} of {size:,} bytes"
        )


def _receive(url: str, path: Path, have: int, size: int, report: Callable[[int], object]) -> int:
    """Append one response to the file and return the number of bytes in it."""
    request = urllib.request.Request(url, headers={"User-Agent": "phocas"})  # noqa: S310  see _open
    if have:
        request.add_header("Range", f"bytes={have}-")
    with _open(request) as answer:
        start = have if getattr(answer, "status", None) == 206 else 0
        announced = answer.headers.get("Content-Length")
        if announced is not None and int(announced) != size - start:
            # A login page or an error page with status 200.
            raise OriginError(
                f"{url}: answered with {int(announced):,} bytes, expected {size - start:,}"
            )
        with path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            # read1 returns what has arrived; read would lose up to PIECE bytes if the connection
            # stalls.
            while start <= size and (piece := answer.read1(PIECE)):
                file.write(piece)
                start += len(piece)
                report(start)
    return start


def _open(request: urllib.request.Request) -> Any:
    """Open a URL; raise after ANSWER_SECONDS even if the name server does not respond."""
    if request.type not in ("http", "https", "file"):
        raise OriginError(f"{request.full_url}: must be an http, https or file URL")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gone = threading.Event()

    def ask() -> None:
        try:
            answer = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()  # an HTTPError is an open response, too
            answers.put(OriginError(f"{request.full_url}: {error}"))
            return
        except Exception as error:  # noqa: BLE001  raised again by the thread that waits
            answers.put(error)
            return
        answers.put(answer)
        if gone.is_set():
            answer.close()

    # A name lookup has no time limit and cannot be stopped, so it runs in a thread of its own.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        gone.set()
        raise OriginError(f"{request.full_url}: no answer within {ANSWER_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _mismatch(path: Path, md5: str) -> str | None:
    """Compare the digest; if it is wrong, delete the file and return a message."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if got == md5:
        return None
    path.unlink()
    return f"has md5 {got}, expected {md5}"
