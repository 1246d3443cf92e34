"""Rules whose workers have weights, such as their numbers of examples, that nobody can abuse.

b still counts workers. What a rule cuts is the mass of the b heaviest, so that b liars, whichever
they are, are cut; a value at the edge is cut in part. docs/theory.md has the definitions, what is
promised, and a bound on the influence of any worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import LARGEST_TOTAL, Masses, Weighing, Window
from phocas.rules.algebra import (
    Decision,
    Floats,
    Matrix,
    Mix,
    Planning,
    heaviest,
    select,
    through,
)
from phocas.rules.base import Pipeline, Rule, Told
from phocas.rules.host import HostMatrix
from phocas.rules.promise import Tolerance, mass_spreads
from phocas.specs import normalise

Units = NDArray[np.int64]


def capped(weights: Floats, max_share: float) -> Floats:
    """Lower the largest weights until none is more than a share of what all are then.

    >>> capped(np.array([1.0, 1.0, 2.0, 96.0]), 0.4)
    array([1.        , 1.        , 2.        , 2.66666667])
    """
    ordered = np.sort(weights)
    # With the k heaviest at the limit c and the others s in all, c = share (s + k c).
    for k in range(1, len(ordered) + 1):
        if k == len(ordered) or k * max_share >= 1:
            return np.asarray(np.minimum(weights, ordered[-k]))
        rest = float(ordered[: len(ordered) - k].sum())
        limit = max_share * rest / (1 - k * max_share)
        if limit >= ordered[-k - 1]:
            return np.asarray(np.minimum(weights, limit))
    return weights


def units_of(weights: Any, m: int, max_share: float | None) -> Units:
    """Return weights as whole numbers in proportion, of at most ``LARGEST_TOTAL`` in all.

    Counts that are no more than that stay as they are. A weight of 0 stays 0 and leaves its worker
    out; any other is at least 1. Refuses what is no weight: NaN, infinite or negative.
    """
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be numbers, one for each worker: got {weights!r}") from None
    if given.shape != (m,):
        raise ValueError(f"weights must be one for each of {m} workers: got shape {given.shape}")
    bad = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(bad):
        worker = int(bad[0])
        raise ValueError(
            f"weights must be finite and at least 0: worker {worker} has {given[worker]:g};"
            " leave a worker out with 0"
        )
    present = given > 0
    workers = int(present.sum())
    room = LARGEST_TOTAL - workers
    if not present.any():
        raise ValueError("weights must not all be 0: nobody would be left")
    if max_share is None and given.sum() <= LARGEST_TOTAL and np.all(given == np.floor(given)):
        return given.astype(np.int64)
    shares = given / given.max()
    if max_share is not None:
        least = 1 / workers
        if isinstance(max_share, bool) or not least - 1e-9 <= max_share <= 1:
            raise ValueError(
                f"max_share must be between 1/{workers}, where all weigh the same, and 1: got"
                f" {max_share!r}"
            )
        # Rounded down, others may lose a unit each: nobody is above the cap of what is left.
        shares[present] = capped(shares[present], max(least, max_share * (1 - workers / room)))
    shares /= shares.sum()
    return np.where(present, np.maximum(1, np.floor(shares * room)), 0).astype(np.int64)


def check_cap(rule: Rule, max_share: float | None) -> None:
    """Raise ValueError unless the rule holds under a cap, whatever weights workers claim.

    >>> from phocas import TrimmedMean
    >>> check_cap(TrimmedMean(b=2), 0.25)
    Traceback (most recent call last):
        ...
    ValueError: trimmed-mean:b=2 needs b x max_share < 1/2, ... the largest max_share is 0.2499
    """
    if not rule.weighable:
        raise ValueError(f"{rule} cannot be weighted; leave the weights out")
    count = _liars(rule)
    if max_share is None or 2 * count * max_share < 1:
        return
    digits = 3 + math.ceil(math.log10(2 * count))
    largest = (math.ceil(10**digits / (2 * count)) - 1) / 10**digits
    b = f"b={count}" if count > rule.least_liars else "1 worker"
    raise ValueError(
        f"{rule} needs {b.partition('=')[0]} x max_share < 1/2, so that workers within b cannot"
        f" claim half of all weight: got {b} with max_share={max_share:g}, the largest max_share is"
        f" {largest:g}"
    )


@dataclass(frozen=True)
class Weighted(Rule):
    """Apply a rule to workers that have weights, with nobody above ``max_share`` of all.

    ``rule(rows, weights=w, max_share=s)`` is this. Refused if the b heaviest could hold half of all
    weight. Weights are rounded to whole units of about 1/4,000,000 of all; a worker of weight 0 is
    not there. With equal weights it is the rule itself, to the bit.

    Breakdown: survives the b heaviest, so any b, if the rule survives b.

    Args:
        rule: the rule, which must have a definition with weights.
        weights: one number for each worker.
        max_share: the largest share of all weight that anybody may have.

    >>> import numpy as np
    >>> from phocas import Median
    >>> Weighted(Median(), (1, 1, 5))(np.array([[1.0], [2.0], [6.0]]))
    Traceback (most recent call last):
        ...
    ValueError: the heaviest of 3 workers has 71.4% of all weight, half is too much: ...
    >>> Weighted(Median(), (1, 1, 5), max_share=0.4)(np.array([[1.0], [2.0], [6.0]]))
    array([2.])
    """

    rule: Rule
    weights: tuple[float, ...]
    max_share: float | None = None
    name: ClassVar[str] = "weighted"
    outermost: ClassVar[bool] = True

    units: Units = field(init=False, repr=False, compare=False)
    """The weights of those that have one, in whole units."""
    present: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    """Who has a weight."""

    def __post_init__(self) -> None:
        """Check the weights, and that the rule has a definition with them."""
        check_cap(self.rule, None)
        found = units_of(self.weights, len(self.weights), self.max_share)
        check_cap(self.rule, self.max_share)
        normalise(self, units=found[found > 0], present=np.flatnonzero(found))

    @property
    def _plain(self) -> bool:
        """Tell whether all have the same weight, so that there is none."""
        return bool(self.units.min() == self.units.max())

    def check(self, m: int) -> None:
        """Refuse a rule that does not hold, and weights of which the b heaviest hold half."""
        if m != len(self.weights):
            raise ValueError(
                f"weights must be one for each of {m} workers: got {len(self.weights)}"
            )
        units = self.units
        self.rule.check(len(units))
        b, liars = _told(self.rule), _liars(self.rule)
        if self._plain or 2 * heaviest(units, liars) < units.sum():
            return
        most = next(q for q in range(liars, -1, -1) if 2 * heaviest(units, q) < units.sum())
        share = (1 / len(units) + 1 / (2 * liars)) / 2
        who = f"{liars} heaviest" if liars > 1 else "heaviest"
        have = "have" if liars > 1 else "has"
        told = f"the largest b is {most}, or " if b > self.rule.least_liars else ""
        raise ValueError(
            f"the {who} of {len(units)} workers {have}"
            f" {heaviest(units, liars) / units.sum():.1%} of all weight, half is too much:"
            f" {told}max_share={share:.4g} would hold"
        )

    def _masses(self) -> Masses | None:
        return self.rule.masses(self.units)

    def window(self, m: int) -> Window:
        """Return the rule's window, for those who have a weight."""
        del m
        return self.rule.window(len(self.units))

    def expected(self, m: int) -> float:
        """Return the share of all mass that is left out."""
        del m
        units = self.units
        masses = None if self._plain else self._masses()
        if masses is None or masses.reach:
            return self.rule.expected(len(units))
        return 1 - masses.kept(float(units.sum())) / float(units.sum())

    def tolerates(self, m: int) -> Tolerance:
        """Return how many of the heaviest are survived, and so how many of any."""
        self.check(m)
        units = self.units
        before = self.rule.tolerates(len(units))
        masses = self._masses()
        limit = (units.sum() - 1) / 2 if masses is None else _survived(masses)
        most = max(q for q in range(len(units)) if q == 0 or heaviest(units, q) <= limit)
        return Tolerance(min(before.rows, most), min(before.values, most))

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the distance from the honest weighted mean, in honest weighted spreads."""
        masses, units = self._masses(), self.units
        if self._plain:
            return self.rule.spreads(len(units), q)
        if masses is None or isinstance(self.rule, Pipeline) or q > self.tolerates(m).values:
            return None
        return mass_spreads(masses, units, heaviest(units, q))

    def decide(self, matrix: Matrix, rng: np.random.Generator | None = None) -> Decision:
        """Decide as any rule does, where there are kernels for weights."""
        if not isinstance(matrix, HostMatrix):
            raise TypeError("weights need rows in host memory: move the tensors to the CPU first")
        return super().decide(matrix, rng)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Plan as the rule does, among those who have a weight."""
        units, present = self.units, self.present
        first = Mix() if len(present) == m else Mix(select(m, present))
        weighed = None if self._plain else units
        return (yield from through(first, self.rule.weighted_planning(len(units), weighed, rng)))

    def decision(self, mix: Mix, m: int) -> Decision:
        """Cut mass instead of values; the rows that were chosen are averaged by weight already."""
        del m
        units = self.units
        decided = self.rule.decision(mix, len(units))
        masses = self._masses()
        if self._plain:
            return decided
        if masses is not None:
            decided.weighing = Weighing(units, masses)
            return decided
        if mix.weights is None or len(mix.weights) > 1:
            raise ValueError(
                f"{self.rule} cannot be weighted: its weighted_planning must return one row"
            )
        fair = np.ones(mix.weights.shape[1])  # more than m with a base
        fair[self.present] = units / units.sum()
        return Decision(Mix(mix.weights, fair), Window())


def _told(rule: Rule) -> int:
    """Return the largest b of a rule's steps, 0 if it has none."""
    steps = (*rule.stages, rule.rule) if isinstance(rule, Pipeline) else (rule,)
    return max(step.b if isinstance(step, Told) else 0 for step in steps)


def _liars(rule: Rule) -> int:
    """Return how many of the heaviest must not hold half of all weight."""
    return max(_told(rule), rule.least_liars)


def _survived(masses: Masses) -> float:
    return masses.trim if masses.drop is None else min(masses.trim, masses.drop)
