"""Atomic writes of files, and checks that a path is writable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

_NUMBERED = Path("/proc/self/fd")
"""The open files of this process, by file descriptor."""


def write_atomically(path: Path, content: bytes, *, keep: Path | None = None) -> None:
    """Write content to a path so that after a crash the file is complete or absent.

    The previous file is moved to ``keep``, if that is given, once the new content is on the disk.
    """
    with written_atomically(path, keep=keep) as file:
        file.write(content)


@contextmanager
def written_atomically(path: Path, *, keep: Path | None = None) -> Iterator[BufferedRandom]:
    """Yield a file that appears at a path once it is completely written, or not at all.

    Until then it has no name, on systems that support this, so that a killed process leaves no
    file. Errors of the disk that name no file are given this path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unnamed = _open_unnamed(path.parent)
        with unnamed or temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if unnamed is not None:
                temporary.unlink(missing_ok=True)
                # With a folder given by descriptor, os.link follows the symbolic link in /proc, as
                # it must.
                with _opened(path.parent) as folder:
                    os.link(_NUMBERED / str(file.fileno()), temporary.name, dst_dir_fd=folder)
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    except OSError as error:
        if error.filename is None and error.strerror:  # otherwise the message would change
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename is durable once the folder is on the disk
        with _opened(path.parent) as folder:
            os.fsync(folder)


def _open_unnamed(folder: Path) -> BufferedRandom | None:
    """Open a file without a name that can be linked later; None if the system cannot."""
    kind = getattr(os, "O_TMPFILE", None)
    if kind is None or not _NUMBERED.is_dir():
        return None
    try:
        number = os.open(folder, kind | os.O_RDWR, 0o666)
    except OSError:  # if the folder is unusable, opening a named file reports it
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
    """Raise ValueError unless a file can be written at a path; call it before long computations."""
    if path.is_dir():
        raise ValueError(f"{what} must be a file: got {path}, which is a folder")
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing != path and not existing.is_dir():
        raise ValueError(f"{what} {path} cannot be written: {existing} is no folder")
    if not os.access(existing, os.W_OK if existing == path else os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path} cannot be written: no permission to write to {existing}")
