"""A test by betting for workers whose data differ: each worker is compared with its own past."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from phocas.detection.evalues import MAX_WEALTH, invested_by

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

WorkerData: TypeAlias = Literal["alike", "differ"]
WORKER_DATA: tuple[WorkerData, ...] = get_args(WorkerData)
"""The data of honest workers.

- ``alike``: all draw from the same data. Workers are compared with one another in every round.
- ``differ``: each has its own data (Dirichlet, by label, federated clients). Each worker is
  compared with its own past.
"""

FIRST_VERDICT = 32
"""The rounds in which a worker must have taken part before it can be flagged."""
CHANCES = np.array([[[0.2]], [[0.3]]])
"""The largest probability of a striking length, and of a striking direction, of an honest row."""

_PAST = 32  # rounds of a worker that its present round is compared with
_RECENT = 0.125  # weight of the present row in the mean direction of a worker
_FEWEST = 3  # workers with a past, which show the change that is common to all
_LONG = _PAST * 3 // 4  # the rank in the own past of a length that is usual
_TURNED = _PAST // 10  # the rank in the own past of a cosine that is still usual
_TIMES = float(np.log(2.5))  # a striking row is more than 2.5 times as long as this length
_AGAINST = 0.25  # a striking cosine is below this part of the usual one
# Fractions of the wealth that are bet, by measure: for changes in every round, and in most.
_FRACTIONS = np.array([[0.95, 0.6], [0.95, 0.95]])[..., None]
_TINY = float(np.finfo(np.float64).tiny)


class OwnPast:
    r"""A test by betting of whether each worker still sends rows as it used to.

    Two numbers describe a row, in columns that are the same in every round: the logarithm of its
    length, and the cosine of its angle with the mean direction of the worker's own last rows. The
    change of each is its difference from the median of the worker's last 32 rounds. The median
    change over the workers is common to all of them (the loss falls, the learning rate changes) and
    is subtracted. What remains is *striking* if

    - the row is more than 2.5 times as long as three quarters of the worker's last 32 rows, or
    - its cosine is smaller than nine tenths of the last 32, and less than a quarter of their
      median, or
    - the row is missing or not finite.

    A striking round does not enter the worker's past, so that a fault does not become usual. In
    every round a fraction s of the wealth is bet on "striking", with P = 0.2 for lengths and 0.3
    for directions. The wealth is multiplied by 1 - s + s / P if the round is striking, and by
    1 - s if not.

    **Assumption.** Given all rounds before, the length of an honest worker's row is striking with
    probability at most 0.2, and its direction with probability at most 0.3. Then no bet on this
    worker grows in expectation, whatever data it has, and the false alarm probability is that of
    :class:`phocas.detection.evalues.EValueTest`. The limits of a round are fixed before it, except
    for the common change, which is between the changes of honest workers if most are honest. If the
    rounds of a worker were exchangeable, they would be striking with probability at most 1/4 and
    1/10, and without the factor of 2.5 and the quarter. The assumption does not hold if training
    fails or is so unstable that an honest worker's gradients change or reverse for many rounds.

    **What an attacker can do.** There is no verdict about the first 32 rounds of a worker. A worker
    that is Byzantine from its first round on, and always in the same way, is its own measure and is
    never flagged. Neither is a worker that changes slowly, by less than a factor of 2.5 in 32
    rounds, or that shrinks its rows. The rule has to tolerate such workers.

    >>> rng = np.random.default_rng(0)
    >>> test = OwnPast(5)
    >>> honest = 10 * np.eye(5, 50)  # five kinds of data
    >>> for round in range(80):
    ...     rows = honest + rng.normal(size=(5, 50))
    ...     rows[2] *= -1 if round >= 60 else 1
    ...     e_values = test.observe(rows)
    >>> np.flatnonzero(e_values > 5000)
    array([2])
    """

    def __init__(self, num_workers: int, momentum: float = 0.0) -> None:
        self.momentum = momentum
        self.before = np.zeros((0, 0))
        """The rows of the round before, if rows have momentum."""
        self.counts = np.zeros(num_workers)
        """The rounds that are in each worker's past."""
        self.bets = np.zeros(num_workers)
        """The rounds in which there was a bet on each worker."""
        self.wealth = np.zeros((*_FRACTIONS.shape[:2], num_workers))
        self.past = np.zeros((2, _PAST, num_workers))
        """Logarithms of lengths, and cosines, in the last rounds of each worker."""
        self.directions = np.zeros((num_workers, 0))
        """The mean direction of each worker's past rows."""

    def observe(self, rows: Floats, workers: Indices | None = None) -> Floats:
        """Bet on the rows of one round, and return the e-values of all workers after it.

        Args:
            rows: the rows of the participants, in columns that are the same in every round.
            workers: the number of the worker of each row; all workers in order if None.
        """
        who = np.arange(len(self.counts)) if workers is None else workers
        flat = self._without_momentum(rows.reshape(len(rows), -1))
        if not self.directions.size:
            self.directions = np.zeros((len(self.counts), flat.shape[1]))
        with np.errstate(all="ignore"):
            lengths = _lengths(flat)
            usable = np.isfinite(lengths)
            units = np.where(usable[:, None], flat, 0.0) / np.maximum(lengths, _TINY)[:, None]
            mean = self.directions[who]
            cosines = np.einsum("mc,mc->m", units, mean) / np.maximum(_lengths(mean), _TINY)
            now = np.stack([np.log(np.maximum(lengths, _TINY)), cosines])
        known = usable & (self.counts[who] >= FIRST_VERDICT)
        striking = self._striking(now, known, who) | ~usable
        self._bet(striking, known | ~usable, who)
        kept = usable & ~striking.any(axis=0)
        self._remember(now[:, kept], units[kept], who[kept])
        return self.evidence()

    def _without_momentum(self, rows: Floats) -> Floats:
        """Return what is new in rows with momentum: the rest repeats the rows of the last round."""
        if not self.momentum:
            return rows
        before, self.before = self.before, rows
        with np.errstate(invalid="ignore"):
            return rows - self.momentum * before if before.size else rows

    def _striking(self, now: Floats, known: Bools, who: Indices) -> Bools:
        """Return which workers with a known past are striking, by measure: (2, participants)."""
        striking = np.zeros(now.shape, bool)
        if np.count_nonzero(known) < _FEWEST:
            return striking
        past = np.sort(self.past[:, :, who[known]], axis=1)
        usual = past[:, _PAST // 2]
        own = now[:, known]
        own = own - np.median(own - usual, axis=1, keepdims=True)
        striking[0, known] = own[0] > past[0, _LONG] + _TIMES
        striking[1, known] = own[1] < np.minimum(past[1, _TURNED], _AGAINST * usual[1])
        return striking

    def _bet(self, striking: Bools, staked: Bools, who: Indices) -> None:
        """Update the wealth of the bets on the workers in ``staked``."""
        there = who[staked]
        new = [invested_by(n + 1) - invested_by(n) for n in self.bets[there].astype(int).tolist()]
        self.bets[there] += 1
        factors = 1 - _FRACTIONS + _FRACTIONS / CHANCES * striking[:, None, staked]
        wealth = (self.wealth[:, :, there] + np.array(new) / _FRACTIONS.size) * factors
        self.wealth[:, :, there] = np.minimum(wealth, MAX_WEALTH)

    def _remember(self, now: Floats, units: Floats, who: Indices) -> None:
        """Add the round to the past of some workers."""
        counts = self.counts[who].astype(int)
        self.past[:, counts % _PAST, who] = now
        weights = np.maximum(_RECENT, 1 / (1 + counts))[:, None]
        self.directions[who] += weights * (units - self.directions[who])
        self.counts[who] += 1

    def evidence(self) -> Floats:
        """Return the e-value of each worker."""
        return np.asarray(self.wealth.sum(axis=(0, 1)))

    def no_verdict(self) -> tuple[int, ...]:
        """Return the workers that have not taken part in enough rounds to be flagged."""
        return tuple(np.flatnonzero(self.counts < FIRST_VERDICT).tolist())

    def forget(self, worker: int) -> None:
        """Discard the past of a worker, and the wealth of the bets on it."""
        self.counts[worker] = 0
        self.wealth[..., worker] = 0.0

    def state(self) -> dict[str, Floats]:
        """Return the arrays for a checkpoint."""
        return {
            "own_counts": self.counts,
            "own_bets": self.bets,
            "own_wealth": self.wealth,
            "own_past": self.past,
            "own_directions": self.directions,
            "own_before": self.before,
        }

    def load_state(self, state: Mapping[str, Floats]) -> None:
        """Restore the arrays of a checkpoint."""
        self.directions = np.array(state["own_directions"])
        self.before = np.array(state["own_before"])
        for name, array in self.state().items():
            np.copyto(array, state[name])


def check_worker_data(data: str) -> WorkerData:
    """Return the word for the data of honest workers; raise ValueError for any other word."""
    for known in WORKER_DATA:
        if data == known:
            return known
    raise ValueError(f"data must be one of {', '.join(WORKER_DATA)}: got {data!r}")


def _lengths(rows: Floats) -> Floats:
    return np.asarray(np.sqrt(np.einsum("mc,mc->m", rows, rows)))
