"""The comparison of the rows of one round: what the detector needs of them.

Rows are compared in a new sample of columns in each round, with one another and with the direction
in which the model has moved in the last rounds. Honest gradients mostly agree with this direction,
and rows with flipped signs point the other way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phocas.detection.evalues import angles, products

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]

RUNS = 32
WIDTH = 32  # neighbouring columns: 128 bytes of a row are read as quickly as one value
_SPAN = 16  # rounds: steps of fewer are mostly noise, and gradients of long ago point elsewhere
_ABSURD = 1e6  # values so many times the usual size are no gradients

CUTOFFS = (4.0, 8.0, 16.0, 64.0, 1024.0)
"""The cutoffs, in standard deviations."""

GROSS = 64.0
"""Values beyond this cutoff are no gradients; beyond 16 deviations some honest values are."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the columns: ``runs`` groups of ``width`` neighbouring columns each.

    The groups start at equal distances, so that every layer has columns in the sample.

    Attributes:
        start: the first column of the first group.
        runs: the number of groups.
        stride: the number of columns from the start of a group to the start of the next.
        width: the number of columns of a group.
    """

    start: int
    runs: int
    stride: int
    width: int

    @classmethod
    def draw(cls, d: int, rng: np.random.Generator) -> Sample:
        """Draw a sample of d columns: all are equally likely, except the outermost.

        >>> Sample.draw(118_282, np.random.default_rng(0))
        Sample(start=3126, runs=32, stride=3696, width=32)
        """
        runs = min(RUNS, d)
        stride = d // max(1, runs)
        width = min(WIDTH, stride)
        spare = d - (runs - 1) * stride - width if runs else 0
        return cls(int(rng.integers(spare + 1)), runs, stride, width)

    @classmethod
    def even(cls, d: int, columns: int) -> Sample:
        """Return a fixed sample of about ``columns`` of d columns: groups of eight neighbours.

        >>> Sample.even(118_282, 256)
        Sample(start=1844, runs=32, stride=3696, width=8)
        """
        runs = max(1, min(columns // 8, d))
        stride = d // runs
        width = min(8, stride)
        return cls((stride - width) // 2, runs, stride, width)

    def take(self, rows: Any) -> Floats:
        """Return the sampled values of an (m, d) array or tensor: (m, runs, width)."""
        begin = rows[:, self.start :]
        if not isinstance(rows, np.ndarray):  # a tensor, perhaps of a type that NumPy lacks
            row, item = begin.stride()
            seen = begin.as_strided(
                (len(rows), self.runs, self.width), (row, self.stride * item, item)
            )
            return np.asarray(seen.double().cpu().numpy())
        row, item = begin.strides
        seen = np.lib.stride_tricks.as_strided(
            begin,
            (len(rows), self.runs, self.width),
            (row, self.stride * item, item),
            writeable=False,
        )
        return _doubles(seen)

    def columns(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sampled columns within a range, counted from the first column of the range."""
        starts = self.start + self.stride * np.arange(self.runs)
        found = (starts[:, None] + np.arange(self.width)).ravel()
        return found[(found >= first) & (found < stop)] - first

    def joined(self, parts: Sequence[npt.NDArray[np.floating]]) -> Floats:
        """Return the result of :meth:`take`, joined from the sampled columns of all ranges."""
        whole = _doubles(np.concatenate(parts, axis=1))
        return whole.reshape(len(whole), self.runs, self.width)

    def owners(self, bounds: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """Return the range that contains each group of the sample, or -1 if two ranges share it."""
        starts = self.start + self.stride * np.arange(self.runs)
        stops = np.array([stop for _, stop in bounds])
        first = np.searchsorted(stops, starts, side="right")
        last = np.searchsorted(stops, starts + self.width - 1, side="right")
        return np.where(first == last, first, -1)


def _doubles(values: npt.NDArray[np.floating]) -> Floats:
    with np.errstate(invalid="ignore"):  # random bits may be signalling NaN
        return values.astype(np.float64)


@dataclass(frozen=True, slots=True)
class OutlierCount:
    """The outliers in some columns of one round."""

    cutoff: float
    """The cutoff: how many deviations from the centre a value may be."""
    most: int
    """The largest number of them in one column."""
    rows: int
    """The number of workers with at least one."""
    share: float
    """Their share of all values."""


def count_outliers(values: npt.ArrayLike) -> tuple[OutlierCount, ...]:
    """Count the values beyond each cutoff in some columns, (m, columns) or (m, runs, width).

    The centre of a column is the median. The deviation of a column is the larger of two numbers:
    the distance from the centre within which half of the values are, and the root mean square of
    this distance over all columns. Fewer than half of the workers cannot change either of them
    arbitrarily. Sparse columns need the second number, because half of their values are often zero.
    The second number is too large for columns of layers with small gradients, so counts are lower
    bounds. NaN and inf are beyond every cutoff. If the deviation is zero because all columns are
    sparse, only NaN and inf are beyond the cutoffs.

    >>> values = np.random.default_rng(0).normal(size=(9, 64))
    >>> values[:2, 5] = np.inf, -300
    >>> [(each.cutoff, each.most, each.rows) for each in count_outliers(values) if each.cutoff > 8]
    [(16.0, 2, 2), (64.0, 2, 2), (1024.0, 1, 1)]
    """
    rows = np.asarray(values, np.float64)
    columns = np.ascontiguousarray(rows.reshape(len(rows), -1).T)
    m = len(rows)
    b = (m - 1) // 2
    wrong = ~np.isfinite(columns)
    with np.errstate(all="ignore"):
        ordered = np.sort(np.where(np.isnan(columns), np.inf, columns), axis=1)
        apart = np.abs(columns - ordered[:, b : m - b].mean(axis=1, keepdims=True))
        apart[np.isnan(apart)] = np.inf
        radius = np.partition(apart, m - 1 - b, axis=1)[:, m - 1 - b]
        known = radius[np.isfinite(radius)]
        usual = np.sqrt(np.square(known).mean()) if known.any() else np.inf
        deviation = np.maximum(radius, usual)[:, None]
        found = []
        for cutoff in CUTOFFS:
            beyond = wrong | (apart > cutoff * deviation)
            most = int(beyond.sum(axis=1).max(initial=0))
            share = float(beyond.mean()) if beyond.size else 0.0
            found.append(OutlierCount(cutoff, most, int(beyond.any(axis=0).sum()), share))
    return tuple(found)


@dataclass(frozen=True, eq=False, slots=True)
class Comparison:
    """Numbers that compare m rows in a sample of their columns.

    How many numbers there are depends on m and on the groups of columns, not on the columns. So a
    server that has the values can send these numbers instead.
    """

    products: Floats
    """The inner products of the rows, (m, m)."""
    sizes: Floats
    """The length of each row in each group of neighbouring columns, (m, groups)."""
    angles: Floats | None = None
    """How far each row points from a direction that was known before the round, (m,)."""
    outliers: tuple[OutlierCount, ...] = ()
    """The numbers of outliers, if requested."""


def compare(
    values: Floats,
    direction: Floats | None = None,
    *,
    momentum: float = 0.0,
    before: Floats | None = None,
    outliers: bool = False,
) -> Comparison:
    """Compare the rows of one round.

    Args:
        values: the values of a sample of the columns, (m, groups, width), or rows, (m, columns).
        direction: a direction in these columns that was known before the round.
        momentum: the momentum of the rows; only what is new in them is compared.
        before: the values of the round before in the same columns, for rows with momentum.
        outliers: whether to count the outliers of the values.

    >>> found = compare(np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([0.0, 1.0]))
    >>> found.products.tolist(), found.sizes.ravel().tolist(), found.angles.tolist()
    ([[25.0, 8.0], [8.0, 4.0]], [5.0, 2.0], [0.19999999999999996, 0.0])
    """
    new = values
    if momentum and before is not None:
        with np.errstate(all="ignore"):
            new = values - momentum * before
    return Comparison(
        products(new),
        group_sizes(new),
        None if direction is None else angles(new, direction),
        count_outliers(values) if outliers else (),
    )


def group_sizes(values: Floats) -> Floats:
    """Return the length of each row in each group of columns, (m, groups); NaN stays NaN."""
    groups = values.reshape(len(values), -1, values.shape[-1])
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(np.einsum("mrw,mrw->mr", groups, groups)))


