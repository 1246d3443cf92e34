"""The gradients of dense models, by merged batches and a hand-written backward pass."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from phocas.training.dropout import worker_generator
from phocas.training.gradients.base import SAMPLES_A_BLOCK, Loss, WorkerGradients


class MergedBatchGradients(WorkerGradients):
    """Merged batches of all workers, with a hand-written backward pass for dense layers.

    With A the inputs of a linear layer and D the gradient at its outputs, the gradient of worker i
    is ``D_i^T A_i``. One batched product computes it for all workers, directly into the rows of the
    matrix.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = _dense_layers(self.model)
        self.plain_cross_entropy = is_cross_entropy(self.loss)
        self._starts: dict[int, int] = {}
        offset = 0
        for tensor in self.flat.tensors:
            self._starts[id(tensor)] = offset
            offset += tensor.numel()

    def by_tensor(self, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Split k rows of all d parameters into one (k, *shape) tensor for each parameter tensor.

        The keys of the result are the ids of the parameter tensors.
        """
        return {
            id(tensor): rows[:, start : start + tensor.numel()].view(-1, *tensor.shape)
            for tensor, start in zip(self.flat.tensors, self._starts.values(), strict=True)
        }

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        out: torch.Tensor,
        seed: int,
        round: int,
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Run blocks of workers in parallel; their size depends only on the batch size."""
        num_workers, batch_size = targets.shape[:2]
        step = math.ceil(SAMPLES_A_BLOCK / batch_size)
        losses = torch.empty(num_workers, dtype=self.loss_dtype, device=self.device)
        random = any(isinstance(layer, nn.Dropout) and layer.p for layer in self.layers)

        def block(start: int) -> None:
            stop = min(start + step, num_workers)
            generators = (
                [
                    worker_generator(seed, round, first_worker + i, out.device)
                    for i in range(start, stop)
                ]
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

        self.pool.map(block, range(0, num_workers, step))
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
            elif isinstance(layer, nn.Embedding):
                tape.append((layer, values))
                values = functional.embedding(values, layer.weight).flatten(1)
            elif isinstance(layer, nn.ReLU):
                values = values.relu()
                tape.append((layer, values))
            elif isinstance(layer, nn.Dropout) and layer.p:
                mask = torch.empty_like(values)
                for rows, generator in zip(mask.view(k, n, -1), generators, strict=True):
                    rows.bernoulli_(1 - layer.p, generator=generator)
                values = values * mask.div_(1 - layer.p)
                tape.append((layer, mask))
        delta = self.output_gradient(values, targets, losses)
        lowest = next(
            place
            for place, (layer, _) in enumerate(tape)
            if isinstance(layer, nn.Linear | nn.Embedding)
        )
        for place in range(len(tape) - 1, lowest - 1, -1):
            layer, saved = tape[place]
            if isinstance(layer, nn.ReLU):
                delta = torch.ops.aten.threshold_backward(delta, saved, 0)
            elif isinstance(layer, nn.Linear):
                self._write(layer, delta.view(k, n, -1), saved.view(k, n, -1), out)
                if place > lowest:
                    delta = delta @ layer.weight
            elif isinstance(layer, nn.Embedding):
                self._write_embedding(layer, delta.view(k, -1, layer.embedding_dim), saved, out)
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

    def _write_embedding(
        self, layer: nn.Embedding, delta: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor
    ) -> None:
        start = self._starts[id(layer.weight)]
        rows = out[:, start : start + layer.weight.numel()].view(-1, *layer.weight.shape).zero_()
        for row, part, chosen in zip(rows, delta, tokens.view(len(delta), -1), strict=True):
            row.index_add_(0, chosen, part)
            if layer.padding_idx is not None:
                row[layer.padding_idx] = 0

    def output_gradient(
        self, outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        """Store the losses and return the gradient at the outputs."""
        k, n = targets.shape[:2]
        scale = 1 if self.reduction == "mean" else n
        if self.plain_cross_entropy and targets.dtype == torch.int64:
            logs = functional.log_softmax(outputs, 1)
            chosen = targets.reshape(-1, 1)
            torch.mean(logs.gather(1, chosen).view(k, n), 1, dtype=losses.dtype, out=losses).neg_()
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


def is_dense(model: nn.Module, input_dims: int, *, whole: bool = False) -> bool:
    """Return True if a model is a plain stack of linear layers, ReLU, flatten and dropout.

    For integer inputs (``whole``), the first layer must be an embedding.
    """
    layers = _dense_layers(model)
    if not layers or not isinstance(layers[-1], nn.Linear):
        return False
    flattened = input_dims == 1
    if whole:
        if not _is_plain_embedding(layers[0]):
            return False
        flattened = input_dims == 0  # an embedding adds an axis
    for layer in layers[whole:]:
        if type(layer) not in (nn.Linear, nn.ReLU, nn.Flatten, nn.Dropout, nn.Identity):
            return False
        if _is_hooked(layer):
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


def _is_plain_embedding(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Embedding
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
        and not layer.sparse
        and not _is_hooked(layer)
    )


def _is_hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)  # noqa: SLF001


def is_cross_entropy(loss: Loss) -> bool:
    """Return True for the mean cross-entropy without weights, smoothing or ignored labels."""
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
