"""A rule over servers that each hold a range of columns: the bits that one server would get.

Every server makes its own :class:`Evaluation`. As long as it has a ``request``, each server
measures its columns with ``partial``, all partials are exchanged, and everyone gives all of them
to ``answer``. Then each server finishes its own columns.

>>> import numpy as np
>>> from phocas import Krum
>>> rows = np.random.default_rng(0).normal(size=(7, 100))
>>> shards = [(0, 33), (33, 100)]
>>> evaluation = Evaluation(Krum(b=2), m=7)
>>> while evaluation.request is not None:
...     evaluation.answer([evaluation.partial(rows[:, a:b], start=a) for a, b in shards])
>>> whole = np.concatenate([evaluation.finish(rows[:, a:b]) for a, b in shards])
>>> np.array_equal(whole, Krum(b=2)(rows))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from phocas.rules import measures
from phocas.rules.algebra import Clean, Columns, Decision, Floats, Plausible, Radii, Request
from phocas.rules.base import (
    Explanation,
    Randomness,
    Rule,
    as_generator,
    decision_rows,
    shares,
)
from phocas.rules.host import HostMatrix
from phocas.rules.inputs import open_rows
from phocas.rules.measures import Partial
from phocas.rules.table import RULES
from phocas.rules.washing import Marks


class Evaluation:
    """The planning of one aggregation, as seen by one holder of columns.

    Most column rules have nothing to ask: their ``request`` is None from the start. Heraclius asks
    for the radii of columns whose block is cut, unless ``whole_blocks`` is False: then every holder
    has blocks of its own, from its first column on. A rule that cleans asks for them in any case,
    and then for what is implausible. With ``d``, the columns of the whole matrix, an answer that
    lacks the last of them is refused as well.

    Args:
        rule: the rule, or its text.
        m: how many workers there are.
        rng: the randomness of rules that draw, the same for every holder.
        d: the columns of the whole matrix.
        whole_blocks: whether blocks of columns that are cut are put together.

    >>> import numpy as np
    >>> from phocas import Evaluation, Phocas
    >>> rows = np.array([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [900.0, 0.0]])
    >>> holders = [Evaluation(Phocas(b=1), m=4) for _ in range(2)]
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
        self.rule = RULES.of(rule, "Evaluation")
        self.rule.check(m)
        self.m = m
        self.d = d
        if self.rule.whole and d is None:
            raise ValueError(_needs_all(self.rule))
        self._cleanup = self.rule.cleanup(m)
        self.whole_blocks = whole_blocks or self._cleanup is not None
        self.request: Request | Radii | Plausible | None = None
        self._clean: Clean | None = None
        self._marks: dict[int, Marks | None] = {}
        self._decision: Decision | None = None
        self._planning = self.rule.planning(m, as_generator(rng))
        if self._cleanup is None:
            self._advance(None)
        else:
            self.request = self._cleanup.plausible().radii(m)

    @property
    def cleans(self) -> bool:
        """Tell whether the rule cleans, for which columns must be in host memory."""
        return self._cleanup is not None

    def _advance(self, reply: Floats | None) -> None:
        try:
            request = next(self._planning) if reply is None else self._planning.send(reply)
            self.request = replace(request, clean=self._clean)
        except StopIteration as stop:
            self.request = None
            self._decision = replace(self.rule.decision(stop.value, self.m), clean=self._clean)
            if self._decision.window.reach and self.whole_blocks:
                self.request = self._decision.radii()

    def partial(self, columns: Any, start: int) -> Partial:
        """Measure columns that begin at column ``start`` of the whole matrix."""
        if self.request is None:
            raise ValueError("there is no request: the evaluation is ready to finish")
        matrix = self._open(columns, start)
        found = matrix.partial(self.request, start)
        if isinstance(matrix, HostMatrix):
            self._marks[start] = matrix.marks
        return found

    def answer(self, partials: Iterable[Partial]) -> None:
        """Take everyone's partials, in any order; columns must be measured once each."""
        if self.request is None:
            raise ValueError("there is no request to answer: the evaluation is ready to finish")
        if isinstance(self.request, Plausible):
            if self._cleanup is not None:
                shares = measures.shares(partials, self.d)
                self._clean = self._cleanup.clean(self.request, shares)
            self._advance(None)
        elif not isinstance(self.request, Radii):
            self._advance(measures.total(self.request, partials, self.d))
        elif self._decision is None and self._cleanup is not None:
            self.request = self._cleanup.plausible(measures.spreads(partials, self.d))
        elif self._decision is not None:
            self._decision.spreads = measures.spreads(partials, self.d)
            self.request = None

    def finish(self, columns: Any, start: int | None = None) -> Any:
        """Aggregate columns, in the form that they have, from column ``start`` of the matrix on."""
        decision = self._decided(start)
        return self._all(columns, start).apply(decision, None, start or 0)

    def explain(self, columns: Any, start: int | None = None) -> Explanation:
        """Aggregate columns and say what share of each worker's values there was dropped."""
        decision = self._decided(start)
        matrix = self._all(columns, start)
        counts = np.zeros(decision_rows(decision, self.m), np.int64)
        value = matrix.apply(decision, counts, start or 0)
        cleaned = None
        if decision.clean is not None and isinstance(matrix, HostMatrix) and matrix.marks:
            here = matrix.marks.counts(self.m) / max(1, matrix.d)
            cleaned = replace(decision.clean, shares=here).lost
        dropped = shares(decision, self.m, counts, matrix.d, cleaned)
        return Explanation(value, dropped, self.rule.expected(self.m))

    def standing(self, columns: Any, start: int) -> Callable[[], Explanation]:
        """Return :meth:`explain` for columns that stay where they are while their values change.

        It is for who calls it time and again, and saves all that does not depend on the values. A
        value that it returns may be overwritten by the next one.
        """
        decision = self._decided(start)
        matrix = self._all(columns, start)
        kept = matrix.standing(decision) if isinstance(matrix, HostMatrix) else None
        if kept is None:
            return partial(self.explain, columns, start)
        expected = self.rule.expected(self.m)

        def explain() -> Explanation:
            counts = np.zeros(self.m, np.int64)
            value = kept.apply(counts)
            return Explanation(value, shares(decision, self.m, counts, matrix.d), expected)

        return explain

    def _decided(self, start: int | None) -> Decision:
        if self._decision is None or self.request is not None:
            raise ValueError(
                f"the evaluation is not ready: it waits for an answer to {self.request}"
            )
        by_blocks = self._decision.spreads is not None or self._clean is not None
        if by_blocks and start is None:
            raise ValueError(
                f"{self.rule} goes by blocks of columns: give the column at which these begin, as"
                " start=..."
            )
        return self._decision

    def _all(self, columns: Any, start: int | None) -> Columns:
        """Open columns that are finished here, which must be all of them for some rules."""
        matrix = self._open(columns, start or 0)
        if self.rule.whole and matrix.d != self.d:
            raise ValueError(f"{_needs_all(self.rule)}: got {matrix.d} of {self.d}")
        return matrix

    def _open(self, columns: Any, start: int) -> Columns:
        matrix = columns if isinstance(columns, HostMatrix) else open_rows(columns)
        if isinstance(matrix, HostMatrix):
            matrix.marks = self._marks.get(start)
        if matrix.m != self.m:
            raise ValueError(f"columns must be of {self.m} rows: got {matrix.m}")
        return matrix


def _needs_all(rule: Rule) -> str:
    return (
        f"{rule} needs all columns in one place: use one server and say d, or set columnwise=True"
        " if each column is reduced on its own"
    )
