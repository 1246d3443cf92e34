"""This machine: its cores, and the folder of the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Return the user's cache folder for phocas; raise RuntimeError if there is no home folder."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not root.is_absolute():  # by the XDG specification a relative path is invalid and ignored
        root = Path.home() / ".cache"
    return root / "phocas"
