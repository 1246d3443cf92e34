"""The rounds in which each client took part, and the share of its values that was dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ParticipationShare:
    """The participation of one client."""

    client: int
    """Its number."""
    rounds: int
    """The rounds in which it took part."""
    dropped: float
    """The mean share of its values that the rule dropped in these."""


class ParticipationShares:
    """The dropped share of each client, over the rounds in which it took part.

    >>> seen = ParticipationShares(5)
    >>> seen.update(np.array([1, 4]), np.array([0.75, 0.25]))
    >>> seen.update(np.array([1, 2]), np.array([0.25, 0.0]))
    >>> seen.shares()[0]
    ParticipationShare(client=1, rounds=2, dropped=0.5)
    """

    def __init__(self, clients: int) -> None:
        self.sums = np.zeros((2, clients))
        """The sum of the dropped shares, and the number of rounds."""

    def update(
        self, participants: npt.NDArray[np.int64] | None, dropped: npt.NDArray[np.float64]
    ) -> None:
        """Add one round; None stands for all clients."""
        who = slice(None) if participants is None else participants
        sums, rounds = self.sums  # of one dimension each, where NumPy looks up faster
        sums[who] += dropped
        rounds[who] += 1

    def clear(self) -> None:
        """Discard all rounds."""
        self.sums[:] = 0

    def means(self) -> npt.NDArray[np.float64]:
        """Return the mean share of each client, NaN for clients that took no part."""
        with np.errstate(invalid="ignore"):
            found: npt.NDArray[np.float64] = self.sums[0] / self.sums[1]
        return found

    def shares(self) -> list[ParticipationShare]:
        """Return the clients that took part, the largest dropped share first."""
        means = self.means()
        there = np.flatnonzero(self.sums[1])
        order = there[np.argsort(-means[there], kind="stable")]
        rounds = self.sums[1]
        return [ParticipationShare(int(i), int(rounds[i]), float(means[i])) for i in order]
