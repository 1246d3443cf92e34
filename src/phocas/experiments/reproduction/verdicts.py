"""Claims as predicates: a number over the repeats, its interval, and where it should lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from phocas.experiments.reproduction.outcomes import MissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phocas.experiments.reproduction.outcomes import Outcomes, Repeats

Verdict = Literal["holds", "does not hold", "not decided"]

ROUNDING = 1e-9
REASONS_OF = "mnist"  # the task whose claims were looked into; for others it is only a hint

# The 97.5% points of Student's t for 1 to 30 degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean over repeats and its 95% confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    repeats: int


def interval(values: npt.ArrayLike) -> Interval:
    """Return the mean of the repeats and its interval; one repeat knows no bounds.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., repeats=3)
    >>> interval([0.5])
    Interval(mean=0.5, low=-inf, high=inf, repeats=1)
    """
    numbers = np.asarray(values, np.float64)
    n = len(numbers)
    if n == 0:
        raise MissingError("no repeat is complete in all the cases to be compared")
    mean = float(numbers.mean())
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    t = _STUDENT[n - 2] if n - 2 < len(_STUDENT) else 1.96
    half = t * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Check:
    """A number that a claim says something about, and the range the claim wants it in."""

    what: str
    found: Interval
    at_least: float = -math.inf
    at_most: float = math.inf
    unit: str = ""

    @property
    def verdict(self) -> Verdict:
        """Holds if the whole interval is in the range, does not if all of it is outside."""
        if self.at_least <= self.found.low and self.found.high <= self.at_most:
            return "holds"
        if self.found.high < self.at_least or self.found.low > self.at_most:
            return "does not hold"
        return "not decided"

    @property
    def mean_says(self) -> bool:
        """Whether the mean over the repeats is in the range; a rounding outside does not count."""
        return self.at_least - ROUNDING <= self.found.mean <= self.at_most + ROUNDING


def difference(first: Repeats, second: Repeats, quantity: str) -> npt.NDArray[np.float64]:
    """Return first - second by repeat; a repeat has the same weights and batches in both."""
    return contrast([(1, first), (-1, second)], quantity)


def contrast(parts: Sequence[tuple[int, Repeats]], quantity: str) -> npt.NDArray[np.float64]:
    """Return a sum with signs over the repeats that all the cases have."""
    seeds = sorted(set.intersection(*(set(repeats.seeds) for _, repeats in parts)))
    total = np.zeros(len(seeds))
    for sign, repeats in parts:
        values = getattr(repeats, quantity)
        total += [sign * values[repeats.seeds.index(seed)] for seed in seeds]
    return total


@dataclass(frozen=True)
class Claim:
    """One sentence, the paper's in our words or ours, and what must be true of the results."""

    name: str
    section: str
    text: str
    checks: Callable[[Outcomes], Sequence[Check]]
    reason: str = ""
    """Why it does not hold, where it does not, as far as it was found out."""


@dataclass(frozen=True)
class Finding:
    """What the results say of a claim."""

    claim: Claim
    checks: tuple[Check, ...]
    verdict: Verdict
    note: str = ""

    @property
    def repeats(self) -> int:
        """The least number of repeats behind any of the numbers."""
        return min((check.found.repeats for check in self.checks), default=0)


def judge(claim: Claim, outcomes: Outcomes) -> Finding:
    """Decide a claim: it holds if all its checks do, and does not if one of them does not."""
    try:
        checks = tuple(claim.checks(outcomes))
    except MissingError as error:
        return Finding(claim, (), "not decided", str(error))
    reason = claim.reason
    if reason and outcomes.reproduction.task != REASONS_OF:
        reason = f"On MNIST: {reason}"
    verdicts = {check.verdict for check in checks}
    if "does not hold" in verdicts:
        return Finding(claim, checks, "does not hold", reason)
    if verdicts == {"holds"}:
        return Finding(claim, checks, "holds")
    few = "one repeat has no interval; " if min(c.found.repeats for c in checks) == 1 else ""
    if all(check.mean_says for check in checks):
        return Finding(claim, checks, "not decided", f"{few}the means agree with it")
    note = f"{few}the means speak against it" + (f". {reason}" if reason else "")
    return Finding(claim, checks, "not decided", note)
