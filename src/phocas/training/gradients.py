"""The gradients of all workers at once, each written straight into its row of the matrix.

Three ways, chosen by the model and all checked against plain autograd:

- :class:`Merged`: the batches of many workers go through a dense model as one, and a backward pass
  written by hand leaves a gradient a worker (the paper's MLP, m = 20: 4 ms; a loop 30 ms).
- :class:`Vectorised`: ``torch.func.vmap`` over the workers, for small models without convolutions.
- :class:`Looped`: one worker after another by autograd, convolutions in channels-last layout.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional

from phocas.specs import unknown
from phocas.training.dropout import Noise, seed_dropout, worker_generator

if TYPE_CHECKING:
    from phocas.training.lanes import Lanes
    from phocas.training.parameters import FlatParameters

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Reduction = Literal["mean", "sum"]
Buffers = dict[str, torch.Tensor]

SAMPLES_A_BLOCK = 320  # the smallest merged batch that costs less than 5% more a sample than 640
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WorkerGradients(ABC):
    """Compute the gradient of each worker's batch at the current parameters."""

    channels_last = False
    """Whether the model is better given images laid out channels-last."""

    def __init__(
        self, model: nn.Module, loss: Loss, flat: FlatParameters, lanes: Lanes, reduction: Reduction
    ) -> None:
        self.model = model
        self.loss = loss
        self.flat = flat
        self.lanes = lanes
        self.reduction = reduction

    @abstractmethod
    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,  # noqa: A002
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Write the gradients of inputs (m, n, ...) and targets (m, n) into out (m, d).

        Returns the m losses, each the mean over a batch. ``first_worker`` is the number of row 0.
        """

    def _scale(self, batch_size: int) -> float:
        return 1.0 if self.reduction == "mean" else float(batch_size)


class Merged(WorkerGradients):
    """Merge the workers' batches and write the backward pass of dense layers by hand.

    With A the inputs of a linear layer and D the gradient at its outputs, worker i's gradient is
    ``D_i^T A_i``: one batched product for all workers, with the matrix's own rows as its result.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, flat: FlatParameters, lanes: Lanes, reduction: Reduction
    ) -> None:
        super().__init__(model, loss, flat, lanes, reduction)
        self.layers = _dense_layers(model)
        self.plain_cross_entropy = is_cross_entropy(loss)
        self._starts: dict[int, int] = {}
        offset = 0
        for tensor in flat.tensors:
            self._starts[id(tensor)] = offset
            offset += tensor.numel()

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,  # noqa: A002
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run blocks of workers side by side; a block's size depends on the batch size alone."""
        num_workers, batch_size = targets.shape[:2]
        step = math.ceil(SAMPLES_A_BLOCK / batch_size)
        losses = torch.empty(num_workers, dtype=out.dtype)
        random = any(isinstance(layer, nn.Dropout) and layer.p for layer in self.layers)

        def block(start: int) -> None:
            stop = min(start + step, num_workers)
            generators = (
                [worker_generator(seed, round, first_worker + i) for i in range(start, stop)]
                if random
                else []
            )
            with torch.no_grad():
                self._block(
                    inputs[start:stop],
                    targets[start:stop],
                    out[start:stop],
                    losses[start:stop],
                    generators,
                )

        self.lanes.map(block, range(0, num_workers, step))
        return losses

    def _block(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        losses: torch.Tensor,
        generators: list[torch.Generator],
    ) -> None:
        k, n = targets.shape[:2]
        values = inputs.reshape(k * n, -1)
        tape: list[tuple[nn.Module, torch.Tensor]] = []  # a layer and what its backward pass needs
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                tape.append((layer, values))
                values = functional.linear(values, layer.weight, layer.bias)
            elif isinstance(layer, nn.ReLU):
                values = values.relu()
                tape.append((layer, values))
            elif isinstance(layer, nn.Dropout) and layer.p:
                mask = torch.empty_like(values)
                for rows, generator in zip(mask.view(k, n, -1), generators, strict=True):
                    rows.bernoulli_(1 - layer.p, generator=generator)
                values = values * mask.div_(1 - layer.p)
                tape.append((layer, mask))
        delta = self._loss(values, targets, losses)
        lowest = next(
            place for place, (layer, _) in enumerate(tape) if isinstance(layer, nn.Linear)
        )
        for place in range(len(tape) - 1, lowest - 1, -1):
            layer, saved = tape[place]
            if isinstance(layer, nn.ReLU):
                delta = torch.ops.aten.threshold_backward(delta, saved, 0)
            elif isinstance(layer, nn.Linear):
                self._write(layer, delta.view(k, n, -1), saved.view(k, n, -1), out)
                if place > lowest:
                    delta = delta @ layer.weight
            else:
                delta = delta * saved

    def _write(
        self, layer: nn.Linear, delta: torch.Tensor, inputs: torch.Tensor, out: torch.Tensor
    ) -> None:
        start = self._starts[id(layer.weight)]
        rows = out[:, start : start + layer.weight.numel()].view(-1, *layer.weight.shape)
        torch.bmm(delta.transpose(1, 2), inputs, out=rows)
        if layer.bias is not None:
            start = self._starts[id(layer.bias)]
            torch.sum(delta, 1, out=out[:, start : start + layer.bias.numel()])

    def _loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        """Store the losses and return the gradient at the outputs."""
        k, n = targets.shape[:2]
        scale = self._scale(n)
        if self.plain_cross_entropy and targets.dtype == torch.int64:
            logs = functional.log_softmax(outputs, 1)
            chosen = targets.reshape(-1, 1)
            torch.mean(logs.gather(1, chosen).view(k, n), 1, out=losses).neg_()
            delta = logs.exp_()
            return delta.scatter_add_(1, chosen, delta.new_full((k * n, 1), -1.0)).mul_(scale / n)
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            parts = [
                self.loss(part, target)
                for part, target in zip(leaf.view(k, n, -1), targets, strict=True)
            ]
            total = torch.stack(parts)
            (delta,) = torch.autograd.grad(total.sum() * scale, leaf)
        losses.copy_(total.detach())
        return delta


