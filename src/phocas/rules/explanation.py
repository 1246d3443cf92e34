"""The result of a rule with the share of each worker's values that was dropped for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.notebook import html_table

_MOST_SHOWN = 20  # workers that a notebook shows


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A result, and the share of each worker's values that was dropped for it.

    A rule that weights rows drops no values. Then ``dropped`` is the part of its weight in the
    mean, 1/m, that a worker has lost. A value that equals the farthest kept value counts as kept.

    Attributes:
        value: the result, in the form of the rows.
        dropped: for each worker, the share of its values that did not enter the result.
        expected: the share that is dropped of a worker whose values are like those of the others.

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
        """Return ``dropped - expected`` for each worker."""
        return self.dropped - self.expected

    def plot(self, axes: Any = None) -> Any:
        """Draw the dropped share of each worker with matplotlib, and return the axes.

        Args:
            axes: the axes to draw into; None: those of a new figure.
        """
        if axes is None:
            from matplotlib import pyplot as plt  # noqa: PLC0415 - only figures need it

            axes = plt.subplots(figsize=(6, 2.5), layout="constrained")[1]
        axes.bar(np.arange(len(self.dropped)), self.dropped)
        axes.axhline(self.expected, color="0.4", linestyle="--", label="expected")
        axes.set(xlabel="worker", ylabel="dropped share", ylim=(0, 1))
        axes.legend(frameon=False)
        return axes

    def _repr_html_(self) -> str:
        """Return the dropped shares as a small HTML table, largest first."""
        order = np.argsort(-self.dropped, kind="stable")[:_MOST_SHOWN]
        caption = f"dropped shares; {self.expected:.4g} is expected of an honest worker"
        if len(order) < len(self.dropped):
            caption += f"; the {len(order)} largest of {len(self.dropped)}"
        rows = [(int(i), float(self.dropped[i]), float(self.excess[i])) for i in order]
        return html_table(["worker", "dropped", "excess"], rows, caption)
