"""Glue to other people's training loops: the rules inside torch's DDP and FSDP2."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load an integration when it is first asked for: each needs what it integrates with."""
    if name in {"ddp", "fsdp"}:
        return importlib.import_module(f"phocas.integrations.{name}")
    raise AttributeError(f"module 'phocas.integrations' has no attribute {name!r}")
