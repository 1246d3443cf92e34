"""The data folder: idx files that are verified before use and replaced atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phocas.files import write_atomically
from phocas.machine import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BufferedReader

STAMPS = ".verified.json"


class DataError(ValueError):
    """Missing, damaged or unreachable data; the message names the file and how to repair it.

    >>> issubclass(DataError, ValueError)
    True
    """


@dataclass(frozen=True)
class StoredFile:
    """One idx file of bytes in the data folder.

    Attributes:
        name: file name.
        shape: shape of the array.
        sha256: digest of the whole file.
        md5: published digest of the whole file, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    md5: str | None = None

    @property
    def header(self) -> bytes:
        """Return the file's first bytes: type 8 (unsigned byte), number of dimensions, sizes."""
        return idx_header(self.shape)

    @property
    def size(self) -> int:
        """Return the size of the whole file in bytes."""
        return len(self.header) + math.prod(self.shape)

    def wrong(self, content: bytes) -> str | None:
        """Return a message if this is not the content of the file, otherwise None."""
        if len(content) != self.size:
            return f"has {len(content):,} bytes, expected {self.size:,}"
        for kind, expected in (("sha256", self.sha256), ("md5", self.md5)):
            got = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
            if expected is not None and got != expected:
                return f"has {kind} {got}, expected {expected}"
        return None


def idx_header(shape: Sequence[int]) -> bytes:
    """Return the header of an idx file of bytes.

    >>> idx_header((60000, 28, 28)).hex()
    '000008030000ea600000001c0000001c'
    """
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: the given one, ``$PHOCAS_DATA``, or one in the user's cache.

    Args:
        folder: the folder, if one is given.

    >>> data_folder("here").name
    'here'
    """
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("PHOCAS_DATA"):
        return Path(chosen).expanduser()
    return cache_folder() / "data"


def repair(name: str, folder: Path) -> str:
    """Return the command that fetches a data set into the folder and replaces damaged files."""
    command = f"phocas data {name}"
    return (
        command if folder == data_folder() else f"{command} --data-dir {shlex.quote(str(folder))}"
    )


def problems(
    home: Path, files: Sequence[StoredFile], *, thorough: bool = False
) -> dict[StoredFile, str]:
    """Return a message for each file that cannot be used; empty if all files are intact.

    Size and header are checked each time. The digest is checked once and remembered with the file's
    size and times, so a changed file is checked again. ``thorough`` always checks it.
    """
    stamps = {} if thorough else _read_stamps(home)
    found: dict[StoredFile, str] = {}
    good: dict[str, list[object]] = {}
    for stored in files:
        try:
            with (home / stored.name).open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, stored.sha256]
                fault = _fault(
                    stored, file, status.st_size, trusted=stamps.get(stored.name) == stamp
                )
        except FileNotFoundError:
            fault = "is missing"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        if fault is None:
            good[stored.name] = stamp
        else:
            found[stored] = fault
    if good and good != stamps:
        # A read-only folder is no error: digests are then checked on every load.
        with contextlib.suppress(OSError):
            write_atomically(home / STAMPS, json.dumps(good, indent=1).encode())
    return found


def map_file(home: Path, stored: StoredFile) -> npt.NDArray[np.uint8]:
    """Map a verified file into memory, read-only, so that processes share its pages."""
    mapped = np.memmap(home / stored.name, np.uint8, "r", len(stored.header), stored.shape)
    return mapped.view(np.ndarray)  # indexing an ndarray is faster: no hooks of the subclass


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the folder's lock, so that only one process at a time fetches into it."""
    with (home / ".lock").open("ab") as file:
        try:
            import fcntl  # noqa: PLC0415  missing on Windows, where only digests protect the folder
        except ImportError:
            pass
        else:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if sys.stderr.isatty():
                    print(f"another process fetches into {home}: waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fault(stored: StoredFile, file: BufferedReader, size: int, *, trusted: bool) -> str | None:
    if size != stored.size:
        return f"has {size:,} bytes, expected {stored.size:,}"
    if file.read(len(stored.header)) != stored.header:
        return f"does not start with the idx header of {' x '.join(map(str, stored.shape))} bytes"
    if not trusted:
        file.seek(0)
        got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != stored.sha256:
            return f"has sha256 {got}, expected {stored.sha256}"
    return None


def _read_stamps(home: Path) -> dict[str, Any]:
    try:
        stamps = json.loads((home / STAMPS).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}
