"""Probability that a run survives values that are corrupted at random, as by the paper's gambler.

Every value that a worker sends is corrupted independently with probability ``rate``. A rule
survives a round if no more is corrupted than ``rule.tolerates`` returns: corrupted values per
column, or corrupted rows if the rule only tolerates rows. A run survives if all its rounds do. A
rule may also survive beyond its guarantee, so these probabilities are lower bounds.

Probabilities are stored as logarithms of both survival and failure, so that 1e-300 and 1 - 1e-300
are both exact.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod

from phocas.rules import RULES, Bounded, Rule, Tolerance, parse_rule
from phocas.specs import count

# Below exp(-40) a probability and its union bound agree to the last bit.
_TINY = -40.0


@dataclasses.dataclass(frozen=True)
class Chance:
    """The probability that a rule survives corrupted values, stored as two logarithms.

    A rule survives if it tolerates the number of corrupted values; otherwise it fails.

    Attributes:
        log_survives: logarithm of the probability to survive.
        log_fails: logarithm of the probability to fail.

    >>> chance = every(0.25)
    >>> chance.survives, round(chance.fails, 2)
    (0.75, 0.25)
    """

    log_survives: float
    log_fails: float

    @property
    def survives(self) -> float:
        """Return the probability that the number of corrupted values is tolerated."""
        return math.exp(self.log_survives)

    @property
    def fails(self) -> float:
        """Return the probability to fail, with full precision however small it is."""
        return math.exp(self.log_fails)

    def repeated(self, times: int) -> Chance:
        """Return the probability to survive ``times`` independent trials."""
        union = self.log_fails + math.log(times)
        log_survives = times * self.log_survives if times else 0.0
        if union < _TINY:
            return Chance(log_survives, union)
        return Chance(log_survives, log_complement(log_survives))

    def union(self, times: int) -> float:
        """Return a bound on the probability to fail at least once in ``times`` trials.

        The trials need not be independent.
        """
        return math.exp(min(0.0, self.log_fails + math.log(times)))


def at_most(m: int, b: int, bad: Chance) -> Chance:
    """Return the probability that at most b of m fail, each with probability ``bad``.

    This is the binomial distribution function.

    >>> at_most(m=2, b=0, bad=every(0.1)).survives
    0.81
    >>> at_most(m=20, b=9, bad=every(1e-40)).fails
    0.0
    >>> round(at_most(m=20, b=9, bad=every(1e-40)).log_fails)
    -909
    """
    if b >= m or bad.log_fails == -math.inf:
        return Chance(0.0, -math.inf)
    if bad.log_survives == -math.inf:
        return Chance(-math.inf, 0.0)
    above = log_sum([_log_binomial(m, k, bad) for k in range(b + 1, m + 1)])
    # Sum the smaller side and derive the other: a sum close to 1 has lost the difference.
    if above < math.log(0.5):
        return Chance(log_complement(above), above)
    below = log_sum([_log_binomial(m, k, bad) for k in range(b + 1)])
    return Chance(below, log_complement(below))


def every(rate: float) -> Chance:
    """Return the ``Chance`` of one value that is corrupted with probability ``rate``.

    >>> every(0.25).survives
    0.75
    """
    if isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"a rate is a probability, 0 <= rate <= 1: got rate={rate!r}")
    return Chance(
        math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) if rate > 0 else -math.inf
    )


class RandomFaults(ABC):
    """Faults that strike the rounds of a run at random: the base of the models of faults."""

    num_workers: int

    @abstractmethod
    def trial(self, tolerance: Tolerance) -> tuple[Chance, int]:
        """Return the survival probability of one part of a run, and the number of parts."""

    def survival(self, rule: Rule | str) -> Survival:
        """Return the probability that a run with this rule survives.

        A run survives if the rule tolerates the faults of every round.
        """
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        trial, times = self.trial(rule.tolerates(self.num_workers))
        b = rule.b if isinstance(rule, Bounded) else None
        return Survival(rule.name, b, trial.repeated(times), trial.union(times))

    def every_b(self, name: str) -> list[Survival]:
        """Return the survival probabilities of a rule for every b that it accepts."""
        return [self.survival(rule) for rule in RULES[name].choices(self.num_workers)]

    def smallest(self, name: str, confidence: float = 0.999) -> Survival | None:
        """Return the smallest b with which a run survives with that confidence, or None.

        >>> gambler = Exposure(num_workers=20, dims=118282, rounds=500, rate=0.0005, servers=20)
        >>> gambler.smallest("phocas").b, gambler.smallest("krum")
        (3, None)
        """
        if not 0 < confidence < 1:
            raise ValueError(f"a confidence lies between 0 and 1: got {confidence!r}")
        enough = (each for each in self.every_b(name) if each.chance.fails <= 1 - confidence)
        return next(enough, None)


@dataclasses.dataclass(frozen=True)
class Exposure(RandomFaults):
    """The values that may be corrupted: the columns of one server or of all, for some rounds.

    Args:
        num_workers: m, the number of workers.
        dims: d, the number of columns.
        rounds: number of rounds.
        rate: probability that a value is corrupted.
        servers: number of servers that share the columns, of which one is affected; 1: all columns.

    >>> Exposure(num_workers=20, dims=118282, rounds=500, rate=0.0005, servers=20).columns
    5915
    """

    num_workers: int
    dims: int
    rounds: int
    rate: float
    servers: int = 1

    def __post_init__(self) -> None:
        for field in ("num_workers", "dims", "rounds", "servers"):
            count("a plan", field, getattr(self, field), minimum=1)
        every(self.rate)
        if self.servers > self.dims:
            raise ValueError(
                f"a plan needs a column for every server: got servers={self.servers} with"
                f" dims={self.dims}, the largest number of servers is {self.dims}"
            )

    @property
    def columns(self) -> int:
        """Return the number of columns at risk: those of the largest shard."""
        return -(-self.dims // self.servers)

    def trial(self, tolerance: Tolerance) -> tuple[Chance, int]:
        """Return the survival probability of one trial, and the number of trials.

        A trial is a column in a round, or a whole round if the rule only tolerates rows.
        """
        if tolerance.values >= tolerance.rows:
            column = at_most(self.num_workers, tolerance.values, every(self.rate))
            return column, self.columns * self.rounds
        touched = every(self.rate).repeated(self.columns)
        return at_most(self.num_workers, tolerance.rows, touched), self.rounds


@dataclasses.dataclass(frozen=True)
class Survival:
    """The probability that a run with a rule given b survives.

    Attributes:
        rule: name of the rule.
        b: the rule's b, or None if it has none.
        chance: probability that a run survives.
        union: the union bound on the probability of failure, which is simpler to verify.

    >>> Survival("phocas", 3, every(0.25), union=0.3).chance.survives
    0.75
    """

    rule: str
    b: int | None
    chance: Chance
    union: float


def _log_binomial(m: int, k: int, bad: Chance) -> float:
    ways = math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1)
    return ways + k * bad.log_fails + (m - k) * bad.log_survives


def log_sum(logs: list[float]) -> float:
    """Return the logarithm of a sum of probabilities, given their logarithms."""
    top = max(logs)
    return min(0.0, top + math.log(math.fsum(math.exp(value - top) for value in logs)))


def log_complement(log_p: float) -> float:
    """Return log(1 - p) given log p, precise for p near 0 and near 1."""
    if log_p == 0.0:
        return -math.inf
    return math.log(-math.expm1(log_p)) if log_p > math.log(0.5) else math.log1p(-math.exp(log_p))
