"""Loading of Triton source as kernels that can be launched."""

from __future__ import annotations

import hashlib
import linecache
import re
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any

import torch

from phocas.files import write_atomically
from phocas.kernels import jit
from phocas.kernels.triton import KernelError

THREADS = 128  # threads per program
OLDEST = (3, 5)  # the first version of Triton with tl.map_elementwise


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Return why Triton cannot be used at all, or None if it can."""
    try:
        import triton  # noqa: PLC0415 - an extra
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install 'phocas[gpu]'"
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if version < OLDEST:
        return f"Triton must be {'.'.join(map(str, OLDEST))} or newer: got {triton.__version__}"
    return None


def interpreted() -> bool:
    """Return whether Triton interprets its kernels on the CPU; raise KernelError without Triton."""
    reason = obstacle()
    if reason:
        raise KernelError(reason)
    import triton  # noqa: PLC0415

    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=64)
def warps(device: torch.device) -> int:
    """Return the number of warps of a program, smaller where warps are twice as wide (AMD)."""
    if device.type != "cuda":
        return THREADS // 32
    return THREADS // int(torch.cuda.get_device_properties(device).warp_size)


class Kernel:
    """A Triton function, launched on the device of its first tensor."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._works: set[torch.device] = set()
        self._fails: dict[torch.device, KernelError] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch the kernel; raise KernelError if its first launch on a device fails.

        The first launch compiles the kernel. After a failure the same error is raised again without
        another attempt.
        """
        device = args[0].device
        if device in self._fails:
            raise self._fails[device]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                # Without fusion by the compiler, so that bits are the same on every device.
                options = {"num_warps": warps(device), "enable_fp_fusion": False}
                self.function[grid](*args, **constants, **options)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if device in self._works:
                    raise
                reason = str(error).strip().splitlines() or [type(error).__name__]
                message = f"Triton could not make a kernel for {device}: {reason[-1]}"
                self._fails[device] = KernelError(message)
                raise self._fails[device] from error
        self._works.add(device)


@lru_cache(maxsize=1024)
def load(text: str) -> dict[str, Kernel]:
    """Return the kernels in a module of Triton source, by name.

    Triton caches compiled kernels itself.
    """
    interpreted()
    name = _kept(text)
    # Triton looks the source up by file name: it gets this text, whatever happened to the file.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "phocas.kernels.triton.written"}
    exec(compile(text, name, "exec"), names)  # noqa: S102 - our own text
    return {key: Kernel(value) for key, value in names.items() if hasattr(value, "run")}


def _kept(text: str) -> str:
    """Write source to the user's cache, for readers and debuggers, and return the file's name.

    The file is never read again, because executing a file would require trusting it.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        path = jit.cache_folder().parent / "triton" / f"{digest}.py"
    except RuntimeError:  # no home folder is known, as in some containers
        return f"<phocas {digest}>"
    with suppress(OSError):  # the folder is not writable
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, text.encode())
    return str(path)
