"""The outcomes of a reproduction: the repeats of every case, from a results or a curves file."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from phocas.experiments.reproduction.tasks import (
    BASELINE,
    Case,
    Metric,
    Reproduction,
    byzantine_workers,
)
from phocas.experiments.results import ENDED, Results

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from phocas.experiments.config import RunConfig
    from phocas.experiments.results import RunRecord


@dataclass(frozen=True, eq=False)
class Repeats:
    """The finished repeats of a case."""

    case: Case
    wanted: int
    seeds: tuple[int, ...]
    rounds: tuple[int, ...]
    accuracy: npt.NDArray[np.float64]
    """Accuracy by repeat and evaluation."""
    distance: npt.NDArray[np.float64]
    """Mean distance from the aggregate to the mean of the honest gradients, by repeat."""
    aggregate_ms: npt.NDArray[np.float64]
    """Shortest time of an aggregation by repeat; other load on the machine only adds to it."""
    dropped_of_byzantine: npt.NDArray[np.float64]
    """Mean share dropped of the workers that are Byzantine in every round, by repeat."""
    dropped_of_honest: npt.NDArray[np.float64]
    """Mean share dropped of the other workers, by repeat."""
    nonfinite: npt.NDArray[np.int64]
    """Number of rounds whose aggregate was not finite, by repeat."""

    @property
    def final(self) -> npt.NDArray[np.float64]:
        """Return the accuracy at the end."""
        return np.asarray(self.accuracy[:, -1])

    @property
    def best(self) -> npt.NDArray[np.float64]:
        """Return the highest accuracy of all evaluations."""
        return np.asarray(self.accuracy.max(axis=1))

    @property
    def average(self) -> npt.NDArray[np.float64]:
        """Return the accuracy averaged over the rounds; it is higher if accuracy rises sooner."""
        return np.asarray(self.accuracy[:, 1:].mean(axis=1))


class MissingError(LookupError):
    """A case that a claim refers to has no complete run."""


class Outcomes:
    """All repeats of a reproduction, by figure and label."""

    def __init__(self, reproduction: Reproduction, cases: dict[str, list[Repeats]]) -> None:
        self.reproduction = reproduction
        self._figures = cases

    def figure(self, name: str) -> list[Repeats]:
        """Return the cases of a figure that have a complete run, in the figure's order."""
        if not self._figures.get(name):
            raise MissingError(f"no complete run of figure {name!r}")
        return self._figures[name]

    def get(
        self, figure: str, label: str, *, b: int | None = None, batch_size: int | None = None
    ) -> Repeats:
        """Return one case of a figure."""
        for repeats in self.figure(figure):
            case = repeats.case
            if (
                case.label == label
                and b in (None, case.b)
                and batch_size in (None, case.config.batch_size)
            ):
                return repeats
        raise MissingError(f"no complete run of {label!r} in figure {figure!r}")

    def series(self, figure: str, label: str) -> list[Repeats]:
        """Return all cases of a label in a figure; raise MissingError if one is incomplete."""
        cases = self.figure(figure)
        planned = next(f for f in self.reproduction.figures if f.name == figure).cases
        wanted = [case for case in planned if case.label == label]
        found = [each for each in cases if each.case in wanted]
        if len(found) < len(wanted):
            raise MissingError(
                f"no complete run of {len(wanted) - len(found)} cases of {label!r} in {figure!r}"
            )
        return found

    def baseline(self, figure: str) -> Repeats:
        """Return the mean without failures, with which a figure is compared."""
        return self.get(figure, "Mean" if figure == "none" else BASELINE)


