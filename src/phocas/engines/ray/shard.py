"""The server processes of a Ray cluster, each with a range of columns and their optimizer."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from phocas.detection.sampling import Sample
from phocas.engines.ray.session import the_ray
from phocas.engines.ray.values import (
    Values,
    absent,
    array_of,
    kind,
    numbers,
    readable,
    sent,
    tensor_of,
)
from phocas.engines.ray.worker import join
from phocas.kernels import set_num_threads
from phocas.rules import Mean
from phocas.rules.measures import Partial
from phocas.rules.sharded import ShardedAggregation
from phocas.training.server import Aggregate, ParameterServer
from phocas.training.task import ServerTask

_MARKS = 16  # values of a slice by which a repeated row is recognised

Part = tuple[int, int, Any]
"""The first worker, the last worker + 1, and a reference to their slices for this server."""


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
    """Seconds to wait for slices: less than the trainer waits for this server."""


@dataclass(eq=False)
class Answer:
    """The answer of a server in a round, besides the aggregate of its columns."""

    partial: Partial | None = None
    """A measurement that the rule needs from all servers before it can continue."""
    dropped: npt.NDArray[np.float64] | None = None
    """For each worker, the share of its values that the rule dropped."""
    expected: float = 0.0
    """The share of its values that an honest worker loses by chance."""
    touched: int = 0
    """The number of cells that the attack changed."""
    honest: Values | None = None
    """The mean of the received rows, before the attack."""
    problems: dict[int, str] = field(default_factory=dict)
    """Workers whose slice could not be used, and why."""
    repeated: set[int] = field(default_factory=set)
    """Workers that sent the same values as in an earlier round."""
    sampled: list[Values] = field(default_factory=list)
    """The values of each sample's columns, after the attack."""


