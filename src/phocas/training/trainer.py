"""Synchronous SGD among workers that may lie: the loop over rounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from phocas.attacks import parse_attack
from phocas.data import IID, Split
from phocas.rules import parse_rule
from phocas.rules.sampling import Sample
from phocas.rules.suspicion import Suspicion
from phocas.seeds import Stream, generator
from phocas.specs import count
from phocas.training.cluster import Cluster, LocalCluster
from phocas.training.gradients import worker_gradients
from phocas.training.lanes import Lanes, one_torch_thread
from phocas.training.parameters import FlatParameters
from phocas.training.samples import Pair, Samples
from phocas.training.schedules import Constant
from phocas.training.server import Action, OnNonfinite, ParameterServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from phocas.attacks import Attack
    from phocas.data import Dataset
    from phocas.rules import Rule
    from phocas.training.gradients.base import Loss, Reduction

# Fixed, so that an evaluation does not depend on the threads.
_TEST_BATCH = 1000
_TEST_IMAGES = 100  # convolutions of so many, channels-last, stay in cache: 0.4 ms for 1.3 an image


@dataclass(frozen=True)
class Evaluation:
    """How the model does on the test samples."""

    loss: float
    top1: float
    top3: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Round:
    """One round of training."""

    number: int
    """From 1: so many rounds have been run."""
    loss: float
    """The mean loss of the workers' batches."""
    lr: float
    action: Action
    """What was done with the aggregate: applied, skipped or stopped."""
    finite: bool
    gradient_norm: float
    honest_distance: float | None
    """From the aggregate to the mean of the uncorrupted gradients, where it was asked for."""
    dropped: npt.NDArray[np.float64]
    """For each worker, the share of its values that the rule left out."""
    expected_dropped: float
    by_server: npt.NDArray[np.float64] | None
    """The same within each server's columns, (s, m), where it was asked for."""
    touched: int
    """The number of cells that the attack changed."""
    suspects: tuple[int, ...]
    """Workers that are wrong beyond chance, or differ by their data; see :class:`Suspicion`."""
    seconds: dict[str, float]
    """Times by phase: data, gradients, attack, aggregate, update, metrics."""
    missing: tuple[int, ...] = ()
    """Workers whose row did not come in time, or came in no usable form."""
    news: tuple[str, ...] = ()
    """What went wrong with processes and messages, in words."""
    unusual: tuple[int, ...] = ()
    """Workers that are lately left out far more than most, or have changed: a warning, no proof."""
    suspect_servers: tuple[int, ...] = ()
    """Servers that more than b workers' values reach absurdly wrong."""


