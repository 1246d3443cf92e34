"""Engines, which run the rounds of a task: an engine builds a cluster of workers and servers.

An engine is a frozen dataclass of settings with ``build(task) -> Cluster``:
:class:`phocas.engines.local.LocalSettings`, :class:`phocas.engines.ray.RaySettings`. A trainer
takes an engine or its name: ``Trainer(..., engine="ray")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EngineError(RuntimeError):
    """An error that stops an engine; the rounds before it are kept.

    Args:
        message: what happened.
        failures: the reason for each part that failed: ``{"worker 3": "died"}``.

    >>> str(EngineError("stopped", {"worker 3": "died"})), EngineError("stopped").failures
    ('stopped', {})
    """

    def __init__(self, message: str, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failures)
