"""Synchronous SGD among workers that may lie: the loop over rounds."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from torch.nn import functional

from phocas.provenance import code_of
from phocas.rules.cells import lost_cells
from phocas.rules.census import Count, census
from phocas.rules.sampling import Sample
from phocas.rules.suspicion import Suspicion
from phocas.seeds import Stream, generator
from phocas.specs import count
from phocas.training.attendance import Attendance
from phocas.training.checkpoints import load_checkpoint, save_checkpoint
from phocas.training.cluster import find_engine
from phocas.training.course import Course
from phocas.training.evaluation import Metrics, evaluate
from phocas.training.lanes import one_torch_thread
from phocas.training.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from phocas.training.cluster import Cluster, Engine, Gathered
    from phocas.training.gradients.base import Loss
    from phocas.training.models import Builder
    from phocas.training.server import Action, ParameterServer


_CENSUS_EVERY = 4
_LOST = 1e6  # times the first loss, or 1 if that is larger: no honest gradient leads back


@dataclass(frozen=True, eq=False)
class Picture:
    """Some columns of the matrix of one round, as the servers received them."""

    sample: Sample
    """Which columns they are."""
    values: npt.NDArray[np.float64]
    """The values, (m, columns)."""
    lost: npt.NDArray[np.float64]
    """How much of each was left out, from 0 to 1; see :func:`phocas.rules.cells.lost_cells`."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round of training."""

    number: int
    """From 1: so many rounds have been run."""
    loss: float
    """The mean loss of the workers' batches."""
    lr: float
    """The learning rate of the step."""
    action: Action
    """What was done with the aggregate: applied, skipped or stopped."""
    finite: bool
    """Whether the aggregate was."""
    gradient_norm: float
    """The length of the aggregate."""
    honest_distance: float | None
    """From the aggregate to the mean of the uncorrupted gradients, where it was asked for."""
    dropped: npt.NDArray[np.float64]
    """For each worker, the share of its values that the rule left out."""
    expected_dropped: float
    """The share of its values that an honest worker expects to lose."""
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
    lost: int | None = None
    """The round that destroyed the model, if one did; later rounds give no evidence."""
    census: tuple[Count, ...] = ()
    """How many values of some columns were implausible, in one round of four."""
    picture: Picture | None = None
    """Some columns of the matrix, where they were asked for."""
    participants: npt.NDArray[np.int64] | None = None
    """Which client or worker each entry of ``dropped`` is of, where not all took part."""
    virtual_seconds: float | None = None
    """What a virtual clock shows, where there is one."""
    staleness: int | None = None
    """How many steps behind the last row was, where nobody waits."""
    refused: int = 0
    """Rows that were too stale to be used."""


