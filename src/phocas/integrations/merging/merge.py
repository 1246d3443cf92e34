"""Aggregate m rows of named tensors by a rule, a part of a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.integrations.merging.tensors import Tensor
from phocas.rules import Rule, ShardedAggregation
from phocas.rules.execution import ColumnRange
from phocas.rules.explanation import Explanation
from phocas.rules.host import HostMatrix
from phocas.rules.inputs import lower_median

PART_COLUMNS = 1 << 20
"""Columns that are aggregated at a time: few enough for caches, and a whole number of blocks."""
_EXPONENT = np.uint16(0x7F80)


class Shares:
    """The share of each row's values that was dropped, by tensor and in total."""

    def __init__(self, m: int) -> None:
        self.m = m
        self._lost: dict[str, NDArray[np.float64]] = {}
        self._columns: dict[str, int] = {}

    def add(self, name: str, why: Explanation, columns: int) -> None:
        """Add the shares of some columns of a tensor."""
        before = self._lost.get(name, np.zeros(self.m))
        self._lost[name] = before + why.dropped[: self.m] * columns
        self._columns[name] = self._columns.get(name, 0) + columns

    def by_tensor(self) -> dict[str, NDArray[np.float64]]:
        """Return the shares of each tensor."""
        return {name: lost / self._columns[name] for name, lost in self._lost.items()}

    def total(self) -> NDArray[np.float64]:
        """Return the shares of all values."""
        lost = sum(self._lost.values(), start=np.zeros(self.m))
        return np.asarray(lost / max(1, sum(self._columns.values())))


class Merge:
    """The aggregation of m rows of named tensors, a part of a tensor at a time.

    Args:
        rows: the tensors of each row, by name; a base that all rows started from comes last.
        m: the number of rows without the base.
        rule: the rule; with a base, a :class:`Relative`.
        seed: a seed for rules that draw at random.
        progress: called with the number of bytes done and of all bytes.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Tensor]],
        m: int,
        rule: Rule,
        seed: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.rows = rows
        self.m = m
        self.starts: dict[str, int] = {}
        """The first column of each tensor that is not of integers."""
        self.columns = 0
        self.not_finite = 0
        for tensor in rows[0].values():
            if not tensor.is_integer:
                self.starts[tensor.name] = self.columns
                self.columns += tensor.columns
        self.evaluation = ShardedAggregation(rule, len(rows), seed, d=self.columns)
        self._progress = progress
        self._done = 0
        self._size = len(rows) * sum(each.nbytes for each in rows[0].values())

    def plan(self) -> None:
        """Measure the whole rows as the rule requires, such as their distances."""
        while self.evaluation.request is not None:
            self._done = 0
            self.evaluation.answer(
                self.evaluation.partial(matrix, start) for start, matrix in self._measured()
            )

    def parts(self, tensor: Tensor, shares: Shares | None) -> Iterator[NDArray[Any]]:
        """Yield the aggregated values of a tensor, part by part."""
        if tensor.is_integer:
            readers = [row[tensor.name].reader() for row in self.rows[: self.m]]
            for begin in range(0, tensor.columns, PART_COLUMNS):
                part = [read(begin, begin + PART_COLUMNS) for read in readers]
                self._report(len(self.rows) * part[0].nbytes)
                yield lower_median(part)
            return
        if self.evaluation.rule.whole:
            yield self._at_once(tensor, shares)
            return
        for start, matrix in self._matrices(tensor):
            if shares is None:
                values = self.evaluation.finish(matrix, start)
            else:
                why = self.evaluation.explain(matrix, start)
                shares.add(tensor.name, why, matrix.d)
                values = why.value
            self.not_finite += count_not_finite(values, tensor.element)
            yield values

    def stream(self, shares: Shares | None) -> Generator[NDArray[Any], None, None]:
        """Yield the values of all tensors in parts; compute a part ahead of the caller."""
        everything = (
            part for tensor in self.rows[0].values() for part in self.parts(tensor, shares)
        )
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(next, everything, None)
            while (part := coming.result()) is not None:
                coming = pool.submit(next, everything, None)
                yield part

    def _measured(self) -> Iterator[tuple[int, HostMatrix]]:
        """Yield (first column, matrix) to measure: parts of tensors, or all values at once."""
        if self.evaluation.rule.whole:
            yield 0, self._whole
            return
        for tensor in self.rows[0].values():
            if not tensor.is_integer:
                yield from self._matrices(tensor)

    @cached_property
    def _whole(self) -> HostMatrix:
        """All values of all rows, for a rule that needs all columns at once."""
        pieces = [
            ColumnRange(
                start, tensor.columns, [row[name].open() for row in self.rows], tensor.element
            )
            for name, start in self.starts.items()
            for tensor in [self.rows[0][name]]
        ]
        return HostMatrix(pieces, lambda answers: dict(zip(self.starts, answers, strict=True)))

    @cached_property
    def _explained(self) -> Explanation:
        return self.evaluation.explain(self._whole, 0)

    def _at_once(self, tensor: Tensor, shares: Shares | None) -> NDArray[Any]:
        """Return a tensor of the result of a rule that needs all columns at once."""
        values: NDArray[Any] = self._explained.value[tensor.name]
        if shares is not None:
            shares.add(tensor.name, self._explained, tensor.columns)
        self.not_finite += count_not_finite(values, tensor.element)
        return values

    def _matrices(self, tensor: Tensor) -> Iterator[tuple[int, HostMatrix]]:
        """Yield the values that all rows have in one tensor, as matrices of a range of columns.

        Each item is (first column, matrix). Columns are counted over all tensors.
        """
        readers = [row[tensor.name].reader() for row in self.rows]
        start = self.starts[tensor.name]
        begin = 0
        while begin < tensor.columns:
            end = min(tensor.columns, begin + PART_COLUMNS - (start + begin) % PART_COLUMNS)
            rows = [read(begin, end) for read in readers]
            yield (
                start + begin,
                HostMatrix([ColumnRange(0, end - begin, rows, tensor.element)], _only),
            )
            self._report(sum(row.nbytes for row in rows))
            begin = end

    def _report(self, read: int) -> None:
        self._done += read
        if self._progress is not None:
            self._progress(self._done, self._size)


def _only(answers: list[NDArray[Any]]) -> NDArray[Any]:
    return answers[0]


def rows_not_finite(rows: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the indices of the rows in which a value is NaN or infinite."""
    return [
        index
        for index, row in enumerate(rows)
        if any(
            count_not_finite(tensor.open(), tensor.element)
            for tensor in row.values()
            if not tensor.is_integer
        )
    ]


def count_not_finite(values: NDArray[Any], element: str) -> int:
    """Return how many stored values are NaN or infinite."""
    if element == "bfloat16":
        return int(np.count_nonzero((values & _EXPONENT) == _EXPONENT))
    return values.size - int(np.count_nonzero(np.isfinite(values)))
