"""Parameter servers and workers: training with Byzantine workers.

The names below load torch when they are first used, so that ``import phocas.training`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phocas.training.running import TrainingRun
    from phocas.training.server import ParameterServer
    from phocas.training.task import Task, TaskSettings
    from phocas.training.trainer import Round, Trainer

__all__ = ["ParameterServer", "Round", "Task", "TaskSettings", "Trainer", "TrainingRun"]

_HOMES = {
    "ParameterServer": "server",
    "Round": "trainer",
    "Task": "task",
    "TaskSettings": "task",
    "Trainer": "trainer",
    "TrainingRun": "running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
