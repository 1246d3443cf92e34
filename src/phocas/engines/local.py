"""The local engine: all workers and servers in this process, the workers' gradients batched."""

from __future__ import annotations

from typing import Any

from phocas.kernels import set_num_threads
from phocas.training.trainer import Trainer


def start(
    model: Any, loss: Any, data: Any, *, threads: int | None = None, **settings: Any
) -> Trainer:
    """Make a trainer that uses so many threads for gradients and for aggregation."""
    if threads is not None:
        set_num_threads(threads)
    return Trainer(model, loss, data, threads=threads, **settings)
