"""Aggregation on several servers that each hold a range of columns.

The result has the same bits as on one server. Every server creates a :class:`ShardedAggregation`.
While the aggregation has a ``request``, each server measures its columns with ``partial``, the
servers exchange all partial measurements, and each server passes all of them to ``answer``. Then
each server reduces its own columns with ``finish``.

>>> import numpy as np
>>> from phocas import Krum
>>> rows = np.random.default_rng(0).normal(size=(7, 100))
>>> shards = [(0, 33), (33, 100)]
>>> evaluation = ShardedAggregation(Krum(b=2), m=7)
>>> while evaluation.request is not None:
...     evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in shards])
>>> whole = np.concatenate([evaluation.finish(rows[:, a:b]) for a, b in shards])
>>> np.array_equal(whole, Krum(b=2)(rows))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from phocas.deprecation import former_attributes
from phocas.rules import measures
from phocas.rules.algebra import SquaredRadii
from phocas.rules.base import Randomness, Rule, as_generator, plan_of
from phocas.rules.execution import Execution, Matrix, Measurement
from phocas.rules.explanation import Explanation
from phocas.rules.inputs import open_rows
from phocas.rules.measures import Partial
from phocas.rules.table import RULES


@former_attributes(standing="prepare", cleans="filters")
class ShardedAggregation:
    """One aggregation of rows whose columns are held by several servers.

    ``request`` is the next measurement; None: columns can be finished. For most column rules
    ``request`` is None from the start. Heraclius requests the radii of columns whose block is split
    between servers, then whether there are outliers, and then the lengths of the rows' tails. (A
    block is 1024 columns, counted from the first column of the matrix.) With ``whole_blocks=False``
    Heraclius requests nothing: every server counts blocks from its own first column, and measures
    tails in its own columns, with a limit from its own radii or from ``squares``. A rule that
    filters cells always requests these radii, and then the number of replaced cells. With ``d``, an
    answer without the last columns is rejected as well.

    Args:
        rule: the rule, or its text.
        m: the number of workers.
        rng: a generator or seed for rules that draw; it must be the same on every server.
        d: the number of columns of the whole matrix.
        whole_blocks: whether the parts of split blocks of columns are measured together.

    >>> import numpy as np
    >>> from phocas import ShardedAggregation, Phocas
    >>> rows = np.array([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [900.0, 0.0]])
    >>> holders = [ShardedAggregation(Phocas(b=1), m=4) for _ in range(2)]
    >>> [holder.request for holder in holders]
    [None, None]
    """

    def __init__(
        self,
        rule: Rule | str,
        m: int,
        rng: Randomness = None,
        *,
        d: int | None = None,
        whole_blocks: bool = True,
    ) -> None:
        self.rule = RULES.of(rule, "ShardedAggregation")
        self.rule.check(m)
        self.m = m
        self.d = d
        if self.rule.whole and d is None:
            raise ValueError(_needs_all(self.rule))
        plan = plan_of(self.rule, m, as_generator(rng))
        self.filters = plan.filtering is not None
        """Whether the rule filters cells, which needs the columns in host memory."""
        self._run = Execution(plan, m, d=d, shared=whole_blocks or self.filters)

    @property
    def squares(self) -> float:
        """Return the smallest sum of squared radii from which the limit of the tail is computed.

        It is 0 unless it is set. A server that knows the sum of all columns, of this or of an
        earlier round, sets it with ``whole_blocks=False``.
        """
        return self._run.squares

    @squares.setter
    def squares(self, squares: float) -> None:
        self._run.squares = squares

    def squared_radii(self, columns: Any) -> float:
        """Return the sum of the squared radii of some columns, for a rule that keeps a tail."""
        matrix, plan = self._open(columns), self._run.plan
        if plan.tail is None:
            return 0.0
        outliers = matrix.outliers(plan.tail.outliers(plan.window, None))
        return float(measures.total(SquaredRadii(), [outliers.squared_radii()]))

    @property
    def request(self) -> Measurement | None:
        """Return the next measurement over all columns; None: columns can be finished."""
        return self._run.request

    def partial(self, columns: Any, start: int) -> Partial:
        """Measure columns that begin at column ``start`` of the whole matrix."""
        return self._run.partial(self._open(columns), start)

    def answer(self, partials: Iterable[Partial]) -> None:
        """Accept the partial measurements of all servers, in any order, each column once."""
        self._run.answer(partials)

    def finish(self, columns: Any, start: int | None = None) -> Any:
        """Aggregate columns that begin at column ``start``; return the result in the same form."""
        return self._run.reduce(self._all(columns, start), start or 0)

    def explain(self, columns: Any, start: int | None = None) -> Explanation:
        """Aggregate columns, and return the share of each worker's values dropped there."""
        found = self._run.explain(self._all(columns, start), start or 0)
        return Explanation(*found, self.rule.expected(self.m))

    def prepare(self, columns: Any, start: int) -> Callable[[], Explanation]:
        """Return a function like :meth:`explain` for columns at a fixed address in memory.

        The values of the columns may change between calls. Work that does not depend on the values
        is done once. The result of one call may be overwritten by the next call.
        """
        prepared = self._run.prepare(self._all(columns, start), self.rule.expected(self.m))
        return partial(self.explain, columns, start) if prepared is None else prepared

    def _all(self, columns: Any, start: int | None) -> Matrix:
        """Return the matrix of the columns to finish; raise ValueError if the rule needs more."""
        if self.request is not None:
            raise ValueError(f"the aggregation is not ready: it needs an answer to {self.request}")
        if self._run.by_blocks and start is None:
            raise ValueError(
                f"{self.rule} goes by blocks of columns: give the column at which these begin, as"
                " start=..."
            )
        matrix = self._open(columns)
        if self.rule.whole and matrix.d != self.d:
            raise ValueError(f"{_needs_all(self.rule)}: got {matrix.d} of {self.d}")
        return matrix

    def _open(self, columns: Any) -> Matrix:
        matrix = columns if isinstance(columns, Matrix) else open_rows(columns)
        if matrix.m != self.m:
            raise ValueError(f"columns must be of {self.m} rows: got {matrix.m}")
        return matrix


def _needs_all(rule: Rule) -> str:
    return (
        f"{rule} needs all columns in one place: use one server and give d, or set columnwise=True"
        " if each column is reduced on its own"
    )
