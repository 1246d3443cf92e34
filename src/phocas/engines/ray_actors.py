"""What runs in the processes of a Ray cluster: workers that compute rows, and server shards.

Rows travel as slices: a worker process returns one list of vectors for each server, views of its
own matrix that Ray copies into the object store once; a server reads them where they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from phocas.attacks import Attack, attack_rng
from phocas.engines.faults import Fault, ProcessFault, RowFault
from phocas.engines.ray_session import the_ray
from phocas.kernels import set_num_threads
from phocas.rules import Mean, Rule
from phocas.rules.measures import Partial
from phocas.rules.sharded import Evaluation
from phocas.training.cluster import rule_rng
from phocas.training.data import Assignment, batch_indices
from phocas.training.gradients import Loss, Reduction, worker_gradients
from phocas.training.lanes import Lanes
from phocas.training.parameters import FlatParameters
from phocas.training.samples import Samples
from phocas.training.server import Aggregate, ParameterServer

Values = npt.NDArray[np.floating[Any]]
Source = tuple[int, int, list[Any]]
"""The workers first to last - 1, and a reference for each server to the list of their slices."""

_MARKS = 16  # values of a slice that are remembered to know it again


@dataclass(frozen=True, eq=False)
class WorkerJob:
    """All that workers need to know, the same for each of them."""

    model: nn.Module
    loss: Loss
    samples: Samples
    assignment: Assignment
    num_workers: int
    bounds: list[slice]
    batch_size: int
    seed: int
    reduction: Reduction
    path: str
    attack: Attack | None
    momentum: float
    keeps_rows: bool
    """Whether a script will want the row of the round before."""


@dataclass(frozen=True, eq=False)
class Report:
    """What comes with the rows of a process."""

    losses: Values
    buffers: list[dict[str, npt.NDArray[Any]]]
    """For each worker, the buffers that its model changed; empty if there are none."""
    seconds: float


class WorkerProcess:
    """The actor: it learns its job with the first question, also when it was started again.

    (An actor that is made with its job has Ray warn that it may be lost; it is the trainer's.)
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._workers: Workers | None = None

    def _at_work(self, job: Sequence[Any]) -> Workers:
        if self._workers is None:
            self._workers = Workers(the_ray().get(job[0]), self.first, self.last)
        return self._workers

    def prepare(self, job: Sequence[Any]) -> None:
        """Get ready; the job is a reference in a list, which Ray leaves alone."""
        self._at_work(job)

    def gradients(self, job: Sequence[Any], *question: Any) -> tuple[Any, ...]:
        """Answer as :meth:`Workers.gradients` does."""
        return self._at_work(job).gradients(*question)

    def momentum(self, job: Sequence[Any]) -> Values | None:
        """Return the velocities, for a checkpoint."""
        velocity = self._at_work(job).velocity
        return None if velocity is None else velocity.numpy()

    def set_momentum(self, job: Sequence[Any], values: Values) -> None:
        """Go on from a checkpoint."""
        velocity = self._at_work(job).velocity
        if velocity is not None:
            velocity.copy_(torch.from_numpy(np.array(values)))

    def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()


class Workers:
    """The workers first to last - 1, in one process."""

    def __init__(self, job: WorkerJob, first: int, last: int) -> None:
        self.job = job
        self.first, self.last = first, last
        torch.set_num_threads(1)
        self.flat = FlatParameters(job.model)
        sample = job.samples.draw(np.zeros((1, job.batch_size), np.int64))
        self.compute = worker_gradients(
            job.model,
            job.loss,
            self.flat,
            Lanes(1),
            sample=sample,
            reduction=job.reduction,
            path=job.path,
        )
        self.rows = torch.zeros(last - first, self.flat.size, dtype=self.flat.vector.dtype)
        self.velocity = torch.zeros_like(self.rows) if job.momentum else None
        self._before: torch.Tensor | None = None

    def gradients(
        self,
        round: int,  # noqa: A002
        parameters: Sequence[Any],
        buffers: Mapping[str, npt.NDArray[Any]] | None,
        faults: Sequence[Fault],
    ) -> tuple[Any, ...]:
        """Pull the model and return the slices of the rows for each server, then a report."""
        _strike(faults)
        start = time.perf_counter()
        pulled = the_ray().get(list(parameters))
        vector = self.flat.vector.numpy()
        for bounds, values in zip(self.job.bounds, pulled, strict=True):
            vector[bounds] = values
        inputs, targets = self._batches(round)
        losses, changed = self._compute(inputs, targets, round, buffers)
        if self.velocity is not None:
            self.velocity.mul_(self.job.momentum).add_(self.rows, alpha=1 - self.job.momentum)
            self.rows.copy_(self.velocity)
        report = Report(losses, changed, time.perf_counter() - start)
        slices = self._slices([fault for fault in faults if isinstance(fault, RowFault)])
        if self.job.keeps_rows:
            self._before = self.rows.clone()
        return *slices, report

    def _batches(self, round: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
        job = self.job
        indices = batch_indices(job.assignment, job.num_workers, job.batch_size, job.seed, round)
        if job.attack is None or not job.samples.num_classes:
            return job.samples.draw(indices[self.first : self.last])
        inputs, targets = job.samples.draw(indices)  # labels are corrupted for all workers at once
        rng = attack_rng(job.seed, round)
        job.attack.corrupt_labels(targets.numpy(), job.samples.num_classes, rng=rng, round=round)
        return inputs[self.first : self.last], targets[self.first : self.last]

    def _compute(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        round: int,  # noqa: A002
        buffers: Mapping[str, npt.NDArray[Any]] | None,
    ) -> tuple[Values, list[dict[str, npt.NDArray[Any]]]]:
        job = self.job
        if buffers is None:
            losses = self.compute(inputs, targets, self.rows, job.seed, round, self.first)
            return losses.numpy(), []
        own = dict(job.model.named_buffers())
        found, changed = [], []
        for i in range(self.last - self.first):
            for name, values in buffers.items():
                own[name].copy_(torch.from_numpy(np.array(values)))
            one = slice(i, i + 1)
            worker = self.first + i
            found.append(
                self.compute(inputs[one], targets[one], self.rows[one], job.seed, round, worker)
            )
            changed.append({name: buffer.numpy().copy() for name, buffer in own.items()})
        return torch.cat(found).numpy(), changed

    def _slices(self, faults: Sequence[RowFault]) -> list[list[Any]]:
        rows = self.rows.numpy()
        before = None if self._before is None else self._before.numpy()
        slices: list[list[Any]] = [[row[bounds] for row in rows] for bounds in self.job.bounds]
        for fault in faults:
            i = (fault.worker or 0) - self.first
            for bounds, part in zip(self.job.bounds, slices, strict=True):
                past = None if before is None else before[i, bounds]
                part[i] = fault.change(rows[i, bounds], past, bounds.start)
        return slices


@dataclass(frozen=True, eq=False)
class ShardJob:
    """What one server needs to know."""

    rule: Rule
    num_workers: int
    start: int
    d: int
    shapes: list[tuple[int, ...]]
    """The shapes of the parameters here; one that another server shares is a flat piece."""
    optimizer: Any
    lr: float
    seed: int
    attack: Attack | None
    threads: int


@dataclass(eq=False)
class Answer:
    """What a server says of the rows of a round, besides the aggregate of its columns."""

    partial: Partial | None = None
    """What it measured, if the rule wants to know more before it decides."""
    dropped: npt.NDArray[np.float64] | None = None
    expected: float = 0.0
    finite: bool = True
    touched: int = 0
    honest: Values | None = None
    """The mean of the rows that came, before the attack."""
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose slice could not be used, and why."""
    repeated: set[int] = field(default_factory=set)
    """Workers who sent what they had sent the round before."""


class Shard:
    """A server: a range of columns of the parameters, their optimiser, and the rows of a round."""

    def __init__(
        self, job: ShardJob, vector: Values, state: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        set_num_threads(job.threads)
        torch.set_num_threads(1)
        self.job = job
        pieces, offset = [], 0
        for shape in job.shapes:
            size = int(np.prod(shape))
            piece = torch.from_numpy(np.array(vector[offset : offset + size])).view(shape)
            pieces.append(nn.Parameter(piece))
            offset += size
        self.server = ParameterServer(
            FlatParameters(nn.ParameterList(pieces)),
            num_workers=job.num_workers,
            rule=job.rule,
            optimizer=job.optimizer,
            lr=job.lr,
            on_nonfinite="apply",  # whether all of it is finite is not known here
        )
        _load_optimizer(self.server.optimizer, state)
        self._evaluation: Evaluation | None = None
        self._rows: Any = None
        self._answer = Answer()
        self._marks: dict[int, tuple[int, bytes]] = {}

    def aggregate(
        self,
        round: int,  # noqa: A002
        number: int,
        sources: Sequence[Source],
        previous: Sequence[Source] | None,
        honest: bool,
        faults: Sequence[Fault],
    ) -> tuple[Values | None, Answer]:
        """Take the slices of this server (``number``), and reduce them or say what was measured."""
        _strike(faults)
        self._answer = Answer()
        rows = self._gather(number, sources, self._answer.problems)
        self._recognise(rows, round)
        present = [row for row in rows if row is not None]
        if honest and present:
            self._answer.honest = Mean()(present)
        matrix: Any = self._fill(rows)
        attack = self.job.attack
        if attack is not None:
            matrix = np.stack(matrix)
            past = None
            if previous is not None:
                past = np.stack(self._fill(self._gather(number, previous, {})))
            self._answer.touched = attack.corrupt(
                matrix,
                rng=attack_rng(self.job.seed, round),
                round=round,
                previous=past,
                start=self.job.start,
                d=self.job.d,
            ).count
        self._rows = matrix
        rng = rule_rng(self.job.seed, round)
        self._evaluation = Evaluation(self.job.rule, self.job.num_workers, rng)
        return self._advance()

    def answer(self, partials: Sequence[Partial]) -> tuple[Values | None, Answer]:
        """Take what all servers measured, and go on."""
        if self._evaluation is None:
            raise RuntimeError("there is nothing to answer: no round was begun here")
        self._evaluation.answer(partials)
        return self._advance()

    def _advance(self) -> tuple[Values | None, Answer]:
        evaluation = self._evaluation
        if evaluation is None:
            raise RuntimeError("no round was begun here")
        answer = self._answer
        if evaluation.request is not None:
            answer.partial = evaluation.partial(self._rows, self.job.start)
            return None, answer
        explained = evaluation.explain(self._rows)
        self._evaluation = self._rows = None  # lets go of the object store's memory
        answer.partial = None
        answer.dropped, answer.expected = explained.dropped, float(explained.expected)
        answer.finite = bool(np.isfinite(explained.value).all())
        return explained.value, answer

    def step(
        self,
        value: Sequence[Any],
        factor: float,
        faults: Sequence[Fault],
    ) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
        """Step along the aggregate, and return the parameters and the optimiser's state."""
        _strike(faults)
        gradient = torch.from_numpy(np.array(the_ray().get(value[0])))
        nobody = np.zeros(self.job.num_workers)
        self.server.update(Aggregate(gradient, nobody, 0.0, nobody[None], finite=True), factor)
        return self.server.vector.numpy(), optimizer_state(self.server.optimizer)

    def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    def _gather(
        self, number: int, sources: Sequence[Source], problems: dict[int, str]
    ) -> list[Values | None]:
        """Read the slices where they are, and leave out what is none."""
        ray = the_ray()
        rows: list[Values | None] = [None] * self.job.num_workers
        for first, last, references in sources:
            try:
                part = ray.get(references[number], timeout=60)
            except ray.exceptions.RayError as error:
                lost = f"its values were lost on the way ({type(error).__name__})"
                problems |= dict.fromkeys(range(first, last), lost)
                continue
            for worker in range(first, last):
                row = part[worker - first] if len(part) == last - first else part
                problem = self._problem(row)
                if problem is None:
                    rows[worker] = row
                else:
                    problems[worker] = problem
        return rows

    def _problem(self, row: Any) -> str | None:
        vector = self.server.vector
        if not isinstance(row, np.ndarray):
            return f"sent {type(row).__name__} where an array was due"
        if row.shape != tuple(vector.shape):
            return f"sent shape {row.shape} where {tuple(vector.shape)} was due"
        dtype = str(vector.dtype).removeprefix("torch.")
        if row.dtype.name != dtype:
            return f"sent {row.dtype.name} where {dtype} was due"
        return None

    def _fill(self, rows: list[Values | None]) -> list[Values]:
        nothing = np.full_like(self.server.vector.numpy(), np.nan)
        return [nothing if row is None else row for row in rows]

    def _recognise(self, rows: list[Values | None], round: int) -> None:  # noqa: A002
        """Note who sent the same as in a round before, by a few values of the slice."""
        places = np.linspace(0, self.server.vector.numel() - 1, _MARKS).astype(np.int64)
        for worker, row in enumerate(rows):
            if row is not None:
                seen = row[places]
                when, mark = self._marks.get(worker, (round, b""))
                self._marks[worker] = round, seen.tobytes()
                if when < round and seen.any() and mark == seen.tobytes():
                    self._answer.repeated.add(worker)


def _strike(faults: Sequence[Fault]) -> None:
    for fault in faults:
        if isinstance(fault, ProcessFault):
            fault.strike()


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, npt.NDArray[Any]]:
    """Return what an optimiser keeps, as arrays by ``index.key``; plain numbers as float64."""
    return {
        f"{index}.{key}": value.numpy()
        if isinstance(value, torch.Tensor)
        else np.array(value, np.float64)
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
        if value is not None
    }


def _load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, npt.NDArray[Any]]
) -> None:
    entries: dict[int, dict[str, Any]] = {}
    for name, values in state.items():
        index, _, key = name.partition(".")
        number = values.ndim == 0 and values.dtype == np.float64
        kept = float(values) if number else torch.from_numpy(np.array(values))
        entries.setdefault(int(index), {})[key] = kept
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
