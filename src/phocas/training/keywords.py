"""The keyword arguments of a trainer, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Required, TypedDict

import torch

from phocas.attacks import Attack
from phocas.data import Split
from phocas.detection.exclusion import AfterEvidence, Never
from phocas.detection.own_past import WorkerData
from phocas.rules import Rule
from phocas.specs import OnNonfinite
from phocas.training.augmentation import Augmentation
from phocas.training.gradients.base import Reduction
from phocas.training.optimizers import Optimizers
from phocas.training.task import ByzantineData, MomentumForm


class TrainerKeywords(TypedDict, total=False):
    """The settings that ``Trainer`` takes: those of :class:`phocas.training.task.TaskSettings`.

    They are declared once more because editors do not read a dataclass here; a test compares both.
    """

    rule: Required[Rule | Callable[..., Any] | str]
    num_workers: int
    clients: int | None
    num_servers: int
    batch_size: int
    lr: float
    attack: Attack | Callable[..., Any] | str | None
    seed: int
    split: Split | Callable[..., Any] | str
    byzantine_data: ByzantineData
    validation: float
    worker_data: WorkerData | None
    exclude: Never | AfterEvidence | str
    optimizer: Optimizers | str
    optimizer_options: Mapping[str, Any]
    schedule: Callable[[int], float] | str
    weight_decay: float
    local_steps: int | None
    server_optimizer: str | None
    worker_momentum: float
    worker_momentum_form: MomentumForm
    trusted: int | None
    reduction: Reduction
    standardise: bool
    augmentation: Augmentation
    on_nonfinite: OnNonfinite
    device: torch.device | str | None
    threads: int | None
    gradient_path: str | None
