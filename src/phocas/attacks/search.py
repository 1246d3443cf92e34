"""Search for the Byzantine rows that harm a known rule most, within a number of trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from phocas.attacks.base import Scene
from phocas.attacks.memory import host_array
from phocas.rules import Rule

Objective = Literal["distance", "descent"]


class Search:
    """A counted sequence of trials of a rule on a matrix, which remembers the worst rows.

    The score of a trial is the distance of the rule's result from the honest mean, or minus its
    inner product with the honest mean. A result that is not finite scores infinity.
    """

    def __init__(
        self,
        scene: Scene,
        rule: Rule,
        rows: np.ndarray,
        mean: np.ndarray,
        *,
        objective: Objective,
        budget: int,
        seed: int = 0,
    ) -> None:
        self.scene = scene
        self.rule = rule
        self.rows = rows
        self.mean = mean.astype(np.float64)
        self.objective = objective
        self.left = budget
        self.seed = seed
        self.best = -np.inf
        self._original = scene.matrix.words[rows]
        self._worst = self._original

    def result(self) -> np.ndarray:
        """Return the rule's result on the current matrix; this costs one trial."""
        self.left -= 1
        reference = None if self.rule.needs_reference is None else self.scene.reference
        rng = np.random.default_rng(self.seed)
        return host_array(self.rule(self.scene.rows, rng=rng, reference=reference))

    def measure(self) -> float:
        """Return the score of the current matrix."""
        result = self.result()
        if not np.isfinite(result).all():
            return np.inf
        if self.objective == "distance":
            return norm(result - self.mean)
        return -float(np.multiply(result, self.mean).sum())

    def score(self) -> float:
        """Return the score of the current matrix.

        If the score is the highest so far, keep the Byzantine rows of the matrix as the worst rows.
        """
        score = self.measure()
        if score > self.best:
            self.best, self._worst = score, self.scene.matrix.words[self.rows]
        return score

    def honest_again(self) -> None:
        """Restore the Byzantine workers' original rows."""
        self.scene.matrix.words[self.rows] = self._original

    def commit(self) -> None:
        """Write the worst rows found into the matrix."""
        self.scene.matrix.words[self.rows] = self._worst

    def worst_row(self) -> np.ndarray:
        """Return the first of the worst rows, with zeros for values that are not finite."""
        self.commit()
        row = self.scene.matrix.read(self.rows[0]).astype(np.float64)
        return np.nan_to_num(row, nan=0.0, posinf=0.0, neginf=0.0)

    def along(self, direction: np.ndarray, first: float, tries: int) -> float:
        """Search steps of mean + step * direction for all Byzantine rows; return the worst step."""
        return climb(lambda step: self._at(direction, step), first, min(tries, self.left))

    def expand(
        self, direction: np.ndarray, start: float, first: float, ratio: float, tries: int
    ) -> float:
        """Search as ``along`` does, from a given step on; see :func:`expand`."""
        tries = min(tries, self.left)
        return expand(lambda step: self._at(direction, step), start, first, ratio, tries)

    def _at(self, direction: np.ndarray, step: float) -> float:
        """Write mean + step * direction into all Byzantine rows, and return the score."""
        values = self.mean + step * direction
        self.scene.matrix.write(self.rows, values.astype(self.scene.matrix.kind.work))
        return self.score()


def norm(vector: np.ndarray) -> float:
    """Return the Euclidean length of a vector.

    ``np.linalg.norm`` starts BLAS threads, which compete with the rule's threads: it takes 5 ms at
    d = 20,000, this function 0.03 ms.
    """
    return float(np.sqrt(np.square(vector).sum()))


def climb(value: Callable[[float], float], first: float, tries: int) -> float:
    """Return a step > 0 with a large value, after at most ``tries`` evaluations.

    The first half of the evaluations doubles the step, starting at ``first`` / 4. The second half
    narrows the bracket around the best step from both sides. The value may drop suddenly, as when a
    rule stops selecting the Byzantine rows; then the bracket shrinks to that edge.
    """
    steps: list[float] = []
    values: list[float] = []
    for k in range(max(tries // 2, min(tries, 1))):
        steps.append(first * 2.0 ** (k - 2))
        values.append(value(steps[-1]))
    if not steps:
        return first
    peak = int(np.argmax(values))
    best, most = steps[peak], values[peak]
    low = steps[peak - 1] if peak else 0.0
    high = steps[peak + 1] if peak + 1 < len(steps) else 4 * best
    upper = True
    for _ in range(tries - len(steps)):
        step = (best + high) / 2 if upper else (low + best) / 2
        got = value(step)
        if got > most:
            low, high = (best, high) if upper else (low, best)
            best, most = step, got
        elif upper:
            high = step
        else:
            low = step
        upper = not upper
    return best


def expand(
    value: Callable[[float], float], start: float, first: float, ratio: float, tries: int
) -> float:
    """Return a step >= start with a large value, after at most ``tries`` evaluations.

    This is the line search of ByzFL's benchmark. It leaves ``start`` by the width ``first``, which
    doubles while the value grows. Then it walks back and forth around the best step, with a width
    that shrinks by ``ratio`` each time.

    >>> round(expand(lambda step: -abs(step - 7), 0, 10, 0.8, 20), 1)
    7.0
    """
    best = probe = start
    most, width = value(start), first
    growing = True
    for _ in range(tries - 1):
        if growing or probe < best:
            probe = (best if growing else probe) + width
        else:
            back = probe - width
            probe = back if back >= start else (start + probe) / 2
        got = value(probe)
        better = got > most
        if better:
            best, most = probe, got
        growing = growing and better
        width *= 2 if growing else ratio
    return best
