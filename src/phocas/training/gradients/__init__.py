"""The gradients of all workers at once, each written directly into its row of the matrix.

There are three ways, chosen by the model. Tests compare all of them with plain autograd:

- :class:`MergedBatchGradients`: the batches of many workers go through a dense model as one batch,
  and a backward pass written by hand gives one gradient per worker (the paper's MLP, m = 20: 4 ms;
  a loop 30 ms).
- :class:`Vectorised`: ``torch.func.vmap`` over the workers, for small models without convolutions.
- :class:`Looped`: one worker after another by autograd, convolutions in channels-last layout.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from phocas.specs import unknown
from phocas.training.buffers import take_median
from phocas.training.dropout import (
    Noise,
    SeededDropout,
    generator_states,
    own_randomness,
    seed_dropout,
    worker_generator,
    worker_seed,
)
from phocas.training.gradients.base import (
    SAMPLES_A_BLOCK,
    Buffers,
    Loss,
    Reduction,
    WorkerGradients,
)
from phocas.training.gradients.merged import MergedBatchGradients, is_dense

if TYPE_CHECKING:
    from phocas.training.parameters import FlatParameters
    from phocas.training.pool import DeterministicPool


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Vectorised(WorkerGradients):
    """Gradients by ``torch.func.vmap`` over the workers of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replica = _replica(self.model).train()

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run blocks of workers one after another: transformations of vmap share the module."""
        del seed, round, first_worker  # models that draw random numbers use Looped
        num_workers, batch_size = targets.shape[:2]
        step = math.ceil(SAMPLES_A_BLOCK / batch_size)
        scale = 1 if self.reduction == "mean" else batch_size
        losses = torch.empty(num_workers, dtype=self.loss_dtype, device=self.device)
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        parameters = {names[id(tensor)]: tensor.detach() for tensor in self.flat.tensors}

        def objective(
            values: Buffers, batch: torch.Tensor, target: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = torch.func.functional_call(self.replica, values, (batch,))
            loss = self.loss(outputs, target)
            return loss * scale, loss

        gradients = torch.func.vmap(
            torch.func.grad(objective, has_aux=True), in_dims=(None, 0, 0), randomness="error"
        )

        def block(start: int) -> None:
            rows = slice(start, start + step)
            found, losses[rows] = gradients(parameters, inputs[rows], targets[rows])
            offset = 0
            for gradient in found.values():
                part = gradient.flatten(1)
                out[rows, offset : offset + part.shape[1]] = part
                offset += part.shape[1]

        for start in range(0, num_workers, step):
            self.pool.map(block, [start])
        return losses


class Looped(WorkerGradients):
    """Gradients by autograd, one worker at a time, for any module.

    Workers run in parallel, unless the model changes its buffers or draws random numbers other than
    those of nn.Dropout. Each worker starts with the server's buffers (such as the running means of
    batch norm). The server then takes the median of the finite values over the workers
    (:func:`take_median`), because a Byzantine worker may send wrong buffers, too.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise = Noise()
        self.replica = _replica(self.model)
        seed_dropout(self.replica, self.noise)
        self.replica.train()
        self.drops = any(isinstance(part, SeededDropout) for part in self.replica.modules())
        own = dict(self.replica.named_parameters())
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        self.tensors = [own[names[id(tensor)]] for tensor in self.flat.tensors]
        self._relaid = [
            (mine, theirs)
            for mine, theirs in zip(self.tensors, self.flat.tensors, strict=True)
            if self.channels_last and mine.dim() == 4
        ]
        for mine, _ in self._relaid:
            mine.data = mine.data.clone(memory_format=torch.channels_last)
        self.serial = False

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run the workers in parallel, or in order if they would change each other's state."""
        num_workers, batch_size = targets.shape[:2]
        scale = 1 if self.reduction == "mean" else batch_size
        losses = torch.empty(num_workers, dtype=self.loss_dtype, device=self.device)
        for mine, theirs in self._relaid:
            mine.data.copy_(theirs.data)

        def worker(i: int) -> None:
            if self.drops:
                self.noise.generator = worker_generator(seed, round, first_worker + i, self.device)
            batch = inputs[i]
            if self.channels_last and batch.dim() == 4:
                batch = batch.contiguous(memory_format=torch.channels_last)
            loss = self.loss(self.replica(batch), targets[i])
            found = torch.autograd.grad(loss * scale, self.tensors, allow_unused=True)
            for view, gradient in zip(self.flat.views(out[i]), found, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
            losses[i] = loss.detach()

        if self.serial:
            self._in_order(worker, num_workers, seed, round, first_worker)
        else:
            self.pool.map(worker, range(num_workers))
        return losses

    def _in_order(
        self,
        worker: Callable[[int], None],
        num_workers: int,
        seed: int,
        round: int,
        first_worker: int,
    ) -> None:
        theirs = dict(self.model.named_buffers())
        kept: list[Buffers] = []
        with own_randomness(self.device):
            for i in range(num_workers):
                for name, buffer in self.replica.named_buffers():
                    buffer.copy_(theirs[name])
                torch.manual_seed(worker_seed(seed, round, first_worker + i))
                self.pool.map(worker, [i])
                kept.append({key: b.clone() for key, b in self.replica.named_buffers()})
        for name, buffer in theirs.items():
            take_median(buffer, [buffers[name] for buffers in kept])
        self.left = kept


def worker_gradients(
    model: nn.Module,
    loss: Loss,
    flat: FlatParameters,
    pool: DeterministicPool,
    *,
    sample: tuple[torch.Tensor, torch.Tensor],
    reduction: Reduction = "mean",
    path: str | None = None,
) -> WorkerGradients:
    """Choose how to compute the workers' gradients, by the model and a trial on a sample.

    Args:
        model: the model.
        loss: the loss function.
        flat: the parameters of the model as one vector.
        pool: the threads.
        sample: inputs (some workers, n, ...) and targets of the real shapes.
        reduction: whether a gradient is the mean or the sum over a batch.
        path: ``merged``, ``vectorised`` or ``looped`` to skip the trial; None to choose by it.
    """
    ways = {"merged": MergedBatchGradients, "vectorised": Vectorised, "looped": Looped}
    if path is not None and path not in ways:
        raise ValueError(unknown("gradient path", path, ways))
    given = (model, loss, flat, pool, reduction)
    whole = not sample[0].is_floating_point()
    if path == "merged" or (path is None and is_dense(model, sample[0].dim() - 2, whole=whole)):
        return MergedBatchGradients(*given)
    try:
        looped = _looped(partial(Looped, *given), model, sample)
    except RuntimeError as error:
        if not whole:
            raise
        raise TypeError(
            f"a trial of the model on inputs of whole numbers failed: {error}; whole numbers stay"
            " so, as embeddings need them: if these are quantities, give them as floats"
        ) from error
    small = not any(isinstance(part, _CONVOLUTIONS) for part in model.modules())
    if path == "vectorised" or (path is None and small and not looped.serial):
        vectorised = Vectorised(*given)
        if path == "vectorised" or _agrees(vectorised, looped, sample):
            return vectorised
    return looped


def _looped(
    make: Callable[..., Looped], model: nn.Module, sample: tuple[torch.Tensor, torch.Tensor]
) -> Looped:
    """Use channels-last layout for convolutions, unless the model does not accept it."""
    if any(isinstance(part, nn.Conv2d) for part in model.modules()):
        looped = make(channels_last=True)
        # A view after a convolution needs the usual layout; other errors are raised again below.
        with contextlib.suppress(RuntimeError):
            looped.serial = _disturbs(looped, sample)
            return looped
    looped = make()
    looped.serial = _disturbs(looped, sample)
    return looped


def _replica(model: nn.Module) -> nn.Module:
    """Copy a module without copying its parameters."""
    shared = {}
    for tensor in model.parameters():
        twin = nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
        shared[id(tensor)] = twin
    return copy.deepcopy(model, dict(shared))


def _disturbs(looped: Looped, sample: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Run one worker; return True if it changes buffers or draws from the global generator."""
    inputs, targets = (part[:1] for part in sample)
    buffers = {name: buffer.clone() for name, buffer in looped.replica.named_buffers()}
    with own_randomness(looped.device):
        states = generator_states(looped.device)
        looped(inputs, targets, torch.empty_like(looped.flat.vector)[None], 0, 0)
        drew = not all(map(torch.equal, states, generator_states(looped.device)))
    changed = any(
        not torch.equal(buffers[name], buffer) for name, buffer in looped.replica.named_buffers()
    )
    for name, buffer in looped.replica.named_buffers():
        buffer.copy_(buffers[name])
    return drew or changed


def _agrees(
    vectorised: Vectorised, looped: Looped, sample: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    """Run one worker both ways; return True if vmap works and gives the same gradients."""
    inputs, targets = (part[:1] for part in sample)
    found, expected = (torch.empty_like(looped.flat.vector)[None] for _ in range(2))
    looped(inputs, targets, expected, 0, 0)
    try:
        vectorised(inputs, targets, found, 0, 0)
    except Exception:  # noqa: BLE001  # vmap raises many kinds of errors for models it does not support
        return False
    # The sums of bfloat16 differ by a few last bits.
    relative = max(1e-3, 4 * torch.finfo(expected.dtype).eps)
    tolerance = max(1e-4, relative / 10) * float(expected.abs().max()) + 1e-12
    return bool(torch.allclose(found, expected, rtol=relative, atol=tolerance))
