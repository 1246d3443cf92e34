"""A server of a Ray cluster: a range of columns, their optimizer, and the rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from phocas.detection.comparison import RecentDirection, Sample
from phocas.engines.ray.inbox import Delivery
from phocas.engines.ray.values import (
    Values,
    absent,
    array_of,
    numbers,
    readable,
    sent,
    tensor_of,
)
from phocas.rules import Mean
from phocas.rules.measures import Partial
from phocas.rules.sharded import ShardedAggregation
from phocas.training.server import Aggregate, ParameterServer
from phocas.training.task import ServerTask

_MARKS = 16  # values of a slice by which a repeated row is recognised

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class ShardJob:
    """The job of one server."""

    task: ServerTask
    """The part of the task that servers need."""
    start: int
    """The first of its columns."""
    d: int
    """The number of columns of all servers together."""
    shapes: list[tuple[int, ...]]
    """The shapes of its parameters; a parameter that is cut between servers is flat."""
    threads: int
    """The number of its threads."""
    patience: float
    """Seconds to wait for slices and measurements: less than the trainer waits for this server."""


@dataclass(frozen=True, eq=False)
class Question:
    """The measurements of a round that the trainer wants from a server."""

    round: int
    """The number of the round, from 0."""
    due: tuple[int, ...]
    """The workers that have sent their rows."""
    honest: bool
    """Whether to measure the distance from the mean of the rows."""
    compared: Sequence[Sample] = ()
    """The columns in which rows are compared: of this round and, with momentum, of the next."""
    shown: Sequence[Sample] = ()
    """The columns whose values to return."""
    reference: Values | None = None
    """The server's columns of the trusted gradient, for a rule that needs one."""


@dataclass(frozen=True, eq=False)
class ComparedPart:
    """A server's part of the columns in which the rows of a round are compared."""

    values: Values
    """The values of all workers, (m, columns), after the attack."""
    direction: Values
    """The recent direction of the model."""
    before: Values | None
    """The values of the round before; None if they are not known."""


