"""Searching for the lie that hurts a known rule most, within a number of tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from phocas.attacks.base import Scene
from phocas.attacks.memory import host_array
from phocas.rules import Rule

Objective = Literal["distance", "descent"]


class Search:
    """Tries of a rule on the matrix as it stands, counted, and the worst of them remembered.

    The score of a try is the distance of the rule's result from the honest mean, or how far it
    points against it, - <result, mean>. A result that is not finite scores infinity.
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
        self._own = scene.matrix.words[rows]
        self._lies = self._own

    def result(self) -> np.ndarray:
        """Return what the rule makes of the matrix now, at the price of one try."""
        self.left -= 1
        return host_array(self.rule(self.scene.rows, rng=np.random.default_rng(self.seed)))

    def measure(self) -> float:
        """Score what stands in the matrix now."""
        result = self.result()
        if not np.isfinite(result).all():
            return np.inf
        if self.objective == "distance":
            return norm(result - self.mean)
        return -float(np.multiply(result, self.mean).sum())

    def score(self) -> float:
        """Score the rows that stand in the matrix now, and remember them if they are the worst."""
        score = self.measure()
        if score > self.best:
            self.best, self._lies = score, self.scene.matrix.words[self.rows]
        return score

    def honest_again(self) -> None:
        """Put the bad workers' own rows back."""
        self.scene.matrix.words[self.rows] = self._own

    def commit(self) -> None:
        """Put the worst lies that were found into the matrix."""
        self.scene.matrix.words[self.rows] = self._lies

    def worst_row(self) -> np.ndarray:
        """Return the first of the worst rows, to start from; zeros where it is not finite."""
        self.commit()
        row = self.scene.matrix.read(self.rows[0]).astype(np.float64)
        return np.nan_to_num(row, nan=0.0, posinf=0.0, neginf=0.0)

    def along(self, direction: np.ndarray, first: float, tries: int) -> float:
        """Search along mean + step * direction, all bad rows alike; return the worst step."""
        work = self.scene.matrix.kind.work

        def at(step: float) -> float:
            lie = self.mean + step * direction
            self.scene.matrix.write(self.rows, lie.astype(work))
            return self.score()

        return climb(at, first, min(tries, self.left))


def norm(vector: np.ndarray) -> float:
    """Return the length of a vector.

    ``np.linalg.norm`` wakes the threads of the BLAS, which then wait for those of the rule: 5 ms
    at d = 20,000 against 0.03.
    """
    return float(np.sqrt(np.square(vector).sum()))


def climb(value: Callable[[float], float], first: float, tries: int) -> float:
    """Return a step > 0 with a large value, after at most that many tries.

    Half of the tries double the step from ``first`` / 4 on; the other half close in on the best
    from both sides. The value may drop off a cliff, as when a rule stops selecting the liars: then
    the bracket shrinks onto its edge.
    """
    steps: list[float] = []
    values: list[float] = []
    for k in range(max(tries // 2, min(tries, 1))):
        steps.append(first * 2.0 ** (k - 2))
        values.append(value(steps[-1]))
    if not steps:
        return first
    place = int(np.argmax(values))
    best, most = steps[place], values[place]
    low = steps[place - 1] if place else 0.0
    high = steps[place + 1] if place + 1 < len(steps) else 4 * best
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
