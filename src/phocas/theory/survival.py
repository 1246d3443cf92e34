"""The chance that a run survives values that go bad at random: the paper's gambler, as arithmetic.

Every value a worker sends goes bad with probability ``rate``, on its own. A rule survives a round
if no more goes bad than ``rule.tolerates`` says: bad values in each column, or touched rows if the
rule promises to survive rows only. A run survives if all its rounds do. Beyond its promise a rule
may still be lucky, so these are lower bounds on what a run will show.

Chances are kept as logarithms of both sides, so that 1e-300 and 1 - 1e-300 are both exact.
"""

from __future__ import annotations

import dataclasses
import math

from phocas.rules import RULES, Rule, Told, Tolerance, parse_rule
from phocas.specs import count

# Below exp(-40) a chance and its union bound agree to the last bit.
_TINY = -40.0


@dataclasses.dataclass(frozen=True)
class Chance:
    """The chance to survive, held as the logarithms of surviving and of failing.

    Attributes:
        log_survives: the logarithm of surviving.
        log_fails: the logarithm of failing.

    >>> chance = every(0.25)
    >>> chance.survives, round(chance.fails, 2)
    (0.75, 0.25)
    """

    log_survives: float
    log_fails: float

    @property
    def survives(self) -> float:
        """Return the probability to survive."""
        return math.exp(self.log_survives)

    @property
    def fails(self) -> float:
        """Return the probability to fail, to full precision however small."""
        return math.exp(self.log_fails)

    def repeated(self, times: int) -> Chance:
        """Return the chance of that many independent trials: ``1 - (1 - p)^times`` to fail."""
        union = self.log_fails + math.log(times)
        log_survives = times * self.log_survives if times else 0.0
        if union < _TINY:
            return Chance(log_survives, union)
        return Chance(log_survives, log_complement(log_survives))

    def union(self, times: int) -> float:
        """Bound the probability to fail once in that many trials, independent or not."""
        return math.exp(min(0.0, self.log_fails + math.log(times)))


def at_most(m: int, b: int, bad: Chance) -> Chance:
    """Return the chance that at most b of m go bad, each as ``bad`` says: the binomial tail.

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
    # The smaller side is summed, the other follows: a sum close to 1 has lost the difference.
    if above < math.log(0.5):
        return Chance(log_complement(above), above)
    below = log_sum([_log_binomial(m, k, bad) for k in range(b + 1)])
    return Chance(below, log_complement(below))


def every(rate: float) -> Chance:
    """Return the chance of one value that goes bad with probability ``rate``.

    >>> every(0.25).survives
    0.75
    """
    if isinstance(rate, bool) or not 0 <= rate <= 1:
        raise ValueError(f"a rate is a probability, 0 <= rate <= 1: got rate={rate!r}")
    return Chance(
        math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) if rate > 0 else -math.inf
    )


@dataclasses.dataclass(frozen=True)
class Exposure:
    """What is exposed to bad values: the columns of one server or of all, for some rounds.

    Args:
        num_workers: m, how many workers there are.
        dims: d, how many columns there are.
        rounds: for how many rounds.
        rate: the probability that a value is bad.
        servers: how many servers share the columns, if one of them is exposed.

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
        """Return the columns that can go bad: those of the largest shard if one server is hit."""
        return -(-self.dims // self.servers)

    def trial(self, tolerance: Tolerance) -> tuple[Chance, int]:
        """Return the chance of one independent part of a run, and how many parts there are."""
        if tolerance.values >= tolerance.rows:
            column = at_most(self.num_workers, tolerance.values, every(self.rate))
            return column, self.columns * self.rounds
        touched = every(self.rate).repeated(self.columns)
        return at_most(self.num_workers, tolerance.rows, touched), self.rounds

    def survival(self, rule: Rule | str) -> Survival:
        """Return the chance that a run with this rule survives."""
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        trial, times = self.trial(rule.tolerates(self.num_workers))
        told = rule.b if isinstance(rule, Told) else None
        return Survival(rule.name, told, trial.repeated(times), trial.union(times))

    def every_b(self, name: str) -> list[Survival]:
        """Return the chances of a rule for every b that it may be told, or its only one."""
        return [self.survival(rule) for rule in RULES[name].choices(self.num_workers)]

    def smallest(self, name: str, confidence: float = 0.999) -> Survival | None:
        """Return the smallest b that survives with that confidence, if there is one.

        >>> gambler = Exposure(num_workers=20, dims=118282, rounds=500, rate=0.0005, servers=20)
        >>> gambler.smallest("phocas").b, gambler.smallest("krum")
        (3, None)
        """
        if not 0 < confidence < 1:
            raise ValueError(f"a confidence lies between 0 and 1: got {confidence!r}")
        enough = (each for each in self.every_b(name) if each.chance.fails <= 1 - confidence)
        return next(enough, None)


@dataclasses.dataclass(frozen=True)
class Survival:
    """A rule told b, the chance that a run with it survives, and the union bound on failing.

    Attributes:
        rule: its name.
        b: what it is told, if anything.
        chance: that a run survives.
        union: a bound on failing that is quick to see.

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
    """Return the logarithm of a sum of probabilities, from theirs."""
    top = max(logs)
    return min(0.0, top + math.log(math.fsum(math.exp(value - top) for value in logs)))


def log_complement(log_p: float) -> float:
    """Return log(1 - p) from log p, exact on both ends."""
    if log_p == 0.0:
        return -math.inf
    return math.log(-math.expm1(log_p)) if log_p > math.log(0.5) else math.log1p(-math.exp(log_p))
