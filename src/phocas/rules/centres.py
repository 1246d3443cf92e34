"""Rules whose result is a weighted sum of the rows: geometric median and centered clipping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Floats,
    Mix,
    Planning,
    fitting_norms,
    lost,
    measured_distances,
    shrinking,
)
from phocas.rules.base import Rule
from phocas.rules.guarantee import Tolerance
from phocas.specs import count, normalise, positive

# Rows farther from the centre than this many typical distances are moved towards the centre before
# Weiszfeld's iteration. Otherwise their distances would cancel those between near rows.
FAR = 1e3


class WeighingRule(Rule):
    """A rule whose result is one weighted sum of all rows."""

    def window(self, m: int) -> Window:
        """Return the window of the one mixed row."""
        del m
        return Window()


@dataclass(frozen=True)
class GeometricMedian(WeighingRule):
    """Minimise the sum of distances to the rows, by Weiszfeld's iteration.

        GeometricMedian = argmin_v |x_1 - v| + ... + |x_m - v|

    The iteration stops when a step is shorter than ``tolerance`` times the typical distance between
    rows.

    Breakdown: tolerates fewer than m/2 Byzantine rows; the influence of a row depends on its
    direction, not on its distance. A row with NaN or inf has weight zero.

    Reference: Weiszfeld (1937); Chen, Su, Xu, "Distributed statistical machine learning in
    adversarial settings" (2017).

    Args:
        iterations: the largest number of iterations.
        tolerance: the step length that ends the iteration, in typical distances between rows.

    >>> import numpy as np
    >>> rows = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [900.0, 900.0]])
    >>> GeometricMedian()(rows).round(1)
    array([1.6, 1.6])
    """

    iterations: int = 100
    tolerance: float = 1e-6
    name: ClassVar[str] = "geometric-median"
    aliases: ClassVar[tuple[str, ...]] = ("geomed", "gm", "rfa")
    weighable = True
    min_byzantine: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the limits of the iteration."""
        normalise(
            self,
            iterations=count("GeometricMedian", "iterations", self.iterations, minimum=1),
            tolerance=positive("GeometricMedian", "tolerance", self.tolerance),
        )

    def tolerates(self, m: int) -> Tolerance:
        """Return the largest minority of the rows."""
        self.check(m)
        return Tolerance(rows=self.largest_b(m))

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the bound of Allouah et al., "Fixing by mixing" (2023)."""
        return None if q > self.tolerates(m).rows else 2 * (m - q) / (m - 2 * q)

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the weights of the rows from the distances between them."""
        return self.weighted_planning(m, None, rng)

    def weighted_planning(
        self, m: int, units: NDArray[np.int64] | None, rng: np.random.Generator | None
    ) -> Planning:
        """Compute the weights of the rows, with each distance multiplied by the worker's weight."""
        del rng
        pulls = np.ones(m) if units is None else units * (m / units.sum())
        if m == 1:
            return Mix(np.ones((1, 1)))
        squared, request = yield from measured_distances()
        if np.any(np.isinf(squared)) and not request.wide:
            request = replace(request, wide=True)
            squared = yield request
        spread = _to_majority(squared, pulls)
        centre = int(np.argmin(spread))
        typical = float(spread[centre])
        if not np.isfinite(typical):
            return lost(m)
        if typical == 0:
            weights = np.zeros((1, m))
            weights[0, centre] = 1
            return Mix(weights, fair=1 / m)
        with np.errstate(divide="ignore"):
            shrink = np.minimum(1.0, np.sqrt(FAR**2 * typical / squared[centre]))
        shrink[centre] = 1.0
        if np.any(shrink < 1):
            drawn = np.diag(shrink)
            drawn[:, centre] += 1 - shrink
            wide = not 1e-24 < typical < 1e36 / FAR**2 or bool(np.any(shrink[shrink > 0] < 1e-30))
            squared = yield replace(request, weights=drawn, wide=wide)
        weights = self._weiszfeld(squared, shrink, centre, typical, pulls)
        return Mix(weights[None, :], fair=1 / m)

    def _weiszfeld(
        self, squared: Floats, shrink: Floats, centre: int, typical: float, pulls: Floats
    ) -> Floats:
        """Return the weights, given the distances between rows moved to the centre by ``shrink``.

        The moved rows are z_i = c + s_i (x_i - c). Every x_i - v is a combination of the z with
        weights that add up to zero. Its norm follows from the distances between the z.
        """
        m = len(squared)
        present = shrink > 0
        stretch = np.where(present, 1 / np.where(present, shrink, 1), 0)
        squared = np.where(np.isfinite(squared), squared, 0.0)
        to_rows = np.diag(stretch)
        to_rows[:, centre] += 1 - stretch
        # Start from the mean of the near rows. From a start far away, each step shortens the
        # distance by a constant factor only: 7 near rows against 6 far ones need hundreds of steps.
        near = (shrink == 1) * pulls
        weights = near / near.sum()
        floor = 1e-12 * np.sqrt(typical)
        previous: Floats | None = None
        for _ in range(self.iterations):
            point = weights @ to_rows
            directions = to_rows - point
            lengths = -0.5 * ((directions @ squared) * directions).sum(axis=1)
            distances = np.sqrt(np.maximum(lengths, 0.0))
            inverse = present * pulls / np.maximum(distances, floor)
            here = present & (distances <= floor)
            inverse[here] = 0.0
            if not inverse.any():
                break
            onward = inverse / inverse.sum()
            if here.any():
                pull = float(pulls[here].sum())
                onward = self._leave(onward, weights, pull, inverse, to_rows, squared)
            weights = onward
            if previous is not None:
                moved = point - previous
                step = -0.5 * moved @ squared @ moved
                if step <= self.tolerance**2 * typical:
                    break
            previous = point
        return np.asarray(weights, np.float64).reshape(m)

    @staticmethod
    def _leave(
        onward: Floats,
        weights: Floats,
        here: float,
        inverse: Floats,
        to_rows: Floats,
        squared: Floats,
    ) -> Floats:
        """Return the weights after a step from a point that coincides with rows.

        Weiszfeld's weights are infinite at a row. This is the step of Vardi and Zhang (2000), with
        ``here`` the total weight of the rows at the point. The step may be zero.
        """
        way = (onward - weights) @ to_rows
        pull = inverse.sum() * np.sqrt(max(0.0, float(-0.5 * way @ squared @ way)))
        stay = min(1.0, here / pull) if pull > 0 else 1.0
        return (1 - stay) * onward + stay * weights


