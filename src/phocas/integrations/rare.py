"""Parameters in which most values come from few ranks, such as embeddings of rare tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phocas.rules import Rule
from phocas.rules.sampling import Sample

if TYPE_CHECKING:
    from phocas.integrations.witness import Segment

Floats = NDArray[np.float64]

_ENOUGH = 64  # sampled columns of a parameter
_NOTABLE = 0.02  # share of columns with values of few ranks


def by_coordinates(rule: Rule, m: int) -> bool:
    """Tell whether a rule drops single values of the m rows, and not whole rows only."""
    window = rule.window(m)
    chooses = not window.plain and bool(window.trim or window.drop)
    return not window.watched and (chooses or rule.cleanup(m) is not None)


class RareFeatures:
    """Counts, for each parameter, of sampled values that are zero and of those that are rare.

    A value is rare if more than half of the ranks have zero in its column. A rule that goes by
    coordinates takes it for an outlier and drops it in every step.
    """

    def __init__(self, m: int, parameters: int) -> None:
        self.m = m
        self.columns = np.zeros(parameters, np.int64)
        self.zeros = np.zeros((parameters, m), np.int64)
        self.rare = np.zeros((parameters, m), np.int64)

    def count(self, values: Floats, sample: Sample, parts: Sequence[Segment]) -> None:
        """Count the (m, runs, width) values of a sample of columns that lie within the parts."""
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
        """Return the parameter with the most rare values, or NaN.

        More than half of its values are zero on more than half of the ranks. The b ranks with the
        most rare values do not count, since they may be Byzantine.
        """
        mostly_zero = 2 * (self.columns < 2 * self.zeros.T).sum(axis=0) > self.m
        rare = np.sort(self.rare)[:, : self.m - b].sum(axis=1)
        counted = mostly_zero & (self.columns >= _ENOUGH) & (rare > _NOTABLE * self.columns)
        return float(np.argmax(rare * counted)) if counted.any() else np.nan
