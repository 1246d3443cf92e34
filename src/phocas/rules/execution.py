"""The execution of rules: filter cells, mix rows, reduce columns, on any back end.

A rule becomes a :class:`Plan`. An :class:`Execution` runs the plan on a :class:`Matrix`, or on
ranges of columns of a larger matrix. Only this module combines filter, mix, weights and monitoring.
A back end (host memory, Triton, torch operations) is a subclass of :class:`Matrix` that implements
its primitives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import PLAIN_MEAN, Weighing, Window
from phocas.rules import measures
from phocas.rules.algebra import (
    UNMIXED,
    Allowance,
    Filtering,
    Floats,
    Function,
    Mix,
    OutlierShares,
    Planning,
    Radii,
    Request,
    SquaredRadii,
    Tail,
    TailNorms,
    by_function,
    select,
)
from phocas.rules.explanation import Explanation
from phocas.rules.measures import Partial

Counts = NDArray[np.int64]
Measurement: TypeAlias = Request | Radii | OutlierShares | SquaredRadii | TailNorms


@dataclass(slots=True, eq=False)
class Plan:
    """The execution plan of a rule: an optional filter, an optional mix, and a reduction.

    Attributes:
        window: which values of each column are averaged.
        planning: the generator that computes the mix; None if the rows are not mixed.
        function: a function of the mixed rows that replaces the window.
        weighing: the weights of the workers, which replace the window.
        filtering: which cells are replaced before anything else.
        tail: the allowance for outliers of the window; only for rows that are neither filtered, nor
            mixed, nor weighed.
        monitored: if set, the result is the plain mean of this number of rows, from the first, and
            the rest of the plan only counts the values that it would have dropped.
    """

    window: Window
    planning: Planning | None = None
    function: Function | None = None
    weighing: Weighing | None = None
    filtering: Filtering | None = None
    tail: Tail | None = None
    monitored: int | None = None

    @property
    def keeps_tail(self) -> bool:
        """Tell whether outliers of the window are added to the result."""
        return (
            self.tail is not None
            and self.planning is None
            and self.filtering is None
            and self.weighing is None
        )


@dataclass(slots=True, eq=False)
class Reduction:
    """The reduction of mixed rows to one row.

    Attributes:
        window: which values of each column are averaged.
        mix: the rows that are reduced.
        weighing: the weights of the workers, which replace the window.
        spreads: the scales of blocks of columns, for a window with a cutoff: those of split blocks
            by block number; None: the matrix computes them.
        mean: whether to return the plain mean of all rows, and use the window for the counts only.
        tail: the allowance for outliers; None: outliers are dropped.
        allowed: how much of each row's tail is added, if it was measured over more columns.
        squares: the smallest sum of squared radii from which the limit of the tail is computed.
    """

    window: Window
    mix: Mix = UNMIXED
    weighing: Weighing | None = None
    spreads: Any = None
    mean: bool = False
    tail: Tail | None = None
    allowed: Allowance | None = None
    squares: float = 0.0

    @property
    def sums(self) -> Floats | None:
        """Return the weights of the mix, or None if the mix only selects rows."""
        return self.mix.weights if self.mix.selected is None else None


@dataclass(slots=True, eq=False)
class ColumnRange:
    """A range of columns of all m rows.

    Attributes:
        start: the first column, counted from the first column of the matrix.
        columns: the number of columns.
        arrays: one (m, columns) array or tensor, or m of ``columns`` values.
        element: the name of the type of the values.
    """

    start: int
    columns: int
    arrays: Any
    element: str


class Outliers(Protocol):
    """The cells of a matrix that a filter replaces, in the form of the back end."""

    def counts(self) -> NDArray[Any]:
        """Return how many cells of each row are replaced."""

    def partial(self) -> Partial:
        """Return the counts by block of columns, to be added to those of other ranges."""

    def squared_radii(self) -> Partial:
        """Return the mean of the squared radii of each block of columns.

        The mean of a block of which this range has only a part is that of the whole block. It is
        stored at the first of the block's columns in this range, followed by zeros.
        """


class Matrix(ABC):
    """The m x d matrix of rows in one memory; subclasses implement the abstract primitives.

    A piece is a :class:`ColumnRange`. A block here is a part of a piece, in the form in which the
    kernels of a back end read it. A block of columns is a fixed number of columns, counted from the
    first column of the whole matrix.
    """

    m: int
    pieces: Sequence[ColumnRange]
    rebuild: Callable[[list[Any]], Any]
    weighs: ClassVar[bool] = False
    """Whether the back end has kernels for workers with weights."""

    @property
    def d(self) -> int:
        """Return the number of columns."""
        return sum(piece.columns for piece in self.pieces)

    @abstractmethod
    def blocks(self, piece: ColumnRange) -> Iterator[tuple[int, int, Any]]:
        """Yield the blocks of a piece (range of columns): first column, last column + 1, rows."""

    @abstractmethod
    def measured(self, request: Request | Radii, start: int, rows: Any) -> Partial:
        """Measure a block that begins at column ``start`` of the whole matrix."""

    @abstractmethod
    def block_spreads(self, reduction: Reduction) -> Any:
        """Return the scales that :meth:`reduce_block` needs for a window with a cutoff.

        The scale of a block of columns is the root mean square of the radii of its columns.
        """

    @abstractmethod
    def outliers(self, request: OutlierShares, start: int = 0) -> Outliers:
        """Find the cells to replace; the columns begin at ``start`` of the whole matrix."""

    @abstractmethod
    def filtered(self, outliers: Any, excluded: NDArray[np.bool_]) -> Matrix:
        """Return the matrix with outliers replaced by column centres, and excluded rows as NaN."""

    @abstractmethod
    def tail_squares(self, outliers: Any, limit: float) -> Floats:
        """Return the squared length of each row's tail; see :class:`Tail`."""

    @abstractmethod
    def add_tail(self, outs: list[Any] | None, outliers: Any, allowed: Allowance) -> Counts:
        """Add the scaled tails to the results; return the number of lost values of each row.

        A value is lost if it is farther from the centre than the limit. The sum of a column is
        divided by the number of its values that are not lost. Without results, only count.
        """

    @abstractmethod
    def empty(self, piece: ColumnRange, reduction: Reduction, rows: Any) -> Any:
        """Return an empty array for the result of a piece, whose first block is given."""

    @abstractmethod
    def reduce_block(
        self, reduction: Reduction, start: int, rows: Any, out: Any, counts: Counts | None
    ) -> None:
        """Mix and reduce a block into ``out``; add the dropped values of each row to ``counts``.

        ``start`` is the position of the block's first column in the whole matrix. It tells to which
        block of columns each column belongs.
        """

    @abstractmethod
    def values(self, rows: Any, weights: Floats | None) -> NDArray[np.floating]:
        """Return a copy of the mixed rows of a block in host memory."""

    @abstractmethod
    def stored(self, piece: ColumnRange, values: Any) -> Any:
        """Return the result of a piece in the type of its values; None means no columns."""

    def prepare(
        self, reduction: Reduction, execution: Execution, expected: float
    ) -> Callable[[], Explanation] | None:
        """Return a faster reduction of rows at a fixed address; None if there is none.

        See :meth:`Execution.prepare`.
        """
        del reduction, execution, expected
        return None

    def measure(self, request: Request) -> Floats:
        """Return the squared distances or squared norms of whole rows."""
        found: Floats = measures.total(request, [self.partial(request)])
        return found

    def partial(self, request: Request | Radii, start: int = 0) -> Partial:
        """Measure these columns, which begin at column ``start`` of the whole matrix."""
        result = Partial(self.m if request.weights is None else len(request.weights))
        for piece in self.pieces:
            for begin, _, rows in self.blocks(piece):
                result += self.measured(request, start + piece.start + begin, rows)
        return result

    def reduce(self, reduction: Reduction, counts: Counts | None = None, start: int = 0) -> Any:
        """Mix and reduce; return the result in the form of the rows.

        Add the number of dropped values of each row to ``counts``. Blocks of columns are counted
        from ``start`` if their scales are given, and from the first column of this matrix if not.
        """
        given = reduction.spreads
        if given is None:
            start = 0
            if reduction.window.cutoff:
                reduction.spreads = self.block_spreads(reduction)
        outside = counts if reduction.tail is None else np.zeros(self.m, np.int64)
        outs = []
        for piece in self.pieces:
            out = None
            for begin, end, rows in self.blocks(piece):
                if out is None:
                    out = self.empty(piece, reduction, rows)
                part = out if end - begin == piece.columns else out[begin:end]
                self.reduce_block(reduction, start + piece.start + begin, rows, part, outside)
            outs.append(out)
        if reduction.tail is not None and outside is not None:
            if reduction.allowed is not None or np.count_nonzero(outside):
                self.keep_tail(reduction, given, outs, outside, start)
            if counts is not None:
                counts += outside
        return self.rebuild(
            [self.stored(piece, out) for piece, out in zip(self.pieces, outs, strict=True)]
        )

    def tail_partial(self, outliers: Any, limit: float) -> Partial:
        """Measure the squared length of each row's tail in a range of columns."""
        del outliers, limit
        raise TypeError("the tails of ranges of columns are measured in host memory only")

    def keep_tail(
        self, reduction: Reduction, spreads: Any, outs: list[Any], outside: Counts, start: int
    ) -> None:
        """Add the outliers of the window to the result, as far as the tail allows.

        Args:
            reduction: the reduction whose result ``outs`` is, one array for each piece.
            spreads: the scales of split blocks, if the columns are a part of the whole matrix.
            outs: the results, to which the tail is added unless they are plain means.
            outside: the number of outliers of each row; those that are kept are subtracted.
            start: the first column, counted from the first column of the whole matrix.
        """
        tail = reduction.tail
        if tail is None:
            raise ValueError("the reduction keeps no tail")
        outliers = self.outliers(tail.outliers(reduction.window, spreads), start)
        allowed = reduction.allowed
        if allowed is None:
            squares = measures.total(SquaredRadii(), [outliers.squared_radii()])
            limit = tail.limit(max(squares, reduction.squares))
            allowed = tail.allowance(self.tail_squares(outliers, limit), limit)
        lost = self.add_tail(None if reduction.mean else outs, outliers, allowed)
        outside -= np.rint(allowed.scales * np.maximum(outside - lost, 0)).astype(np.int64)

    def apply(self, function: Function, mix: Mix) -> Any:
        """Reduce the mixed rows by a function, which gets all columns in host memory."""
        found = [
            self.values(rows, mix.weights)
            for piece in self.pieces
            for _, _, rows in self.blocks(piece)
        ]
        values = by_function(function, np.concatenate(found, axis=1))
        parts = [values[piece.start : piece.start + piece.columns] for piece in self.pieces]
        return self.rebuild(
            [self.stored(piece, part) for piece, part in zip(self.pieces, parts, strict=True)]
        )


