"""Where rounds run: an engine makes a cluster (workers and servers) from a task.

An engine is a frozen value of settings with ``build(task) -> Cluster``:
:class:`phocas.engines.local.LocalSettings`, :class:`phocas.engines.ray.RaySettings`. A trainer
takes one, or its name: ``Trainer(..., engine="ray")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EngineError(RuntimeError):
    """Why an engine could not begin or go on; what was done until then is kept.

    ``failures`` says what is known of each part that failed: ``{"worker 3": "died"}``.

    Args:
        message: what happened.
        failures: what is known of each part that failed.

    >>> str(EngineError("stopped", {"worker 3": "died"})), EngineError("stopped").failures
    ('stopped', {})
    """

    def __init__(self, message: str, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failures)
