"""Verdicts on claims: a number over the repeats, its interval, and the claimed range."""

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
REASONS_OF = "mnist"  # the reasons were investigated on this task; for others they are hints

# The 97.5% points of Student's t for 1 to 30 degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t.

    >>> student(9)
    2.262
    """
    return _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 1.96


@dataclass(frozen=True)
class Interval:
    """A mean over repeats and its 95% confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    repeats: int


def interval(values: npt.ArrayLike) -> Interval:
    """Return the mean of the repeats and its interval, which is infinite for one repeat.

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
    half = student(n - 1) * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Check:
    """A number that a claim is about, and the claimed range.

    Attributes:
        what: description of the number.
        found: its mean and interval over the repeats.
        at_least: lower end of the claimed range.
        at_most: upper end of the claimed range.
        unit: unit of the number, if it has one.
        equal: differences up to this size count as zero: a claim of a difference does not hold if
            the whole interval is that close to 0.
    """

    what: str
    found: Interval
    at_least: float = -math.inf
    at_most: float = math.inf
    unit: str = ""
    equal: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: the whole interval is in the range, all outside, or neither."""
        if self.at_least <= self.found.low and self.found.high <= self.at_most:
            return "holds"
        if self.found.high < self.at_least or self.found.low > self.at_most or self.is_equal:
            return "does not hold"
        return "not decided"

    @property
    def is_equal(self) -> bool:
        """Return whether the interval is as good as 0, and not wholly in the range."""
        inside = self.at_least <= self.found.low and self.found.high <= self.at_most
        return not inside and max(abs(self.found.low), abs(self.found.high)) <= self.equal

    @property
    def mean_says(self) -> bool:
        """Return whether the mean over the repeats is in the range, up to rounding."""
        return self.at_least - ROUNDING <= self.found.mean <= self.at_most + ROUNDING


def difference(first: Repeats, second: Repeats, quantity: str) -> npt.NDArray[np.float64]:
    """Return first - second by repeat; a repeat has the same weights and batches in both."""
    return contrast([(1, first), (-1, second)], quantity)


def contrast(parts: Sequence[tuple[int, Repeats]], quantity: str) -> npt.NDArray[np.float64]:
    """Return for each repeat that all cases have the sum of the cases' signed quantities."""
    seeds = sorted(set.intersection(*(set(repeats.seeds) for _, repeats in parts)))
    total = np.zeros(len(seeds))
    for sign, repeats in parts:
        values = getattr(repeats, quantity)
        total += [sign * values[repeats.seeds.index(seed)] for seed in seeds]
    return total


@dataclass(frozen=True)
class Claim:
    """One claim, the paper's in our words or ours.

    Attributes:
        name: short name of the claim.
        section: section of the paper.
        text: the claim in a sentence.
        checks: function that returns the checks of the claim on results.
        reason: why the claim does not hold, if it does not and the reason is known.
    """

    name: str
    section: str
    text: str
    checks: Callable[[Outcomes], Sequence[Check]]
    reason: str = ""


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on a claim.

    Attributes:
        claim: the claim.
        checks: its checks.
        verdict: whether it holds, does not hold, or is not decided.
        note: an explanation of the verdict.
    """

    claim: Claim
    checks: tuple[Check, ...]
    verdict: Verdict
    note: str = ""

    @property
    def repeats(self) -> int:
        """Return the smallest number of repeats behind any of the numbers."""
        return min((check.found.repeats for check in self.checks), default=0)


def judge(claim: Claim, outcomes: Outcomes) -> ClaimResult:
    """Decide a claim: it holds if all its checks hold, and does not if one of them does not."""
    try:
        checks = tuple(claim.checks(outcomes))
    except MissingError as error:
        return ClaimResult(claim, (), "not decided", str(error))
    reason = claim.reason
    if reason and outcomes.reproduction.task != REASONS_OF:
        reason = f"On MNIST: {reason}"
    return decide(claim, checks, reason)


def decide(claim: Claim, checks: tuple[Check, ...], reason: str = "") -> ClaimResult:
    """Decide a claim by its checks; the reason is given if it does not hold."""
    verdicts = {check.verdict for check in checks}
    if "does not hold" in verdicts:
        equal = next((check.equal for check in checks if check.is_equal), None)
        said = "" if equal is None else f"Equal within {100 * equal:g} points. "
        return ClaimResult(claim, checks, "does not hold", (said + reason).rstrip())
    if verdicts == {"holds"}:
        return ClaimResult(claim, checks, "holds")
    few = "one repeat has no interval; " if min(c.found.repeats for c in checks) == 1 else ""
    if all(check.mean_says for check in checks):
        return ClaimResult(claim, checks, "not decided", f"{few}the means agree with it")
    note = f"{few}the means speak against it" + (f". {reason}" if reason else "")
    return ClaimResult(claim, checks, "not decided", note)
