"""Changes of workers over time: since when one is faulty, and whether one drifts."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from phocas.detection.evalues import MAX_WEALTH, invested_by

Floats = npt.NDArray[np.float64]

_EARLY = 64  # rounds in which most wealth is new
_GROWTH = 0.1  # log wealth per round: faster growth marks the onset
_SCORES_PER_DOUBLING = 4  # resolution of the scores that a worker is compared to its past by
_DOUBLINGS = 8
_FIRST = 20  # rounds before a worker is compared to its past


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
