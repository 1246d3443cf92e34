"""Where rounds run: engines make trainers whose workers and servers live somewhere.

An engine is a module with ``start(model, loss, data, **settings) -> Trainer``; the settings are
those of :class:`phocas.training.Trainer`. It gives the trainer a cluster
(:class:`phocas.training.cluster.Cluster`) that gathers the rows of a round.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phocas.specs import unknown

if TYPE_CHECKING:
    from phocas.training.trainer import Trainer

ENGINES = {"local": "phocas.engines.local", "ray": "phocas.engines.ray"}


class EngineError(RuntimeError):
    """Why an engine could not begin or go on; what was done until then is kept."""


def start(engine: str, model: Any, loss: Any, data: Any, **settings: Any) -> Trainer:
    """Make a trainer whose rounds run on the named engine."""
    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, ENGINES))
    trainer: Trainer = importlib.import_module(ENGINES[engine]).start(model, loss, data, **settings)
    return trainer