@dataclass(eq=False)
class Answer:
    """The answer of a server in a round; the aggregate of its columns stays with the server."""

    partial: list[Any] | None = None
    """A reference to a measurement that the rule needs from all servers to continue."""
    dropped: npt.NDArray[np.float64] | None = None
    """For each worker, the share of its values that the rule dropped."""
    expected: float = 0.0
    """The share of its values that an honest worker loses by chance."""
    squares: float = 0.0
    """The sum of the squares of the aggregate."""
    finite: bool = True
    """Whether all values of the aggregate are finite."""
    touched: int = 0
    """The number of cells that the attack changed."""
    distance: float | None = None
    """The squared distance from the aggregate to the mean of the rows before the attack."""
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose slice could not be used, and why."""
    late: set[int] = field(default_factory=set)
    """Workers that sent a row of an earlier round."""
    repeated: set[int] = field(default_factory=set)
    """Workers that sent the same values as in an earlier round."""
    compared: list[Any] = field(default_factory=list)
    """A reference to the part of the columns in which rows are compared, if they are."""
    shown: list[Values] = field(default_factory=list)
    """The values of the columns to return, after the attack."""
    news: list[str] = field(default_factory=list)
    """Descriptions of anything else that a process sent and must not send."""
    copied: bool = True
    """Whether the process with the copy of the columns has the aggregate too."""


class Shard:
    """A range of columns with their optimizer, and the aggregation of their rows.

    Every server has a copy in another process. The copy gets the aggregate of each round before any
    server steps, and steps along it too. So a lost server costs no parameter.

    Args:
        job: the job of the server.
        state: its parameters and its state, as :meth:`state` returns it.
    """

    def __init__(self, job: ShardJob, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.job = job
        pieces, offset = [], 0
        for shape in job.shapes:
            size = int(np.prod(shape))
            piece = tensor_of(np.array(state["vector"][offset : offset + size])).view(shape)
            pieces.append(nn.Parameter(piece))
            offset += size
        # It applies every aggregate that it is asked to: only the trainer sees all columns.
        alone = replace(job.task, num_servers=1, on_nonfinite="apply")
        self.server = alone.serve(nn.ParameterList(pieces))
        self.value = np.empty_like(array_of(self.server.vector))
        """The aggregate of the current round."""
        self._direction = RecentDirection(self.server.vector)
        self.load(state)

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state."""
        array_of(self.server.vector)[:] = state["vector"]
        self.round = int(state["round"])
        """The number of the round whose rows are aggregated next, from 0."""
        self.valued = -1
        """The round of the aggregate in ``value``."""
        found = {key.partition(".")[2]: v for key, v in state.items() if key.startswith("state.")}
        _load_optimizer(self.server, found)
        if self.server.reference is not None and "reference" in state:
            self.server.reference = tensor_of(np.array(state["reference"]))
        vector = array_of(self.server.vector)
        moved = {name: np.array(state.get(name, vector)) for name in ("older", "newer")}
        self._direction.load_state({name: tensor_of(values) for name, values in moved.items()})
        # Rows of the previous round, for attacks that need them. A copy has none.
        self._previous = np.array(state["previous"]) if "previous" in state else None
        self._next: Values | None = None
        # Values of the previous round in the columns that are compared now. A copy has none.
        before = state.get("before", np.empty(0))
        self._before = np.array(before) if before.size else None
        self._following: Values | None = None
        self.compared: ComparedPart | None = None
        """The part of the current round for the comparison of rows."""
        self._evaluation: ShardedAggregation | None = None
        self._rows: Any = None
        self._honest: Values | None = None
        self._answer = Answer()
        self._marks: dict[int, tuple[int, bytes]] = {}

    def state(self) -> State:
        """Return the parameters and everything else that a copy needs."""
        kept = {
            "vector": array_of(self.server.vector),
            "round": np.array(self.round),
            **{name: array_of(tensor) for name, tensor in self._direction.state().items()},
            **{f"state.{key}": v for key, v in _optimizer_state(self.server).items()},
        }
        if self.server.reference is not None:
            kept["reference"] = array_of(self.server.reference)
        if self._previous is not None:
            kept["previous"] = self._previous
        if self._before is not None:
            kept["before"] = self._before
        return kept

    def aggregate(self, question: Question, delivery: Delivery) -> Partial | None:
        """Aggregate the slices of a round, or return a measurement that other servers need."""
        round, task = question.round, self.job.task
        rows = delivery.rows
        answer = self._answer = Answer(
            problems=delivery.problems, late=delivery.late, news=delivery.news
        )
        self._recognise(rows, round)
        present = [row for row in rows if row is not None]
        self._honest = sent(Mean()(readable(present))) if question.honest and present else None
        like = array_of(self.server.vector)
        arrays: Any = fill(rows, like)
        kept = self.server.reference
        reference = question.reference if kept is None else array_of(kept)
        attack = task.attack_of(round)
        if attack is not None:
            arrays = np.stack(arrays)
            past, self._next = self._previous, arrays.copy() if attack.needs_previous else None
            answer.touched = attack.corrupt(
                readable(arrays),
                rng=task.attack_rng(round),
                round=round,
                previous=None if past is None else readable(past.copy()),
                start=self.job.start,
                d=self.job.d,
                reference=reference,
            ).count
        self._sample(question, arrays)
        rule, m = task.rule, task.num_workers
        if reference is not None:
            rule, m, arrays = rule.referenced(), m + 1, [*arrays, reference]
        self._rows = readable(arrays)
        self._evaluation = ShardedAggregation(rule, m, task.rule_rng(round))
        return self._advance()

    def _sample(self, question: Question, rows: Sequence[Values]) -> None:
        """Take the values of sampled columns."""
        start, like = self.job.start, array_of(self.server.vector)

        def take(sample: Sample) -> Values:
            columns = sample.columns(start, start + len(like))
            return np.stack([numbers(row[columns]) for row in rows])

        self._answer.shown = [take(sample) for sample in question.shown]
        self.compared = None
        if question.compared:
            now, *following = question.compared
            columns = now.columns(start, start + len(like))
            older = array_of(self._direction.state()["older"])
            pair = (numbers(each[columns]).astype(np.float64) for each in (older, like))
            self.compared = ComparedPart(take(now), next(pair) - next(pair), self._before)
            self._following = take(following[0]) if following else None

    def answer(self, partials: Sequence[Partial]) -> Partial | None:
        """Continue the aggregation with the measurements of all servers."""
        assert self._evaluation is not None
        self._evaluation.answer(partials)
        return self._advance()

    def _advance(self) -> Partial | None:
        evaluation = self._evaluation
        assert evaluation is not None
        if evaluation.request is not None:
            return evaluation.partial(self._rows, self.job.start)
        explained = evaluation.explain(self._rows, self.job.start)
        self._evaluation = self._rows = None
        answer = self._answer
        answer.dropped = explained.dropped[: self.job.task.num_workers]
        answer.expected = float(explained.expected)
        self.value[:] = sent(explained.value)
        self.valued = self.round
        values = numbers(self.value)
        with np.errstate(over="ignore", invalid="ignore"):
            answer.squares = float(np.square(values, dtype=np.float64).sum())
            answer.finite = math.isfinite(answer.squares) or bool(np.isfinite(values).all())
            if self._honest is not None:
                apart = values - numbers(self._honest)
                answer.distance = float(np.square(apart, dtype=np.float64).sum())
        return None

    @property
    def result(self) -> Answer:
        """The answer of the current round."""
        return self._answer

    def step(self, round: int, factor: float | None) -> None:
        """Take an optimizer step along the aggregate of a round, unless it was taken already.

        Args:
            round: the number of the round.
            factor: the factor of the learning rate; None to drop the aggregate.
        """
        if round < self.round:
            return
        if factor is not None:
            if self.valued != round:
                raise RuntimeError(f"round {round + 1} has no aggregate here")
            dropped = np.zeros(self.job.task.num_workers)  # measured by the server, not needed here
            value = tensor_of(self.value)
            self.server.update(Aggregate(value, dropped, 0.0, dropped[None]), factor)
        self.round = round + 1
        self._direction.advance(self.round)
        if self._next is not None:
            self._previous, self._next = self._next, None
        self._before, self._following = self._following, None

    def _recognise(self, rows: list[Values | None], round: int) -> None:
        """Note workers that sent the same slice as in an earlier round; compare a few values."""
        places = np.linspace(0, self.server.vector.numel() - 1, _MARKS).astype(np.int64)
        for worker, row in enumerate(rows):
            if row is not None:
                seen = row[places]
                when, mark = self._marks.get(worker, (round, b""))
                self._marks[worker] = round, seen.tobytes()
                if when < round and seen.any() and mark == seen.tobytes():
                    self._answer.repeated.add(worker)


