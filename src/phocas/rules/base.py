"""The base classes of rules: frozen values to call, explain, compare, print and combine."""

from __future__ import annotations

import numbers
from abc import abstractmethod
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Never, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from phocas.deprecation import former_attributes, warn_renamed
from phocas.kernels import Masses, Window
from phocas.notebook import html_table
from phocas.rules import execution
from phocas.rules.algebra import (
    Filtering,
    Mix,
    OutlierShares,
    Planning,
    beside,
    through,
    weighted_mean,
)
from phocas.rules.execution import Plan
from phocas.rules.explanation import Explanation
from phocas.rules.guarantee import ASSUMED, Tolerance
from phocas.rules.inputs import open_rows, with_reference
from phocas.specs import Spec, count, normalise

Randomness: TypeAlias = np.random.Generator | int | None
Needed: TypeAlias = Literal["previous", "trusted"]
"""A reference vector: the previous aggregate, or the server's gradient on trusted samples."""


def as_generator(rng: Randomness) -> np.random.Generator | None:
    """Return a random generator: the given generator, or a new generator for a given seed.

    Return None for None; rules then use no randomness.
    """
    if rng is None or isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, bool) or not isinstance(rng, numbers.Integral) or rng < 0:
        raise TypeError(f"rng must be a NumPy generator, a seed >= 0 or None: got {rng!r}")
    return np.random.default_rng(int(rng))


_FORMER_METHODS = {
    "spreads": "error_bound",
    "liars": "max_byzantine",
    "least_liars": "min_byzantine",
}


