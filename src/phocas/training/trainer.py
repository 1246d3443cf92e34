"""Synchronous SGD with workers that may be Byzantine: the loop over rounds."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
import numpy.typing as npt
from torch.nn import functional

from phocas.deprecation import former_attributes
from phocas.detection import Detector
from phocas.detection.comparison import OutlierCount, RecentDirection, Sample, count_outliers
from phocas.detection.dropped_cells import dropped_cells
from phocas.detection.exclusion import Exclusions, Never
from phocas.notebook import html_table
from phocas.provenance import code_of
from phocas.seeds import Stream, generator
from phocas.specs import count
from phocas.training.checkpoints import load_checkpoint, save_checkpoint
from phocas.training.cluster import Wanted, find_engine
from phocas.training.evaluation import Metrics, evaluate
from phocas.training.pool import one_torch_thread
from phocas.training.running import TrainingRun, run
from phocas.training.server import ParticipationShares
from phocas.training.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from phocas.training.cluster import Cluster, Engine, Gathered
    from phocas.training.gradients.base import Loss
    from phocas.training.keywords import TrainerKeywords
    from phocas.training.models import Builder
    from phocas.training.server import Action, ParameterServer


_COUNT_EVERY = 4  # rounds between counts of outliers
_LOST = 1e6  # a median loss above this multiple of max(1, first loss) means a destroyed model


@dataclass(frozen=True, eq=False)
class Picture:
    """Some columns of the matrix of one round, as the servers received them."""

    sample: Sample
    """The sampled columns."""
    values: npt.NDArray[np.float64]
    """The values, (m, columns)."""
    lost: npt.NDArray[np.float64]
    """The dropped share of each value, from 0 to 1; see ``phocas.detection.dropped_cells``."""


@former_attributes(suspects="flagged", suspect_servers="flagged_servers", census="outlier_counts")
@dataclass(frozen=True, eq=False)
class Round:
    """One round of training."""

    number: int
    """The number of the round, from 1."""
    loss: float
    """The mean loss of the workers' batches."""
    lr: float
    """The learning rate of the step."""
    action: Action
    """The use of the aggregate: applied, skipped or stopped."""
    finite: bool
    """Whether the aggregate has no NaN and inf."""
    gradient_norm: float
    """The norm of the aggregate."""
    honest_distance: float | None
    """The distance from the aggregate to the mean of uncorrupted gradients, if requested."""
    dropped: npt.NDArray[np.float64]
    """For each worker, the share of its values that the rule dropped."""
    expected_dropped: float
    """The expected dropped share of an honest worker."""
    by_server: npt.NDArray[np.float64] | None
    """The dropped shares within each server's columns, (s, m), if requested."""
    touched: int
    """The number of cells that the attack changed."""
    flagged: tuple[int, ...]
    """Flagged workers: faulty, or with other data; see :class:`phocas.detection.Detector`."""
    seconds: dict[str, float]
    """Times by phase: data, gradients, attack, aggregate, update, metrics."""
    missing: tuple[int, ...] = ()
    """Workers whose row was late or invalid."""
    news: tuple[str, ...] = ()
    """Descriptions of the failures of processes and messages, and of excluded clients."""
    unusual: tuple[int, ...] = ()
    """Workers whose values were recently dropped far more than most, or drifted: only a warning."""
    flagged_servers: tuple[int, ...] = ()
    """Servers that receive extreme values from more than b workers."""
    lost: int | None = None
    """The round that destroyed the model, if one did; later rounds give no evidence."""
    outlier_counts: tuple[OutlierCount, ...] = ()
    """The numbers of outliers in some columns, in one round of four."""
    picture: Picture | None = None
    """Some columns of the matrix, if requested."""
    participants: npt.NDArray[np.int64] | None = None
    """The client or worker of each entry of ``dropped``, if not all took part."""
    virtual_seconds: float | None = None
    """The time of the virtual clock, if there is one."""
    staleness: int | None = None
    """The staleness of the last row in steps, in asynchronous training."""
    refused: int = 0
    """The number of rows that were rejected as too stale."""
    excluded: tuple[int, ...] = ()
    """Clients that are excluded from the next round on."""

    def _repr_html_(self) -> str:
        """Return the main facts as a small HTML table."""
        facts = {
            "loss": self.loss,
            "action": self.action,
            "gradient norm": self.gradient_norm,
            "corrupted cells": self.touched,
            "flagged workers": ", ".join(map(str, self.flagged)) or "none",
            "most dropped": f"worker {int(np.argmax(self.dropped))}, {self.dropped.max():.1%}"
            if len(self.dropped)
            else "none",
            "ms": 1e3 * sum(self.seconds.values()),
        }
        return html_table([], list(facts.items()), f"round {self.number}")


