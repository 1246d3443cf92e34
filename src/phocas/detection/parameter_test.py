"""Tests of ranks in single parameters: distances, directions and lengths of their rows.

The tests by score are for faults without adversaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phocas.detection.batch_sizes import equalised
from phocas.detection.evalues import TOO_LONG, EValueTest, Strategy, products

if TYPE_CHECKING:
    import torch

    from phocas.detection.observer import Segment

Floats = NDArray[np.float64]

ABSURD = 16.0
"""A row of a parameter this many times as long as usual is no gradient."""

_COLUMNS = 8192  # sampled columns of all parameters, at most 512 and at least 32 of each
_MOST, _LEAST = 512, 32
_MEMORY = 0.9  # weight of earlier rounds in the direction of a parameter
_WHOLE = (0.3, 0.2)  # parts of the wealth for all parameters together: distances, directions
_EACH = (0.25, 0.25)  # parts that the parameters share
_STRATEGIES = (
    Strategy(0.9, striking=False, prior=0.6),
    Strategy(0.5, striking=False, prior=0.4),
)
_QUIET = 16  # rounds for each round in which honest ranks seem to be far by chance
_LASTING = np.array([0.95, 0.95**2])  # weight of earlier rounds in evidence on directions
_LARGE = math.sqrt(np.finfo(np.float64).max)  # what overflows when squared
_TINY = float(np.finfo(np.float64).tiny)


def middle(values: Floats) -> float:
    """Return the lower median: with a minority of faulty workers it is between honest values."""
    return float(np.sort(np.where(np.isnan(values), np.inf, values))[(len(values) - 1) // 2])


def absurd(lengths: Floats, usual: float, b: int) -> NDArray[np.bool_]:
    """Return which workers send absurd values, by the length of each worker's row of a parameter.

    A row has absurd values if it is 16 times as long as the median row of the parameter and as
    ``usual``, the usual length of a row of the whole unit. If this holds for more than b rows, no
    worker is returned: they cannot all be faulty. If both lengths are zero, as when others do not
    use the parameter, only a row that is not finite has absurd values.

    >>> absurd(np.array([1.0, 2.0, np.nan, 1.0]), usual=1.0, b=1)
    array([False, False,  True, False])
    """
    limit = ABSURD * max(middle(lengths), usual)
    found = ~(lengths <= limit) if limit else ~np.isfinite(lengths)
    return found if found.sum() <= b else np.zeros(len(lengths), bool)


def plausible(lengths: Floats) -> bool:
    """Return whether rows are so short that none can have absurd values in any parameter.

    A row of a parameter is no longer than the whole row. (Lengths between 15 and 16 times the usual
    are left to :func:`absurd`, since lengths are rounded.)

    >>> plausible(np.array([1.0, 2.0, 14.0])), plausible(np.array([1.0, np.nan, 1.0]))
    (True, False)
    """
    return bool((lengths <= 15 / 16 * ABSURD * middle(lengths)).all())


class Direction:
    r"""Evidence on whether each worker's rows point as those of the others do.

    Let p_ij be the product of rows i and j over the usual squared length of a row. The median of
    p_ij over j is on average the same, s, for an honest worker, for one whose rows are noisier
    (half the batch size), and c s for rows that are scaled by c. It is 0 for rows of noise and -s
    for a flipped sign. So d_i = median_j p_ij - s / 2, with the median over workers for s, is
    positive for the former and negative for the latter. Rows 1000 times as long as usual are wrong:
    for them d is negative, wherever they point. :meth:`along` is the sum of d over rounds in units
    of its root sum of squares, where later rounds weigh more. If d is symmetric about 0, it exceeds
    z with probability at most exp(-z^2 / 2).

    >>> direction = Direction(4)
    >>> for _ in range(9):
    ...     direction.observe(np.outer([1, 1, -1, 3], [1, 1, -1, 3]) + np.eye(4))
    >>> direction.along().round(1).tolist()
    [3.0, 3.0, -3.0, 3.0]
    """

    def __init__(self, num_workers: int) -> None:
        self.sums = np.zeros((2, num_workers))

    def observe(self, products: Floats) -> None:
        """Observe the inner products between the m rows of one round."""
        m = len(products)
        if m < 3:
            return
        with np.errstate(all="ignore"):
            known = products / np.sort(products.diagonal())[(m - 1) // 2]
        absurd = ~(known.diagonal() <= TOO_LONG**2)
        known.reshape(-1)[:: m + 1] = np.inf  # sorted to the end, as NaN is
        known.sort(axis=1)
        found = known[:, (m - 2) // 2]
        usual = np.sort(found)[(m - 1) // 2]
        d = np.zeros(m)
        if math.isfinite(usual):
            np.subtract(found, usual / 2, out=d, where=np.isfinite(found) & (found < _LARGE))
        d[absurd] = -1.0
        self.sums *= _LASTING[:, None]
        self.sums[0] += d
        self.sums[1] += d * d

    def along(self) -> Floats:
        """Return the evidence on each worker's direction, in standard deviations.

        The evidence is positive if the worker's rows point as those of the others do.
        """
        return np.asarray(self.sums[0] / np.sqrt(np.maximum(self.sums[1], _TINY)))

    def forget(self, worker: int) -> None:
        """Discard the evidence on a worker."""
        self.sums[:, worker] = 0.0


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sampled columns of a range of columns, by parameter."""

    parts: Sequence[Segment]
    index: torch.Tensor
    """The sampled columns."""
    starts: NDArray[np.int64]
    """Where the columns of each parameter begin among the sampled ones."""
    places: NDArray[np.int64]
    """The index of each sampled column in the memory of directions."""
    sizes: NDArray[np.int64]
    parameters: NDArray[np.int64]
    width: int
    """The number of columns of the range."""


