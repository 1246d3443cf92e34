"""What a rule is: a frozen value that can be called, explained, compared, printed and combined."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import Decision, Floats, Mix, Planning, Request, through
from phocas.rules.inputs import open_rows
from phocas.specs import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A result, and who was thrown away for it.

    ``dropped`` is, for each worker, the share of its values that did not enter the result (for
    rules that weigh rather than choose: the share of a fair weight that it lost). ``expected`` is
    the share that a worker would lose if who sent a value did not matter. A value that equals the
    farthest kept one counts as kept.
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

    @abstractmethod
    def check(self, m: int) -> None:
        """Raise ValueError unless the step holds its promise with m workers."""

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Work out the mix of the rows; a plain column rule has none."""
        del m, rng
        yield from ()
        return Mix()


class Rule(Stage):
    """Reduce m rows to one."""

    columnwise: ClassVar[bool] = False
    outermost: ClassVar[bool] = False
    """Whether it must see the rows as they come, with nothing before it."""

    @abstractmethod
    def window(self, m: int) -> Window:
        """Return which values of a column are averaged, given m workers, after the mix."""

    @abstractmethod
    def expected(self, m: int) -> float:
        """Return the share of its values that an honest worker expects to lose."""

    def __call__(self, rows: Any, *, rng: np.random.Generator | None = None) -> Any:
        """Aggregate m rows: an array, a tensor, m vectors, or m mappings of names to them."""
        matrix = open_rows(rows)
        self.check(matrix.m)
        return matrix.apply(self.decide(matrix, rng), None)

    def explain(self, rows: Any, *, rng: np.random.Generator | None = None) -> Explanation:
        """Aggregate, and say what share of each worker's values was dropped."""
        matrix = open_rows(rows)
        self.check(matrix.m)
        decision = self.decide(matrix, rng)
        counts = np.zeros(decision_rows(decision, matrix.m), np.int64)
        value = matrix.apply(decision, counts)
        return Explanation(
            value, shares(decision, matrix.m, counts, matrix.d), self.expected(matrix.m)
        )

    def decide(self, matrix: Any, rng: np.random.Generator | None = None) -> Decision:
        """Work out the mix and the window for a matrix that can be measured."""
        planning = self.planning(matrix.m, rng)
        reply: Floats | None = None
        while True:
            try:
                request: Request = planning.send(reply) if reply is not None else next(planning)
            except StopIteration as stop:
                return Decision(stop.value, self.window(matrix.m))
            reply = matrix.measure(request)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule from text, as :func:`phocas.parse_rule` does."""
        from phocas.rules.table import parse_rule  # noqa: PLC0415 - the table knows every rule

        return parse_rule(text)


class PreAggregator(Stage):
    """Turn m rows into others, for a rule to reduce."""

    def rows_after(self, m: int) -> int:
        """Return how many rows come out."""
        return m

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
    """Pre-aggregate, then apply a rule: one value, with the rule's interface."""

    stages: tuple[PreAggregator, ...]
    rule: Rule
    name: ClassVar[str] = field(default="pipeline", init=False)

    def __post_init__(self) -> None:
        """Refuse a rule that must see the rows as they come."""
        if self.rule.outermost:
            raise ValueError(
                f"{type(self.rule).__name__} goes around a pipeline, not into one: got {self}"
            )

    def __str__(self) -> str:
        return "|".join(str(stage) for stage in (*self.stages, self.rule))

    def _rows(self, m: int) -> int:
        for stage in self.stages:
            m = stage.rows_after(m)
        return m

    def check(self, m: int) -> None:
        """Check every step with the rows that reach it."""
        for stage in self.stages:
            stage.check(m)
            m = stage.rows_after(m)
        try:
            self.rule.check(m)
        except ValueError as error:
            raise ValueError(f"after pre-aggregation to {m} rows, {error}") from None

    def window(self, m: int) -> Window:
        """Return the rule's window for the rows that reach it."""
        return self.rule.window(self._rows(m))

    def expected(self, m: int) -> float:
        """Return what the rule drops of the rows that reach it."""
        return self.rule.expected(self._rows(m))

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
    decision: Decision, m: int, counts: NDArray[np.int64], columns: int
) -> NDArray[np.float64]:
    """Return each worker's lost share from what the window dropped of each mixed row."""
    lost = counts / max(1, columns)
    if decision.mix.weights is None:
        return lost
    weights = np.abs(np.nan_to_num(decision.mix.weights, nan=0.0))
    entered = (1 - lost) @ weights
    fair = np.broadcast_to(decision.mix.fair, (m,))
    return np.asarray(np.clip(1 - entered / fair, 0.0, 1.0), np.float64)