@dataclass(frozen=True)
class RunOutcome:
    """The numbers of one finished run by which claims are judged.

    Attributes:
        status: complete, or stopped at an aggregate with NaN or inf.
        rounds: rounds of the evaluations.
        accuracy: the accuracy of each evaluation, by the metric of the study.
        distance: mean distance from the aggregate to the mean of the honest gradients.
        aggregate_ms: shortest time of an aggregation.
        dropped_of_byzantine: mean share dropped of workers that are Byzantine in every round.
        dropped_of_honest: mean share dropped of the other workers.
        nonfinite: number of rounds whose aggregate was not finite.
        final_accuracy: top-1 accuracy of the last evaluation.
        test_accuracy: accuracy at the end on test samples, if evaluations are of other samples.
    """

    status: str
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    distance: float
    aggregate_ms: float
    dropped_of_byzantine: float
    dropped_of_honest: float
    nonfinite: int
    final_accuracy: float | None
    test_accuracy: float | None


def read_outcomes(
    results: Path, runs: Sequence[RunConfig], metric: Metric = "top1"
) -> dict[str, RunOutcome]:
    """Read the finished runs of these configurations from a results file, by identity."""
    wanted = {config.identity(): config for config in runs}
    with Results(results, read=True) as file:
        return {
            record.identity: _read(file, record, wanted[record.identity], metric)
            for record in file.runs()
            if record.status in ENDED and record.identity in wanted
        }


def collect(reproduction: Reproduction, found: Mapping[str, RunOutcome]) -> Outcomes:
    """Arrange the finished runs of a reproduction, given by identity, in figures and cases."""
    figures: dict[str, list[Repeats]] = {}
    for figure in reproduction.figures:
        figures[figure.name] = []
        for case in figure.cases:
            configs = [case.repeat(number) for number in range(reproduction.repeats)]
            runs = {c.seed: found[c.identity()] for c in configs if c.identity() in found}
            if runs:
                figures[figure.name].append(_repeats(case, reproduction.repeats, runs))
    return Outcomes(reproduction, figures)


def _read(file: Results, record: RunRecord, config: RunConfig, metric: str) -> RunOutcome:
    points = file.table("evaluations", record.id)
    rounds = file.table("rounds", record.id)
    shares = [row["share"] for row in file.table("dropped", record.id)]  # by round, then worker
    dropped = np.reshape(shares, (-1, record.config["workers"])).mean(axis=0)
    byzantine = byzantine_workers(config)
    wrong, honest = dropped[byzantine], np.delete(dropped, byzantine)
    distances = [row["honest_distance"] for row in rounds if row["honest_distance"] is not None]
    return RunOutcome(
        status=record.status,
        rounds=tuple(point["round"] for point in points),
        accuracy=tuple(point[metric] for point in points),
        distance=math.fsum(distances) / len(distances) if distances else math.nan,
        aggregate_ms=min(row["aggregate_ms"] for row in rounds),
        dropped_of_byzantine=float(wrong.mean()) if len(wrong) else math.nan,
        dropped_of_honest=float(honest.mean()) if len(honest) else math.nan,
        nonfinite=record.nonfinite_rounds,
        final_accuracy=record.final_accuracy,
        test_accuracy=record.test_accuracy,
    )


def _repeats(case: Case, wanted: int, runs: Mapping[int, RunOutcome]) -> Repeats:
    last, step = case.config.rounds, case.config.evaluate_every
    rounds = tuple(sorted({*range(0, last + 1, step), last}))
    names = ("distance", "aggregate_ms", "dropped_of_byzantine", "dropped_of_honest", "nonfinite")
    return Repeats(
        case=case,
        wanted=wanted,
        seeds=tuple(runs),
        rounds=rounds,
        accuracy=np.array(
            [[_accuracy_at(run, round_) for round_ in rounds] for run in runs.values()]
        ),
        **{name: np.array([getattr(run, name) for run in runs.values()]) for name in names},
    )


def _accuracy_at(run: RunOutcome, round_: int) -> float:
    """Return the last accuracy up to a round; a stopped run keeps its last one."""
    return run.accuracy[bisect.bisect_right(run.rounds, round_) - 1]
