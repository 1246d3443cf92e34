"""E-values: tests by betting on distances between rows, valid whatever Byzantine workers send.

Beside the tests: since when a worker is faulty, and whether one drifts.
"""

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


_EARLY = 64  # rounds in which most wealth is new
_GROWTH = 0.1  # log wealth per round: faster growth marks the onset
_SCORES_PER_DOUBLING = 4  # resolution of the scores that a worker is compared to its past by
_DOUBLINGS = 8
_FIRST = 20  # rounds before a worker is compared to its past

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


class Onset:
    """The round in which the wealth of the bets on each worker began to grow.

    The wealth falls or stays while a worker is honest, and grows by a factor in every round in
    which the worker is faulty. There are two estimates, of which the earlier one counts. The first
    is the round after the last minimum of log(wealth) - 0.1 t over the observed rounds t. It is
    late if new wealth has to grow beyond old wealth. The second is for faults that begin after
    round 64, where there is old wealth: the first round of the present series of rounds in which
    wealth grew by more than was put into play. Single rounds without growth do not end a long
    series.

    >>> onset = Onset(2)
    >>> for round in range(1, 9):
    ...     onset.observe(np.array([0.5, 0.5 * 2.0 ** max(0, round - 4)]), round)
    >>> onset.rounds.tolist()
    [9, 5]
    """

    def __init__(self, num_workers: int) -> None:
        self.lowest = np.full(num_workers, math.log(invested_by(1)))
        self.after_lowest = np.ones(num_workers)
        self.series = np.zeros((3, num_workers))
        """The wealth before, the length of the present series, and its first round."""
        self.observed = 0

    @property
    def rounds(self) -> npt.NDArray[np.int64]:
        """Return the estimated onset of each worker."""
        lengths, begun = self.series[1:]
        first = np.where((lengths > 0) & (begun > _EARLY), begun, np.inf)
        return np.minimum(self.after_lowest, first).astype(np.int64)

    def observe(
        self, wealth: Floats, round: int, known: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Observe the wealth of each worker after a round (from 1).

        The estimates of ``known`` workers, which are flagged already, do not change.
        """
        new = invested_by(self.observed + 1) - invested_by(self.observed)
        self.observed += 1
        unknown = np.ones(len(wealth), bool) if known is None else ~known
        level = np.log(np.maximum(wealth, 1e-300)) - _GROWTH * self.observed
        lower = unknown & (level <= self.lowest)
        self.lowest[lower] = level[lower]
        self.after_lowest[lower] = round + 1
        before, lengths, first = self.series
        grew = wealth - before > new
        first[grew & unknown & (lengths == 0)] = round
        np.copyto(lengths, np.where(grew, lengths + 1, lengths // 2), where=unknown)
        before[:] = wealth

    def forget(self, worker: int) -> None:
        """Discard the observations of a worker."""
        self.lowest[worker] = np.inf
        self.series[:, worker] = 0.0

    def state(self) -> Floats:
        """Return the state for a checkpoint, (3, m), without the series."""
        return np.stack([self.after_lowest, self.lowest, np.full_like(self.lowest, self.observed)])

    def load_state(self, state: Floats) -> None:
        """Restore the state of a checkpoint."""
        self.after_lowest[:], self.lowest[:] = state[:2]
        self.observed = int(state[2, 0])


class DriftTest:
    r"""A test by betting of whether a worker is farther from the others than it used to be.

    The score of a worker is its median distance to the others over the median of these, in steps of
    a quarter of a doubling. Let p be the share of rounds so far with a score at least as large as
    the present one, this round included. If scores are exchangeable over the rounds, p is at most x
    with probability at most x, whatever the earlier p were. So wealth that is multiplied by
    1 / (2 sqrt(p)) in every round does not grow in expectation: it *ever* reaches m / alpha with
    probability at most alpha / m. (A conformal test martingale.)

    The test assumes nothing about the other workers' data, so it applies to workers that differ. It
    assumes that nothing changes over time, which does not hold in training: scores drift while a
    model learns, and Byzantine workers that move change the scores of the others. So it only warns.
    """

    def __init__(self, num_workers: int) -> None:
        self.seen = np.zeros((num_workers, 2 * _DOUBLINGS * _SCORES_PER_DOUBLING + 1))
        self.wealth = np.zeros(num_workers)
        self.rounds = 0

    def observe(self, distances: Floats) -> None:
        """Observe the squared distances between the rows of one round."""
        m = len(distances)
        self.rounds += 1
        if m < 3:
            return
        scores = np.sort(distances, axis=1)[:, m // 2]
        middle = np.sort(scores)[m // 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log2(scores / middle) / 2  # of distances, not of their squares
        limit = _DOUBLINGS * _SCORES_PER_DOUBLING
        steps = np.nan_to_num(ratio * _SCORES_PER_DOUBLING, nan=0.0, posinf=limit, neginf=-limit)
        bins = limit + np.clip(np.rint(steps), -limit, limit).astype(np.int64)
        workers = np.arange(m)
        self.seen[workers, bins] += 1
        if self.rounds > _FIRST:
            as_far = np.arange(self.seen.shape[1]) >= bins[:, None]
            p = (self.seen * as_far).sum(axis=1) / self.rounds
            self.wealth += invested_by(self.rounds - _FIRST) - invested_by(self.rounds - _FIRST - 1)
            self.wealth *= 0.5 / np.sqrt(p)
            np.minimum(self.wealth, MAX_WEALTH, out=self.wealth)
