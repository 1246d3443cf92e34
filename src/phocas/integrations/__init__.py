"""Glue to what other people have: torch's DDP and FSDP2, Flower, NVFlare, files of tensors.

``protect`` and ``watch`` take a model that DDP or FSDP2 has wrapped, whichever it is; ``ddp`` and
``fsdp`` have what is special to each, ``lightning`` and ``transformers`` a callback, ``flower`` a
strategy, ``nvflare`` an aggregator, ``merging`` files.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("ddp", "flower", "fsdp", "lightning", "merging", "nvflare", "transformers")
_VERBS = ("protect", "watch")


def __getattr__(name: str) -> Any:
    """Load an integration when it is first asked for: each needs what it integrates with."""
    if name in _MODULES:
        return importlib.import_module(f"phocas.integrations.{name}")
    if name in _VERBS:
        return getattr(importlib.import_module("phocas.integrations.parallel"), name)
    raise AttributeError(f"module 'phocas.integrations' has no attribute {name!r}")
