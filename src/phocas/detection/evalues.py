"""E-values: tests by betting on distances between rows, valid whatever Byzantine workers send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RUN_LENGTH = 100_000
"""The number of observed rounds for which the false alarm probability is stated."""

_SOON = 0.9  # part of the wealth for faults that begin early
MAX_WEALTH = 1e30
"""Larger wealth is capped, so that it cannot overflow."""

_STRIKING = 4.0  # squared distance, in units of what was usual in the rounds before
_MEMORY = 0.9  # weight of the past in what is usual
MEASURES = (0.9, 0.1)
"""Parts of the initial wealth: for bets on squared distances, and on angles."""

TOO_LONG = 1000.0
"""A row this many times as long as usual is no gradient: no loss scale or batch explains it."""

_LASTING = np.array([[0.95], [0.95**2]])  # weight of earlier rounds in evidence on directions
_LARGE = math.sqrt(np.finfo(np.float64).max)  # what overflows when squared
_TINY = float(np.finfo(np.float64).tiny)

_MAX_BETS = 1 << 22  # bets held at once; with more than 400 workers fewer tail sizes are used


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to bet: the fraction of wealth at stake, in every round or only in striking rounds.

    A round is striking if some distance exceeds a limit that was fixed before the round.
    """

    fraction: float
    striking: bool
    prior: float
    """The part of the initial wealth that bets in this way."""


# For faults that show in every round, in most, now and then; and for rare ones that are large.
STRATEGIES = (
    Strategy(0.95, striking=False, prior=0.42),
    Strategy(0.6, striking=False, prior=0.1),
    Strategy(0.2, striking=False, prior=0.1),
    Strategy(0.9, striking=True, prior=0.38),
)


def products(sample: Floats) -> Floats:
    """Return the (m, m) matrix of inner products between the m rows of a sample.

    The matrix for all columns is the sum of the matrices for ranges of columns.
    """
    flat = sample.reshape(len(sample), -1)
    with np.errstate(all="ignore"):
        return np.asarray(flat @ flat.T)


def distances(products: Floats) -> Floats:
    """Return how far m rows are from one another by two measures, (2, m, m), from their products.

    These are squared distances, which show what is large, and 1 minus the cosine of the angle,
    which shows what points elsewhere. Rows that are not finite, or overflow when squared, are
    infinitely far from all others. In double precision, products distinguish float32 rows that
    differ in their last bit.
    """
    squares = products.diagonal()
    found = np.empty((2, *products.shape))
    with np.errstate(all="ignore"):
        np.add(squares[:, None], squares, out=found[0])
        found[0] -= 2.0 * products
        lengths = np.sqrt(squares)
        np.subtract(1.0, products / lengths[:, None] / lengths, out=found[1])
    np.maximum(found, 0.0, out=found)  # keeps NaN
    found[np.isnan(found)] = np.inf
    found.reshape(2, -1)[:, :: len(products) + 1] = 0.0
    return found


def angles(sample: Floats, direction: Floats) -> Floats:
    """Return how far each of m rows points from a direction: 1 minus the cosine of the angle.

    All rows are infinitely far from a direction of length zero.

    >>> angles(np.array([[3.0, 0.0], [-1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 0.0]))
    array([0., 2., 1.])
    """
    rows, way = sample.reshape(len(sample), -1), direction.reshape(-1)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("mc,mc->m", rows, rows))
        apart = 1.0 - rows @ way / lengths / np.sqrt(way @ way)
    apart[np.isnan(apart)] = np.inf
    return np.asarray(np.maximum(apart, 0.0))


