"""Probability that a round has more Byzantine clients than a rule tolerates.

Of N clients q are Byzantine, and a round draws m clients without replacement, so the number of
Byzantine participants is hypergeometric. A run survives if all its rounds do. Rounds are drawn
independently.
"""

from __future__ import annotations

import dataclasses
import math

from phocas.deprecation import former_parameters
from phocas.rules import Tolerance
from phocas.specs import count
from phocas.theory.survival import Chance, RandomFaults, log_complement, log_sum


@former_parameters(liars="byzantine")
@dataclasses.dataclass(frozen=True)
class Participation(RandomFaults):
    """A federated run in which some of the clients participate in each round.

    Args:
        clients: number of clients.
        byzantine: number of Byzantine clients.
        num_workers: number of participants per round.
        rounds: number of rounds.

    >>> federation = Participation(clients=1000, byzantine=100, num_workers=50, rounds=500)
    >>> round(federation.at_most(5).fails, 3), federation.smallest("phocas").b
    (0.383, 16)
    """

    clients: int
    byzantine: int
    num_workers: int
    rounds: int

    def __post_init__(self) -> None:
        for field in ("clients", "num_workers", "rounds"):
            count("a plan", field, getattr(self, field), minimum=1)
        count("a plan", "byzantine", self.byzantine)
        if self.byzantine > self.clients:
            raise ValueError(
                f"a plan needs byzantine <= clients: got byzantine={self.byzantine} of"
                f" {self.clients} clients"
            )
        if self.num_workers > self.clients:
            raise ValueError(
                f"a plan needs workers <= clients: got workers={self.num_workers} with"
                f" clients={self.clients}"
            )

    def at_most(self, b: int) -> Chance:
        """Return the probability that at most b participants of a round are Byzantine."""
        most = min(self.byzantine, self.num_workers)
        least = max(0, self.num_workers - (self.clients - self.byzantine))
        if b >= most:
            return Chance(0.0, -math.inf)
        if b < least:
            return Chance(-math.inf, 0.0)
        above = log_sum([self._log_chance(k) for k in range(b + 1, most + 1)])
        # Sum the smaller side and derive the other: a sum close to 1 has lost the difference.
        if above < math.log(0.5):
            return Chance(log_complement(above), above)
        below = log_sum([self._log_chance(k) for k in range(least, b + 1)])
        return Chance(below, log_complement(below))

    def trial(self, tolerance: Tolerance) -> tuple[Chance, int]:
        """Return the survival probability of a round, and the number of rounds."""
        return self.at_most(tolerance.rows), self.rounds

    def sizes(self) -> list[int]:
        """Return numbers of participants to compare: this one, its halves and its doubles."""
        found = {self.num_workers * 2**k // 8 for k in range(7)}
        return sorted(m for m in found if 3 <= m <= self.clients) or [self.num_workers]

    def with_workers(self, num_workers: int) -> Participation:
        """Return the same run with another number of participants per round."""
        return dataclasses.replace(self, num_workers=num_workers)

    def _log_chance(self, k: int) -> float:
        honest = self.clients - self.byzantine
        return (
            _log_ways(self.byzantine, k)
            + _log_ways(honest, self.num_workers - k)
            - _log_ways(self.clients, self.num_workers)
        )


def _log_ways(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