def fill(rows: Sequence[Values | None], like: Values) -> list[Values]:
    """Return the rows, with a row of NaN in place of each missing row."""
    nothing = absent(like)
    return [nothing if row is None else row for row in rows]


def _optimizer_state(server: ParameterServer) -> dict[str, npt.NDArray[Any]]:
    """Return an optimizer's state as arrays by ``index.key``; plain numbers as float64."""
    return {
        f"{index}.{key}": array_of(value)
        if isinstance(value, torch.Tensor)
        else np.array(value, np.float64)
        for index, entries in server.optimizer_state().items()
        for key, value in entries.items()
        if value is not None
    }


def _load_optimizer(server: ParameterServer, state: Mapping[str, npt.NDArray[Any]]) -> None:
    entries: dict[int, dict[str, Any]] = {}
    for name, values in state.items():
        index, _, key = name.partition(".")
        number = values.ndim == 0 and values.dtype == np.float64
        kept = float(values) if number else tensor_of(np.array(values))
        entries.setdefault(int(index), {})[key] = kept
    server.load_optimizer_state(entries)


def piece_shapes(shapes: Sequence[torch.Size], bounds: slice) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters in a range of columns, flat where one is cut.

    >>> piece_shapes([torch.Size((2, 3)), torch.Size((4,))], slice(0, 8))
    [(2, 3), (2,)]
    """
    pieces: list[tuple[int, ...]] = []
    offset = 0
    for shape in shapes:
        inside = min(bounds.stop, offset + shape.numel()) - max(bounds.start, offset)
        if inside == shape.numel():
            pieces.append(tuple(shape))
        elif inside > 0:
            pieces.append((inside,))
        offset += shape.numel()
    return pieces


def check_optimizer(server: ParameterServer) -> None:
    """Raise ValueError if an optimizer would step differently on parameters that are cut."""
    optimizer = server.optimizer
    if server.num_servers == 1 or optimizer is None:
        return
    if len(optimizer.param_groups) != 1:
        raise ValueError(
            f"servers step on their own columns: {type(optimizer).__name__} with"
            f" {len(optimizer.param_groups)} groups of parameters needs one server"
        )
    rng = np.random.default_rng(0)
    start, steps = rng.normal(size=12), rng.normal(size=(3, 12))

    def run(shapes: list[tuple[int, ...]]) -> np.ndarray:
        parts = [slice(*cut) for cut in itertools.pairwise(np.cumsum([0, *map(math.prod, shapes)]))]
        pieces = [
            torch.nn.Parameter(torch.from_numpy(start[part].copy()).view(shape))
            for part, shape in zip(parts, shapes, strict=True)
        ]
        twin = server.make_optimizer(pieces)
        for step in steps:
            for part, piece in zip(parts, pieces, strict=True):
                piece.grad = torch.from_numpy(step[part].copy()).view(piece.shape)
            twin.step()
        return np.concatenate([piece.detach().numpy().ravel() for piece in pieces])

    if not np.allclose(run([(3, 4)]), run([(5,), (7,)]), rtol=1e-9, atol=0):
        raise ValueError(
            f"{type(optimizer).__name__} steps otherwise when a parameter is cut, and"
            f" {server.num_servers} servers cut them: use one server, or the local engine"
        )
