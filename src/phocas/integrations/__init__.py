"""Glue to other people's training loops: the rules inside torch's DistributedDataParallel."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load an integration when it is first asked for: each needs what it integrates with."""
    if name == "ddp":
        return importlib.import_module("phocas.integrations.ddp")
    raise AttributeError(f"module 'phocas.integrations' has no attribute {name!r}")
