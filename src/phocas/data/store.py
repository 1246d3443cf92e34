"""The folder where data sets are kept: idx files, checked before use, replaced as a whole."""

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
    """Data that is missing, damaged or out of reach: which file, and how to repair it.

    >>> issubclass(DataError, ValueError)
    True
    """


@dataclass(frozen=True)
class StoredFile:
    """One idx file of bytes in the folder: its name, its shape, and what its content must hash to.

    ``md5`` is the digest that is published, where one is; ``sha256`` is that of the same bytes.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    md5: str | None = None

    @property
    def header(self) -> bytes:
        """The first bytes of the file: type 8 (unsigned byte), number of dimensions, sizes."""
        return idx_header(self.shape)

    @property
    def size(self) -> int:
        """The bytes of the whole file."""
        return len(self.header) + math.prod(self.shape)

    def wrong(self, content: bytes) -> str | None:
        """Say what is wrong with content that shall become this file, None if nothing is."""
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
    """Return where data sets are kept: the folder given, ``$PHOCAS_DATA``, or the user cache.

    Args:
        folder: the folder that is wanted, if one is.

    >>> data_folder("here").name
    'here'
    """
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get("PHOCAS_DATA"):
        return Path(chosen).expanduser()
    return cache_folder() / "data"


def repair(name: str, folder: Path) -> str:
    """Return the command that fetches a data set into the folder, replacing what is damaged."""
    command = f"phocas data {name}"
    return (
        command if folder == data_folder() else f"{command} --data-dir {shlex.quote(str(folder))}"
    )


def problems(
    home: Path, files: Sequence[StoredFile], *, thorough: bool = False
) -> dict[StoredFile, str]:
    """Say what is wrong with each file that cannot be used; an empty dictionary means all is well.

    Size and header are checked each time. The digest is checked once and remembered by the file's
    size and times, so that a changed file is checked again; ``thorough`` always checks it.
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
        # A folder that may only be read is no error: the digests are then checked on every load.
        with contextlib.suppress(OSError):
            write_atomically(home / STAMPS, json.dumps(good, indent=1).encode())
    return found


def map_file(home: Path, stored: StoredFile) -> npt.NDArray[np.uint8]:
    """Map a checked file into memory, read-only, so that processes share its pages."""
    mapped = np.memmap(home / stored.name, np.uint8, "r", len(stored.header), stored.shape)
    return mapped.view(np.ndarray)  # indexing an ndarray skips the subclass's hooks


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Let one process at a time fetch into a folder; the others wait for it."""
    with (home / ".lock").open("ab") as file:
        try:
            import fcntl  # noqa: PLC0415  not there on Windows, where digests alone keep the folder whole
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
