"""Rules whose result is a weighted sum of the rows: geometric median and centered clipping."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Floats,
    Mix,
    Norms,
    Planning,
    Request,
    fitting_distances,
    fitting_norms,
    lost,
    measured_distances,
    measured_norms,
    shrinking,
)
from phocas.rules.base import Rule
from phocas.rules.guarantee import Tolerance
from phocas.specs import count, normalise, number, one_of, positive

# Rows farther from the centre than this many typical distances are moved towards the centre before
# Weiszfeld's iteration. Otherwise their distances would cancel those between near rows.
FAR = 1e3
# Rows farther from the start than this many radii, and than this many times the nearest row, are
# moved towards the start in centered clipping, for the same reason: their weight is small, and the
# product of weight and distance would hide near rows.
FAR_RADII = 1e2
LARGE = 1e16, 1e140  # distances whose squares may overflow, in single and double precision


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
    rows. With ``smoothing``, it is the iteration of RFA, which takes a fixed number of steps:

        v <- sum of w_i x_i / sum of w_i,  w_i = 1 / max(smoothing, |x_i - v|),  from v = 0

    ByzFL has ``iterations=3,smoothing=0.1``, and Karimireddy, He and Jaggi have ``iterations=8``.

    Breakdown: tolerates fewer than m/2 Byzantine rows; the influence of a row depends on its
    direction, not on its distance. There is no guarantee with ``smoothing``: the few steps from
    zero may end far from the median. A row with NaN or inf has weight zero.

    Reference: Weiszfeld (1937); Chen, Su, Xu, "Distributed statistical machine learning in
    adversarial settings" (2017); Pillutla, Kakade, Harchaoui, "Robust aggregation for federated
    learning" (2022), who start from the mean.

    Args:
        iterations: the largest number of iterations; with ``smoothing``, the number.
        tolerance: the step length that ends the iteration, in typical distances between rows.
        smoothing: the smallest distance by which RFA divides; 0: iterate to the median.

    >>> import numpy as np
    >>> rows = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [900.0, 900.0]])
    >>> GeometricMedian()(rows).round(1)
    array([1.6, 1.6])
    """

    iterations: int = 100
    tolerance: float = 1e-6
    smoothing: float = 0.0
    name: ClassVar[str] = "geometric-median"
    aliases: ClassVar[tuple[str, ...]] = ("geomed", "gm", "rfa")
    weighable = True
    min_byzantine: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the limits of the iteration, and the smoothing."""
        smoothing = number("GeometricMedian", "smoothing", self.smoothing)
        if not 0 <= smoothing < math.inf:
            raise ValueError(
                f"GeometricMedian needs a finite smoothing >= 0: got smoothing={smoothing:g}"
            )
        normalise(
            self,
            iterations=count("GeometricMedian", "iterations", self.iterations, minimum=1),
            tolerance=positive("GeometricMedian", "tolerance", self.tolerance),
            smoothing=smoothing,
        )

    def tolerates(self, m: int) -> Tolerance:
        """Return the largest minority of the rows; zero with ``smoothing``."""
        self.check(m)
        return Tolerance() if self.smoothing else Tolerance(rows=self.largest_b(m))

    def error_bound(self, m: int, q: int) -> float | None:
        """Return the bound of Allouah et al., "Fixing by mixing" (2023); None with smoothing."""
        if self.smoothing or q > self.tolerates(m).rows:
            return None
        return 2 * (m - q) / (m - 2 * q)

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
        # Distances below the smoothing do not matter.
        typical = max(typical, (self.smoothing * request.scale) ** 2)
        if typical == 0:
            weights = np.zeros((1, m))
            weights[0, centre] = 1
            return Mix(weights, fair=1 / m)
        with np.errstate(divide="ignore", over="ignore"):
            shrink = np.minimum(1.0, np.sqrt(FAR**2 * typical / squared[centre]))
        shrink[centre] = 1.0
        if np.any(shrink < 1):
            drawn = np.diag(shrink)
            drawn[:, centre] += 1 - shrink
            wide = not 1e-24 < typical < 1e36 / FAR**2 or bool(np.any(shrink[shrink > 0] < 1e-30))
            squared = yield replace(request, weights=drawn, wide=wide)
        start = (yield from self._first_step(pulls, shrink > 0)) if self.smoothing else None
        if start is not None and not start.any():
            return lost(m)
        floor = self.smoothing * request.scale or 1e-12 * math.sqrt(typical)
        weights = self._weiszfeld(squared, shrink, centre, typical, pulls, floor, start)
        return Mix(weights[None, :], fair=1 / m)

    def _first_step(
        self, pulls: Floats, present: NDArray[np.bool_]
    ) -> Generator[Request, Floats, Floats]:
        """Return the weights after the first step of the smoothed iteration, from zero.

        They are all zero if every row has NaN or inf.
        """
        squared, request = yield from measured_norms(lambda each: float(np.median(each)))
        lengths = np.where(present, np.sqrt(squared), np.inf)
        weights = pulls / np.maximum(lengths, self.smoothing * request.scale)
        return np.asarray(weights / (weights.sum() or 1.0))

    def _weiszfeld(
        self,
        squared: Floats,
        shrink: Floats,
        centre: int,
        typical: float,
        pulls: Floats,
        floor: float,
        start: Floats | None,
    ) -> Floats:
        """Return the weights, given the distances between rows moved to the centre by ``shrink``.

        The weight of a row is divided by its distance from the point, or by ``floor`` if that is
        larger. ``start`` are the weights after the first step, for the smoothed iteration, which
        has a fixed number of steps.

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
        weights = near / near.sum() if start is None else start
        previous: Floats | None = None
        for _ in range(self.iterations if start is None else self.iterations - 1):
            point = weights @ to_rows
            directions = to_rows - point
            lengths = -0.5 * ((directions @ squared) * directions).sum(axis=1)
            distances = np.sqrt(np.maximum(lengths, 0.0))
            inverse = present * pulls / np.maximum(distances, floor)
            if start is not None:
                weights = inverse / inverse.sum()
                continue
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

        v <- v + mean of (x_i - v) min(1, radius / |x_i - v|),  from v = 0 or the last result

    With ``start="previous"`` the rule needs the previous aggregate as a reference vector, and the
    centre starts there. Training, Ray and the federated adapters provide it, zero in the first
    round; in a call it is ``reference=``. Published: a radius of 10 and 3 iterations.

    Breakdown: b Byzantine rows move the result by at most b/m of ``radius`` per iteration, but
    there is no bound in standard deviations of the honest rows, which are clipped too. A median
    radius lies between the distances of two honest rows if fewer than m/2 rows are Byzantine. A row
    with NaN or inf has infinite norm and is dropped.

    Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization"
    (2021), which starts from the previous result.

    Args:
        radius: the largest norm of a row's difference to the centre; the rest is clipped.
            ``median``: the lower median of the distances of the rows from the start.
        iterations: the number of iterations.
        start: where the centre starts: at ``zero``, or at the ``previous`` aggregate.

    >>> import numpy as np
    >>> CenteredClipping(radius=2.0, iterations=1)(np.array([[1.0], [2.0], [900.0]]))
    array([1.66666667])
    >>> rule = CenteredClipping(radius="median", start="previous")
    >>> rule(np.array([[101.0], [102.0], [900.0]]), reference=np.array([100.0]))
    array([101.66666667])
    """

    radius: float | Literal["median"]
    iterations: int = 1
    start: Literal["zero", "previous"] = "zero"
    name: ClassVar[str] = "centered-clipping"
    aliases: ClassVar[tuple[str, ...]] = ("cc",)

    def __post_init__(self) -> None:
        """Check the radius, the number of iterations and the start."""
        if self.radius != "median":
            normalise(self, radius=positive("CenteredClipping", "radius", self.radius))
        normalise(
            self,
            iterations=count("CenteredClipping", "iterations", self.iterations, minimum=1),
            start=one_of("CenteredClipping", "start", self.start, ("zero", "previous")),
            needs_reference="previous" if self.start == "previous" else None,
        )

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: honest rows beyond the radius are clipped like Byzantine rows."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Start from zero: measure the norms and, for more iterations, the distances of rows."""
        del rng
        if isinstance(self.radius, str):
            squared, request = yield from measured_norms(_lower_median)
        else:
            request = fitting_norms(self.radius)
            squared = yield request
        radius = self._radius(squared, request.scale)
        if not np.isfinite(radius):
            return lost(m)
        if self.iterations == 1:
            return Mix(shrinking(squared, radius)[None, :] / m, fair=1 / m)
        between = fitting_distances(radius / request.scale)
        large = LARGE[between.wide] * request.scale / between.scale
        near, far = _nearer(squared, radius, large)
        if far:
            between = replace(between, weights=np.diag(near), wide=True)
        points = np.zeros((m + 1, m + 1))
        points[:m, :m] = (yield between) * (request.scale / between.scale) ** 2
        with np.errstate(invalid="ignore"):
            points[m, :m] = points[:m, m] = squared * near**2
        return Mix(self._moved(points, near, radius)[None, :], fair=1 / m)

    def referenced_planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Start from the reference: measure the distances of the rows from the reference.

        More iterations use the distances of all pairs of rows. For 20 rows, measuring these once
        takes 1.6 times as long as measuring the distances from one centre.
        """
        del rng
        one = self.iterations == 1

        def from_start(found: Floats) -> Floats:
            return found if one else found[m]

        origin = m if one else None
        if isinstance(self.radius, str):
            points, request = yield from measured_distances(
                lambda found: _lower_median(from_start(found)[:m]), origin
            )
        else:
            request = fitting_distances(self.radius, origin)
            points = yield request
        if np.isinf(from_start(points)).any() and not request.wide:
            present = np.isfinite((yield Norms()))
            if np.isinf(from_start(points)[present]).any():
                request = replace(request, wide=True)
                points = yield request
        squared = from_start(points)[:m]
        radius = self._radius(squared, request.scale)
        if not np.isfinite(radius):
            return lost(m + 1)
        if one:
            weights = shrinking(squared, radius) / m
        else:
            near, far = _nearer(squared, radius, LARGE[request.wide])
            if far:
                drawn = np.diag(np.append(near, 1.0))
                drawn[:m, m] = 1 - near
                points = yield replace(request, weights=drawn, wide=True)
            weights = self._moved(points, near, radius)
        return Mix(np.append(weights, 1 - weights.sum())[None, :], fair=1 / m)

    def _radius(self, squared: Floats, scale: float) -> float:
        """Return the radius, given the squared distances of the rows from the start."""
        if isinstance(self.radius, str):
            return float(np.sqrt(_lower_median(squared)))
        return self.radius * scale

    def _moved(self, points: Floats, near: Floats, radius: float) -> Floats:
        """Return the weights of the rows in the centre; the start has the rest of the weight.

        Args:
            points: the squared distances between points z_1 to z_m and the start s, the last point.
            near: the factors by which rows were moved to the start: z_i = s + near_i (x_i - s).
            radius: the radius.

        Every x_i - v is a combination of the points whose weights add up to zero, so its norm
        follows from the distances between the points.
        """
        m = len(near)
        present = near > 0
        stretch = np.where(present, 1 / np.where(present, near, 1), 0)
        points = np.where(np.isfinite(points), points, 0.0)
        to_rows = np.column_stack([np.diag(stretch), 1 - stretch])
        centre = np.zeros(m)
        for _ in range(self.iterations):
            point = centre @ to_rows
            point[m] += 1 - centre.sum()
            directions = to_rows - point
            squared = np.maximum(-0.5 * ((directions @ points) * directions).sum(axis=1), 0.0)
            factor = present * shrinking(squared, radius)
            centre = centre * (1 - factor.sum() / m) + factor / m
        return centre


def _nearer(squared: Floats, radius: float, large: float) -> tuple[Floats, bool]:
    """Return the factors that move far rows towards the start, and whether there are any.

    A row at infinite distance gets the factor 0. If all rows are far from the start, but none is
    much farther than the nearest, then none can hide another, and no row is moved: measuring moved
    rows takes several times as long.

    Args:
        squared: the squared distances of the rows from the start.
        radius: the radius.
        large: distances that are too large to be measured without moving the rows.
    """
    nearest = math.sqrt(squared.min())
    unit = nearest if radius < nearest < large else radius
    near = shrinking(squared, FAR_RADII * unit)
    return near, bool(np.any(near[np.isfinite(squared)] < 1))


def _lower_median(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
