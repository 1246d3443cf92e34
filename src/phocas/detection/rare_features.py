"""Parameters in which most values come from few ranks, such as embeddings of rare tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phocas.detection.comparison import Sample
from phocas.rules import Rule
from phocas.rules.base import plan_of

if TYPE_CHECKING:
    from phocas.detection.observer import Segment

Floats = NDArray[np.float64]

_ENOUGH = 64  # sampled columns of a parameter
_NOTABLE = 0.02  # share of columns with values of few ranks


def by_coordinates(rule: Rule, m: int) -> bool:
    """Return whether a rule drops single values that few of the m rows have."""
    plan = plan_of(rule, m)
    chooses = not plan.window.plain and bool(plan.window.trim or plan.window.drop)
    drops = chooses and not plan.keeps_tail
    return plan.monitored is None and (drops or plan.filtering is not None)


class RareFeatures:
    """Counts, for each parameter, of sampled values that are zero and of those that are rare.

    A value is rare if it is not zero, and more than half of the ranks have zero in its column. A
    rule that reduces each column treats a rare value as an outlier and drops it in every step.
    """

    def __init__(self, m: int, parameters: int) -> None:
        self.m = m
        self.columns = np.zeros(parameters, np.int64)
        self.zeros = np.zeros((parameters, m), np.int64)
        self.rare = np.zeros((parameters, m), np.int64)

    def count(self, values: Floats, sample: Sample, parts: Sequence[Segment]) -> None:
        """Count the zeros and the rare values in a sample of columns, for each parameter.

        Args:
            values: the sampled values, (m, runs, width).
            sample: the columns that were sampled.
            parts: the parameters to which the columns belong.
        """
        if not parts:
            return
        zero = values.reshape(self.m, -1) == 0
        rare = ~zero & (2 * zero.sum(axis=0) > self.m)
        starts = sample.start + sample.stride * np.arange(sample.runs)
        columns = (starts[:, None] + np.arange(sample.width)).ravel()
        ends = np.searchsorted(columns, [(part.begin, part.end) for part in parts])
        keys = [part.parameter for part in parts]
        np.add.at(self.columns, keys, ends[:, 1] - ends[:, 0])
        for counts, these in ((self.zeros, zero), (self.rare, rare)):
            sums = np.pad(these.cumsum(axis=1), ((0, 0), (1, 0)))
            np.add.at(counts, keys, (sums[:, ends[:, 1]] - sums[:, ends[:, 0]]).T)

    def found(self, b: int) -> float:
        """Return the number of the parameter with the most rare values, or NaN.

        Only parameters count in which, on more than half of the ranks, more than half of the values
        are zero. The b ranks with the most rare values do not count, since they may be Byzantine.
        """
        mostly_zero = 2 * (self.columns < 2 * self.zeros.T).sum(axis=0) > self.m
        rare = np.sort(self.rare)[:, : self.m - b].sum(axis=1)
        counted = mostly_zero & (self.columns >= _ENOUGH) & (rare > _NOTABLE * self.columns)
        return float(np.argmax(rare * counted)) if counted.any() else np.nan