class Trainer:
    """Train a model by rounds of m workers and s servers, under a rule and perhaps an attack.

    >>> import phocas
    >>> from phocas.data import load
    >>> data = load("synthetic:train=500,test=100")
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    >>> with Trainer(model, torch.nn.CrossEntropyLoss(), data, num_workers=10, lr=0.5,
    ...              rule=phocas.Phocas(b=3), attack="gaussian:q=3") as trainer:
    ...     losses = [round.loss for round in trainer.rounds(30)]
    ...     losses[-1] < losses[0] / 2, trainer.suspicion.suspects()
    (True, (0, 1, 2))

    Args:
        model: any module; its parameters become views of one vector and are trained in place.
        loss: ``loss(outputs, targets)``, the mean over a batch.
        data: a :class:`phocas.data.Dataset`, or a pair of arrays (inputs, targets).
        test: a pair of arrays to evaluate on, if ``data`` has none of its own.
        num_workers: m.
        rule: a rule or its spelling, ``"phocas:b=8"``.
        attack: an attack, its spelling, or None.
        optimizer: any torch optimiser, run by the servers.
        lr: the learning rate; ``schedule`` multiplies it by a function of the round.
        num_servers: s; the result does not depend on it.
        batch_size: n samples a worker and round.
        reduction: whether a worker sends the mean or the sum over its batch.
        worker_momentum: beta; workers send v = beta v + (1 - beta) g.
        weight_decay: passed on to the optimiser.
        split: who holds which samples.
        seed: everything random depends on it, the round and the worker, and on nothing else.
        on_nonfinite: skip the step, stop the run, or apply the step if it is not finite.
        threads: how many of the machine's cores to use; changes the time and no bit.
        cluster: makes the workers elsewhere than in this process.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        data: Dataset | Pair | None = None,
        *,
        num_workers: int = 20,
        rule: Rule | str,
        attack: Attack | str | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        optimizer_options: Mapping[str, Any] | None = None,
        schedule: Callable[[int], float] | None = None,
        weight_decay: float = 0.0,
        worker_momentum: float = 0.0,
        reduction: Reduction = "mean",
        num_servers: int = 1,
        batch_size: int = 32,
        split: Split | None = None,
        test: Pair | None = None,
        standardise: bool = False,
        seed: int = 0,
        on_nonfinite: OnNonfinite = "skip",
        threads: int | None = None,
        gradient_path: str | None = None,
        cluster: Callable[[Trainer], Cluster] | None = None,
    ) -> None:
        if data is None:
            raise TypeError("Trainer needs data: a Dataset or a pair of arrays (inputs, targets)")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum': got {reduction!r}")
        self.model = model
        self.loss = loss
        self.rule = parse_rule(rule) if isinstance(rule, str) else rule
        self.attack = parse_attack(attack) if isinstance(attack, str) else attack
        self.seed = count("Trainer", "seed", seed)
        self.batch_size = count("Trainer", "batch_size", batch_size, minimum=1)
        self.schedule: Callable[[int], float] = schedule or Constant()
        self.lr = lr
        self.worker_momentum = worker_momentum
        self.lanes = Lanes(threads)
        flat = FlatParameters(model)
        self.samples = Samples(data, test, standardise=standardise, dtype=flat.vector.dtype)
        options = dict(optimizer_options or {})
        if weight_decay:
            options["weight_decay"] = weight_decay
        self.server = ParameterServer(
            flat,
            num_workers=num_workers,
            rule=self.rule,
            num_servers=num_servers,
            optimizer=optimizer,
            lr=lr,
            optimizer_options=options,
            on_nonfinite=on_nonfinite,
        )
        self.split = split or IID()
        self.assignment = self.split.assign(
            self.samples.classes(), num_workers, generator(Stream.SPLIT, self.seed)
        )
        sample = self.samples.draw(np.zeros((1, self.batch_size), np.int64))
        self.gradients = worker_gradients(
            model, loss, flat, self.lanes, sample=sample, reduction=reduction, path=gradient_path
        )
        self.cluster: Cluster = (cluster or _local)(self)
        self.suspicion = Suspicion(
            num_workers,
            tolerated(self.rule, num_workers),
            [(part.start, part.stop) for part in self.server.bounds] if num_servers > 1 else [],
            worker_momentum,
        )
        self.rounds_done = 0

    def rounds(self, number: int) -> Iterator[Round]:
        """Run so many further rounds, one for each item taken; a stopped round is the last."""
        for _ in range(count("rounds", "number", number)):
            done = self.step()
            yield done
            if done.action == "stopped":
                return

    def step(self, *, detailed: bool = True) -> Round:
        """Run one round; ``detailed=False`` leaves out what needs another pass over the matrix."""
        start = time.perf_counter()
        with one_torch_thread():
            round_ = self.rounds_done
            samples = self._samples(round_)
            seen = self.cluster.gather(round_, by_server=detailed, honest=detailed, samples=samples)
            aggregate = seen.aggregate
            factor = float(self.schedule(round_))
            before = time.perf_counter()
            action = self.cluster.update(aggregate, factor)
            updated = time.perf_counter()
            norm = float(torch.linalg.vector_norm(aggregate.value))
            if samples:
                self.suspicion.observe(seen.sampled[0], samples[0], *seen.sampled[1:])
            else:
                self.suspicion.rest()
            self.suspicion.update(aggregate.dropped)
            self.rounds_done += 1
        seconds = {**seen.seconds, "update": updated - before}
        seconds["metrics"] = (
            time.perf_counter()
            - start
            - sum(value for phase, value in seconds.items() if phase != "metrics")
        )
        return Round(
            number=self.rounds_done,
            loss=float(seen.losses.mean()),
            lr=self.lr * factor,
            action=action,
            finite=aggregate.finite,
            gradient_norm=norm,
            honest_distance=seen.honest_distance,
            dropped=aggregate.dropped,
            expected_dropped=aggregate.expected,
            by_server=aggregate.by_server if detailed else None,
            touched=seen.touched,
            suspects=self.suspicion.suspects(),
            unusual=self.suspicion.unusual(),
            suspect_servers=self.suspicion.servers(),
            seconds=seconds,
            missing=seen.missing,
            news=seen.news,
        )

    def _samples(self, round_: int) -> list[Sample]:
        """Return the columns in which workers are compared, and those of the next round if needed.

        What is new in a row with momentum shows beside its last values in the same columns.
        """
        if not self.suspicion.wants():
            return []
        d = self.server.parameters.size
        rounds = range(round_, round_ + 1 + bool(self.worker_momentum))
        return [Sample.draw(d, generator(Stream.SAMPLE, self.seed, number)) for number in rounds]

    def evaluate(self) -> Evaluation:
        """Return the loss and the top-1 and top-3 accuracy on the test samples."""
        start = time.perf_counter()
        mode = self.model.training
        self.model.eval()
        images = self.gradients.channels_last

        def judge(part: slice) -> tuple[float, int, int, int]:
            inputs, targets = self.samples.test_batch(part)
            if images and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                outputs = self.model(inputs)
                loss = float(self.loss(outputs, targets)) * len(targets)
                if targets.dtype != torch.int64 or outputs.dim() != 2:
                    return loss, 0, 0, len(targets)
                best = outputs.topk(min(3, outputs.shape[1]), dim=1).indices == targets[:, None]
            return loss, int(best[:, 0].sum()), int(best.sum()), len(targets)

        try:
            size = _TEST_IMAGES if images else _TEST_BATCH
            results = self.lanes.map(judge, self.samples.test_parts(size))
        finally:
            self.model.train(mode)
        losses, top1, top3, sizes = zip(*results, strict=True)
        total = sum(sizes)
        return Evaluation(
            math.fsum(losses) / total if all(map(math.isfinite, losses)) else math.nan,
            sum(top1) / total,
            sum(top3) / total,
            time.perf_counter() - start,
        )

    def close(self) -> None:
        """End the threads."""
        self.cluster.close()
        self.lanes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tolerated(rule: Rule, num_workers: int) -> int:
    """Return how many liars a rule was told of, or the most there can be if it was told nothing."""
    told = [
        step.b
        for step in (*getattr(rule, "stages", ()), getattr(rule, "rule", rule))
        if hasattr(step, "b")
    ]
    return max(told, default=(num_workers - 1) // 2)


def _local(trainer: Trainer) -> LocalCluster:
    return LocalCluster(
        trainer.server,
        trainer.gradients,
        trainer.samples,
        trainer.assignment,
        batch_size=trainer.batch_size,
        seed=trainer.seed,
        attack=trainer.attack,
        momentum=trainer.worker_momentum,
    )
