"""From IR text to a callable address, remembered in memory and in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path

from llvmlite import binding as llvm

from phocas import machine
from phocas.kernels.target import Target, host

_addresses: dict[tuple[Hashable, str], int] = {}
_engines: dict[Hashable, llvm.ExecutionEngine] = {}  # the code lives as long as its engine
_lock = threading.Lock()


def address(key: Hashable, write: Callable[[Target], str], symbol: str = "kernel") -> int:
    """Return the address of a function in the module that ``write`` writes, compiled once a key."""
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
    """Compile IR text to an object file for a processor, which need not be the host's."""
    machine = target.machine()
    module = llvm.parse_assembly(text)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    return bytes(machine.emit_object(module))


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``PHOCAS_CACHE``, or the user's cache folder."""
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
    except RuntimeError:  # nobody's home is known, as in some containers
        return compile_text(write(target), target)
    code = _read(path)
    if code is None:
        code = compile_text(write(target), target)
        _write(path, code)
    return code


@lru_cache(maxsize=1)
def _version() -> str:
    """Identify the compiler and the source that writes the IR: either may change the code."""
    digest = hashlib.sha256(repr(llvm.llvm_version_info).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """Return cached code if it is whole and ours: it is going to be executed."""
    try:
        info = path.stat()
        content = path.read_bytes()
    except OSError:
        return None
    if hasattr(os, "getuid") and (info.st_uid != os.getuid() or info.st_mode & 0o022):
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Keep code for other processes; a folder that cannot be written only costs time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


if hasattr(os, "register_at_fork"):
    # A child of a process that was forked while a thread compiles would wait without end for that
    # thread: for our lock, and for one in llvmlite that only code under ours ever takes.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
