"""From Triton source to a kernel that can be launched."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

OLDEST = (3, 5)  # the first Triton that maps a function over the columns


class KernelError(RuntimeError):
    """Triton is not here, too old, or cannot compile for this device."""


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Tell whether Triton interprets its kernels, on the CPU; refuse a Triton that is too old."""
    try:
        import triton  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise KernelError(f"Triton cannot be imported ({error}): pip install triton") from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise KernelError(f"Triton must be {oldest} or newer: got {triton.__version__}")
    return bool(triton.knobs.runtime.interpret)


class Kernel:
    """A Triton function, launched on the device of its first tensor."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._works = False

    def __call__(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch; what goes wrong the first time, as the kernel is compiled, is a KernelError."""
        device = args[0].device
        with torch.cuda.device(device if device.type == "cuda" else -1):
            try:
                # Bits must not depend on what a compiler likes to fuse.
                self.function[grid](*args, **constants, enable_fp_fusion=False)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self._works:
                    raise
                reason = str(error).strip().splitlines() or [type(error).__name__]
                raise KernelError(
                    f"Triton could not make a kernel for {device}: {reason[-1]}"
                ) from error
        self._works = True


@lru_cache(maxsize=1024)
def load(text: str) -> dict[str, Kernel]:
    """Return the kernels in a module of Triton source, by their names.

    The text stays in memory, where Triton asks for it by its digest: a file that is executed is one
    more thing to trust. Triton keeps what it compiled in a cache of its own.
    """
    interpreted()
    name = f"<phocas {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "phocas.kernels.triton.written"}
    exec(compile(text, name, "exec"), names)  # noqa: S102 - our own text
    return {key: Kernel(value) for key, value in names.items() if hasattr(value, "run")}
