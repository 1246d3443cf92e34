"""Bets on who is far from whom, which are fair to honest workers whatever the others do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_RICH = 1e30  # money beyond it is given away: a bet that has long been won need not overflow
_STRIKING = 4.0  # squared distance, in units of what was usual in the rounds before
_MEMORY = 0.9  # of what is usual, from one round to the next
VIEWS = (0.9, 0.1)
"""Parts of the money: by distance, by angle."""

_LASTING = 0.95  # of evidence on directions, from one round to the next
_ABSURD = 1000.0  # times the usual length of a row, beyond what a loss scale or a batch explains
_GROWTH = 0.1  # log wealth a round: what grows faster has begun to grow

_ROOM = 1 << 22  # bets held at once; of more than 400 workers fewer kinds are kept


@dataclass(frozen=True, slots=True)
class Style:
    """Stake a share of the money in every round, or only in those with someone striking."""

    share: float
    striking: bool
    prior: float


# For faults that show in every round, in most, now and then; and for rare ones that are large.
_STYLES = (
    Style(0.95, False, 0.42),
    Style(0.6, False, 0.1),
    Style(0.2, False, 0.1),
    Style(0.9, True, 0.38),
)
_CALM = sum(not style.striking for style in _STYLES)  # these come first


def reaches(num_workers: int, b: int) -> list[int]:
    """Return the numbers r for which it is worth betting on who is among the r farthest.

    >>> reaches(20, 6), reaches(5, 2), reaches(3, 1)
    ([1, 2, 3, 4, 6], [1], [])
    """
    found = [r for r in _up_to(b) if r < num_workers - b - 1]
    few = max(1, _ROOM // (len(VIEWS) * len(_STYLES) * num_workers**2))
    return found[:: max(1, -(-len(found) // few))]


def _up_to(b: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 9, 13, ... up to b: one of them is near any number of liars."""
    found = list(range(1, min(b, 4) + 1))
    while found and found[-1] < b:
        found.append(min(b, found[-1] * 3 // 2))
    return found


def begun_by(rounds: int) -> float:
    """Return the share of the money that has been staked by then: half of it in the first round.

    The rest is staked little by little, about 1 / (t log^2 t) in round t, so that a fault that
    begins late still meets money that has not been lost before.
    """
    return 1 - 1 / (1 + math.log2(1 + rounds))


class Bets:
    r"""Bet, with every worker as the reference, on who is far from it, by fair odds or worse.

    Let d(k, i) be how far row i is from row k, by any measure of these two rows and of what was
    known before the round, b the most liars that there can be among m workers, and R_ki =
    #{j != k : d(k, j) >= d(k, i)} the rank of worker i from reference k: 1 for the farthest, and
    nobody if two are equally far. Each pair (k, i) begins with money of 1, and in every round
    stakes a share s of it on R_ki <= r. It is multiplied by

        1 - s + s (m - b - 1) / r   if R_ki <= r,    and by 1 - s if not.

    **For honest i and k this is fair or worse.** Let H be the honest workers, |H| >= m - b, and
    R'_ki the rank among them alone. Liars only add to those who are at least as far, so R'_ki <=
    R_ki, and R'_ki depends on honest rows and the past alone: it does not matter where liars put
    themselves, nor that they saw the honest rows first. At most r workers of H \ {k} have
    R'_k. <= r. Given the past and row k, the other honest rows are exchangeable, so that each has
    the same probability, P(R_ki <= r) <= P(R'_ki <= r) <= r / (|H| - 1) <= r / (m - b - 1), and
    the money is expected to stay what it was or to shrink.

    A single reference may also be something that was known before the round, and no worker: a
    *course*, such as the way that the model has gone lately. Liars may have had a hand in it: it
    is past, and to the honest rows of now it is as fair as any other. The m - b or more honest rows
    are exchangeable given the past, so that the odds are good enough, and there is no reference
    that could lie about it.

    The same holds for these variations:

    - *Only if somebody is striking.* Call j striking if d(k, j) exceeds a limit that was fixed
      before the round. Nothing is staked in a round without anybody striking, and only who is
      striking wins. With N honest strikers at most min(r, N) honest workers win, so the expected
      gain is at most s 1{N > 0}, and the stake is lost whenever N > 0 or a liar strikes.
    - *A reference that is nowhere.* If every d(k, j) is infinite (row k is missing or NaN), nothing
      is staked. Then no honest worker could have won, so that nobody gains by it.
    - *Sums.* Money may be shared out beforehand: over several r, shares, limits and measures, and
      over the rounds in which betting begins. Money may be given away.

    So for honest i and k the money M_ki is a nonnegative supermartingale from 1. Among the m - 1
    references of worker i at most b lie. :meth:`evidence` is the mean of the m - 1 - b smallest of
    its M_ki, which is at most the mean over some m - 1 - b honest references at all times, again
    such a supermartingale. By Ville's inequality it *ever* reaches m / alpha with probability at
    most alpha / m.
    """

    def __init__(
        self, num_workers: int, b: int, views: Sequence[float] = VIEWS, *, course: bool = False
    ) -> None:
        """Begin with parts of one coin for each view of who is far from whom, or from a course."""
        self.num_workers, self.b = num_workers, b
        self.reaches = reaches(num_workers, b)
        references = 1 if course else num_workers
        shape = (len(views), len(_STYLES), len(self.reaches), references, num_workers)
        self.money = np.zeros(shape)
        self.usual = np.full(len(views), np.nan)
        self.rounds = 0
        # Axes: measure, style, reach, reference, worker.
        reach = np.array(self.reaches, np.float64)[:, None, None]
        share, prior = (
            np.array([getattr(style, name) for style in _STYLES])[:, None, None, None]
            for name in ("share", "prior")
        )
        parts = np.array(views)[:, None, None, None, None]
        self._stakes = parts * prior / reach / (1 / reach).sum()
        self._lose = 1 - share
        self._win = 1 + share * (num_workers - b - 1) / reach / self._lose  # after having lost
        self._places = [num_workers - 1 - r for r in self.reaches]

    def observe(self, views: Floats) -> Floats:
        """Bet on how far rows are from one another in one round, and return the evidence after it.

        ``views`` is (2, m, m), see :func:`phocas.rules.sampling.views`, or of a course (1, 1, m),
        see :func:`phocas.rules.sampling.astray`.
        """
        stake = begun_by(self.rounds + 1) - begun_by(self.rounds)
        self.rounds += 1
        m = self.num_workers
        if not self.reaches:
            return np.zeros(m)
        self.money += self._stakes * stake
        ordered = np.sort(views, axis=2)
        # R <= r says that fewer than r others are as far: that the one after r of them is nearer.
        limits = ordered[:, :, self._places].transpose(0, 2, 1)
        won = (views[:, None] > limits[..., None])[:, None]
        somewhere = np.isfinite(ordered[:, :, 1])
        self._settle(slice(_CALM), somewhere, won)
        if (ordered[:, :, -1] > _STRIKING * self.usual[:, None]).any():  # never before it is known
            striking = views > _STRIKING * self.usual[:, None, None]
            alarm = somewhere & striking.any(axis=2)
            self._settle(slice(_CALM, None), alarm, won & striking[:, None, None])
        # The quartile of a reference at the quartile of references: liars are in few such pairs.
        now = np.sort(ordered[:, :, m // 4], axis=1)[:, ordered.shape[1] // 4]
        kept = np.where(np.isnan(self.usual), now, _MEMORY * self.usual + (1 - _MEMORY) * now)
        np.copyto(self.usual, kept, where=np.isfinite(now))
        return self.evidence()

    def _settle(
        self, styles: slice, staked: npt.NDArray[np.bool_], wins: npt.NDArray[np.bool_]
    ) -> None:
        """Take the stakes of references that have staked, and pay who has won."""
        money, lose = self.money[:, styles], self._lose[styles]
        money *= lose if staked.all() else np.where(staked[:, None, None, :, None], lose, 1.0)
        np.multiply(money, self._win[styles], out=money, where=wins)

    def forget(self, worker: int) -> None:
        """Give away what was won against a worker, and by it as the reference."""
        self.money[..., worker] = 0.0
        self.money[..., worker, :] = 0.0

    def evidence(self) -> Floats:
        """Return for each worker what the bets against it have won, trimmed over references."""
        won = self.money.sum(axis=(0, 1, 2))
        if won.max(initial=0.0) > _RICH:
            np.minimum(self.money, _RICH, out=self.money)
            won = self.money.sum(axis=(0, 1, 2))
        if len(won) == 1 < self.num_workers:
            return np.asarray(won[0])
        np.fill_diagonal(won, np.inf)  # a worker is no reference of itself
        return np.asarray(np.sort(won, axis=0)[: self.num_workers - 1 - self.b].mean(axis=0))


class Direction:
    r"""Measure whether each worker's rows point as those of the others do.

    Let p_ij be the product of rows i and j over the usual squared length of a row. The median of
    p_ij over j is on average the same, s, for an honest worker, for one whose rows are noisier
    (half the batch size), and c s for rows that are scaled by c. It is 0 for rows of noise and -s
    for a flipped sign. So d_i = median_j p_ij - s / 2, with the median over workers for s, says by
    its sign which of the two it is. Rows more than 1000 times as long as usual are of no data: for
    them d is negative, wherever they point. :attr:`along` is its sum over rounds in units of its
    root sum of squares, where later rounds weigh more. If d is symmetric about 0, it exceeds z with
    probability at most exp(-z^2 / 2).

    >>> direction = Direction(4)
    >>> for _ in range(9):
    ...     direction.observe(np.outer([1, 1, -1, 3], [1, 1, -1, 3]) + np.eye(4))
    >>> direction.along().round(1).tolist()
    [3.0, 3.0, -3.0, 3.0]
    """

    def __init__(self, num_workers: int) -> None:
        self.sums = np.zeros((2, num_workers))

    def observe(self, products: Floats) -> None:
        """Take the products of m rows with one another in one round."""
        m = len(products)
        if m < 3:
            return
        with np.errstate(all="ignore"):
            known = products / np.sort(np.diagonal(products))[(m - 1) // 2]
        absurd = ~(np.diagonal(known) <= _ABSURD**2)
        np.fill_diagonal(known, np.inf)  # sorted to the end, as NaN is
        found = np.sort(known, axis=1)[:, (m - 2) // 2]
        usual = np.sort(found)[(m - 1) // 2]
        told = np.isfinite(found) & (found < np.sqrt(np.finfo(np.float64).max))
        d = np.where(told, found - usual / 2, 0.0) if np.isfinite(usual) else np.zeros(m)
        d[absurd] = -1.0
        self.sums *= [[_LASTING], [_LASTING**2]]
        self.sums += [d, np.square(d)]

    def along(self) -> Floats:
        """Return the evidence for each worker, in deviations: positive if it points with others."""
        return np.asarray(self.sums[0] / np.sqrt(np.maximum(self.sums[1], np.finfo(float).tiny)))

    def forget(self, worker: int) -> None:
        """Discard what is known of a worker."""
        self.sums[:, worker] = 0.0


class Onset:
    """The round in which the wealth of the bets against each worker began to grow.

    Wealth falls or stays while a worker is honest, and grows by a factor in every round in which it
    is not. The estimate is the round after the last minimum of log(wealth) - 0.1 t over the rounds
    t that were observed.

    >>> onset = Onset(2)
    >>> for round in range(1, 9):
    ...     onset.observe(np.array([0.5, 0.5 * 2.0 ** max(0, round - 4)]), round)
    >>> onset.rounds.tolist()
    [9, 5]
    """

    def __init__(self, num_workers: int) -> None:
        self.rounds = np.ones(num_workers, np.int64)
        self.lowest = np.full(num_workers, math.log(begun_by(1)))
        self.observed = 0

    def observe(self, wealth: Floats, round: int) -> None:
        """Take the wealth after a round (from 1)."""
        self.observed += 1
        level = np.log(np.maximum(wealth, 1e-300)) - _GROWTH * self.observed
        lower = level <= self.lowest
        self.lowest[lower] = level[lower]
        self.rounds[lower] = round + 1

    def forget(self, worker: int) -> None:
        """Begin anew with a worker."""
        self.lowest[worker] = np.inf

    def state(self) -> list[Any]:
        """Return what a checkpoint must keep, ready for ``json``."""
        return [self.rounds.tolist(), self.lowest.tolist(), self.observed]

    def load_state(self, state: Sequence[Any]) -> None:
        """Go on from a checkpoint."""
        self.rounds[:], self.lowest[:], self.observed = state
