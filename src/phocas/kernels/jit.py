"""Compilation of IR text to a callable address, cached in memory and in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from pathlib import Path

from llvmlite import binding as llvm

from phocas import machine
from phocas.kernels.target import Target, host

_addresses: dict[tuple[Hashable, str], int] = {}
_engines: dict[Hashable, llvm.ExecutionEngine] = {}  # code is freed with its engine
_lock = threading.Lock()


def address(key: Hashable, write: Callable[[Target], str], symbol: str = "kernel") -> int:
    """Compile the IR text that ``write`` returns, once per key; return a function's address."""
    known = _addresses.get((key, symbol))
    if known is not None:
        return known
    with _lock:
        if key not in _engines:
            _engines[key] = _load(_object_code(key, write))
        found = int(_engines[key].get_function_address(symbol))
        _addresses[key, symbol] = found
        return found


def compile_text(text: str, target: Target) -> bytes:
    """Compile IR text to an object file for a processor, which may differ from the host's."""
    machine = target.machine()
    module = llvm.parse_assembly(text)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    return bytes(machine.emit_object(module))


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``PHOCAS_CACHE``, or the user's cache folder."""
    explicit = os.environ.get("PHOCAS_CACHE")
    if explicit:
        return Path(explicit) / "kernels"
    return machine.cache_folder() / "kernels"


def _load(code: bytes) -> llvm.ExecutionEngine:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), host().machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _object_code(key: Hashable, write: Callable[[Target], str]) -> bytes:
    target = host()
    name = hashlib.sha256(repr((key, target, _version())).encode()).hexdigest()
    try:
        path = cache_folder() / f"{name}.o"
    except RuntimeError:  # no home folder is known, as in some containers
        return compile_text(write(target), target)
    code = _read(path)
    if code is None:
        code = compile_text(write(target), target)
        _write(path, code)
    return code


@lru_cache(maxsize=1)
def _version() -> str:
    """Return a digest of the compiler and of the sources that generate IR."""
    digest = hashlib.sha256(repr(llvm.llvm_version_info).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """Return cached code if it is intact, owned by this user and has that name, else None.

    The checks are strict because the code will be executed.
    """
    try:
        with _folder(path.parent) as folder:
            handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            with os.fdopen(handle, "rb") as file:
                _check_ours(handle)
                content = file.read()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if _digest(path.name, code) == digest else None


def _write(path: Path, code: bytes) -> None:
    """Store compiled code for other processes; do nothing if the folder is not writable."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder(path.parent) as folder:
            half = f"{path.name}.{os.getpid()}.tmp"
            new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            try:
                with os.fdopen(os.open(half, new, 0o600, dir_fd=folder), "wb") as file:
                    file.write(_digest(path.name, code) + code)
                os.replace(half, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(half, dir_fd=folder)
                raise


def _digest(name: str, code: bytes) -> bytes:
    """Return a digest of code and name; under another name it would be another kernel."""
    return hashlib.sha256(name.encode() + code).digest()


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open a folder that is not a symbolic link and that only this user can write to."""
    if os.open not in os.supports_dir_fd:
        raise OSError("files cannot be checked here before they are executed")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_ours(folder)
        yield folder
    finally:
        os.close(folder)


def _check_ours(handle: int) -> None:
    """Raise PermissionError if others own or can write to an open file or folder."""
    info = os.fstat(handle)
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise PermissionError("only files that no other user can write are executed")


if hasattr(os, "register_at_fork"):
    # A process forked while a thread compiles would wait forever for that thread: for this lock,
    # and for one in llvmlite that is only taken under this lock.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