class Trainer:
    """Train a model by rounds of m workers and s servers, under a rule and perhaps an attack.

    >>> import phocas, torch
    >>> from phocas.data import load
    >>> data = load("synthetic:train=500,test=100")
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    >>> with Trainer(model, torch.nn.CrossEntropyLoss(), data, num_workers=10, lr=0.5,
    ...              rule=phocas.Phocas(b=3), attack="gaussian:q=3") as trainer:
    ...     losses = [round.loss for round in trainer.rounds(30)]
    ...     losses[-1] < losses[0] / 2, trainer.suspicion.suspects()
    (True, (0, 1, 2))

    Args:
        model: any module; its parameters become views of one vector and are trained in place. Or a
            model's spelling, ``"mlp:hidden=64"``.
        loss: ``loss(outputs, targets)``, the mean over a batch.
        data: a :class:`phocas.data.Dataset` or its spelling, a pair of arrays (inputs, targets), a
            torch Dataset or DataLoader, or a list of these, one a worker; see
            :class:`phocas.training.samples.Samples`.
        test: what to evaluate on, if ``data`` has none of its own; the same kinds.
        engine: where rounds run: ``"local"``, ``"ray"``, or an engine with settings of its own,
            ``phocas.engines.ray.RaySettings(deadline=5)``.
        settings: ``rule`` and any other of :class:`phocas.training.task.TaskSettings`. Rules,
            attacks, splits, schedules and optimisers may be text or values.
    """

    def __init__(
        self,
        model: nn.Module | Builder | str,
        loss: Loss = functional.cross_entropy,
        data: Any = None,
        *,
        test: Any = None,
        engine: Engine | str = "local",
        **settings: Any,
    ) -> None:
        chosen = find_engine(engine)
        task = Task.make(model, loss, data, test=test, **settings)
        self._begin(task, chosen.build(task))
        self.code |= code_of([chosen, *getattr(chosen, "__dict__", {}).values()])

    @classmethod
    def of(cls, task: Task, cluster: Cluster) -> Self:
        """Make a trainer of a task and of the cluster that an engine made from it."""
        trainer = cls.__new__(cls)
        trainer._begin(task, cluster)  # noqa: SLF001  a second constructor
        return trainer

    def _begin(self, task: Task, cluster: Cluster) -> None:
        self.task = task
        self.code: dict[str, str] = dict(task.code)
        self.cluster = cluster
        self.suspicion = Suspicion(
            task.num_workers,
            task.rule.liars(task.num_workers) or None,
            [(part.start, part.stop) for part in self.server.bounds]
            if task.num_servers > 1
            else [],
            task.worker_momentum,
            course=True,
        )
        self.course = Course(self.server.vector)
        self.attendance = Attendance(task.clients or task.num_workers)
        self.rounds_done = 0
        self.first_loss: float | None = None
        """The median loss of the workers in the first round."""
        self.lost: int | None = None
        """The round that destroyed the model; 0 if its first loss was not finite."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.task.model

    @property
    def server(self) -> ParameterServer:
        """The parameters as they are published."""
        return self.cluster.server

    def rounds(self, number: int) -> Iterator[Round]:
        """Run so many further rounds, one for each item taken; a stopped round is the last."""
        for _ in range(count("rounds", "number", number)):
            done = self.step()
            yield done
            if done.action == "stopped":
                return

    def step(self, *, detailed: bool = True, picture: Sample | None = None) -> Round:
        """Run one round; ``detailed=False`` leaves out what needs another pass over the matrix.

        ``picture`` asks for the values of some columns, and which of them were left out.
        """
        start = time.perf_counter()
        with one_torch_thread():
            round_ = self.rounds_done
            samples = self._samples(round_)
            asked = samples if picture is None else [*samples, picture]
            seen = self.cluster.gather(round_, by_server=detailed, honest=detailed, samples=asked)
            aggregate = seen.aggregate
            factor = float(self.task.schedule(round_))
            course = self.course.sampled(samples[0]) if samples else None
            self._judge_model(seen.losses)
            before = time.perf_counter()
            action = self.cluster.update(aggregate, factor)
            updated = time.perf_counter()
            self.attendance.update(seen.participants, aggregate.dropped)
            whole = self.lost is None
            if seen.participants is None and whole:
                if samples:
                    now, *following = seen.sampled[: len(samples)]
                    later = following[0] if following else None
                    self.suspicion.observe(now, samples[0], later, course)
                else:
                    self.suspicion.rest()
                self.suspicion.update(aggregate.dropped)
            counted = samples and whole and round_ % _CENSUS_EVERY == 0
            counts = census(seen.sampled[0]) if counted else ()
            self.rounds_done += 1
            self.course.advance(self.rounds_done)
        seconds = {**seen.seconds, "update": updated - before}
        seconds["metrics"] = (
            time.perf_counter()
            - start
            - sum(value for phase, value in seconds.items() if phase != "metrics")
        )
        return Round(
            number=self.rounds_done,
            loss=float(seen.losses.mean()),
            lr=self.task.lr * factor,
            action=action,
            finite=aggregate.finite,
            gradient_norm=aggregate.norm,
            honest_distance=seen.honest_distance,
            dropped=aggregate.dropped,
            expected_dropped=aggregate.expected,
            by_server=aggregate.by_server if detailed and seen.participants is None else None,
            touched=seen.touched,
            suspects=self.suspicion.suspects() if self.cluster.same_rows else (),
            unusual=self.suspicion.unusual() if self.cluster.same_rows and whole else (),
            suspect_servers=self.suspicion.servers() if self.cluster.same_rows else (),
            lost=self.lost,
            census=counts,
            seconds=seconds,
            missing=seen.missing,
            news=seen.news,
            picture=None if picture is None else self._picture(picture, seen),
            participants=seen.participants,
            virtual_seconds=seen.virtual_seconds,
            staleness=seen.staleness,
            refused=seen.refused,
        )

    def _judge_model(self, losses: npt.NDArray[np.floating]) -> None:
        """Note that the model is lost if the workers' median loss is not finite or absurdly large.

        The size of a step does not tell: a step of any size along columns that no data uses does no
        harm. The median is honest if most workers are.
        """
        if self.lost is not None or 2 * len(losses) <= self.task.num_workers:
            return
        loss = float(np.sort(losses)[len(losses) // 2])  # NaN comes last
        if self.first_loss is None:
            self.first_loss = loss
        if not math.isfinite(loss) or loss > _LOST * max(1.0, self.first_loss):
            self.lost = self.rounds_done

    def _picture(self, sample: Sample, seen: Gathered) -> Picture:
        values = seen.sampled[-1].reshape(self.task.num_workers, -1)
        return Picture(sample, values, lost_cells(self.task.rule, values, seen.aggregate.dropped))

    def _samples(self, round_: int) -> list[Sample]:
        """Return the columns in which workers are compared, and those of the next round if needed.

        What is new in a row with momentum shows beside its last values in the same columns.
        """
        if not self.cluster.same_rows or self.lost is not None or not self.suspicion.wants():
            return []
        d = self.server.parameters.size
        rounds = range(round_, round_ + 1 + bool(self.task.worker_momentum))
        seed = self.task.seed
        return [Sample.draw(d, generator(Stream.SAMPLE, seed, number)) for number in rounds]

    def evaluate(self) -> Metrics:
        """Return the loss and, where targets are classes, the accuracy on the test samples."""
        gradients = self.cluster.gradients
        return evaluate(
            self.model,
            self.task.loss,
            self.task.samples,
            gradients.lanes,
            channels_last=gradients.channels_last,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state of the training into a file, to go on from with :meth:`load`."""
        save_checkpoint(Path(path), self, self._identity())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a file of :meth:`save`, which must be of the same task, engine and code."""
        load_checkpoint(Path(path), self, self._identity())

    def _identity(self) -> str:
        # What is kept of workers and servers differs between engines.
        return f"{self.cluster.kind}-{self.task.identity()}"

    def close(self) -> None:
        """End the threads and processes."""
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
