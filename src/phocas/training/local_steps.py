"""Local steps: each worker takes H optimizer steps, and sends the change of the parameters.

A row is the change :math:`x - x_i` after H steps of worker i's own optimizer, whose state is new in
every round. The server steps along the aggregate with its own optimizer (FedAvg, McMahan et al.
2017; FedOpt, Reddi et al. 2021; DiLoCo, Douillard et al. 2023, whose workers keep the state of
their optimizers between rounds).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phocas.training.buffers import take_median
from phocas.training.dropout import worker_generator
from phocas.training.gradients.base import SAMPLES_A_BLOCK, Buffers, WorkerGradients
from phocas.training.gradients.merged import MergedBatchGradients
from phocas.training.optimizers import OPTIMIZERS, Optimizers, is_plain
from phocas.training.parameters import apart, set_apart

Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Return the batches of a step (from 0) of a round: inputs (m, n, ...) and targets (m, n)."""


@dataclass(frozen=True, eq=False)
class LocalOptimizer:
    """The optimizer of the workers, and the number of its steps in a round."""

    steps: int
    """The number of steps in a round."""
    kind: Optimizers
    """The class of the optimizer."""
    options: Mapping[str, Any]
    """Its options besides the learning rate."""
    lr: float
    """The learning rate."""
    linear: bool
    """Whether the server's optimizer is linear in the rows (SGD, with or without momentum).

    Rows are then divided by the workers' learning rate, and the server's is multiplied by it. So
    rows are sums of gradients, thresholds of rules keep their meaning, and one step of SGD gives
    the bits of synchronous training.
    """

    @property
    def plain(self) -> bool:
        """Whether a step is x - lr g and nothing else."""
        return is_plain(self.kind, self.options)

    def make(self, tensors: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        """Return a new optimizer for tensors whose ``grad`` the caller sets."""
        return self.kind(tensors, lr=lr, **self.options)


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """The steps of some workers in a round."""

    workers: range
    """The workers."""
    seed: int
    """The seed of the run."""
    first: int
    """The number of the first step, counted over the run."""
    lr: float
    """The learning rate of the round."""


class LocalSteps(ABC):
    """The base class of the ways to compute local steps of all workers."""

    def __init__(self, gradients: WorkerGradients, local: LocalOptimizer) -> None:
        self.gradients = gradients
        self.local = local
        self.left: list[Buffers] = []
        """The model's buffers after the last round, for each worker, if the model has any."""

    def __call__(
        self,
        batches: Batches,
        out: torch.Tensor,
        seed: int,
        round: int,
        factor: float,
        first_worker: int = 0,
    ) -> torch.Tensor:
        """Write the rows into out (m, d), and return the workers' mean losses over their steps.

        Args:
            batches: returns the batches of a step.
            out: the rows.
            seed: the seed of the run.
            round: the number of the round.
            factor: the factor of the learning rate in this round.
            first_worker: the worker of row 0.
        """
        lr = self.local.lr * factor
        flat = self.gradients.flat
        first = round * self.local.steps
        if self.local.steps == 1 and self.local.plain and self.local.linear:
            losses = self.gradients(*batches(0), out, seed, first, first_worker)
            self.left = self.gradients.left
            return losses
        start = flat.vector.clone()
        workers = range(first_worker, first_worker + len(out))
        losses = self._run(batches, out, RoundSteps(workers, seed, first, lr))
        torch.sub(start, out, out=out)
        if self.local.linear and lr:  # with a learning rate of 0, no parameter changes
            out.div_(lr)
        return losses

    @abstractmethod
    def _run(self, batches: Batches, out: torch.Tensor, steps: RoundSteps) -> torch.Tensor:
        """Write the parameters of the workers after their steps into out; return mean losses."""


class MergedSteps(LocalSteps):
    """Local steps of many workers of a dense model at once: their weights are rows of one matrix.

    With A the inputs of a linear layer and D the gradient at its outputs, a step of SGD is
    ``W_i^T -= lr A_i^T D_i``: one batched product that updates the weights in place. The weights
    are transposed during the steps: otherwise the products ``A_i W_i^T`` of few samples take 1.5
    times as long, because they transpose the weights of every worker. The outputs and gradients of
    the workers are stored :func:`apart`, so that the bits of a worker do not depend on the others.
    """

    gradients: MergedBatchGradients

    def _run(self, batches: Batches, out: torch.Tensor, steps: RoundSteps) -> torch.Tensor:
        merged = self.gradients
        total = torch.zeros(len(out), dtype=merged.loss_dtype, device=out.device)
        tensors = merged.flat.tensors
        out.copy_(torch.cat([tensor.detach().t().flatten() for tensor in tensors]).expand_as(out))
        random = any(isinstance(layer, nn.Dropout) and layer.p for layer in merged.layers)
        blocks: list[_Block] = []

        def go(block: _Block) -> None:
            place = block.place
            workers = steps.workers[place] if random else ()
            generators = [
                worker_generator(steps.seed, steps.first + step, i, out.device) for i in workers
            ]
            total[place] += block.step(inputs[place], targets[place], generators)

        for step in range(self.local.steps):
            inputs, targets = batches(step)
            if not blocks:  # smaller blocks fit caches better, but cost more calls
                size = math.ceil(SAMPLES_A_BLOCK / targets.shape[1])
                places = [slice(start, start + size) for start in range(0, len(out), size)]
                blocks = [_Block(merged, self.local, out, place, steps.lr) for place in places]
            merged.pool.map(go, blocks)
        merged.pool.map(_Block.transpose_back, blocks)
        return total.div_(self.local.steps)


class _Block:
    """The transposed weights (inputs, outputs) of some workers, and their optimizer."""

    def __init__(
        self,
        merged: MergedBatchGradients,
        local: LocalOptimizer,
        rows: torch.Tensor,
        place: slice,
        lr: float,
    ) -> None:
        self.merged = merged
        self.lr = lr
        self.place = place
        self.original = merged.by_tensor(rows[place])
        self.weights = _transposed(self.original)
        self.optimizer: torch.optim.Optimizer | None = None
        if not local.plain:
            self.gradients = _transposed(merged.by_tensor(merged.flat.rows(len(rows[place]))))
            tensors = []
            for key, stack in self.weights.items():
                for weight, gradient in zip(stack, self.gradients[key], strict=True):
                    tensors.append(weight.t())  # in the shape of the model
                    tensors[-1].grad = gradient.t()
            self.optimizer = local.make(tensors, lr)

    def transpose_back(self) -> None:
        """Transpose the weights in the workers' rows back to their usual layout."""
        for key, original in self.original.items():
            if original.dim() > 2:
                for one, transposed in zip(original, self.weights[key].clone(), strict=True):
                    one.copy_(transposed.t())

    @torch.no_grad()
    def step(
        self, inputs: torch.Tensor, targets: torch.Tensor, generators: list[torch.Generator]
    ) -> torch.Tensor:
        """Take one step of all workers of the block, and return their losses."""
        k, n = targets.shape[:2]
        values = given = inputs.reshape(k, n, -1)
        tape: list[tuple[nn.Module, torch.Tensor]] = []
        for layer in self.merged.layers:
            if isinstance(layer, nn.Linear):
                tape.append((layer, values))
                weights = self.weights[id(layer.weight)]
                values = torch.bmm(values, weights, out=apart(values, k, n, weights.shape[2]))
                if layer.bias is not None:
                    values += self.weights[id(layer.bias)].unsqueeze(1)
            elif isinstance(layer, nn.ReLU):
                values = values.relu() if values is given else values.relu_()
                tape.append((layer, values))
            elif isinstance(layer, nn.Dropout) and layer.p:
                mask = torch.empty_like(values)
                for rows, generator in zip(mask, generators, strict=True):
                    rows.bernoulli_(1 - layer.p, generator=generator)
                values = values * mask.div_(1 - layer.p)
                tape.append((layer, mask))
        losses = torch.empty(k, dtype=self.merged.loss_dtype, device=values.device)
        delta = self.merged.output_gradient(values.reshape(k * n, -1), targets, losses).view(
            k, n, -1
        )
        lowest = next(i for i, (layer, _) in enumerate(tape) if isinstance(layer, nn.Linear))
        for place in range(len(tape) - 1, lowest - 1, -1):
            layer, saved = tape[place]
            if isinstance(layer, nn.ReLU):
                delta = torch.ops.aten.threshold_backward(delta, saved, 0)
            elif isinstance(layer, nn.Linear):
                delta = set_apart(delta)
                below = delta
                if place > lowest:
                    below = torch.bmm(delta, self.weights[id(layer.weight)].transpose(1, 2))
                self._descend(layer, delta, saved)
                delta = below
            else:
                delta = delta * saved
        if self.optimizer is not None:
            self.optimizer.step()
        return losses

    def _descend(self, layer: nn.Linear, delta: torch.Tensor, inputs: torch.Tensor) -> None:
        """Take a step of SGD for one layer, or store its gradient for the optimizer."""
        across = inputs.transpose(1, 2)
        if self.optimizer is None:
            self.weights[id(layer.weight)].baddbmm_(across, delta, alpha=-self.lr)
            if layer.bias is not None:
                self.weights[id(layer.bias)].sub_(delta.sum(1), alpha=self.lr)
            return
        torch.bmm(across, delta, out=self.gradients[id(layer.weight)])
        if layer.bias is not None:
            torch.sum(delta, 1, out=self.gradients[id(layer.bias)])


def _transposed(parts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return views of the memory of matrices (k, a, b) with the shape (k, b, a)."""
    return {key: part.view(len(part), *reversed(part.shape[1:])) for key, part in parts.items()}


class OneByOne(LocalSteps):
    """Local steps of one worker after another in the model itself, for any model and optimizer."""

    def _run(self, batches: Batches, out: torch.Tensor, steps: RoundSteps) -> torch.Tensor:
        flat = self.gradients.flat
        start = flat.vector.clone()
        buffers = dict(self.gradients.model.named_buffers())
        begun = {name: buffer.clone() for name, buffer in buffers.items()}
        m = len(out)
        # One step of all workers at a time, so that samples are drawn once per step.
        out.copy_(start.expand_as(out))
        gradient = torch.empty_like(out[:1])
        optimizers = []
        for row in out:
            tensors = list(flat.views(row))
            for tensor, view in zip(tensors, flat.views(gradient[0]), strict=True):
                tensor.grad = view
            optimizers.append(self.local.make(tensors, steps.lr))
        kept = [{name: tensor.clone() for name, tensor in begun.items()} for _ in range(m)]
        total = torch.zeros(m, dtype=self.gradients.loss_dtype, device=out.device)
        for step in range(self.local.steps):
            inputs, targets = batches(step)
            for i, worker in enumerate(steps.workers):
                one = slice(i, i + 1)
                flat.vector.copy_(out[i])
                for name, buffer in buffers.items():
                    buffer.copy_(kept[i][name])
                total[one] += self.gradients(
                    inputs[one], targets[one], gradient, steps.seed, steps.first + step, worker
                )
                for name, buffer in buffers.items():
                    kept[i][name].copy_(buffer)
                optimizers[i].step()
        flat.vector.copy_(start)
        for name, buffer in buffers.items():  # Byzantine workers may send wrong buffers, too
            take_median(buffer, [each[name] for each in kept])
        self.left = kept
        return total.div_(self.local.steps)


def local_steps(gradients: WorkerGradients, local: LocalOptimizer) -> LocalSteps:
    """Choose how to compute local steps, by the way in which gradients are computed.

    Optimizers of torch are known to treat every tensor independently. Others may combine tensors,
    so they get the tensors of one worker only.
    """
    dense = isinstance(gradients, MergedBatchGradients) and not any(
        isinstance(layer, nn.Embedding) for layer in gradients.layers
    )
    known = local.kind in OPTIMIZERS.values()
    return (MergedSteps if dense and known else OneByOne)(gradients, local)
