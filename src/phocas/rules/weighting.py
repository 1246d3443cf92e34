"""Rules for workers with weights, such as their numbers of examples.

b counts workers, as without weights. A rule cuts as much weight as the b heaviest workers have, so
any b Byzantine workers are cut. A value at the edge may be cut in part. docs/theory.md has the
definitions, the guarantees, and a bound on the influence of each worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import LARGEST_TOTAL, Masses, Weighing, Window
from phocas.rules.algebra import Floats, Mix, Planning, heaviest, select, through
from phocas.rules.base import Bounded, Composite, Pipeline, Rule, plan_of
from phocas.rules.execution import Plan
from phocas.rules.guarantee import Tolerance, mass_spreads
from phocas.specs import normalise

Units = NDArray[np.int64]


def capped(weights: Floats, max_share: float) -> Floats:
    """Lower the largest weights until none is more than a share of the resulting total.

    >>> capped(np.array([1.0, 1.0, 2.0, 96.0]), 0.4)
    array([1.        , 1.        , 2.        , 2.66666667])
    """
    ordered = np.sort(weights)
    # If the k heaviest have the limit c, and the others s in total, then c = share (s + k c).
    for k in range(1, len(ordered) + 1):
        if k == len(ordered) or k * max_share >= 1:
            return np.asarray(np.minimum(weights, ordered[-k]))
        rest = float(ordered[: len(ordered) - k].sum())
        limit = max_share * rest / (1 - k * max_share)
        if limit >= ordered[-k - 1]:
            return np.asarray(np.minimum(weights, limit))
    return weights


def units_of(weights: Any, m: int, max_share: float | None) -> Units:
    """Return weights as integers in proportion, of at most ``LARGEST_TOTAL`` in total.

    Integers within this limit stay unchanged. A weight of 0 stays 0 and excludes its worker; any
    other weight becomes at least 1. Raises ValueError for NaN, infinite or negative weights.
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
        raise ValueError("weights must not all be 0: no worker would be left")
    least = 1 / workers
    if max_share is not None and (
        isinstance(max_share, bool) or not least - 1e-9 <= max_share <= 1
    ):
        raise ValueError(
            f"max_share must be between 1/{workers}, where all weigh the same, and 1: got"
            f" {max_share!r}"
        )
    whole = given.sum() <= LARGEST_TOTAL and np.all(given == np.floor(given))
    if whole and (max_share is None or given.max() <= max_share * given.sum()):
        return given.astype(np.int64)
    shares = given / given.max()
    if max_share is not None:
        # Rounding down may cost each worker one unit. The cap is lower by so much that it holds
        # for the rounded weights as well.
        shares[present] = capped(shares[present], max(least, max_share * (1 - workers / room)))
    shares /= shares.sum()
    return np.where(present, np.maximum(1, np.floor(shares * room)), 0).astype(np.int64)


def check_cap(rule: Rule, max_share: float | None) -> None:
    """Raise ValueError unless the guarantee holds under a cap, whatever weights workers claim.

    >>> from phocas import TrimmedMean
    >>> check_cap(TrimmedMean(b=2), 0.25)
    Traceback (most recent call last):
        ...
    ValueError: trimmed-mean:b=2 needs b x max_share < 1/2, ... the largest max_share is 0.2499
    """
    if not rule.weighable:
        raise ValueError(f"{rule} cannot be weighted; leave the weights out")
    count = _byzantine(rule)
    if max_share is None or 2 * count * max_share < 1:
        return
    b = f"b={count}" if count > rule.min_byzantine else "1 worker"
    raise ValueError(
        f"{rule} needs {b.partition('=')[0]} x max_share < 1/2, so that workers within b cannot"
        f" claim half of all weight: got {b} with max_share={max_share:g}, the largest max_share is"
        f" {_largest_share(count):g}"
    )


def _largest_share(count: int) -> float:
    """Return a share just below 1 / (2 count), of few digits."""
    digits = 3 + math.ceil(math.log10(2 * count))
    return float((math.ceil(10**digits / (2 * count)) - 1) / 10**digits)


