"""What a rule is: a frozen value that can be called, explained, compared, printed and combined."""

from __future__ import annotations

import numbers
from abc import abstractmethod
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Masses, Window
from phocas.rules.algebra import (
    Cleanup,
    Decision,
    Floats,
    Matrix,
    Mix,
    Planning,
    Request,
    through,
    weighted_mean,
)
from phocas.rules.inputs import open_rows
from phocas.rules.promise import ASSUMED, Tolerance
from phocas.specs import Spec, count, normalise

Randomness: TypeAlias = np.random.Generator | int | None


def as_generator(rng: Randomness) -> np.random.Generator | None:
    """Return the generator that is given, or that of a seed; rules draw nothing without one."""
    if rng is None or isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, bool) or not isinstance(rng, numbers.Integral) or rng < 0:
        raise TypeError(f"rng must be a NumPy generator, a seed >= 0 or None: got {rng!r}")
    return np.random.default_rng(int(rng))


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A result, and who was thrown away for it.

    ``dropped`` is, for each worker, the share of its values that did not enter the result (for
    rules that weigh rather than choose: the share of a fair weight that it lost). ``expected`` is
    the share that a worker would lose if who sent a value did not matter. A value that equals the
    farthest kept one counts as kept.

    Attributes:
        value: the result, in the form of the rows.
        dropped: for each worker, the share of its values that did not enter.
        expected: the share that chance would take of each.

    >>> import numpy as np
    >>> from phocas import Phocas
    >>> why = Phocas(b=1).explain(np.array([[1.0], [2.0], [6.0], [900.0]]))
    >>> why.value, why.dropped, why.expected
    (array([3.]), array([0., 0., 0., 1.]), 0.25)
    >>> why.excess
    array([-0.25, -0.25, -0.25,  0.75])
    """

    value: Any
    dropped: NDArray[np.float64]
    expected: float

    @property
    def excess(self) -> NDArray[np.float64]:
        """Return how much more of each worker was dropped than expected."""
        return self.dropped - self.expected


class Stage(Spec):
    """A step over m rows: a rule, or a pre-aggregation before one."""

    outermost: ClassVar[bool] = False
    """Whether it must see the rows as they come, with nothing before it."""
    weighable: bool = False
    """Whether there is a definition for workers that have weights."""

    def check(self, m: int) -> None:
        """Raise ValueError unless the step holds its promise with m workers."""
        if m < 1:
            raise ValueError(f"{type(self).__name__} needs at least 1 row: got {m}")

    @classmethod
    def largest_b(cls, m: int) -> int:
        """Return the largest b that may be told, or is meant if none is; below 0 if none may."""
        return (m - 1) // 2

    @classmethod
    def choices(cls, m: int) -> list[Self]:
        """Return all that this may be told with m workers; nothing if b does not say it all."""
        required = [each for each in fields(cls) if each.default is MISSING]  # type: ignore[arg-type]  # every Spec is a dataclass
        return [] if required or m < 1 else [cls()]

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Work out the mix of the rows; a plain column rule has none."""
        del m, rng
        yield from ()
        return Mix()

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Work out the mix of rows that have weights; without ``units`` all weigh the same."""
        del units
        return self.planning(m, rng)


@dataclass(frozen=True)
class Told(Stage):
    """A step that is told b, the number of wrong rows or values that it has to survive.

    Args:
        b: how many wrong rows or values it has to survive.

    >>> from phocas import Krum
    >>> Krum.largest_b(20), Krum.condition
    (8, '2b + 2 < m')
    >>> len(Krum.choices(20))
    9
    """

    b: int
    condition: ClassVar[str] = "2b < m"
    """What ``largest_b`` says, in the words of the error."""

    def __post_init__(self) -> None:
        """Check that b is a count."""
        normalise(self, b=count(type(self).__name__, "b", self.b))

    @classmethod
    def choices(cls, m: int) -> list[Self]:
        """Return the step with every b that it may be told, from 0 on."""
        return [cls(b) for b in range(cls.largest_b(m) + 1)]

    def check(self, m: int) -> None:
        """Refuse a b that is too large for m."""
        super().check(m)
        largest = self.largest_b(m)
        if self.b > largest:
            advice = f"the largest b is {largest}" if largest >= 0 else "no b is small enough"
            raise ValueError(
                f"{type(self).__name__} needs {self.condition}: got b={self.b} with m={m} workers,"
                f" {advice}"
            )


class Rule(Stage):
    """Reduce m rows to one.

    Attributes:
        columnwise: whether servers can each do their columns alone.
        whole: whether all columns must be in one place.
        weighable: whether workers may have weights.

    >>> import numpy as np
    >>> from phocas import Median
    >>> rule = Median()
    >>> rule(np.array([[1.0], [2.0], [900.0]])), str(rule), rule.tolerates(3).values
    (array([2.]), 'median', 1)
    """

    columnwise: bool = False
    """Whether each column is reduced on its own, so that any server can do it for its columns."""
    whole: bool = False
    """Whether all columns must be in one place, so that only one server can do it."""
    least_liars: ClassVar[int] = 0
    """How many of the heaviest must not hold half, if there is no b that says it."""

    def masses(self, units: NDArray[np.int64]) -> Masses | None:
        """Return which mass of a column is averaged; None: all of the rows that are chosen."""
        del units
        return None

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Plan without weights; a rule that cuts no mass averages what it chose by weight."""
        mix = yield from self.planning(m, rng)
        if units is None or self.masses(units) is not None:
            return mix
        return weighted_mean(mix, units)

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column are averaged, given m workers, after the mix."""

    def expected(self, m: int) -> float:
        """Return the share of its values that an honest worker expects to lose."""
        del m
        return 0.0

    def tolerates(self, m: int) -> Tolerance:
        """Return how many wrong rows, and wrong values a column, are survived among m."""
        self.check(m)
        return Tolerance()

    def liars(self, m: int) -> int:
        """Return how many of m workers may lie for what is said about each of them to hold."""
        return self.tolerates(m).rows

    def spreads(self, m: int, q: int) -> float | None:
        """Bound the distance from the honest mean in honest spreads, whatever q of m send.

        q counts wrong values a column if so many are survived, and wrong rows if not. None is
        beyond what is promised.
        """
        tolerance = self.tolerates(m)
        return ASSUMED if q <= max(tolerance.rows, tolerance.values) else None

    def bound(self, m: int, q: int, *, adaptive: bool = False) -> float | None:
        """Return the paper's Delta for q wrong among m, in units of V, where it has one.

        ``E |result - g|^2 <= Delta V``. ``adaptive`` is a proven bound for an attacker who picks
        what to replace after seeing all. None: there is no theorem, or q is more than it allows.
        """
        del m, q, adaptive
        return None

    def __call__(
        self, rows: Any, *, rng: Randomness = None, weights: Any = None, max_share: Any = None
    ) -> Any:
        """Aggregate m rows: an array, a tensor, m vectors, m mappings of names to them or m lists.

        In mappings (state dicts) and lists, arrays of whole numbers become the lower median of the
        workers' values and flags what more than half of the workers say; blame leaves them out.

        ``weights`` are one number for each worker, such as its examples; ``max_share`` of all
        weight is the most that anyone has. See :class:`phocas.Weighted`.
        """
        if weights is not None or max_share is not None:
            return self.weighted(weights, max_share)(rows, rng=rng)
        matrix = open_rows(rows)
        self.check(matrix.m)
        return matrix.apply(self.decide(matrix, as_generator(rng)), None)

    def explain(
        self, rows: Any, *, rng: Randomness = None, weights: Any = None, max_share: Any = None
    ) -> Explanation:
        """Aggregate, and say what share of each worker's values was dropped."""
        if weights is not None or max_share is not None:
            return self.weighted(weights, max_share).explain(rows, rng=rng)
        matrix = open_rows(rows)
        self.check(matrix.m)
        decision = self.decide(matrix, as_generator(rng))
        counts = np.zeros(decision_rows(decision, matrix.m), np.int64)
        value = matrix.apply(decision, counts)
        cleaned = None if decision.clean is None else decision.clean.lost
        dropped = shares(decision, matrix.m, counts, matrix.d, cleaned)
        return Explanation(value, dropped, self.expected(matrix.m))

    def weighted(self, weights: Any, max_share: float | None = None) -> Rule:
        """Return the rule for workers that have weights: its promises are those with weights."""
        from phocas.rules.weighting import Weighted  # noqa: PLC0415 - it is a rule itself

        if weights is None:
            raise ValueError("max_share needs weights: without them all have the same share")
        return Weighted(self, tuple(np.asarray(weights).tolist()), max_share)

    def decide(self, matrix: Matrix, rng: np.random.Generator | None = None) -> Decision:
        """Work out what is cleaned, the mix and the window for a matrix that can be measured."""
        cleanup = self.cleanup(matrix.m)
        clean = None
        if cleanup is not None:
            plausible = cleanup.plausible()
            clean = cleanup.clean(plausible, matrix.measure(plausible))
        planning = self.planning(matrix.m, rng)
        reply: Floats | None = None
        while True:
            try:
                request: Request = planning.send(reply) if reply is not None else next(planning)
            except StopIteration as stop:
                return replace(self.decision(stop.value, matrix.m), clean=clean)
            reply = matrix.measure(request if clean is None else replace(request, clean=clean))

    def cleanup(self, m: int) -> Cleanup | None:
        """Say how the rows of m workers are cleaned before anything is asked about them."""
        del m
        return None

    def decision(self, mix: Mix, m: int) -> Decision:
        """Say what is done with the rows of m workers once their mix is known."""
        return Decision(mix, self.window(m))