class Vectorised(WorkerGradients):
    """Differentiate all workers of a block in one call with ``torch.func.vmap``."""

    def __init__(
        self, model: nn.Module, loss: Loss, flat: FlatParameters, lanes: Lanes, reduction: Reduction
    ) -> None:
        super().__init__(model, loss, flat, lanes, reduction)
        self.replica = _replica(model).train()

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,  # noqa: A002
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run blocks of workers one after another: vmap's transformations share the module."""
        del seed, round, first_worker  # random models are looped
        num_workers, batch_size = targets.shape[:2]
        step = math.ceil(SAMPLES_A_BLOCK / batch_size)
        scale = self._scale(batch_size)
        losses = torch.empty(num_workers, dtype=out.dtype)
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
            self.lanes.map(block, [start])
        return losses


class Looped(WorkerGradients):
    """Differentiate one worker after another with autograd, for any module.

    Workers run side by side unless the model changes its buffers or draws random numbers other than
    nn.Dropout's. Buffers (running means of batch norm) start each worker from the server's values;
    the server then takes the median over the workers, since a worker may lie there too.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        flat: FlatParameters,
        lanes: Lanes,
        reduction: Reduction,
        *,
        channels_last: bool,
    ) -> None:
        super().__init__(model, loss, flat, lanes, reduction)
        self.noise = Noise()
        self.replica = _replica(model)
        seed_dropout(self.replica, self.noise)
        self.replica.train()
        self.channels_last = channels_last
        own = dict(self.replica.named_parameters())
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.tensors = [own[names[id(tensor)]] for tensor in flat.tensors]
        self._relaid = [
            (mine, theirs)
            for mine, theirs in zip(self.tensors, flat.tensors, strict=True)
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
        round: int,  # noqa: A002
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run the workers side by side, or in order where they would disturb each other."""
        num_workers, batch_size = targets.shape[:2]
        scale = self._scale(batch_size)
        losses = torch.empty(num_workers, dtype=out.dtype)
        for mine, theirs in self._relaid:
            mine.data.copy_(theirs.data)

        def worker(i: int) -> None:
            self.noise.generator = worker_generator(seed, round, first_worker + i)
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
            self.lanes.map(worker, range(num_workers))
        return losses

    def _in_order(
        self,
        worker: Callable[[int], None],
        num_workers: int,
        seed: int,
        round: int,  # noqa: A002
        first_worker: int,
    ) -> None:
        theirs = dict(self.model.named_buffers())
        kept: list[Buffers] = []
        with torch.random.fork_rng(devices=[]):
            for i in range(num_workers):
                for name, buffer in self.replica.named_buffers():
                    buffer.copy_(theirs[name])
                torch.manual_seed(worker_generator(seed, round, first_worker + i).initial_seed())
                self.lanes.map(worker, [i])
                kept.append({key: b.clone() for key, b in self.replica.named_buffers()})
        for name, buffer in theirs.items():
            buffer.copy_(torch.stack([buffers[name] for buffers in kept]).median(0).values)