def _to_majority(squared: Floats, pulls: Floats) -> Floats:
    """Return each row's squared distance within which more than half of all weight is."""
    order = np.argsort(squared, axis=1, kind="stable")
    seen = np.cumsum(pulls[order], axis=1)
    place = (seen > pulls.sum() / 2).argmax(axis=1)
    rows = np.arange(len(squared))
    return np.asarray(squared[rows, order[rows, place]])


@dataclass(frozen=True)
class CenteredClipping(WeighingRule):
    """Move a centre by the mean of the rows' differences to it, each clipped to ``radius``.

        v <- v + mean of (x_i - v) min(1, radius / |x_i - v|),  from v = 0

    Breakdown: b Byzantine rows move the result by at most b/m of ``radius`` per iteration. A row
    with NaN or inf has infinite norm and is dropped.

    Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization"
    (2021), starting from zero instead of the result of the previous round.

    Args:
        radius: the largest norm of a row's difference to the centre; the rest is clipped.
        iterations: the number of iterations.

    >>> import numpy as np
    >>> CenteredClipping(radius=2.0, iterations=1)(np.array([[1.0], [2.0], [900.0]]))
    array([1.66666667])
    """

    radius: float
    iterations: int = 1
    name: ClassVar[str] = "centered-clipping"
    aliases: ClassVar[tuple[str, ...]] = ("cc",)

    def __post_init__(self) -> None:
        """Check the radius and the number of iterations."""
        normalise(
            self,
            radius=positive("CenteredClipping", "radius", self.radius),
            iterations=count("CenteredClipping", "iterations", self.iterations, minimum=1),
        )

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: honest rows beyond the radius are clipped like Byzantine rows."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Measure the distances of the rows to each new centre."""
        del rng
        centre = np.zeros(m)
        factor = np.zeros(m)
        for turn in range(self.iterations):
            # A row of infinite norm has weight zero in every iteration, and so in the centre.
            request = fitting_norms(self.radius, np.eye(m) - centre if turn else None)
            factor = shrinking((yield request), self.radius * request.scale)
            centre = centre * (1 - factor.sum() / m) + factor / m
        return Mix(centre[None, :], fair=1 / m)
