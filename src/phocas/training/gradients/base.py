"""The base class of the ways to compute the workers' gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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


def empty_losses(num_workers: int, rows: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for the workers' losses, of at least 32 bits."""
    kind = torch.promote_types(rows.dtype, torch.float32)
    return torch.empty(num_workers, dtype=kind, device=rows.device)


class WorkerGradients(ABC):
    """Compute the gradient of each worker's batch at the current parameters."""

    channels_last = False
    """Whether images should be in channels-last layout."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        flat: FlatParameters,
        pool: DeterministicPool,
        reduction: Reduction,
    ) -> None:
        self.model = model
        self.loss = loss
        self.flat = flat
        self.pool = pool
        self.reduction = reduction
        self.device = flat.vector.device
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

    def _scale(self, batch_size: int) -> float:
        return 1.0 if self.reduction == "mean" else float(batch_size)