def worker_gradients(
    model: nn.Module,
    loss: Loss,
    flat: FlatParameters,
    lanes: Lanes,
    *,
    sample: tuple[torch.Tensor, torch.Tensor],
    reduction: Reduction = "mean",
    path: str | None = None,
) -> WorkerGradients:
    """Choose how to compute the workers' gradients, by the model and a trial on a sample.

    ``sample`` is a pair of inputs (some workers, n, ...) and targets of the real shapes; ``path``
    forces ``merged``, ``vectorised`` or ``looped``.
    """
    ways = {"merged": Merged, "vectorised": Vectorised, "looped": Looped}
    if path is not None and path not in ways:
        raise ValueError(unknown("gradient path", path, ways))
    if path == "merged" or (path is None and is_dense(model, sample[0].dim() - 2)):
        return Merged(model, loss, flat, lanes, reduction)
    looped = _looped(model, loss, flat, lanes, reduction, sample)
    small = not any(isinstance(part, _CONVOLUTIONS) for part in model.modules())
    if path == "vectorised" or (path is None and small and not looped.serial):
        vectorised = Vectorised(model, loss, flat, lanes, reduction)
        if path == "vectorised" or _agrees(vectorised, looped, sample):
            return vectorised
    return looped


def _looped(
    model: nn.Module,
    loss: Loss,
    flat: FlatParameters,
    lanes: Lanes,
    reduction: Reduction,
    sample: tuple[torch.Tensor, torch.Tensor],
) -> Looped:
    """Lay images out channels-last for convolutions, unless the model cannot take them so."""
    if any(isinstance(part, nn.Conv2d) for part in model.modules()):
        looped = Looped(model, loss, flat, lanes, reduction, channels_last=True)
        # A view after a convolution wants the usual layout; any other trouble comes again below.
        with contextlib.suppress(RuntimeError):
            looped.serial = _disturbs(looped, sample)
            return looped
    looped = Looped(model, loss, flat, lanes, reduction, channels_last=False)
    looped.serial = _disturbs(looped, sample)
    return looped


def is_dense(model: nn.Module, input_dims: int) -> bool:
    """Say whether a model is a plain stack of linear layers, ReLU, flatten and dropout."""
    layers = _dense_layers(model)
    if not layers or not isinstance(layers[-1], nn.Linear):
        return False
    flattened = input_dims == 1
    for layer in layers:
        if type(layer) not in (nn.Linear, nn.ReLU, nn.Flatten, nn.Dropout, nn.Identity):
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:  # noqa: SLF001
            return False
        if isinstance(layer, nn.Flatten):
            if (layer.start_dim, layer.end_dim) != (1, -1):
                return False
            flattened = True
        if isinstance(layer, nn.Linear) and not flattened:
            return False
    tensors = [tensor for layer in layers for tensor in layer.parameters()]
    return len({id(tensor) for tensor in tensors}) == len(tensors) and all(
        tensor.requires_grad for tensor in tensors
    )


def is_cross_entropy(loss: Loss) -> bool:
    """Say whether a loss is the mean cross-entropy without weights, smoothing or ignored labels."""
    if loss is functional.cross_entropy:
        return True
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.weight is None
        and loss.label_smoothing == 0
        and loss.reduction == "mean"
        and loss.ignore_index < 0
    )


def _dense_layers(model: nn.Module) -> list[nn.Module]:
    if type(model) is not nn.Sequential:
        return [model]
    return [layer for part in model for layer in _dense_layers(part)]


def _replica(model: nn.Module) -> nn.Module:
    """Copy a module without copying its parameters."""
    shared = {}
    for tensor in model.parameters():
        twin = nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
        shared[id(tensor)] = twin
    return copy.deepcopy(model, dict(shared))


def _disturbs(looped: Looped, sample: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Try a worker: does it change buffers, or draw from the generator of the process?"""
    inputs, targets = (part[:1] for part in sample)
    buffers = {name: buffer.clone() for name, buffer in looped.replica.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        looped(
            inputs, targets, torch.empty(1, looped.flat.size, dtype=looped.flat.vector.dtype), 0, 0
        )
        drew = not torch.equal(state, torch.get_rng_state())
    changed = any(
        not torch.equal(buffers[name], buffer) for name, buffer in looped.replica.named_buffers()
    )
    for name, buffer in looped.replica.named_buffers():
        buffer.copy_(buffers[name])
    return drew or changed


def _agrees(
    vectorised: Vectorised, looped: Looped, sample: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    """Try a worker both ways; a model that vmap cannot take, or takes differently, is looped."""
    inputs, targets = (part[:1] for part in sample)
    found, expected = (
        torch.empty(1, looped.flat.size, dtype=looped.flat.vector.dtype) for _ in range(2)
    )
    looped(inputs, targets, expected, 0, 0)
    try:
        vectorised(inputs, targets, found, 0, 0)
    except Exception:  # noqa: BLE001  # whatever vmap dislikes about a foreign model, the loop can do
        return False
    tolerance = 1e-4 * float(expected.abs().max()) + 1e-12
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=tolerance))
