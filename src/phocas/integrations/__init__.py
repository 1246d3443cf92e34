"""Glue to what other people have: torch's DistributedDataParallel, Flower, files of tensors."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load an integration when it is first asked for: each needs what it integrates with."""
    if name in ("ddp", "flower", "merging"):
        return importlib.import_module(f"phocas.integrations.{name}")
    raise AttributeError(f"module 'phocas.integrations' has no attribute {name!r}")