def tail_sizes(num_workers: int, b: int, *, by_score: bool = False) -> list[int]:
    """Return the numbers r for which the test bets on the r farthest workers.

    >>> tail_sizes(20, 6), tail_sizes(5, 2), tail_sizes(3, 1), tail_sizes(3, 1, by_score=True)
    ([1, 2, 3, 4, 6], [1], [], [1])
    """
    found = [r for r in _up_to(b) if r < num_workers - b - (not by_score)]
    few = max(1, _MAX_BETS // (len(MEASURES) * len(STRATEGIES) * num_workers**2))
    return found[:: max(1, -(-len(found) // few))]


def _up_to(b: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 9, 13, ... up to b: one of them is near any number of faults."""
    found = list(range(1, min(b, 4) + 1))
    while found and found[-1] < b:
        found.append(min(b, found[-1] * 3 // 2))
    return found


def invested_by(rounds: int) -> float:
    """Return the wealth that has been put into play after so many observed rounds.

    In every round some new wealth begins to bet: each round is the start of an e-process, and their
    sum is an e-detector. So bets on a fault that begins late have wealth that was not lost before.
    Nine tenths of the wealth follow 1 / (t log^2 t), for faults that begin early. The last tenth is
    spread evenly over RUN_LENGTH rounds, so that the delay after the onset has a limit
    that does not depend on the onset. The sum is at most 1 after RUN_LENGTH rounds.

    >>> round(invested_by(1), 3), invested_by(RUN_LENGTH) < 1
    (0.45, True)
    """
    return _SOON * (1 - 1 / (1 + math.log2(1 + rounds))) + (1 - _SOON) * rounds / RUN_LENGTH


class EValueTest:
    r"""A test by betting of whether workers are exchangeable.

    Let d(k, i) be the distance of row i from row k, by any measure of these two rows and of what
    was known before the round. Let b be the largest number of Byzantine workers among m, and R_ki =
    #{j != k : d(k, j) >= d(k, i)} the rank of worker i from reference k: 1 for the farthest, and no
    worker has rank 1 if two are equally far. Each pair (k, i) begins with wealth 1, and in every
    round bets a fraction s of it on R_ki <= r. The wealth is multiplied by

        1 - s + s (m - b - 1) / r   if R_ki <= r,    and by 1 - s if not.

    **For honest i and k this bet is fair or worse.** Let H be the honest workers, |H| >= m - b, and
    R'_ki the rank among them alone. Byzantine workers only add to those at least as far, so R'_ki
    <= R_ki. R'_ki depends on honest rows and the past alone: it does not matter which rows
    Byzantine workers send, even if they see the honest rows first. At most r workers of H \ {k}
    have R'_k. <= r. Given the past and row k, the other honest rows are exchangeable, so that each
    has the same probability, P(R_ki <= r) <= P(R'_ki <= r) <= r / (|H| - 1) <= r / (m - b - 1), and
    the expected wealth does not grow.

    **Tests by score** have one score for each worker instead of distances from references. The
    m - b or more honest rows of this round are exchangeable given the past. So if the scores of
    honest workers are exchangeable as well, P(R_i <= r) <= r / (m - b), and the wealth that wins is
    multiplied by 1 - s + s (m - b) / r. There are two such scores:

    - *The angle to a direction known before the round*, such as the recent direction of the model.
      Byzantine workers may have influenced the direction. But it was fixed before the honest rows
      of this round were drawn, so these rows are exchangeable given the direction.
    - *The distance from the median of all rows.* This score is valid for faults without
      adversaries only: faulty rows must not depend on which honest worker has which row. Malicious
      workers that see the honest rows first can move the median away from one of them.

    The same holds for these variations:

    - *Striking rounds only.* Call j striking if d(k, j) exceeds a limit that was fixed before the
      round. Nothing is bet in a round without a striking worker, and only striking workers win.
      With N striking honest workers at most min(r, N) honest workers win, so the expected gain is
      at most s 1{N > 0}, and the stake is lost whenever N > 0 or a Byzantine worker is striking.
    - *A reference without a row.* If every d(k, j) is infinite (row k is missing or NaN), nothing
      is bet. A bet would lose in such a round for every honest worker.
    - *Mixtures.* Wealth may be divided beforehand: over several r, fractions, limits and measures.
      Wealth may be discarded.

    Of the wealth, :func:`invested_by` begins to bet within t rounds. So for honest i and k the
    wealth M_ki, plus what will begin to bet until round t, is a nonnegative supermartingale from
    invested_by(t). Among the m - 1 references of worker i at most b are Byzantine. :meth:`evidence`
    is the mean of the m - 1 - b smallest of its M_ki. It is at most the mean over some m - 1 - b
    honest references at all times. By Ville's inequality it reaches m / alpha within t rounds with
    probability at most invested_by(t) alpha / m, which is at most alpha / m for t = RUN_LENGTH.
    """

    def __init__(
        self,
        num_workers: int,
        b: int,
        parts: Sequence[float] = MEASURES,
        *,
        by_score: bool = False,
        strategies: Sequence[Strategy] = STRATEGIES,
        tails: Sequence[int] | None = None,
        quiet: int = 16,
    ) -> None:
        """Begin with a part of wealth 1 for each measure.

        Args:
            num_workers: m.
            b: the largest number of Byzantine workers.
            parts: the parts of the initial wealth, one for each measure.
            by_score: whether a worker has one score in each measure, not a distance from each
                reference.
            strategies: the ways to bet, those for striking rounds last.
            tails: the numbers r, those of :func:`tail_sizes` if not given.
            quiet: mean rounds from one true :meth:`growing` to the next, if all are honest.
        """
        self.num_workers, self.b = num_workers, b
        known = tail_sizes(num_workers, b, by_score=by_score)
        self.tails = known if tails is None else [r for r in tails if r in known]
        references = 1 if by_score else num_workers
        # Axes: measure, strategy, tail size, reference, worker.
        self.wealth = np.zeros(
            (len(parts), len(strategies), len(self.tails), references, num_workers)
        )
        self.usual = np.full(len(parts), np.nan)
        self.rounds = 0
        tail = np.array(self.tails, np.float64)[:, None, None]
        fraction, prior = (
            np.array([getattr(strategy, name) for strategy in strategies])[:, None, None, None]
            for name in ("fraction", "prior")
        )
        each = np.array(parts)[:, None, None, None, None]
        self._invested = each * prior / tail / (1 / tail).sum()
        self._lose = 1 - fraction
        exchangeable = num_workers - b - (not by_score)
        self._win = 1 + fraction * exchangeable / tail / self._lose  # after the loss
        self._nearer = [num_workers - 1 - r for r in self.tails]
        always = sum(not strategy.striking for strategy in strategies)
        self._always, self._if_striking = slice(always), slice(always, len(strategies))
        self.streaks = np.zeros((len(parts), num_workers))
        """By measure, how often each worker has lately been the farthest; else it is halved."""
        self._most_references = 1 if by_score else max(1, num_workers - 1 - b)
        chances = quiet * max(1, len(parts)) * num_workers
        self._streak = math.log(chances) / math.log(max(2, num_workers))

    def observe(self, distances: Floats) -> Floats:
        """Bet on the distances of one round, and return the evidence after it.

        ``distances`` is (2, m, m) as of :func:`distances`, or (measures, 1, m) of scores.
        """
        stake = invested_by(self.rounds + 1) - invested_by(self.rounds)
        self.rounds += 1
        m = self.num_workers
        if not self.tails:
            return np.zeros(m)
        self.wealth += self._invested * stake
        ordered = np.sort(distances, axis=2)
        # R <= r says that fewer than r others are as far: that the one after r of them is nearer.
        limits = ordered[:, :, self._nearer].transpose(0, 2, 1)
        won = (distances[:, None] > limits[..., None])[:, None]
        present = np.isfinite(ordered[:, :, 1])
        farthest = won[:, 0, 0].sum(axis=1) >= self._most_references
        np.copyto(self.streaks, np.where(farthest, self.streaks + 1, self.streaks // 2))
        self._settle(self._always, present, won)
        exceeded = ordered[:, :, -1] > _STRIKING * self.usual[:, None]  # never while it is NaN
        if exceeded.any():
            striking = distances > _STRIKING * self.usual[:, None, None]
            staked = present & striking.any(axis=2)
            self._settle(self._if_striking, staked, won & striking[:, None, None])
        # The quartile of a reference at the quartile of references: mostly pairs of honest workers.
        now = np.sort(ordered[:, :, m // 4], axis=1)[:, ordered.shape[1] // 4]
        kept = np.where(np.isnan(self.usual), now, _MEMORY * self.usual + (1 - _MEMORY) * now)
        np.copyto(self.usual, kept, where=np.isfinite(now))
        return self.evidence()

    def growing(self, known: Sequence[int] = ()) -> bool:
        """Return whether some worker has lately been the farthest more often than chance explains.

        Then the next round should be observed.

        Args:
            known: workers that do not count, as they are flagged.
        """
        streaks = self.streaks.max(axis=0, initial=0.0)
        streaks[list(known)] = 0.0
        return bool((streaks >= self._streak).any())

    def _settle(
        self, strategies: slice, staked: npt.NDArray[np.bool_], wins: npt.NDArray[np.bool_]
    ) -> None:
        """Update the wealth: subtract the stakes of all bets, and add the gains of won bets."""
        wealth, lose = self.wealth[:, strategies], self._lose[strategies]
        wealth *= lose if staked.all() else np.where(staked[:, None, None, :, None], lose, 1.0)
        np.multiply(wealth, self._win[strategies], out=wealth, where=wins)

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays of the state, for a checkpoint."""
        return {"money": self.wealth, "usual": self.usual, "streaks": self.streaks}

    def forget(self, worker: int) -> None:
        """Discard the wealth of all bets on a worker, and of bets with the worker as reference."""
        self.wealth[..., worker] = 0.0
        if self.wealth.shape[-2] > 1:
            self.wealth[..., worker, :] = 0.0

    def evidence(self) -> Floats:
        """Return the e-value of each worker.

        The e-value is the mean wealth of the bets on the worker, over the m - 1 - b references with
        the smallest wealth.
        """
        if not self.tails:
            return np.zeros(self.num_workers)
        won: Floats = np.add.reduce(self.wealth, axis=(0, 1, 2))
        if won.max() > MAX_WEALTH:
            np.minimum(self.wealth, MAX_WEALTH, out=self.wealth)
            won = np.add.reduce(self.wealth, axis=(0, 1, 2))
        m = self.num_workers
        if len(won) == 1 < m:  # scores
            return np.asarray(won[0])
        won.reshape(-1)[:: m + 1] = np.inf  # a worker is not its own reference
        won.sort(axis=0)
        return np.asarray(np.add.reduce(won[: m - 1 - self.b], axis=0) / (m - 1 - self.b))


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
        self.sums *= _LASTING
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
