"""Download one file over HTTP: resumed when cut off, given up when silent, checked."""

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

ANSWER_SECONDS = (
    4.0  # name, connection, handshake and first byte together: without internet, go on soon
)
SILENCE_SECONDS = 20.0  # between two pieces of an answer that has begun
BREAKS = 8  # so often may one download break off and be resumed
PIECE = 1 << 16


class OriginError(Exception):
    """An origin that cannot give what is needed; the next one is tried."""


def download(
    url: str, path: Path, *, size: int, md5: str, report: Callable[[int], object] = lambda _: None
) -> None:
    """Bring the file at the URL to the path, with this size and digest, or raise OriginError.

    What an earlier try left at the path is gone on from. It stays there when the connection breaks,
    and is thrown away when it turns out to be wrong.
    """
    resumed = path.exists()
    _complete(url, path, size, report)
    wrong = _mismatch(path, md5)
    if wrong and resumed:  # the old piece may be the culprit: once more, from the start
        _complete(url, path, size, report)
        wrong = _mismatch(path, md5)
    if wrong:
        raise OriginError(f"{url} {wrong}")


def _complete(url: str, path: Path, size: int, report: Callable[[int], object]) -> None:
    """Ask for the rest of the file until it is all there; give up on a try that brought nothing."""
    have = path.stat().st_size if path.exists() else 0
    for _ in range(BREAKS):
        if have == size:
            return
        if have > size:
            path.unlink()
            have = 0
        before, reason = have, "the connection broke off"
        try:
            have = _receive(url, path, have, size, report)
        except (OSError, http.client.HTTPException, ValueError) as error:
            have = path.stat().st_size if path.exists() else 0
            reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        if have <= before and have != size:
            raise OriginError(f"{url}: {reason}, after {have:,} of {size:,} bytes")
    if have != size:
        raise OriginError(f"{url}: broke off {BREAKS} times, after {have:,} of {size:,} bytes")


def _receive(url: str, path: Path, have: int, size: int, report: Callable[[int], object]) -> int:
    """Append one answer to the file and return the bytes that are there now."""
    request = urllib.request.Request(url, headers={"User-Agent": "phocas"})  # noqa: S310  see _open
    if have:
        request.add_header("Range", f"bytes={have}-")
    with _open(request) as answer:
        start = have if getattr(answer, "status", None) == 206 else 0
        announced = answer.headers.get("Content-Length")
        if announced is not None and int(announced) != size - start:
            # A log-in page or an error page with status 200.
            raise OriginError(
                f"{url}: answered with {int(announced):,} bytes, expected {size - start:,}"
            )
        with path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            # read1 gives what has come so far: read would lose up to a piece to a silence.
            while start <= size and (piece := answer.read1(PIECE)):
                file.write(piece)
                start += len(piece)
                report(start)
    return start


def _open(request: urllib.request.Request) -> Any:
    """Open a URL, giving up after ANSWER_SECONDS even if it is the name server that is silent."""
    if request.type not in ("http", "https", "file"):
        raise OriginError(f"{request.full_url}: must be an http, https or file URL")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    gone = threading.Event()

    def ask() -> None:
        try:
            answer = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()  # it is an open answer, too
            answers.put(OriginError(f"{request.full_url}: {error}"))
            return
        except Exception as error:  # noqa: BLE001  raised again by the thread that waits
            answers.put(error)
            return
        answers.put(answer)
        if gone.is_set():
            answer.close()

    # Looking up a name has no time limit and cannot be stopped: it is left behind in a thread.
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
    """Compare the digest; throw the file away if it is wrong and say how."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if got == md5:
        return None
    path.unlink()
    return f"has md5 {got}, expected {md5}"