class PreAggregator(Stage):
    """Turn m rows into others, for a rule to reduce.

    >>> import numpy as np
    >>> from phocas import NNM, Median
    >>> rule = NNM(b=1) | Median()
    >>> str(rule), rule.tolerates(5).rows
    ('nnm:b=1|median', 1)
    """

    def plausible(self, m: int) -> Window | None:
        """Return the window twice beyond whose reach a step that cleans has values replaced."""
        del m
        return None

    def rows_after(self, m: int) -> int:
        """Return how many rows come out."""
        return m

    def tolerates(self, m: int, following: Tolerance) -> Tolerance:
        """Return what is survived among m if what follows survives that of the rows after."""
        del m, following
        return Tolerance()

    def spreads(self, m: int, q: int, following: float) -> float | None:
        """Bound the distance in honest spreads if what follows is that near to what it gets."""
        del m, q, following
        return None

    @overload
    def __or__(self, following: Rule) -> Pipeline: ...
    @overload
    def __or__(self, following: PreAggregator | Chain) -> Chain: ...
    def __or__(self, following: PreAggregator | Chain | Rule) -> Pipeline | Chain:
        """Put the step before another: ``NNM(b=6) | Phocas(b=6)``."""
        return Chain((self,)) | following


@dataclass(frozen=True)
class Chain:
    """Pre-aggregations that still wait for their rule."""

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
class Pipeline(Rule):
    """Pre-aggregate, then apply a rule: one value, with the rule's interface.

    Args:
        stages: what is done before the rule, in this order.
        rule: what reduces the rows that are left.

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
        """Refuse steps after others that must see the rows as they come."""
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

    @property
    def following(self) -> Rule:
        """Return what follows the first stage."""
        rest = self.stages[1:]
        return Pipeline(rest, self.rule) if rest else self.rule

    def cleanup(self, m: int) -> Cleanup | None:
        """Clean as the first stage says; no more rows are out than what follows survives."""
        window = self.stages[0].plausible(m)
        return None if window is None else Cleanup(window, self.following.tolerates(m).rows)

    def _sizes(self, m: int) -> list[int]:
        """Return how many rows reach each stage and, last, the rule."""
        sizes = [m]
        for stage in self.stages:
            sizes.append(stage.rows_after(sizes[-1]))
        return sizes

    def check(self, m: int) -> None:
        """Check every step with the rows that reach it."""
        *before, last = self._sizes(m)
        for stage, size in zip(self.stages, before, strict=True):
            stage.check(size)
        try:
            self.rule.check(last)
        except ValueError as error:
            raise ValueError(f"after pre-aggregation to {last} rows, {error}") from None

    def tolerates(self, m: int) -> Tolerance:
        """Return what is left of the rule's promise on the way back through the stages."""
        self.check(m)
        if self.cleanup(m) is not None and self.following.spreads(m, 0) is None:
            return Tolerance()  # what follows goes far from rows that are near one another
        *before, last = self._sizes(m)
        found = self.rule.tolerates(last)
        for stage, size in zip(reversed(self.stages), reversed(before), strict=True):
            found = stage.tolerates(size, found)
        return found

    def spreads(self, m: int, q: int) -> float | None:
        """Follow the rule's distance back through the stages."""
        tolerance = self.tolerates(m)
        if q > max(tolerance.rows, tolerance.values):
            return None
        cleanup = self.cleanup(m)
        if cleanup is not None:
            found = self._among_cleaned(m, cleanup.most)
            return None if found is None else self.stages[0].spreads(m, q, found)
        *before, last = self._sizes(m)
        found = self.rule.spreads(last, q)
        for stage, size in zip(reversed(self.stages), reversed(before), strict=True):
            found = None if found is None else stage.spreads(size, q, found)
        return found

    def _among_cleaned(self, m: int, most: int) -> float | None:
        """Return how far what follows is from the mean of cleaned rows of which some are out."""
        found = [self.following.spreads(m, out) for out in range(most + 1)]
        known = [each for each in found if each is not None]
        return max(known) if len(known) == len(found) else None

    @property
    def weighable(self) -> bool:  # type: ignore[override]  # read-only here: all steps decide
        """Tell whether every step is."""
        return self.rule.weighable and all(stage.weighable for stage in self.stages)

    @property
    def least_liars(self) -> int:  # type: ignore[override]  # read-only here: the rule decides
        """Return that of the rule."""
        return self.rule.least_liars

    def masses(self, units: NDArray[np.int64]) -> Masses | None:
        """Return what the rule averages of the mass of the mixed rows."""
        return self.rule.masses(units)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Plan one step after the other; row i has the weight of worker i in each."""
        mix = Mix()
        for stage in (*self.stages, self.rule):
            mix = yield from through(mix, stage.weighted_planning(m, units, rng))
        return mix

    @property
    def whole(self) -> bool:  # type: ignore[override]  # read-only here: the rule decides
        """Tell whether the rule must see all columns."""
        return self.rule.whole

    def decision(self, mix: Mix, m: int) -> Decision:
        """Leave it to the rule, with the rows that reach it."""
        return self.rule.decision(mix, self._sizes(m)[-1])

    def window(self, m: int) -> Window:
        """Return the rule's window for the rows that reach it."""
        return self.rule.window(self._sizes(m)[-1])

    def expected(self, m: int) -> float:
        """Return what the rule drops of the rows that reach it."""
        return self.rule.expected(self._sizes(m)[-1])

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Plan one step after the other, each on what the ones before it made."""
        mix = Mix()
        for stage in (*self.stages, self.rule):
            rows = m if mix.weights is None else len(mix.weights)
            mix = yield from through(mix, stage.planning(rows, rng))
        return mix


def decision_rows(decision: Decision, m: int) -> int:
    """Return how many rows the window sees."""
    return m if decision.mix.weights is None else len(decision.mix.weights)


def shares(
    decision: Decision,
    m: int,
    counts: NDArray[np.int64],
    columns: int,
    cleaned: Floats | None = None,
) -> NDArray[np.float64]:
    """Return each worker's lost share from what the window dropped of each mixed row.

    What is ``cleaned`` of a worker is lost before, and what is left of it as that of all.
    """
    lost = counts / max(1, columns)
    if decision.mix.weights is not None:
        weights = np.abs(np.nan_to_num(decision.mix.weights, nan=0.0))
        entered = (1 - lost) @ weights
        fair = np.broadcast_to(decision.mix.fair, (m,))
        lost = np.asarray(np.clip(1 - entered / fair, 0.0, 1.0), np.float64)
    return lost if cleaned is None else lost + cleaned * (1 - lost)
