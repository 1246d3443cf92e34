"""Local steps: each worker goes H steps of its own, and sends how far it has come.

A row is the change of the parameters, :math:`x - x_i` after H steps of worker i's own optimiser,
which begins anew in every round. The server steps along the aggregate with an optimiser of its own
(FedAvg, McMahan et al. 2017; FedOpt, Reddi et al. 2021; DiLoCo, Douillard et al. 2023, whose
workers however keep their optimisers' state from round to round).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phocas.training.dropout import worker_generator
from phocas.training.gradients.base import SAMPLES_A_BLOCK, Buffers, WorkerGradients, empty_losses
from phocas.training.gradients.merged import Merged
from phocas.training.optimizers import OPTIMIZERS, Optimizers, is_plain
from phocas.training.parameters import apart, set_apart

Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""What the workers see in a step (from 0) of a round: inputs (m, n, ...) and targets (m, n)."""


@dataclass(frozen=True, eq=False)
class LocalOptimizer:
    """What each worker steps with, and how many times a round."""

    steps: int
    kind: Optimizers
    options: Mapping[str, Any]
    lr: float
    linear: bool
    """Whether the server steps by plain SGD or momentum, where a factor may move to its rate.

    Rows are then the changes divided by the learning rate: sums of gradients, so that one step of
    SGD is a round of synchronous training to the bit, and what thresholds mean stays.
    """

    @property
    def plain(self) -> bool:
        """Whether a step is x - lr g and nothing else."""
        return is_plain(self.kind, self.options)

    def make(self, tensors: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        """Begin anew, for tensors whose ``grad`` somebody fills."""
        return self.kind(tensors, lr=lr, **self.options)


@dataclass(frozen=True, slots=True)
class Walk:
    """Whose steps a round has, and which: ``first`` is the first one's number in the run."""

    workers: range
    seed: int
    first: int
    lr: float


class LocalSteps(ABC):
    """Let workers take H steps each from the server's parameters, and write how far they came."""

    def __init__(self, gradients: WorkerGradients, local: LocalOptimizer) -> None:
        self.gradients = gradients
        self.local = local
        self.left: list[Buffers] = []
        """The buffers as each worker left them in the last round, if the model has any."""

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

        ``factor`` scales the learning rate in this round; ``first_worker`` is the number of row 0.
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
        losses = self._walk(batches, out, Walk(workers, seed, first, lr))
        torch.sub(start, out, out=out)
        if self.local.linear and lr:  # at the end of a schedule nothing has moved
            out.div_(lr)
        return losses

    @abstractmethod
    def _walk(self, batches: Batches, out: torch.Tensor, walk: Walk) -> torch.Tensor:
        """Write the parameters that workers come to into out, and return their mean losses."""


class MergedSteps(LocalSteps):
    """Step many workers of a dense model at once: their weights are the rows of one matrix.

    With A the inputs of a linear layer and D the gradient at its outputs, a step of SGD is
    ``W_i^T -= lr A_i^T D_i``: one batched product that changes the weights where they are. They are
    turned while workers walk, since the products ``A_i W_i^T`` of few samples take half as long
    again when every worker's weights must be turned first. What products write, and the slopes that
    they read, lies :func:`apart`, so that a worker's bits do not depend on who else is there.
    """

    gradients: Merged

    def _walk(self, batches: Batches, out: torch.Tensor, walk: Walk) -> torch.Tensor:
        merged, total = self.gradients, torch.zeros_like(empty_losses(len(out), out))
        tensors = merged.flat.tensors
        out.copy_(torch.cat([tensor.detach().t().flatten() for tensor in tensors]).expand_as(out))
        random = any(isinstance(layer, nn.Dropout) and layer.p for layer in merged.layers)
        blocks: list[_Block] = []

        def go(block: _Block) -> None:
            place = block.place
            workers = walk.workers[place] if random else ()
            generators = [
                worker_generator(walk.seed, walk.first + step, i, out.device) for i in workers
            ]
            total[place] += block.step(inputs[place], targets[place], generators)

        for step in range(self.local.steps):
            inputs, targets = batches(step)
            if not blocks:  # smaller ones cost more in calls than they save in caches
                size = math.ceil(SAMPLES_A_BLOCK / targets.shape[1])
                places = [slice(start, start + size) for start in range(0, len(out), size)]
                blocks = [_Block(merged, self.local, out, place, walk.lr) for place in places]
            merged.lanes.map(go, blocks)
        merged.lanes.map(_Block.turn_back, blocks)
        return total.div_(self.local.steps)


class _Block:
    """Some workers' weights, and what steps over them: matrices are (inputs, outputs) meanwhile."""

    def __init__(
        self, merged: Merged, local: LocalOptimizer, rows: torch.Tensor, place: slice, lr: float
    ) -> None:
        self.merged = merged
        self.lr = lr
        self.place = place
        self.straight = merged.by_tensor(rows[place])
        self.weights = _turned(self.straight)
        self.optimizer: torch.optim.Optimizer | None = None
        if not local.plain:
            self.slopes = _turned(merged.by_tensor(merged.flat.rows(len(rows[place]))))
            tensors = []
            for key, stack in self.weights.items():
                for weight, slope in zip(stack, self.slopes[key], strict=True):
                    tensors.append(weight.t())  # in the shape that an optimiser knows
                    tensors[-1].grad = slope.t()
            self.optimizer = local.make(tensors, lr)

    def turn_back(self) -> None:
        """Leave the weights in their rows as the model has them."""
        for key, straight in self.straight.items():
            if straight.dim() > 2:
                for one, turned in zip(straight, self.weights[key].clone(), strict=True):
                    one.copy_(turned.t())

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
        losses = empty_losses(k, values)
        delta = self.merged.slope(values.reshape(k * n, -1), targets, losses).view(k, n, -1)
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
        """Step along the slope of one layer, or leave it to the optimiser."""
        across = inputs.transpose(1, 2)
        if self.optimizer is None:
            self.weights[id(layer.weight)].baddbmm_(across, delta, alpha=-self.lr)
            if layer.bias is not None:
                self.weights[id(layer.bias)].sub_(delta.sum(1), alpha=self.lr)
            return
        torch.bmm(across, delta, out=self.slopes[id(layer.weight)])
        if layer.bias is not None:
            torch.sum(delta, 1, out=self.slopes[id(layer.bias)])


def _turned(parts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return stacks of matrices (k, a, b) as if turned ones, (k, b, a), lay in their memory."""
    return {key: part.view(len(part), *reversed(part.shape[1:])) for key, part in parts.items()}


class OneByOne(LocalSteps):
    """Step one worker after another, each in the model itself: for any model and optimiser."""

    def _walk(self, batches: Batches, out: torch.Tensor, walk: Walk) -> torch.Tensor:
        flat = self.gradients.flat
        start = flat.vector.clone()
        buffers = dict(self.gradients.model.named_buffers())
        begun = {name: buffer.clone() for name, buffer in buffers.items()}
        m = len(out)
        # One step of all workers at a time, so that samples are drawn once a step.
        out.copy_(start.expand_as(out))
        gradient = torch.empty_like(out[:1])
        optimizers = []
        for row in out:
            tensors = list(flat.views(row))
            for tensor, slope in zip(tensors, flat.views(gradient[0]), strict=True):
                tensor.grad = slope
            optimizers.append(self.local.make(tensors, walk.lr))
        kept = [{name: tensor.clone() for name, tensor in begun.items()} for _ in range(m)]
        total = torch.zeros_like(empty_losses(m, out))
        for step in range(self.local.steps):
            inputs, targets = batches(step)
            for i, worker in enumerate(walk.workers):
                one = slice(i, i + 1)
                flat.vector.copy_(out[i])
                for name, buffer in buffers.items():
                    buffer.copy_(kept[i][name])
                total[one] += self.gradients(
                    inputs[one], targets[one], gradient, walk.seed, walk.first + step, worker
                )
                for name, buffer in buffers.items():
                    kept[i][name].copy_(buffer)
                optimizers[i].step()
        flat.vector.copy_(start)
        for name, buffer in buffers.items():  # a worker may lie there too
            buffer.copy_(torch.stack([each[name] for each in kept]).median(0).values)
        self.left = kept
        return total.div_(self.local.steps)


def local_steps(gradients: WorkerGradients, local: LocalOptimizer) -> LocalSteps:
    """Choose how workers step, by how their gradients are computed.

    Only torch's own optimisers are known to step every tensor for itself: another may look at all
    that it is given, so it gets one worker's.
    """
    dense = isinstance(gradients, Merged) and not any(
        isinstance(layer, nn.Embedding) for layer in gradients.layers
    )
    known = local.kind in OPTIMIZERS.values()
    return (MergedSteps if dense and known else OneByOne)(gradients, local)
