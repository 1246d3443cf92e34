"""Locks of runs: a file beside the checkpoint, locked by the process that executes the run."""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phocas.experiments.results import RunRecord

try:
    import fcntl
except ImportError:  # without such locks, two processes may execute the same run
    fcntl = None  # type: ignore[assignment]


class RunTakenError(BlockingIOError):
    """Another process is executing the same run."""


def checkpoint_path(results: str | Path, identity: str) -> Path:
    """Return the path of a checkpoint, in a folder beside the results."""
    file = Path(results)
    return file.with_name(file.name + ".checkpoints") / f"{identity}.safetensors"


def previous_path(results: str | Path, identity: str) -> Path:
    """Return the path of the checkpoint before the newest one."""
    return checkpoint_path(results, identity).with_suffix(".before.safetensors")


def state_path(results: str | Path, run: int) -> Path:
    """Return the path of the final state of a finished run."""
    return checkpoint_path(results, f"run-{run}")


def actual_status(record: RunRecord, results: Path) -> str:
    """Return a run's status, or ``killed`` if it is "running" but no local process executes it."""
    if (
        record.status != "running"
        or fcntl is None
        or record.host.get("name") != socket.gethostname()
    ):
        return record.status
    try:
        with _lock_path(results, record.identity).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return "killed"
    except OSError:  # locked, or not readable by this user
        return "running"
    return "killed"


def _lock_path(results: str | Path, identity: str) -> Path:
    return checkpoint_path(results, identity).with_suffix(".lock")


@contextmanager
def claim(results: str | Path, identity: str, patience: float) -> Iterator[None]:
    """Lock a run; raise RunTakenError if another process holds it for ``patience`` seconds."""
    if fcntl is None:
        yield
        return
    path = _lock_path(results, identity)
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # another run ended and removed the folder
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunTakenError(
                        f"another process is running this configuration into {results}"
                    ) from None
                time.sleep(0.02)
                continue
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # the previous holder removed the file that is locked here
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # other runs have files in the folder
                    path.parent.rmdir()
            return