class Clock:
    """The times of the phases of a round, each from the end of the phase before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@former_attributes(suspicion="detector", attendance="participation", course="recent_direction")
class Trainer:
    """The training of a model by rounds of m workers and s servers, with a rule and an attack.

    >>> import phocas, torch
    >>> from phocas.data import load
    >>> data = load("synthetic:train=500,test=100")
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    >>> with Trainer(model, torch.nn.CrossEntropyLoss(), data, num_workers=10, lr=0.5,
    ...              rule=phocas.Phocas(b=3), attack="gaussian:q=3") as trainer:
    ...     done = trainer.run(30)  # results="phocas.sqlite" keeps it
    ...     done.rounds[-1].loss < done.rounds[0].loss / 2, trainer.detector.flagged()
    (True, (0, 1, 2))

    Args:
        model: any module; its parameters become views of one vector and are trained in place. Or
            the text of a model, ``"mlp:hidden=64"``.
        loss: ``loss(outputs, targets)``, the mean over a batch.
        data: a :class:`phocas.data.Dataset` or its text, a pair of arrays (inputs, targets), a
            torch Dataset or DataLoader, or a list of these, one for each worker; see
            :class:`phocas.training.samples.Samples`. Or a function that returns one of these.
        test: the test data, of the same types, if ``data`` has none.
        engine: the engine that runs the rounds: ``"local"``, ``"ray"``, or an engine with settings,
            ``phocas.engines.ray.RaySettings(deadline=5)``.
        settings: ``rule`` and the other fields of :class:`phocas.training.task.TaskSettings`.
            Rules, attacks, splits, schedules and optimizers may be text or values.
    """

    def __init__(
        self,
        model: nn.Module | Builder | str,
        loss: Loss = functional.cross_entropy,
        data: Any = None,
        *,
        test: Any = None,
        engine: Engine | str = "local",
        **settings: Unpack[TrainerKeywords],
    ) -> None:
        chosen = find_engine(engine)
        of_engine = getattr(chosen, "conflicts", lambda _: ())
        task = Task.make(model, loss, data, test=test, of_engine=of_engine, **settings)
        self._begin(task, chosen.build(task))
        self.given |= {"model": model, "data": data, "engine": engine, **settings}
        self.code |= code_of([chosen, *getattr(chosen, "__dict__", {}).values()])

    @classmethod
    def of(cls, task: Task, cluster: Cluster) -> Self:
        """Return a trainer for a task and the cluster that an engine built from the task."""
        trainer = cls.__new__(cls)
        trainer._begin(task, cluster)  # noqa: SLF001  a second constructor
        return trainer

    def __repr__(self) -> str:
        task = self.task
        attack = "" if task.attack is None else f", attack={str(task.attack)!r}"
        return (
            f"Trainer(rule={str(task.rule)!r}, num_workers={task.num_workers}{attack},"
            f" rounds_done={self.rounds_done})"
        )

    def _begin(self, task: Task, cluster: Cluster) -> None:
        self.task = task
        self.given: dict[str, Any] = {}
        """The arguments of the trainer, as the user gave them."""
        self.recorded: dict[Path, tuple[int, str]] = {}
        """By results file: the number of this trainer's run, and a digest of its start."""
        self.code: dict[str, str] = dict(task.code)
        self.cluster = cluster
        differ = task.worker_data == "differ"
        by_client = differ and task.clients is not None
        self.detector = Detector(
            (task.clients if by_client else None) or task.num_workers,
            task.rule.max_byzantine(task.num_workers) or None,
            [(part.start, part.stop) for part in self.server.bounds]
            if task.num_servers > 1 and not by_client
            else [],
            task.worker_momentum,
            direction=True,
            data=task.worker_data,
        )
        self._d = self.server.parameters.size
        direction: RecentDirection | None = getattr(cluster, "recent_direction", None)
        self.recent_direction = direction or RecentDirection(self.server.vector)
        self.participation = ParticipationShares(task.clients or task.num_workers)
        self.exclusions: Exclusions[int] = Exclusions(task.exclude)
        self.rounds_done = 0
        self.first_loss: float | None = None
        """The median loss of the workers in the first round."""
        self.lost: int | None = None
        """The round that destroyed the model; 0 if its first loss was not finite."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained, with its current parameters."""
        _ = self.server  # which fetches them, if they are elsewhere
        return self.task.model

    @property
    def server(self) -> ParameterServer:
        """The parameter server, with the parameters that the workers receive."""
        return self.cluster.server

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Answer the usual names of other libraries' training loops with ``run``."""
            if name in ("train", "fit"):
                raise AttributeError(f"a Trainer has no {name!r}; write trainer.run(100)")
            return object.__getattribute__(self, name)  # raises the error of any other name

    def rounds(self, number: int) -> Iterator[Round]:
        """Run ``number`` further rounds, and yield each; end after a stopped round."""
        for _ in range(count("rounds", "number", number)):
            done = self.step()
            yield done
            if done.action == "stopped":
                return

    def run(
        self,
        rounds: int,
        *,
        results: str | os.PathLike[str] | None = None,
        name: str | None = None,
        evaluate_every: int = 10,
        progress: bool | None = None,
    ) -> TrainingRun:
        """Run further rounds, evaluate between them, and return all that they gave.

        With ``results`` the rounds are a run in a results file, as those of ``phocas train``:
        ``phocas results`` and ``phocas.results.load`` read it. A second call with the same file
        continues that run.

        Args:
            rounds: the number of rounds.
            results: the results file, ``"phocas.sqlite"``, which is created if it does not exist.
            name: the name of the run in tables and figures.
            evaluate_every: rounds between evaluations, if there are test or validation samples.
            progress: whether to show a line on stderr; by default on a terminal and in a notebook.
        """
        return run(self, rounds, results, name, evaluate_every, progress)

    def step(self, *, detailed: bool = True, picture: Sample | None = None) -> Round:
        """Run one round.

        Args:
            detailed: whether to compute the fields that need another pass over the matrix.
            picture: columns whose values, and dropped shares, the round returns.
        """
        clock = Clock()
        with one_torch_thread():
            round_ = self.rounds_done
            samples = self._samples(round_)
            counted = bool(samples) and round_ % _COUNT_EVERY == 0
            wanted = Wanted(
                detailed, detailed, samples, picture, excluded=self._left_out(), outliers=counted
            )
            clock.stop("metrics")
            seen = self.cluster.gather(round_, clock, wanted)
            aggregate = seen.aggregate
            factor = float(self.task.schedule(round_))
            directed = seen.sampled and self.detector.direction_test is not None
            direction = self.recent_direction.sampled(samples[0]) if directed else None
            self._judge_model(seen.losses)
            clock.stop("metrics")
            action = self.cluster.update(aggregate, factor)
            clock.stop("update")
            self.participation.update(seen.participants, aggregate.dropped)
            self._detect(seen, samples, direction)
            news = (*seen.news, *self._exclude(seen))
            whole = self.lost is None
            counts = _outliers(seen) if counted and whole else ()
            self.rounds_done += 1
            self.recent_direction.advance(self.rounds_done)
        clock.stop("metrics")
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
            flagged=self.detector.flagged() if self.cluster.same_rows else (),
            unusual=self.detector.unusual() if self.cluster.same_rows and whole else (),
            flagged_servers=self.detector.servers() if self.cluster.same_rows else (),
            lost=self.lost,
            outlier_counts=counts,
            seconds=clock.seconds,
            missing=seen.missing,
            news=news,
            excluded=tuple(self.exclusions.since),
            picture=None if picture is None else self._picture(picture, seen),
            participants=seen.participants,
            virtual_seconds=seen.virtual_seconds,
            staleness=seen.staleness,
            refused=seen.refused,
        )

    def _detect(
        self, seen: Gathered, samples: list[Sample], direction: npt.NDArray[np.float64] | None
    ) -> None:
        """Update the detector, unless the model is destroyed.

        If not all workers took part, the detector can compare a worker only with its own past.
        """
        if self.lost is not None:
            return
        if seen.participants is not None:
            if seen.sampled:
                self.detector.observe(seen.sampled[0], samples[0], participants=seen.participants)
            return
        if seen.compared is not None:
            self.detector.observe_comparison(seen.compared, samples[0])
        elif seen.sampled:
            now, *following = seen.sampled
            self.detector.observe(now, samples[0], following[0] if following else None, direction)
        else:
            self.detector.rest()
        self.detector.update(seen.aggregate.dropped)

    def _left_out(self) -> tuple[int, ...]:
        """Return the excluded clients that are not drawn: fewer than half, first excluded first."""
        clients = self.task.clients or 0
        most = min(clients - self.task.num_workers, (clients - 1) // 2)
        return tuple(self.exclusions.since)[: max(0, most)]

    def _exclude(self, seen: Gathered) -> list[str]:
        """Exclude and readmit clients after a round; return lines about them."""
        if seen.participants is None or isinstance(self.task.exclude, Never):
            return []
        who = seen.participants.tolist()
        e_values = zip(who, self.detector.e_values[who].tolist(), strict=True)
        judged = [] if self.lost is not None else e_values
        news = self.exclusions.judge(judged, self.detector.num_workers)
        return [*news, *self.exclusions.end_round(self.detector.acquit)]

    def _judge_model(self, losses: npt.NDArray[np.floating]) -> None:
        """Set ``lost`` if the workers' median loss is not finite or extremely large.

        The size of a step is no criterion: a step of any size along columns that no data uses is
        harmless. The median is between honest losses if most workers are honest.
        """
        if self.lost is not None or 2 * len(losses) <= self.task.num_workers:
            return
        loss = float(np.sort(losses)[len(losses) // 2])  # NaN is sorted last
        if self.first_loss is None:
            self.first_loss = loss
        if not math.isfinite(loss) or loss > _LOST * max(1.0, self.first_loss):
            self.lost = self.rounds_done

    def _picture(self, sample: Sample, seen: Gathered) -> Picture:
        assert seen.picture is not None
        values = seen.picture.reshape(self.task.num_workers, -1)
        return Picture(
            sample, values, dropped_cells(self.task.rule, values, seen.aggregate.dropped)
        )

    def _samples(self, round_: int) -> list[Sample]:
        """Return the columns in which workers are compared; none if the round is not observed.

        With momentum, the list has the columns of the next round as well. The detector then
        subtracts a row's previous values in the same columns, to observe its new gradient only. If
        the data of workers differ, the columns are the same in every round.
        """
        if not self.cluster.same_rows or self.lost is not None or not self.detector.wants():
            return []
        rounds = range(round_, round_ + 1 + bool(self.task.worker_momentum))
        if self.task.worker_data == "differ":
            rounds = range(1)
        seed = self.task.seed
        return [Sample.draw(self._d, generator(Stream.SAMPLE, seed, number)) for number in rounds]

    def evaluate(self, *, test: bool = False) -> Metrics:
        """Return the loss and, if targets are classes, the accuracy.

        Args:
            test: evaluate the test samples also if there are validation samples; by default the
                validation samples are evaluated if there are any.
        """
        gradients = self.cluster.gradients
        samples = self.task.samples
        return evaluate(
            self.model,
            self.task.loss,
            samples if test else samples.for_evaluation(),
            gradients.pool,
            channels_last=gradients.channels_last,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state of the training to a file, for :meth:`load`."""
        save_checkpoint(Path(path), self, self._identity())

    def load(self, path: str | os.PathLike[str], *, other_code: bool = False) -> None:
        """Restore a file of :meth:`save`, which must be of the same task, engine and code.

        Args:
            path: the file.
            other_code: continue also if user-defined code has changed since.
        """
        load_checkpoint(Path(path), self, self._identity(), other_code=other_code)

    def _identity(self) -> str:
        # The saved state of workers and servers differs between engines.
        return f"{self.cluster.kind}-{self.task.identity()}"

    def close(self) -> None:
        """End the threads and processes."""
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outliers(seen: Gathered) -> tuple[OutlierCount, ...]:
    """Return the numbers of outliers in the sampled columns of a round."""
    if seen.compared is not None:
        return seen.compared.outliers
    return count_outliers(seen.sampled[0]) if seen.sampled else ()