class Execution:
    """One execution of a plan on m rows.

    While ``request`` is not None, it must be measured over all columns. :meth:`measure` does so for
    a matrix with all columns. Otherwise, :meth:`partial` measures each range of columns, and
    :meth:`answer` accepts all partial results. Then any range of columns can be reduced or
    explained.

    Args:
        plan: the plan to execute.
        m: the number of rows.
        d: the number of columns; if given, an answer with fewer columns is rejected.
        shared: whether blocks of columns may be split, so that their scales must be exchanged.

    Attributes:
        squares: the smallest sum of squared radii from which the limit of the tail is computed.
    """

    def __init__(self, plan: Plan, m: int, *, d: int | None = None, shared: bool = False) -> None:
        self.plan = plan
        self.m = m
        self.d = d
        self.mix = UNMIXED
        self.request: Measurement | None = None
        self._shared = shared
        self.squares = 0.0
        self._allowed: Allowance | None = None
        self._spreads: Mapping[int, float] | None = None
        self._looked_for: OutlierShares | None = None
        self._outliers: dict[tuple[int, int], Outliers] = {}
        self._excluded: NDArray[np.bool_] | None = None
        if shared or plan.planning is not None or plan.filtering is not None:
            self._steps = self._questions()
            self.reply(None)

    def _questions(self) -> Generator[Measurement, Any, None]:
        """Yield the requests for measurements over all columns, and store their results."""
        plan = self.plan
        if plan.filtering is not None:
            request = plan.filtering.request
            if self._shared:
                request = replace(request, spreads=(yield request.radii(self.m)))
            self._look_for(request)
            self._excluded = plan.filtering.excluded((yield request))
        if plan.planning is not None:
            self.mix = yield from plan.planning
        if self._shared and plan.window.cutoff:
            self._spreads = yield Radii(plan.window, self.mix.weights, plan.weighing)
        if self._shared and plan.tail is not None and plan.keeps_tail:
            beyond = OutlierShares(plan.window, spreads=self._spreads)
            self._look_for(beyond)
            if not (yield beyond).any():
                return
            self._look_for(plan.tail.outliers(plan.window, self._spreads))
            limit = plan.tail.limit((yield SquaredRadii()))
            self._allowed = plan.tail.allowance((yield TailNorms(limit)), limit)

    def _look_for(self, request: OutlierShares) -> None:
        self._looked_for, self._outliers = request, {}

    def reply(self, answer: Any) -> None:
        """Accept the answer to the request, and set the next request."""
        try:
            self.request = self._steps.send(answer)
        except StopIteration:
            self.request = None

    @property
    def by_blocks(self) -> bool:
        """Tell whether the reduction of columns depends on their position in blocks of columns."""
        return self._spreads is not None or self._excluded is not None

    def partial(self, matrix: Matrix, start: int) -> Partial:
        """Measure columns that begin at column ``start`` of the whole matrix."""
        if isinstance(self.request, OutlierShares):
            return self._found(matrix, start).partial()
        if isinstance(self.request, SquaredRadii):
            return self._found(matrix, start).squared_radii()
        if isinstance(self.request, TailNorms):
            return matrix.tail_partial(self._found(matrix, start), self.request.limit)
        if self.request is None:
            raise ValueError("there is no request: the aggregation is ready to finish")
        return self._seen(matrix, start).partial(self.request, start)

    def answer(self, partials: Iterable[Partial]) -> None:
        """Accept the partial results of all columns, in any order."""
        if self.request is None:
            raise ValueError("there is no request to answer: the aggregation is ready to finish")
        self.reply(measures.total(self.request, partials, self.d))

    def measure(self, matrix: Matrix) -> None:
        """Answer every request from a matrix that has all columns."""
        while self.request is not None:
            if isinstance(self.request, OutlierShares):
                self.reply(self._found(matrix, 0).counts() / max(1, matrix.d))
            elif isinstance(self.request, Radii | SquaredRadii | TailNorms):
                raise TypeError("radii are exchanged between ranges of columns: there is one")
            else:
                self.reply(self._seen(matrix, 0).measure(self.request))

    def _found(self, matrix: Matrix, start: int) -> Outliers:
        """Return the cells to replace; the search runs once per range of columns."""
        if self._looked_for is None:
            raise ValueError("the plan filters nothing")
        place = start, matrix.d  # a range without columns may begin where another one does
        if place not in self._outliers:
            self._outliers[place] = matrix.outliers(self._looked_for, start)
        return self._outliers[place]

    def _seen(self, matrix: Matrix, start: int) -> Matrix:
        """Return the filtered rows, or the matrix if the plan has no filter."""
        if self._excluded is None:
            return matrix
        return matrix.filtered(self._found(matrix, start), self._excluded)

    def reduce(self, matrix: Matrix, start: int = 0, counts: Counts | None = None) -> Any:
        """Reduce columns that begin at column ``start`` of the whole matrix."""
        plan = self.plan
        if plan.weighing is not None and not matrix.weighs:
            raise TypeError("weights need rows in host memory: move the tensors to the CPU first")
        seen = matrix if self._excluded is None else self._seen(matrix, start)
        if plan.monitored is None and plan.function is not None:
            return seen.apply(plan.function, self.mix)
        reduction = self._reduction()
        if plan.monitored is None:
            return seen.reduce(reduction, counts, start)
        if counts is not None and self._in_one_pass:
            return matrix.reduce(replace(reduction, mean=True), counts, start)
        if counts is not None:
            seen.reduce(reduction, counts, start)
        return matrix.reduce(monitored_mean(plan.monitored, self.m))

    def _reduction(self) -> Reduction:
        """Return the reduction of the mixed rows, with what was measured over all columns."""
        plan = self.plan
        # With ranges of columns there is no tail if no value is beyond twice the cutoff.
        keeps = plan.keeps_tail and not (self._shared and self._allowed is None)
        return Reduction(
            plan.window,
            self.mix,
            plan.weighing,
            self._spreads,
            tail=plan.tail if keeps else None,
            allowed=self._allowed,
            squares=self.squares,
        )

    @property
    def _in_one_pass(self) -> bool:
        """Tell whether one pass over the rows computes the result and the counts."""
        plan = self.plan
        return (
            self.mix.weights is None
            and self._excluded is None
            and plan.weighing is None
            and plan.function is None
            and plan.monitored in (None, self.m)
        )

    def explain(self, matrix: Matrix, start: int = 0) -> tuple[Any, Floats]:
        """Reduce columns; return the result and the dropped share of each worker's values."""
        counts = np.zeros(self.m if self.mix.weights is None else len(self.mix.weights), np.int64)
        value = self.reduce(matrix, start, counts)
        dropped = self._shares(counts, matrix.d)
        if self._excluded is not None:
            replaced = self._found(matrix, start).counts() / max(1, matrix.d)
            dropped += np.where(self._excluded, 1.0, replaced) * (1 - dropped)
        return value, dropped

    def prepare(self, matrix: Matrix, expected: float) -> Callable[[], Explanation] | None:
        """Return a faster :meth:`explain` for rows at a fixed address, whose values may change.

        Return None if the back end has none. A call may overwrite the result of the previous call.

        Args:
            matrix: the rows.
            expected: the share that is dropped of an honest worker, which the result contains.
        """
        if not self._in_one_pass or self._spreads is not None:
            return None
        reduction = replace(self._reduction(), mean=self.plan.monitored is not None)
        return matrix.prepare(reduction, self, expected)

    def _shares(self, counts: Counts, columns: int) -> Floats:
        """Return the dropped share of each worker, from the dropped values of each mixed row."""
        lost: Floats = counts / max(1, columns)
        if self.mix.weights is None:
            return lost
        weights = np.abs(np.nan_to_num(self.mix.weights, nan=0.0))
        entered = (1 - lost) @ weights
        fair = np.broadcast_to(self.mix.fair, (self.m,))
        return np.asarray(np.clip(1 - entered / fair, 0.0, 1.0), np.float64)


def monitored_mean(rows: int, m: int) -> Reduction:
    """Return the reduction to the plain mean of the first ``rows`` of m rows."""
    mix = UNMIXED if rows == m else Mix(select(m, np.arange(rows)))
    return Reduction(PLAIN_MEAN, mix)


def aggregate(plan: Plan, matrix: Matrix) -> Any:
    """Reduce a matrix that has all columns; a monitored plan needs no measurements."""
    if plan.monitored is not None:
        return matrix.reduce(monitored_mean(plan.monitored, matrix.m))
    measured = plan.planning is not None or plan.filtering is not None
    if not measured and plan.function is None and plan.weighing is None:
        return matrix.reduce(Reduction(plan.window, tail=plan.tail))  # 3 us less than an execution
    execution = Execution(plan, matrix.m)
    execution.measure(matrix)
    return execution.reduce(matrix)


def explain(plan: Plan, matrix: Matrix) -> tuple[Any, Floats]:
    """Reduce a matrix that has all columns; return the result and each worker's dropped share."""
    execution = Execution(plan, matrix.m)
    execution.measure(matrix)
    return execution.explain(matrix)
