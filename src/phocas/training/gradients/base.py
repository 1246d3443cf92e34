"""The base class of the ways to compute the workers' gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from phocas.training.parameters import FlatParameters
    from phocas.training.pool import DeterministicPool

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Reduction = Literal["mean", "sum"]
Buffers = dict[str, torch.Tensor]

SAMPLES_A_BLOCK = 320  # the smallest merged batch whose cost per sample is within 5% of that of 640


@dataclass(eq=False)
class WorkerGradients(ABC):
    """The gradient of each worker's batch at the current parameters."""

    model: nn.Module
    """The model."""
    loss: Loss
    """The loss function, the mean over a batch."""
    flat: FlatParameters
    """The parameters of the model as one vector."""
    pool: DeterministicPool
    """The threads."""
    reduction: Reduction
    """Whether a gradient is the mean or the sum over a batch."""
    channels_last: bool = False
    """Whether images should be in channels-last layout."""

    def __post_init__(self) -> None:
        self.device = self.flat.vector.device
        self.loss_dtype = torch.promote_types(self.flat.vector.dtype, torch.float32)
        """The type of the workers' losses, of at least 32 bits."""
        self.left: list[Buffers] = []
        """The model's buffers after the last call, for each worker, if the model changes any."""

    @abstractmethod
    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Write the gradients of inputs (m, n, ...) and targets (m, n) into out (m, d).

        Returns the m losses, each the mean over a batch. ``first_worker`` is the number of row 0.
        """