class ParameterTest:
    r"""Tests by score of whether ranks are exchangeable in each parameter, in one rank's columns.

    Two scores are computed from a fixed sample of the columns of each parameter: the squared
    distance of a rank's values from the median of all ranks, and the angle to the recent direction
    of these medians. :class:`EValueTest` says why both are valid. Half of the wealth is shared out
    equally over the parameters, so that the false alarm probability of all tests together is that
    of one. The other half is for :func:`whole_test`, which the detector does with the sums of the
    scores over all parameters and ranks.

    A fault in one of P parameters is flagged after log(mP) / log(m - b) more observed steps than
    the same fault in all of them.

    Args:
        num_workers: the number of ranks, m.
        b: the largest number of faulty ranks.
        parameters: the number of parameters of the model.
    """

    def __init__(self, num_workers: int, b: int, parameters: int) -> None:
        self.m, self.parameters = num_workers, parameters
        shared = [part / max(1, parameters) for part in _EACH for _ in range(parameters)]
        self.each = EValueTest(
            num_workers,
            b,
            shared,
            by_score=True,
            strategies=_STRATEGIES,
            tails=[1],
            quiet=_QUIET * num_workers,  # any of m ranks may report it
        )
        self.most = min(_MOST, max(_LEAST, _COLUMNS // max(1, parameters)))
        # The last row of these arrays is for columns that belong to no known parameter.
        self.recent = np.zeros((parameters + 1, self.most))
        """The recent direction of each parameter in its sampled columns."""
        self.sampled = np.full((parameters + 1, 2), -1.0)
        """The first address and the number of columns that the direction belongs to."""
        self.directions = np.zeros((2, parameters + 1, num_workers))
        """Sums of evidence on directions, and of its squares, by parameter and rank."""
        self.layouts: dict[int, _Layout] = {}
        self._begin()

    def _begin(self) -> None:
        # Axes: distance, product with the direction, squared length; parameter; rank.
        self.sums = np.zeros((3, self.parameters + 1, self.m))
        self.lengths = np.zeros(self.parameters + 1)
        """The squared length of the recent direction in the columns of this step."""

    def take(
        self,
        rows: torch.Tensor,
        parts: Sequence[Segment],
        place: int,
        sizes: Floats | None = None,
    ) -> Floats:
        """Observe the rows of some columns; return the inner products of the sampled values.

        Args:
            rows: the rows, (m, width).
            parts: the parameters in these columns.
            place: the number of the first column in the gradient.
            sizes: the size of the batch of each rank, if ranks have different ones.
        """
        layout = self.layouts.get(place)
        parts = tuple(parts)
        if layout is None or layout.parts != parts or layout.width != rows.shape[1]:
            layout = self.layouts[place] = self._layout(rows, parts)
        values = rows.index_select(1, layout.index).double().cpu().numpy()
        known_products = products(values)
        if sizes is not None:
            values = equalised(values, sizes)
        ordered = np.sort(values, axis=0)
        half = (self.m - 1) // 2
        centre = (ordered[half] + ordered[self.m - 1 - half]) / 2
        recent = self.recent.reshape(-1)[layout.places]
        known = np.empty((3, *values.shape))
        with np.errstate(all="ignore"):
            np.square(values - centre, out=known[0])
            np.multiply(values, recent, out=known[1])
            np.square(values, out=known[2])
            sums = np.add.reduceat(known, layout.starts, axis=2)
            self.sums[:, layout.parameters] += sums.transpose(0, 2, 1)
            self.lengths[layout.parameters] += np.add.reduceat(recent * recent, layout.starts)
            self._remember(layout, centre, recent)
        return known_products

    def _remember(self, layout: _Layout, centre: Floats, recent: Floats) -> None:
        """Update the recent direction of the parameters by the medians of this step."""
        lengths = np.sqrt(np.add.reduceat(centre * centre, layout.starts))
        new = np.repeat(np.where(lengths > 0, (1 - _MEMORY) / lengths, np.nan), layout.sizes)
        found = _MEMORY * recent + new * centre
        known = self.recent.reshape(-1)
        known[layout.places] = np.where(np.isfinite(found), found, recent)

    def _layout(self, rows: torch.Tensor, parts: Sequence[Segment]) -> _Layout:
        """Choose the columns to sample: those of each parameter at equal distances."""
        import torch  # noqa: PLC0415 - only observers of tensors need it

        width = rows.shape[1]
        known = [part for part in parts if part.begin < part.end]
        ranges = [(part.parameter, part.begin, part.end) for part in known] or [(-1, 0, width)]
        columns, found = [], []
        for parameter, begin, end in ranges:
            size = min(self.most, end - begin)
            columns.append(begin + np.arange(size) * (end - begin) // size)
            found.append((parameter, size))
        for part in known:
            label = (part.first + part.before, part.end - part.begin)
            if tuple(self.sampled[part.parameter]) != label:  # other columns than before
                self.sampled[part.parameter] = label
                self.recent[part.parameter] = 0.0
        parameters, sizes = (np.array(each) for each in zip(*found, strict=True))
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        index = torch.from_numpy(np.concatenate(columns)).to(rows.device)
        rows_of = parameters % (self.parameters + 1) * self.most
        places = np.concatenate(
            [row + np.arange(size) for row, size in zip(rows_of, sizes, strict=True)]
        )
        return _Layout(parts, index, starts, places, sizes, parameters, width)

    def totals(self) -> Floats:
        """Return the sums of this step over all parameters, for :func:`whole_scores`."""
        return np.concatenate([self.sums.sum(axis=1).ravel(), [self.lengths.sum()]])

    def observe(self) -> Floats:
        """Bet on the scores of this step, and return the evidence against each rank."""
        distances, along, squares = self.sums
        with np.errstate(all="ignore"):
            angles = 1 - along / np.sqrt(squares * self.lengths[:, None])
        self._note_directions(1 - angles, squares)
        scores = np.stack([distances, np.maximum(angles, 0.0)])[:, : self.parameters]
        scores[:, (squares[: self.parameters] == 0).all(axis=1)] = np.inf  # not observed here
        scores[np.isnan(scores)] = np.inf
        self._begin()
        if not self.parameters:
            return np.zeros(self.m)
        return self.each.observe(scores.reshape(-1, 1, self.m))

    def _note_directions(self, cosines: Floats, squares: Floats) -> None:
        """Record whether each rank's values point as the others' do, as :class:`Direction` does."""
        middle = (self.m - 1) // 2
        usual = np.sort(cosines, axis=1)[:, middle, None]
        d = np.where(np.isfinite(cosines) & np.isfinite(usual), cosines - usual / 2, 0.0)
        d[~(squares <= TOO_LONG**2 * np.sort(squares, axis=1)[:, middle, None])] = -1.0
        self.directions *= _LASTING[:, None, None]
        self.directions[0] += d
        self.directions[1] += d * d

    def by_parameter(self) -> Floats:
        """Return the part of each rank's e-value that comes from each parameter, (P, m)."""
        wealth = np.add.reduce(self.each.wealth, axis=(1, 2, 3))
        return np.asarray(wealth.reshape(len(_EACH), -1, self.m).sum(axis=0))

    def along(self, parameter: int) -> Floats:
        """Return whether the values of each rank point as the others', in standard deviations."""
        total, squares = self.directions[:, parameter]
        return np.asarray(total / np.sqrt(np.maximum(squares, _TINY)))

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays of the state, for a checkpoint."""
        return {
            **self.each.arrays(),
            "recent": self.recent,
            "sampled": self.sampled,
            "directions": self.directions,
        }

    @property
    def rounds(self) -> int:
        """Return the number of observed steps."""
        return self.each.rounds

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self.each.rounds = rounds
        self.layouts.clear()
        self._begin()

    def forget(self, rank: int) -> None:
        """Discard the wealth of all bets on a rank."""
        self.each.forget(rank)
        self.directions[:, :, rank] = 0.0


def whole_test(num_workers: int, b: int) -> EValueTest:
    """Return the test of all parameters together, by the scores of :func:`whole_scores`."""
    return EValueTest(num_workers, b, _WHOLE, by_score=True, quiet=_QUIET)


def whole_scores(totals: Floats) -> Floats:
    """Return the scores of m ranks in all columns, (2, 1, m), from :meth:`ParameterTest.totals`.

    ``totals`` is (holders, 3m + 1).
    """
    with np.errstate(all="ignore"):
        sums = totals.sum(axis=0)
        scores, along, squares = sums[:-1].reshape(3, 1, -1)
        found = np.stack([scores, np.maximum(1 - along / np.sqrt(squares * sums[-1]), 0.0)])
    found[np.isnan(found)] = np.inf
    return found