class Stage(Spec):
    """A step over m rows: a rule, or a pre-aggregation before one."""

    outermost: ClassVar[bool] = False
    """Whether no other step may come before this one."""
    weighable: bool = False
    """Whether the step is defined for workers with weights."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept methods that a rule of version 0.2 overrides by their former names."""
        super().__init_subclass__(**kwargs)
        for old, new in _FORMER_METHODS.items():
            if old in vars(cls):
                warn_renamed(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
                setattr(cls, new, vars(cls)[old])

    def check(self, m: int) -> None:
        """Raise ValueError unless the guarantee of the step holds with m workers."""
        if m < 1:
            raise ValueError(f"{type(self).__name__} needs at least 1 row: got {m}")

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return the largest b that is valid with m workers; negative if no b is.

        For a rule that has no b, return the number of wrong values that the rule tolerates.
        """
        return (m - 1) // 2

    @classmethod
    def choices(cls, m: int) -> list[Self]:
        """Return one instance for each valid b with m workers.

        The list is empty if the class has settings besides b.
        """
        required = [each for each in fields(cls) if each.default is MISSING]  # type: ignore[arg-type]  # every Spec is a dataclass
        return [] if required or m < 1 else [cls()]

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the mix of the rows: yield requests for measurements and return a ``Mix``.

        A mix is a matrix of weights that turns the m rows into the rows to reduce. A rule that does
        not override this method reduces the rows as they are.
        """
        del m, rng
        yield from ()
        return Mix()

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Compute the mix of the rows of workers that have weights.

        Args:
            m: the number of rows.
            units: the weight of each worker in whole units; None: all weights are equal.
            rng: the randomness of steps that draw.
        """
        del units
        return self.planning(m, rng)


@dataclass(frozen=True)
class Bounded(Stage):
    """A step that is given b, the number of wrong rows or values that it tolerates.

    Args:
        b: how many wrong rows or values the step tolerates.

    >>> from phocas import Krum
    >>> Krum.largest_b(20), Krum.condition
    (8, '2b + 2 < m')
    >>> len(Krum.choices(20))
    9
    """

    b: int
    condition: ClassVar[str] = "2b < m"
    """The condition on b and m as text, for errors; :meth:`largest_b` is the largest such b."""

    def __post_init__(self) -> None:
        """Check that b is a count."""
        normalise(self, b=count(type(self).__name__, "b", self.b))

    @classmethod
    def choices(cls, m: int) -> list[Self]:
        """Return one instance of the class for each valid b: 0, 1, ..., ``largest_b(m)``."""
        return [cls(b) for b in range(cls.largest_b(m) + 1)]

    def check(self, m: int) -> None:
        """Raise ValueError if b is too large for m workers."""
        super().check(m)
        largest = self.largest_b(m)
        if self.b > largest:
            advice = f"the largest b is {largest}" if largest >= 0 else "no b is small enough"
            raise ValueError(
                f"{type(self).__name__} needs {self.condition}: got b={self.b} with m={m} workers,"
                f" {advice}"
            )


@former_attributes(**_FORMER_METHODS)
class Rule(Stage):
    """An aggregation rule: a reduction of m rows to one.

    Attributes:
        columnwise: whether each column is reduced on its own.
        whole: whether the rule needs all columns on one server.
        weighable: whether workers may have weights.
        needs_reference: the reference vector that the rule needs besides the rows, if any.

    >>> import numpy as np
    >>> from phocas import Median
    >>> rule = Median()
    >>> rule(np.array([[1.0], [2.0], [900.0]])), str(rule), rule.tolerates(3).values
    (array([2.]), 'median', 1)
    """

    columnwise: bool = False
    """Whether each column is reduced on its own, so that a server needs no other columns."""
    whole: bool = False
    """Whether all columns must be on one server."""
    min_byzantine: ClassVar[int] = 0
    """How many of the heaviest workers must not hold half of all weight, if there is no b."""
    needs_reference: Needed | None = None
    """``previous`` or ``trusted``: the reference vector that is aggregated beside the rows."""

    def referenced_planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the mix of m rows and a reference vector, which is the last of m + 1 rows.

        A rule with ``needs_reference`` overrides this method.
        """
        del m, rng
        raise TypeError(f"{self} has no use for a reference: leave the reference out")

    def masses(self, units: NDArray[np.int64]) -> Masses | None:
        """Return which part of a column's total weight the rule averages, if workers have weights.

        None: the rule cuts no weight from columns; it averages the chosen rows by their weights.

        Args:
            units: the weight of each worker, in whole units.
        """
        del units
        return None

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Compute the mix as without weights.

        If :meth:`masses` returns None, the chosen rows are averaged by their weights.
        """
        mix = yield from self.planning(m, rng)
        if units is None or self.masses(units) is not None:
            return mix
        return weighted_mean(mix, units)

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column of mixed rows are averaged, given m workers."""

    def expected(self, m: int) -> float:
        """Return the expected share of an honest worker's values that is dropped."""
        del m
        return 0.0

    def tolerates(self, m: int) -> Tolerance:
        """Return how many wrong rows, and how many wrong values per column, are tolerated."""
        self.check(m)
        return Tolerance()

    def max_byzantine(self, m: int) -> int:
        """Return how many of m workers may be Byzantine for detection to be valid."""
        return self.tolerates(m).rows

    def error_bound(self, m: int, q: int) -> float | None:
        """Bound the distance from the honest mean, in standard deviations of the honest rows.

        The bound holds whatever q of m workers send. If the rule tolerates q wrong values per
        column, q counts these; otherwise q counts wrong rows. None: there is no guarantee for q.
        """
        tolerance = self.tolerates(m)
        return ASSUMED if q <= max(tolerance.rows, tolerance.values) else None

    @property
    def proven(self) -> bool:
        """Return whether the rule has an error bound of its own, and not the assumed one.

        A rule without one, such as a user's function with a ``b``, only claims its tolerance.
        """
        return type(self).error_bound is not Rule.error_bound

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the paper's Delta for q Byzantine of m workers, in units of the variance V.

        The theorem is ``E |result - g|^2 <= Delta V``. With ``adaptive``, the bound also holds
        against an attacker that chooses which values to replace after seeing all of them. The
        bound is None if there is no theorem, or if q is more than the theorem allows.
        """
        del m, q, adaptive
        return None

    def __call__(
        self,
        rows: Any,
        *,
        rng: Randomness = None,
        weights: Any = None,
        max_share: Any = None,
        reference: Any = None,
    ) -> Any:
        """Aggregate m rows: an array, a tensor, m vectors, m mappings of names to them or m lists.

        In mappings (state dicts) and lists, arrays of integers become the lower median of the
        workers' values, and Boolean arrays the majority. An explanation does not count them.

        ``weights`` are one number for each worker, such as its number of examples. ``max_share``
        is the largest share of all weight that a worker may have. See :class:`phocas.Weighted`.
        ``reference`` is a vector like a row, for a rule with ``needs_reference``.
        """
        if weights is not None or max_share is not None:
            return self.weighted(weights, max_share)(rows, rng=rng, reference=reference)
        if reference is not None:
            return self.referenced()(with_reference(rows, reference), rng=rng)
        matrix = open_rows(rows)
        self.check(matrix.m)
        return execution.aggregate(plan_of(self, matrix.m, as_generator(rng)), matrix)

    def explain(
        self,
        rows: Any,
        *,
        rng: Randomness = None,
        weights: Any = None,
        max_share: Any = None,
        reference: Any = None,
    ) -> Explanation:
        """Aggregate, and return the share of each worker's values that was dropped as well."""
        if weights is not None or max_share is not None:
            return self.weighted(weights, max_share).explain(rows, rng=rng, reference=reference)
        if reference is not None:
            found = self.referenced().explain(with_reference(rows, reference), rng=rng)
            return replace(found, dropped=found.dropped[:-1])
        matrix = open_rows(rows)
        self.check(matrix.m)
        plan = plan_of(self, matrix.m, as_generator(rng))
        return Explanation(*execution.explain(plan, matrix), self.expected(matrix.m))

    def _repr_html_(self) -> str:
        """Return the rule and its parameters as a small HTML table."""
        given = [(each.name, str(getattr(self, each.name))) for each in fields(self)]  # type: ignore[arg-type]  # every Spec is a dataclass
        return html_table([], [("", self.summary()), *given], str(self))

    def referenced(self) -> Rule:
        """Return the rule for rows of which the last is the reference; see ``Referenced``."""
        from phocas.rules.relative import Referenced  # noqa: PLC0415 - it is a rule itself

        return Referenced(self)

    def weighted(self, weights: Any, max_share: float | None = None) -> Rule:
        """Return the rule for workers that have weights; its guarantees depend on the weights."""
        from phocas.rules.weighting import Weighted  # noqa: PLC0415 - it is a rule itself

        if weights is None:
            raise ValueError("max_share needs weights: without them all have the same share")
        return Weighted(self, tuple(np.asarray(weights).tolist()), max_share)


class Composite(Rule):
    """A rule with its own execution plan, because a mix and a window do not describe it."""

    @abstractmethod
    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return the execution plan for m rows."""


def plan_of(rule: Rule, m: int, rng: np.random.Generator | None = None) -> Plan:
    """Return the execution plan of a rule for m rows.

    >>> from phocas import Phocas
    >>> plan_of(Phocas(b=2), 7).window.drop
    2
    """
    if isinstance(rule, Composite):
        return rule.plan(m, rng)
    # A rule that does not override planning mixes nothing. Skipping it saves a microsecond.
    unmixed = type(rule).planning is Stage.planning
    return Plan(rule.window(m), None if unmixed else rule.planning(m, rng))


@former_attributes(spreads="error_bound")
class PreAggregator(Stage):
    """A step before a rule that turns m rows into other rows.

    >>> import numpy as np
    >>> from phocas import NNM, Median
    >>> rule = NNM(b=1) | Median()
    >>> str(rule), rule.tolerates(5).rows
    ('nnm:b=1|median', 1)
    """

    def filter_window(self, m: int) -> Window | None:
        """Return the window of the cell filter, which replaces cells beyond twice its cutoff.

        None if the step filters no cells.
        """
        del m
        return None

    def rows_after(self, m: int) -> int:
        """Return how many rows the step returns for m rows."""
        return m

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return how many Byzantine rows and values the step and its successors tolerate.

        Args:
            m: the number of rows before the step.
            following: the tolerance of the next step, for the rows after this step.
        """
        del m, following
        return Tolerance()

    def error_bound(self, m: int, q: int, following: float) -> float | None:
        """Bound the error of the whole pipeline, given the error bound of the following steps."""
        del m, q, following
        return None

    def __call__(self, rows: Any, **options: Any) -> Never:
        """Raise TypeError: a rule must follow."""
        del rows, options
        raise TypeError(
            f"{self!r} is a pre-aggregator: write a rule after it, ({self!r} | Median())(rows)"
        )

    @overload
    def __or__(self, following: Rule) -> Pipeline: ...
    @overload
    def __or__(self, following: PreAggregator | Chain) -> Chain: ...
    def __or__(self, following: PreAggregator | Chain | Rule) -> Pipeline | Chain:
        """Combine the step with a following step or rule: ``NNM(b=6) | Phocas(b=6)``."""
        return Chain((self,)) | following


@dataclass(frozen=True)
class Chain:
    """Pre-aggregations without a rule: ``chain | rule`` makes a pipeline."""

    stages: tuple[PreAggregator, ...]

    @overload
    def __or__(self, following: Rule) -> Pipeline: ...
    @overload
    def __or__(self, following: PreAggregator | Chain) -> Chain: ...
    def __or__(self, following: PreAggregator | Chain | Rule) -> Pipeline | Chain:
        if isinstance(following, Chain):
            return Chain(self.stages + following.stages)
        if isinstance(following, Pipeline):
            return Pipeline((*self.stages, *following.stages), following.rule)
        if isinstance(following, Rule):
            return Pipeline(self.stages, following)
        if isinstance(following, PreAggregator):
            return Chain((*self.stages, following))
        return NotImplemented


@dataclass(frozen=True)
class Pipeline(Composite):
    """A rule with pre-aggregations before it; it has the interface of a rule.

    Args:
        stages: the pre-aggregations, in the order in which they are applied.
        rule: the rule that reduces their result.

    >>> from phocas import NNM, Median, Phocas, parse_rule
    >>> parse_rule("nnm:b=2|phocas:b=2") == NNM(b=2) | Phocas(b=2)
    True
    >>> (NNM(b=2) | Median()).tolerates(9).rows
    2
    """

    stages: tuple[PreAggregator, ...]
    rule: Rule
    name: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        """Raise ValueError if a step that must come first does not."""
        if self.rule.outermost:
            raise ValueError(
                f"{type(self.rule).__name__} goes around a pipeline, not into one: got {self}"
            )
        for stage in self.stages[1:]:
            if stage.outermost:
                name = type(stage).__name__
                raise ValueError(
                    f"{name} must come first and once, where the rows are as they came: got {self}"
                )

    def __str__(self) -> str:
        return "|".join(str(stage) for stage in (*self.stages, self.rule))

    def __repr__(self) -> str:
        return " | ".join(repr(stage) for stage in (*self.stages, self.rule))

    @property
    def following(self) -> Rule:
        """Return the rule without its first stage."""
        rest = self.stages[1:]
        return Pipeline(rest, self.rule) if rest else self.rule

    def _filtering(self, m: int) -> Filtering | None:
        """Return the cell filter of the first stage, or None.

        The filter excludes at most as many rows as the following steps tolerate.
        """
        window = self.stages[0].filter_window(m)
        if window is None:
            return None
        return Filtering(OutlierShares(window), self.following.tolerates(m).rows)

    def _sizes(self, m: int) -> list[int]:
        """Return the number of input rows of each stage and, last, of the rule."""
        sizes = [m]
        for stage in self.stages:
            sizes.append(stage.rows_after(sizes[-1]))
        return sizes

    def check(self, m: int) -> None:
        """Check every step with the number of its input rows."""
        *before, last = self._sizes(m)
        for stage, size in zip(self.stages, before, strict=True):
            stage.check(size)
        try:
            self.rule.check(last)
        except ValueError as error:
            raise ValueError(f"after pre-aggregation to {last} rows, {error}") from None

    def tolerates(self, m: int) -> Tolerance:
        """Return the tolerance of the rule, reduced by each stage before it."""
        self.check(m)
        if self._filtering(m) is not None and self.following.error_bound(m, 0) is None:
            return Tolerance()  # the following steps have no error bound even without attackers
        *before, last = self._sizes(m)
        found = self.rule.tolerates(last)
        for stage, size in zip(reversed(self.stages), reversed(before), strict=True):
            found = stage.tolerates(size, found)
        return found

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the error bound of the rule, enlarged by each stage before it."""
        tolerance = self.tolerates(m)
        if q > max(tolerance.rows, tolerance.values):
            return None
        filtering = self._filtering(m)
        if filtering is not None:
            found = self._among_filtered(m, filtering.most)
            return None if found is None else self.stages[0].error_bound(m, q, found)
        *before, last = self._sizes(m)
        found = self.rule.error_bound(last, q)
        for stage, size in zip(reversed(self.stages), reversed(before), strict=True):
            found = None if found is None else stage.error_bound(size, q, found)
        return found

    @property
    def proven(self) -> bool:
        """Return whether the rule at the end has an error bound of its own."""
        return self.rule.proven

    def _among_filtered(self, m: int, most: int) -> float | None:
        """Bound the error of the following steps if at most ``most`` rows are excluded."""
        found = [self.following.error_bound(m, out) for out in range(most + 1)]
        known = [each for each in found if each is not None]
        return max(known) if len(known) == len(found) else None

    @property
    def weighable(self) -> bool:  # type: ignore[override]  # read-only here: all steps decide
        """Tell whether every step has a definition with weights."""
        return self.rule.weighable and all(stage.weighable for stage in self.stages)

    @property
    def min_byzantine(self) -> int:  # type: ignore[override]  # read-only here: the rule decides
        """Return ``min_byzantine`` of the rule that follows the stages."""
        return self.rule.min_byzantine

    def masses(self, units: NDArray[np.int64]) -> Masses | None:
        """Return which part of a column's total weight the rule at the end averages."""
        return self.rule.masses(units)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Compute the mix of all steps; row i has the weight of worker i in every step."""
        mix = Mix()
        for stage in (*self.stages, self.rule):
            mix = yield from through(mix, stage.weighted_planning(m, units, rng))
        return mix

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: the rule decides
        """Tell whether the rule needs all columns on one server."""
        return self.rule.whole

    def plan(self, m: int, rng: np.random.Generator | None) -> Plan:
        """Return a plan that applies the stages and then the rule."""
        plan = plan_of(self.rule, self._sizes(m)[-1], rng)
        plan.planning, plan.filtering = self.planning(m, rng), self._filtering(m)
        return plan

    def window(self, m: int) -> Window:
        """Return the window of the rule for the rows after all stages."""
        return self.rule.window(self._sizes(m)[-1])

    def expected(self, m: int) -> float:
        """Return the expected dropped share of the rule, for the rows after all stages."""
        return self.rule.expected(self._sizes(m)[-1])

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the mix of all steps, each on the rows that the previous step made."""
        mix = Mix()
        for stage in (*self.stages, self.rule):
            rows = m if mix.weights is None else len(mix.weights)
            mix = yield from through(mix, stage.planning(rows, rng))
        return mix

    @property
    def needs_reference(self) -> Needed | None:  # type: ignore[override]  # the rule decides
        """Return the reference vector that the rule after the stages needs."""
        return self.rule.needs_reference

    def referenced_planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the mix of all steps; the stages leave the reference unchanged."""
        mix, rows = Mix(), m
        for stage in self.stages:
            mix = yield from through(mix, beside(stage.planning(rows, rng), rows))
            rows = stage.rows_after(rows)
        return (yield from through(mix, self.rule.referenced_planning(rows, rng)))
