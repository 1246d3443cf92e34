"""The outcomes of a reproduction: the repeats of every case, read from the results file."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from phocas.experiments.reproduction.tasks import BASELINE, Case, Reproduction
from phocas.experiments.results import ENDED, Results

if TYPE_CHECKING:
    from pathlib import Path

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
    dropped: npt.NDArray[np.float64]
    """Mean share of a worker's values that was dropped, by repeat and worker."""
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
    def dropped_of_byzantine(self) -> npt.NDArray[np.float64]:
        """Return the mean share dropped of the workers that are Byzantine in every round."""
        return np.asarray(self.dropped[:, self.case.byzantine].mean(axis=1))

    @property
    def dropped_of_honest(self) -> npt.NDArray[np.float64]:
        """Return the mean share dropped of the other workers."""
        return np.asarray(np.delete(self.dropped, self.case.byzantine, axis=1).mean(axis=1))

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


def collect(reproduction: Reproduction, results: Path) -> Outcomes:
    """Read the finished runs of a reproduction; other runs are omitted."""
    with Results(results, read=True) as file:
        records: dict[str, RunRecord] = {
            record.identity: record for record in file.runs() if record.status in ENDED
        }
        read: dict[str, _RunOutcome] = {}
        figures: dict[str, list[Repeats]] = {}
        for figure in reproduction.figures:
            figures[figure.name] = []
            for case in figure.cases:
                runs = {}
                for number in range(reproduction.repeats):
                    config = case.repeat(number)
                    record = records.get(config.identity())
                    if record is not None:
                        if record.identity not in read:
                            read[record.identity] = _read(file, record, reproduction.metric)
                        runs[config.seed] = read[record.identity]
                if runs:
                    figures[figure.name].append(_repeats(case, reproduction.repeats, runs))
    return Outcomes(reproduction, figures)


@dataclass(frozen=True)
class _RunOutcome:
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    distance: float
    aggregate_ms: float
    dropped: npt.NDArray[np.float64]
    nonfinite: int


def _read(file: Results, record: RunRecord, metric: str) -> _RunOutcome:
    points = file.table("evaluations", record.id)
    rounds = file.table("rounds", record.id)
    shares = [row["share"] for row in file.table("dropped", record.id)]  # by round, then worker
    distances = [row["honest_distance"] for row in rounds if row["honest_distance"] is not None]
    return _RunOutcome(
        tuple(point["round"] for point in points),
        tuple(point[metric] for point in points),
        math.fsum(distances) / len(distances) if distances else math.nan,
        min(row["aggregate_ms"] for row in rounds),
        np.reshape(shares, (-1, record.config["workers"])).mean(axis=0),
        record.nonfinite_rounds,
    )


def _repeats(case: Case, wanted: int, runs: dict[int, _RunOutcome]) -> Repeats:
    last, step = case.config.rounds, case.config.evaluate_every
    rounds = tuple(sorted({*range(0, last + 1, step), last}))
    return Repeats(
        case=case,
        wanted=wanted,
        seeds=tuple(runs),
        rounds=rounds,
        accuracy=np.array(
            [[_accuracy_at(run, round_) for round_ in rounds] for run in runs.values()]
        ),
        distance=np.array([run.distance for run in runs.values()]),
        aggregate_ms=np.array([run.aggregate_ms for run in runs.values()]),
        dropped=np.array([run.dropped for run in runs.values()]),
        nonfinite=np.array([run.nonfinite for run in runs.values()]),
    )


def _accuracy_at(run: _RunOutcome, round_: int) -> float:
    """Return the last accuracy up to a round; a stopped run keeps its last one."""
    return run.accuracy[bisect.bisect_right(run.rounds, round_) - 1]
