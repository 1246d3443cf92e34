"""Learning curves: a run's evaluations by round, by seconds, and by the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phocas.experiments.results import PHASES, Results

Floats = npt.NDArray[np.float64]
Axis = Literal["round", "seconds", "virtual"]
Metric = Literal["top1", "top3", "loss"]

_SPENT = ("round", *(f"{phase}_ms" for phase in PHASES))
_METRICS = ("round", "loss", "top1", "top3", "seconds")


@dataclass(frozen=True, eq=False)
class Curve:
    """The evaluations of a run, with their positions on each axis.

    Attributes:
        round: round of each evaluation.
        seconds: seconds that rounds and evaluations had taken until each evaluation.
        virtual: time of the virtual clock at each evaluation, or None if the run has no such clock.
        top1: accuracy at each evaluation.
        top3: top-3 accuracy at each evaluation.
        loss: loss at each evaluation.
    """

    round: Floats
    seconds: Floats
    virtual: Floats | None
    top1: Floats
    top3: Floats
    loss: Floats


def read_curve(results: Results, run: int) -> Curve:
    """Read the curve of a run; missing numbers become NaN."""
    rounds = columns(results, "rounds", run, _SPENT)
    evaluations = columns(results, "evaluations", run, _METRICS)
    clock = {row["round"]: row["seconds"] for row in results.table("virtual", run)}
    shown = [{0: 0.0, **clock}.get(int(at), np.nan) for at in evaluations["round"]]
    return Curve(
        evaluations["round"],
        elapsed(rounds, evaluations),
        np.array(shown) if clock else None,
        evaluations["top1"],
        evaluations["top3"],
        evaluations["loss"],
    )


def columns(
    results: Results, table: Literal["rounds", "evaluations"], run: int, names: Sequence[str]
) -> dict[str, Floats]:
    """Return some columns of a run's table, by name."""
    values = np.array(results.numbers(table, run, names), np.float64)
    return dict(zip(names, values.reshape(-1, len(names)).T, strict=True))


def elapsed(rounds: Mapping[str, Floats], evaluations: Mapping[str, Floats]) -> Floats:
    """Return the seconds that a run had computed by each of its evaluations."""
    spent = np.cumsum(np.sum([rounds[f"{phase}_ms"] for phase in PHASES], axis=0)) / 1e3
    at = np.searchsorted(rounds["round"], evaluations["round"], side="right")
    return np.asarray(np.concatenate([[0.0], spent])[at] + np.cumsum(evaluations["seconds"]))


def cost(
    rounds: Mapping[str, Floats], evaluations: Mapping[str, Floats]
) -> dict[str, float | None]:
    """Return milliseconds per round: the median of each phase, and the mean for evaluations."""
    done = len(rounds["round"])
    found: dict[str, float | None] = {
        phase: float(np.median(rounds[f"{phase}_ms"])) if done else None for phase in PHASES
    }
    found["evaluation"] = 1e3 * float(evaluations["seconds"].sum()) / done if done else None
    return found


def read_cost(results: Results, run: int) -> dict[str, float | None]:
    """Read the milliseconds per round of a run, by phase."""
    return cost(
        columns(results, "rounds", run, _SPENT), columns(results, "evaluations", run, _METRICS)
    )
