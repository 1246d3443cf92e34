"""How likely a round has more liars than a rule survives, where m of N clients take part.

Of N clients q lie, and a round draws m of them without replacement: the number of liars in it is
hypergeometric. A run survives if all its rounds do, which are drawn independently.
"""

from __future__ import annotations

import dataclasses
import math

from phocas.rules import RULES, Rule, Told, parse_rule
from phocas.specs import count
from phocas.theory.survival import Chance, Survival, log_complement, log_sum


@dataclasses.dataclass(frozen=True)
class Participation:
    """Of ``clients``, ``liars`` lie, and ``num_workers`` take part in each of some rounds.

    Args:
        clients: how many clients there are.
        liars: how many of them lie.
        num_workers: how many take part in a round.
        rounds: how many rounds there are.

    >>> federation = Participation(clients=1000, liars=100, num_workers=50, rounds=500)
    >>> round(federation.at_most(5).fails, 3), federation.smallest("phocas").b
    (0.383, 16)
    """

    clients: int
    liars: int
    num_workers: int
    rounds: int

    def __post_init__(self) -> None:
        for field in ("clients", "num_workers", "rounds"):
            count("a plan", field, getattr(self, field), minimum=1)
        count("a plan", "liars", self.liars)
        if self.liars > self.clients:
            raise ValueError(
                f"a plan needs liars <= clients: got liars={self.liars} of {self.clients} clients"
            )
        if self.num_workers > self.clients:
            raise ValueError(
                f"a plan needs workers <= clients: got workers={self.num_workers} with"
                f" clients={self.clients}"
            )

    def at_most(self, b: int) -> Chance:
        """Return the chance that at most b of a round's participants lie."""
        most = min(self.liars, self.num_workers)
        least = max(0, self.num_workers - (self.clients - self.liars))
        if b >= most:
            return Chance(0.0, -math.inf)
        if b < least:
            return Chance(-math.inf, 0.0)
        above = log_sum([self._log_chance(k) for k in range(b + 1, most + 1)])
        # The smaller side is summed, the other follows: a sum close to 1 has lost the difference.
        if above < math.log(0.5):
            return Chance(log_complement(above), above)
        below = log_sum([self._log_chance(k) for k in range(least, b + 1)])
        return Chance(below, log_complement(below))

    def survival(self, rule: Rule | str) -> Survival:
        """Return the chance that a run with this rule survives."""
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        trial = self.at_most(rule.tolerates(self.num_workers).rows)
        told = rule.b if isinstance(rule, Told) else None
        return Survival(rule.name, told, trial.repeated(self.rounds), trial.union(self.rounds))

    def smallest(self, name: str, confidence: float = 0.999) -> Survival | None:
        """Return the smallest b that survives with that confidence, if there is one."""
        if not 0 < confidence < 1:
            raise ValueError(f"a confidence lies between 0 and 1: got {confidence!r}")
        every = (self.survival(rule) for rule in RULES[name].choices(self.num_workers))
        return next((each for each in every if each.chance.fails <= 1 - confidence), None)

    def sizes(self) -> list[int]:
        """Return numbers of participants to choose from: this one, and halves and doubles of it."""
        found = {self.num_workers * 2**k // 8 for k in range(7)}
        return sorted(m for m in found if 3 <= m <= self.clients) or [self.num_workers]

    def with_workers(self, num_workers: int) -> Participation:
        """Return the same with another number of participants a round."""
        return dataclasses.replace(self, num_workers=num_workers)

    def _log_chance(self, k: int) -> float:
        honest = self.clients - self.liars
        return (
            _log_ways(self.liars, k)
            + _log_ways(honest, self.num_workers - k)
            - _log_ways(self.clients, self.num_workers)
        )


def _log_ways(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