class RecentDirection:
    """The difference of the parameters 16 to 32 rounds ago and now.

    The difference is the sum of the steps of these rounds, with the sign of the gradients. The
    class keeps two snapshots of the parameters, one of which is replaced every 16 rounds.

    >>> import torch
    >>> vector = torch.zeros(4)
    >>> direction = RecentDirection(vector)
    >>> _ = vector.sub_(torch.tensor([1.0, 0.0, -1.0, 0.5]))
    >>> direction.sampled(Sample(start=0, runs=2, stride=2, width=2)).ravel()
    array([ 1. ,  0. , -1. ,  0.5])
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._older, self._newer = vector.clone(), vector.clone()

    def sampled(self, sample: Sample) -> npt.NDArray[np.float64]:
        """Return the direction in the columns of a sample, (runs, width)."""
        now, then = (sample.take(vector[None])[0] for vector in (self._vector, self._older))
        return np.asarray(then - now)

    def advance(self, rounds_done: int) -> None:
        """Take a snapshot of the parameters every 16 rounds."""
        if rounds_done % _SPAN == 0:
            self._older, self._newer = self._newer, self._older
            self._newer.copy_(self._vector)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint."""
        return {"older": self._older, "newer": self._newer}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self._older.copy_(state["older"])
        self._newer.copy_(state["newer"])


class AbsurdServers:
    """The servers in whose columns the values of workers are absurd.

    A group of neighbouring values is absurd if the values are not finite or a million times the
    usual size, and if the worker sent no such values to at least half of the servers. The usual
    size is the median of a round, and the largest of these medians so far: gradients of workers
    that have learned their own data vanish, which does not make another worker's gradient absurd.

    Args:
        num_workers: m.
        bounds: the column ranges of the servers.
    """

    def __init__(self, num_workers: int, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = bounds
        self.found = np.zeros((len(bounds), num_workers))
        """1 where a server has received absurd values of a worker, (servers, m)."""
        self.size = np.zeros(1)

    def observe(self, sizes: Floats, sample: Sample) -> None:
        """Observe the lengths of rows in the groups of a sample of the columns, (m, runs)."""
        if not self.bounds:
            return
        usual = np.partition(sizes.ravel(), sizes.size // 2)[sizes.size // 2]
        if not usual < math.inf:
            return
        np.maximum(self.size, usual, out=self.size)
        absurd = ~(sizes <= _ABSURD * self.size)
        if not absurd.any() or not self.size:
            return
        owners = sample.owners(self.bounds)
        found = np.zeros(self.found.shape, bool)
        for server in set(owners.tolist()) - {-1}:
            found[server] = absurd[:, owners == server].any(axis=1)
        found &= found.sum(axis=0) <= len(found) / 2
        self.found[found] = 1
