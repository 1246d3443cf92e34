"""Files that are there entirely or not at all, in places that are looked at first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

_NUMBERED = Path("/proc/self/fd")
"""The open files of this process, by their numbers."""


def write_atomically(path: Path, content: bytes, *, keep: Path | None = None) -> None:
    """Put content at a path so that it survives a crash whole, or does not appear.

    What was there before goes to ``keep``, if that is given, once the new content is on the disk.
    """
    with written_atomically(path, keep=keep) as file:
        file.write(content)


@contextmanager
def written_atomically(path: Path, *, keep: Path | None = None) -> Iterator[BufferedRandom]:
    """Yield a file that appears at a path when all of it was written, or not at all.

    Until then it has no name where that can be had, so that whoever is killed leaves nothing. An
    error of the disk that names no file names this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        nameless = _nameless(path.parent)
        with nameless or half.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if nameless is not None:
                half.unlink(missing_ok=True)
                # A folder given by number makes this follow the link, as it must.
                with _opened(path.parent) as folder:
                    os.link(_NUMBERED / str(file.fileno()), half.name, dst_dir_fd=folder)
        if keep is not None and path.exists():
            path.replace(keep)
        half.replace(path)
    except OSError as error:
        if error.filename is None and error.strerror:  # others would lose what they say
            error.filename = str(path)
        raise
    finally:
        half.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself lasts once the folder is on the disk
        with _opened(path.parent) as folder:
            os.fsync(folder)


def _nameless(folder: Path) -> BufferedRandom | None:
    """Open a file that has no name and can be given one; not every system has such."""
    kind = getattr(os, "O_TMPFILE", None)
    if kind is None or not _NUMBERED.is_dir():
        return None
    try:
        number = os.open(folder, kind | os.O_RDWR, 0o666)
    except OSError:  # what is wrong with the folder itself, opening a file with a name will say
        return None
    return os.fdopen(number, "w+b")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    number = os.open(folder, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def check_writable(path: Path, what: str) -> None:
    """Raise ValueError unless a file can be written at a path, now rather than after hours."""
    if path.is_dir():
        raise ValueError(f"{what} must be a file: got {path}, which is a folder")
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if place != path and not place.is_dir():
        raise ValueError(f"{what} {path} cannot be written: {place} is no folder")
    if not os.access(place, os.W_OK if place == path else os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path} cannot be written: no permission to write to {place}")