class Shard:
    """The actor of a server: a range of columns, their optimizer, and the rows of a round."""

    def __init__(
        self, job: ShardJob, vector: Values, state: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        set_num_threads(job.threads)
        torch.set_num_threads(1)
        self.job = job
        pieces, offset = [], 0
        for shape in job.shapes:
            size = int(np.prod(shape))
            piece = tensor_of(np.array(vector[offset : offset + size])).view(shape)
            pieces.append(nn.Parameter(piece))
            offset += size
        # It applies every aggregate that it is asked to: only the trainer sees all columns.
        alone = replace(job.task, num_servers=1, on_nonfinite="apply")
        self.server = alone.serve(nn.ParameterList(pieces))
        _load_optimizer(self.server, state)
        self._evaluation: ShardedAggregation | None = None
        self._rows: Any = None
        self._value: Values | None = None
        self._answer = Answer()
        self._marks: dict[int, tuple[int, bytes]] = {}

    def aggregate(
        self,
        round: int,
        parts: Sequence[Part],
        previous: Sequence[Part] | None,
        honest: bool,
        samples: Sequence[Sample],
        reference: Values | None = None,
    ) -> tuple[Values | None, Answer]:
        """Read the slices of this server's columns, and aggregate them or return a measurement.

        Args:
            round: the number of the round.
            parts: where the slices of the workers are.
            previous: where those of the previous round are, for attacks that use them.
            honest: whether to return the mean of the rows.
            samples: the columns whose values to return.
            reference: this server's columns of the reference vector, for a rule that needs one.
        """
        self._answer = Answer()
        rows, self._answer.problems = self._gather(parts)
        self._recognise(rows, round)
        present = [row for row in rows if row is not None]
        if honest and present:
            self._answer.honest = sent(Mean()(readable(present)))
        like = array_of(self.server.vector)
        arrays: Any = fill(rows, like)
        task = self.job.task
        attack = task.attack_of(round)
        if attack is not None:
            arrays = np.stack(arrays)
            past = None
            if previous is not None:
                past = readable(np.stack(fill(self._gather(previous)[0], like)))
            self._answer.touched = attack.corrupt(
                readable(arrays),
                rng=task.attack_rng(round),
                round=round,
                previous=past,
                start=self.job.start,
                d=self.job.d,
            ).count
        for sample in samples:
            columns = sample.columns(self.job.start, self.job.start + len(like))
            self._answer.sampled.append(np.stack([numbers(row[columns]) for row in arrays]))
        rule, m = task.rule, task.num_workers
        if reference is not None:
            rule, m, arrays = rule.referenced(), m + 1, [*arrays, reference]
        self._rows = readable(arrays)
        self._evaluation = ShardedAggregation(rule, m, task.rule_rng(round))
        return self._advance()

    def answer(self, partials: Sequence[Partial]) -> tuple[Values | None, Answer]:
        """Continue the aggregation with the measurements of all servers."""
        if self._evaluation is None:
            raise RuntimeError("aggregate must be called before answer")
        self._evaluation.answer(partials)
        return self._advance()

    def _advance(self) -> tuple[Values | None, Answer]:
        evaluation = self._evaluation
        if evaluation is None:
            raise RuntimeError("aggregate must be called first")
        answer = self._answer
        if evaluation.request is not None:
            answer.partial = evaluation.partial(self._rows, self.job.start)
            return None, answer
        explained = evaluation.explain(self._rows, self.job.start)
        self._evaluation = self._rows = None  # releases memory of the object store
        answer.partial = None
        answer.dropped = explained.dropped[: self.job.task.num_workers]
        answer.expected = float(explained.expected)
        self._value = sent(explained.value)
        return self._value, answer

    def step(
        self, value: Sequence[Any], factor: float
    ) -> tuple[Values, dict[str, npt.NDArray[Any]]]:
        """Take an optimizer step along the aggregate; return the parameters and the state.

        Args:
            value: a reference to the aggregate, for a restored server that has none; else empty.
            factor: the factor of the learning rate.
        """
        known = np.array(the_ray().get(value[0])) if value else self._value
        if known is None:
            raise RuntimeError("aggregate must be called before step")
        gradient = tensor_of(known)
        nobody = np.zeros(self.job.task.num_workers)
        self.server.update(Aggregate(gradient, nobody, 0.0, nobody[None]), factor)
        return array_of(self.server.vector), _optimizer_state(self.server)

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def restore(self, vector: Values, state: Mapping[str, npt.NDArray[Any]]) -> tuple[None, None]:
        """Restore the parameters and the optimizer of a checkpoint."""
        array_of(self.server.vector)[:] = vector
        _load_optimizer(self.server, state)
        self._value = None
        self._marks.clear()
        return None, None

    def _gather(self, parts: Sequence[Part]) -> tuple[list[Values | None], dict[int, str]]:
        like = array_of(self.server.vector)
        return read_rows(parts, like, self.job.task.num_workers, self.job.patience)

    def _recognise(self, rows: list[Values | None], round: int) -> None:
        """Note workers that sent the same slice as in an earlier round, by a few of its values."""
        places = np.linspace(0, self.server.vector.numel() - 1, _MARKS).astype(np.int64)
        for worker, row in enumerate(rows):
            if row is not None:
                seen = row[places]
                when, mark = self._marks.get(worker, (round, b""))
                self._marks[worker] = round, seen.tobytes()
                if when < round and seen.any() and mark == seen.tobytes():
                    self._answer.repeated.add(worker)


def read_rows(
    parts: Sequence[Part], like: Values, num_workers: int, patience: float
) -> tuple[list[Values | None], dict[int, str]]:
    """Read slices without a copy; return a row or None for each worker, and the errors."""
    rows: list[Values | None] = [None] * num_workers
    problems: dict[int, str] = {}
    fetched = _fetch([at for *_, at in parts], patience)
    for (first, last, _), part in zip(parts, fetched, strict=True):
        if isinstance(part, Exception):
            lost = f"lost its values on the way ({type(part).__name__})"
            if isinstance(part, TimeoutError):
                lost = f"did not deliver its values within {patience:g} s"
            problems |= dict.fromkeys(range(first, last), lost)
            continue
        whole = isinstance(part, list) and len(part) == last - first
        for worker in range(first, last):
            found = _row(part[worker - first] if whole else part, like)
            if isinstance(found, str):
                problems[worker] = found
            else:
                rows[worker] = found
    return rows, problems


def fill(rows: Sequence[Values | None], like: Values) -> list[Values]:
    """Return the rows, with a row of NaN in place of each missing row."""
    nothing = absent(like)
    return [nothing if row is None else row for row in rows]


def _row(pieces: Any, like: Values) -> Values | str:
    """Return the slice of a worker, or a text that says what is wrong with the slice."""
    if not isinstance(pieces, list) or not pieces:
        return f"sent {type(pieces).__name__} where a list of arrays was due"
    for piece in pieces:
        if type(piece) is not np.ndarray or piece.ndim != 1:
            return f"sent {type(piece).__name__} where an array of one dimension was due"
        if piece.dtype != like.dtype:  # other bytes first is another dtype too
            return f"sent {kind(piece)} where {kind(like)} was due"
    length = sum(map(len, pieces))
    if length != len(like):
        return f"sent shape ({length},) where {like.shape} was due"
    return join(pieces)


def _fetch(references: Sequence[Any], patience: float) -> list[Any]:
    """Get the values of references until a deadline; return an exception for each late value."""
    ray = the_ray()
    until = time.monotonic() + patience
    try:
        return list(ray.get(list(references), timeout=patience))
    except ray.exceptions.RayError:  # one is lost, or the time is over
        left = max(0.0, until - time.monotonic())
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=left)
    there = set(ready)
    until = time.monotonic() + patience / 2  # ready values are local, unless they were lost since
    found: list[Any] = []
    for reference in references:
        if reference not in there:
            found.append(TimeoutError())
            continue
        try:
            found.append(ray.get(reference, timeout=max(0.0, until - time.monotonic())))
        except ray.exceptions.RayError as error:
            found.append(error)
    return found


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
