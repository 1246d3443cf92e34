"""Who took part in how many rounds, and how much of theirs was left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Share:
    """What is known of one client."""

    client: int
    rounds: int
    """The rounds in which it took part."""
    dropped: float
    """The mean share of its values that the rule left out in these."""


class Attendance:
    """Sum up what was left out of each client, over the rounds in which it took part.

    >>> seen = Attendance(5)
    >>> seen.update(np.array([1, 4]), np.array([0.75, 0.25]))
    >>> seen.update(np.array([1, 2]), np.array([0.25, 0.0]))
    >>> seen.shares()[0]
    Share(client=1, rounds=2, dropped=0.5)
    """

    def __init__(self, clients: int) -> None:
        self.sums = np.zeros((2, clients))
        """What was left out, and in how many rounds."""

    def update(
        self, participants: npt.NDArray[np.int64] | None, dropped: npt.NDArray[np.float64]
    ) -> None:
        """Take one round; None says that all took part."""
        who = slice(None) if participants is None else participants
        left_out, rounds = self.sums  # of one dimension each, where NumPy looks up faster
        left_out[who] += dropped
        rounds[who] += 1

    def clear(self) -> None:
        """Begin anew."""
        self.sums[:] = 0

    def means(self) -> npt.NDArray[np.float64]:
        """Return the mean share of each client, and NaN for who took no part."""
        with np.errstate(invalid="ignore"):
            found: npt.NDArray[np.float64] = self.sums[0] / self.sums[1]
        return found

    def shares(self) -> list[Share]:
        """Return those who took part, of whom most was left out first."""
        means = self.means()
        there = np.flatnonzero(self.sums[1])
        order = there[np.argsort(-means[there], kind="stable")]
        return [Share(int(i), int(self.sums[1, i]), float(means[i])) for i in order]
