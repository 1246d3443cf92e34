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

from collections.abc import Iterable
from typing import Any

import numpy as np

from phocas.rules import measures
from phocas.rules.algebra import Decision, Floats, Radii, Request
from phocas.rules.base import (
    Explanation,
    Randomness,
    Rule,
    as_generator,
    decision_rows,
    shares,
)
from phocas.rules.inputs import HostMatrix, open_rows
from phocas.rules.measures import Partial
from phocas.rules.table import RULES


class Evaluation:
    """The planning of one aggregation, as seen by one holder of columns.

    Most column rules have nothing to ask: their ``request`` is None from the start. Heraclius asks
    for the radii of columns whose block is cut, unless ``whole_blocks`` is False: then every holder
    has blocks of its own, from its first column on. With ``d``, the columns of the whole matrix, an
    answer that lacks the last of them is refused as well.
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
        self.whole_blocks = whole_blocks
        self.request: Request | Radii | None = None
        self._decision: Decision | None = None
        self._planning = self.rule.planning(m, as_generator(rng))
        self._advance(None)

    def _advance(self, reply: Floats | None) -> None:
        try:
            self.request = next(self._planning) if reply is None else self._planning.send(reply)
        except StopIteration as stop:
            self.request = None
            self._decision = self.rule.decision(stop.value, self.m)
            if self._decision.window.reach and self.whole_blocks:
                self.request = self._decision.radii()

    def partial(self, columns: Any, start: int) -> Partial:
        """Measure columns that begin at column ``start`` of the whole matrix."""
        if self.request is None:
            raise ValueError("there is no request: the evaluation is ready to finish")
        return self._open(columns).partial(self.request, start)

    def answer(self, partials: Iterable[Partial]) -> None:
        """Take everyone's partials, in any order; columns must be measured once each."""
        if self.request is None:
            raise ValueError("there is no request to answer: the evaluation is ready to finish")
        if not isinstance(self.request, Radii):
            self._advance(measures.total(self.request, partials, self.d))
        elif self._decision is not None:
            self._decision.spreads = measures.spreads(partials, self.d)
            self.request = None

    def finish(self, columns: Any, start: int | None = None) -> Any:
        """Aggregate columns, in the form that they have, from column ``start`` of the matrix on."""
        decision = self._decided(start)
        return self._all(columns).apply(decision, None, start or 0)

    def explain(self, columns: Any, start: int | None = None) -> Explanation:
        """Aggregate columns and say what share of each worker's values there was dropped."""
        decision = self._decided(start)
        matrix = self._all(columns)
        counts = np.zeros(decision_rows(decision, self.m), np.int64)
        value = matrix.apply(decision, counts, start or 0)
        dropped = shares(decision, self.m, counts, matrix.d)
        return Explanation(value, dropped, self.rule.expected(self.m))

    def _decided(self, start: int | None) -> Decision:
        if self._decision is None or self.request is not None:
            raise ValueError(
                f"the evaluation is not ready: it waits for an answer to {self.request}"
            )
        if self._decision.spreads is not None and start is None:
            raise ValueError(
                f"{self.rule} goes by blocks of columns: give the column at which these begin, as"
                " start=..."
            )
        return self._decision

    def _all(self, columns: Any) -> HostMatrix:
        """Open columns that are finished here, which must be all of them for some rules."""
        matrix = self._open(columns)
        if self.rule.whole and matrix.d != self.d:
            raise ValueError(f"{_needs_all(self.rule)}: got {matrix.d} of {self.d}")
        return matrix

    def _open(self, columns: Any) -> HostMatrix:
        matrix = columns if isinstance(columns, HostMatrix) else open_rows(columns)
        if matrix.m != self.m:
            raise ValueError(f"columns must be of {self.m} rows: got {matrix.m}")
        if not isinstance(matrix, HostMatrix):
            raise TypeError("shards must be in host memory: move the tensor to the CPU first")
        return matrix


def _needs_all(rule: Rule) -> str:
    return (
        f"{rule} needs all columns in one place: use one server and say d, or set columnwise=True"
        " if each column is reduced on its own"
    )
