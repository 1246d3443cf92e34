"""The server's own gradient on trusted samples, the reference vector of rules such as FLTrust."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phocas.data import Assignment, batch_indices
from phocas.training.local_steps import local_steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from phocas.training.gradients.base import WorkerGradients
    from phocas.training.local_steps import Batches
    from phocas.training.server import ParameterServer
    from phocas.training.task import Task


class TrustedGradient:
    """The row that a worker with the trusted samples would send: the reference of each round.

    It is the gradient of all trusted samples at once, with the workers' momentum if they have one.
    With local steps it is the change after as many steps, on batches of the workers' size.

    Args:
        task: the task, which has trusted samples.
        gradients: the computation of gradients in the process of the trainer.
    """

    def __init__(self, task: Task, gradients: WorkerGradients) -> None:
        if task.trusted is None:
            raise ValueError("a trusted gradient needs trusted samples: got a task without them")
        self._task, self._gradients = task, gradients
        self._alone = Assignment([task.trusted])
        self._batch = self._samples(task.trusted[None])
        self._steps = None if task.local is None else local_steps(gradients, task.local)

    @classmethod
    def of(cls, task: Task, gradients: WorkerGradients) -> TrustedGradient | None:
        """Return the trusted gradient of a task, or None if its rule needs none."""
        return None if task.trusted is None else cls(task, gradients)

    def provide(self, server: ParameterServer, round: int) -> None:
        """Set the reference of a server for a round, at its current parameters."""
        beta, gain = self._task.worker_momentum, self._task.momentum_gain
        row = self._row(server, round)
        if beta and server.reference is not None:
            row = server.reference.mul_(beta).add_(row, alpha=gain)
        elif beta:
            row.mul_(gain)
        server.reference = row

    def _row(self, server: ParameterServer, round: int) -> torch.Tensor:
        task, gradients = self._task, self._gradients
        buffers = [(buffer, buffer.clone()) for buffer in task.model.buffers()]
        left, worker = gradients.left, task.num_workers
        out = torch.empty_like(server.vector)[None]
        if self._steps is None:
            gradients(*self._batch, out, task.seed, round, worker)
            if task.reduction == "sum":  # the sum over as many samples as a worker has
                out.mul_(task.batch_size / self._batch[1].shape[1])
        else:
            factor = float(task.schedule(round))
            self._steps(self._batches(round), out, task.seed, round, factor, worker)
        gradients.left = left
        for buffer, before in buffers:  # batch norm's statistics are those of the workers
            buffer.copy_(before)
        return out[0]

    def _batches(self, round: int) -> Batches:
        """Return the batches of local steps, drawn from the trusted samples."""
        task = self._task
        steps = 1 if task.local is None else task.local.steps

        def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            number = round * steps + step
            return self._samples(batch_indices(self._alone, 1, task.batch_size, task.seed, number))

        return draw

    def _samples(self, indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._task.samples.draw(indices)
        device = self._task.device
        return inputs.clone().to(device), targets.clone().to(device)