@dataclass(frozen=True)
class Weighted(Composite):
    """A rule for workers with weights, each at most ``max_share`` of all weight.

    ``rule(rows, weights=w, max_share=s)`` applies it. The b heaviest workers must have less than
    half of all weight; otherwise the call raises ValueError. Weights are rounded to integer units
    of about 1/4,000,000 of the total. A worker of weight 0 is excluded. With equal weights the
    result is that of the rule without weights, to the bit.

    Breakdown: tolerates the b heaviest workers, and so any b workers, if the rule tolerates b.

    Args:
        rule: the rule, which must be defined for weights.
        weights: one number for each worker.
        max_share: the largest share of all weight that a worker may have.

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
    """The weights of the workers whose weight is not 0, in integer units."""
    present: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    """The indices of the workers whose weight is not 0."""

    def __post_init__(self) -> None:
        """Check the weights, and that the rule is defined for weights."""
        check_cap(self.rule, None)
        found = units_of(self.weights, len(self.weights), self.max_share)
        check_cap(self.rule, self.max_share)
        normalise(self, units=found[found > 0], present=np.flatnonzero(found))

    @property
    def _plain(self) -> bool:
        """Tell whether all weights are equal, so that the rule without weights applies."""
        return bool(self.units.min() == self.units.max())

    def check(self, m: int) -> None:
        """Raise ValueError if the rule rejects m, or if the b heaviest have half of all weight."""
        if m != len(self.weights):
            raise ValueError(
                f"weights must be one for each of {m} workers: got {len(self.weights)}"
            )
        units = self.units
        self.rule.check(len(units))
        b, byzantine = _given_b(self.rule), _byzantine(self.rule)
        if self._plain or 2 * heaviest(units, byzantine) < units.sum():
            return
        most = next(q for q in range(byzantine, -1, -1) if 2 * heaviest(units, q) < units.sum())
        share = max(1 / len(units), _largest_share(byzantine))
        counted = capped(units.astype(np.float64), share).max() / units.max()
        who = f"{byzantine} heaviest" if byzantine > 1 else "heaviest"
        have = "have" if byzantine > 1 else "has"
        advice = f"the largest b is {most}, or " if b > self.rule.min_byzantine else ""
        raise ValueError(
            f"the {who} of {len(units)} workers {have}"
            f" {heaviest(units, byzantine) / units.sum():.1%} of all weight, half is too much:"
            f" {advice}max_share={share:g} would hold, with which an example of the heaviest worker"
            f" counts {counted:.2g} times as much as one of a light worker"
        )

    def _masses(self) -> Masses | None:
        return self.rule.masses(self.units)

    def window(self, m: int) -> Window:
        """Return the rule's window for the workers whose weight is not 0."""
        del m
        return self.rule.window(len(self.units))

    def expected(self, m: int) -> float:
        """Return the share of all weight that is dropped."""
        del m
        units = self.units
        masses = None if self._plain else self._masses()
        if masses is None or masses.cutoff:
            return self.rule.expected(len(units))
        return 1 - masses.kept(float(units.sum())) / float(units.sum())

    def tolerates(self, m: int) -> Tolerance:
        """Return how many of the heaviest workers, and so of any workers, are tolerated."""
        self.check(m)
        units = self.units
        before = self.rule.tolerates(len(units))
        masses = self._masses()
        limit = (units.sum() - 1) / 2 if masses is None else _survived(masses)
        most = max(q for q in range(len(units)) if q == 0 or heaviest(units, q) <= limit)
        return Tolerance(min(before.rows, most), min(before.values, most))

    @property
    def proven(self) -> bool:
        """Return whether the weighted rule has an error bound of its own."""
        return self.rule.proven

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the distance from the weighted honest mean.

        The unit is the weighted standard deviation (RMS) of honest rows.
        """
        masses, units = self._masses(), self.units
        if self._plain:
            return self.rule.error_bound(len(units), q)
        if masses is None or isinstance(self.rule, Pipeline) or q > self.tolerates(m).values:
            return None
        return mass_spreads(masses, units, heaviest(units, q))

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the rule's execution plan for workers whose weight is not 0.

        The plan cuts weight from each column instead of a number of values.
        """
        plan = plan_of(self.rule, len(self.units), rng)
        plan.planning = self._planning(m, rng)
        if self._plain:
            return plan
        masses = self._masses()
        if masses is None:
            plan.window = Window()
            plan.planning = self._averaged(plan.planning, m)
        else:
            plan.weighing = Weighing(self.units, masses)
        return plan

    def _planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the rule's mix of the rows whose weight is not 0."""
        units, present = self.units, self.present
        first = Mix() if len(present) == m else Mix(select(m, present))
        weighed = None if self._plain else units
        return (yield from through(first, self.rule.weighted_planning(len(units), weighed, rng)))

    def _averaged(self, planning: Planning, m: int) -> Planning:
        """Compute the mix of a rule that averages its chosen rows by weight: one row."""
        mix = yield from planning
        if mix.weights is None or len(mix.weights) > 1:
            raise ValueError(
                f"{self.rule} cannot be weighted: its weighted_planning must return one row"
            )
        fair = np.ones(m)
        fair[self.present] = self.units / self.units.sum()
        return Mix(mix.weights, fair)


def _given_b(rule: Rule) -> int:
    """Return the largest b of a rule's steps; 0 if no step has a b."""
    steps = (*rule.stages, rule.rule) if isinstance(rule, Pipeline) else (rule,)
    return max(step.b if isinstance(step, Bounded) else 0 for step in steps)


def _byzantine(rule: Rule) -> int:
    """Return how many of the heaviest workers must have less than half of all weight."""
    return max(_given_b(rule), rule.min_byzantine)


def _survived(masses: Masses) -> float:
    return masses.trim if masses.drop is None else min(masses.trim, masses.drop)
