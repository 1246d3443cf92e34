"""Integrations with other software: torch's DDP and FSDP2, Flower, NVFlare, files of tensors.

``protect`` and ``watch`` take a model that DDP or FSDP2 has wrapped. ``ddp`` and ``fsdp`` have the
functions that are special to each. ``outer`` has the outer step of DiLoCo. ``lightning`` and
``transformers`` have callbacks, ``flower`` a strategy, and ``nvflare`` an aggregator. ``merging``
merges files of tensors.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("ddp", "flower", "fsdp", "lightning", "merging", "nvflare", "outer", "transformers")
_VERBS = ("protect", "watch")


def __getattr__(name: str) -> Any:
    """Import an integration on first use, because it needs an optional framework."""
    if name in _MODULES:
        return importlib.import_module(f"phocas.integrations.{name}")
    if name in _VERBS:
        return getattr(importlib.import_module("phocas.integrations.parallel"), name)
    raise AttributeError(f"module 'phocas.integrations' has no attribute {name!r}")
