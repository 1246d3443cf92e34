"""Who is running a run: a lock beside its checkpoint that ends with its process."""

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
except ImportError:  # no such locks on this system: two processes may then run one run
    fcntl = None  # type: ignore[assignment]


class RunTakenError(BlockingIOError):
    """Another process is running this very run."""


def checkpoint_path(results: str | Path, identity: str) -> Path:
    """Return where a checkpoint is kept: in a folder beside the results."""
    file = Path(results)
    return file.with_name(file.name + ".checkpoints") / f"{identity}.safetensors"


def previous_path(results: str | Path, identity: str) -> Path:
    """Return where the checkpoint before the newest is kept."""
    return checkpoint_path(results, identity).with_suffix(".before.safetensors")


def state_path(results: str | Path, run: int) -> Path:
    """Return where the state in which a run came to its end is kept."""
    return checkpoint_path(results, f"run-{run}")


def actual_status(record: RunRecord, results: Path) -> str:
    """Return a run's status, or ``killed`` if it says running and no process here runs it."""
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
    except OSError:  # held, or not ours to look at
        return "running"
    return "killed"


def _lock_path(results: str | Path, identity: str) -> Path:
    return checkpoint_path(results, identity).with_suffix(".lock")


@contextmanager
def claim(results: str | Path, identity: str, patience: float) -> Iterator[None]:
    """Hold a run; raise RunTakenError if another process holds it for so many seconds."""
    if fcntl is None:
        yield
        return
    path = _lock_path(results, identity)
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # another run ended and tidied the folder away
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
                continue  # the holder before us removed the file that we have locked
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # other runs have files there
                    path.parent.rmdir()
            return
