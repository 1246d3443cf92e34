"""How times grow with m and d: exponents of measurements, and the paper's claims about them.

The paper says that Trmean and Phocas are nearly linear, O(dm) to O(dm log m), "of the same order as
averaging", and that Krum and Multi-Krum are O(dm^2). An exponent is the slope of a straight line
through the logarithms of time and of m or d, with its 95% interval from the residuals: points that
are not on a line make the interval wide.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from phocas.experiments.reproduction.complexity import series
from phocas.experiments.reproduction.outcomes import MissingError
from phocas.experiments.reproduction.verdicts import (
    Check,
    Claim,
    ClaimResult,
    Interval,
    decide,
    interval,
    student,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from phocas.experiments.reproduction.complexity import Axis, Complexity, Measurements, Point

LINEAR = (0.9, 1.1)
"""Exponents that count as linear in d."""
QUADRATIC = (1.75, 2.1)
"""Exponents that count as quadratic in m."""
NETWORK = (
    "Here networks of about m log^2 m steps sort the columns (an exponent of 1.5 between m = 8 and"
    " 1024), not the paper's selection algorithm."
)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> Interval:
    """Return the slope of log(values) over log(sizes), with its 95% interval.

    >>> round(exponent([1, 2, 4], [3, 12, 48]).mean, 9)
    2.0
    """
    if len(sizes) < 3:
        raise MissingError(f"an exponent needs 3 sizes: {len(sizes)} are measured")
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(values, np.float64))
    off = x - x.mean()
    slope = float(off @ y / (off @ off))
    rest = y - y.mean() - slope * off
    degrees = len(x) - 2
    half = student(degrees) * math.sqrt(float(rest @ rest) / degrees / float(off @ off))
    return Interval(slope, slope - half, slope + half, len(x))


def exponent_of(points: Sequence[Point], axis: Axis) -> Interval:
    """Return the exponent of a series."""
    return exponent([getattr(point, axis) for point in points], [point.best for point in points])


def nearly_linear(sizes: Sequence[int]) -> float:
    """Return the exponent of m log m between the smallest and the largest m.

    >>> round(nearly_linear([8, 64, 1024]), 3)
    1.248
    """
    low, high = min(sizes), max(sizes)
    return 1 + math.log(math.log(high) / math.log(low)) / math.log(high / low)


def judge_complexity(study: Complexity, found: Measurements) -> list[ClaimResult]:
    """Decide the claims about time complexity."""
    results = []
    for claim, checks in _claims(study, found):
        try:
            results.append(decide(claim, tuple(checks()), claim.reason))
        except MissingError as error:
            results.append(ClaimResult(claim, (), "not decided", str(error)))
    return results


def _claims(
    study: Complexity, found: Measurements
) -> Iterator[tuple[Claim, Callable[[], list[Check]]]]:
    def claim(name: str, text: str, reason: str = "") -> Claim:
        return Claim(name.lower(), "Time complexity", text, lambda _: (), reason)

    for label in ("Trmean", "Phocas"):
        yield (
            claim(f"{label}-m", f"{label} is nearly linear in m: no more than m log m.", NETWORK),
            partial(_nearly_linear, study, found, label),
        )
        yield (
            claim(f"{label}-order", f"{label} is of the same order as averaging in m.", NETWORK),
            partial(_as_averaging, study, found, label),
        )
    for label in study.specs(study.sizes.at_m):
        yield (
            claim(f"{label}-d", f"{label} is linear in d."),
            partial(_linear, study, found, label),
        )
    for label in ("Krum", "Multi-Krum"):
        yield (
            claim(f"{label}-m", f"{label} is quadratic in m, in the upper half of m."),
            partial(_quadratic, study, found, label),
        )
        yield (
            claim(f"{label}-dearer", f"Phocas costs less than {label} at the largest m."),
            partial(_dearer, study, found, label),
        )


def _measured(
    study: Complexity, found: Measurements, label: str, axis: Axis
) -> list[tuple[str, list[Point]]]:
    """Return the series of a rule with at least 3 points, each with a label; instructions last."""
    kinds = [*study.sizes.threads, *([0] if axis == "m" else [])]
    every = [(_kind(kind), series(study, found, label, axis, kind)) for kind in kinds]
    enough = [(kind, points) for kind, points in every if len(points) >= 3]
    if not enough:
        raise MissingError(f"an exponent needs 3 sizes: fewer are measured of {label} along {axis}")
    return enough


def _nearly_linear(study: Complexity, found: Measurements, label: str) -> list[Check]:
    return [
        Check(
            f"exponent of {label} in m, {kind}",
            exponent_of(points, "m"),
            at_most=round(nearly_linear([point.m for point in points]), 3),
        )
        for kind, points in _measured(study, found, label, "m")
    ]


def _as_averaging(study: Complexity, found: Measurements, label: str) -> list[Check]:
    checks = []
    for kind, points in _measured(study, found, label, "m"):
        means = [found.points[("Mean", *point.key[1:])].best for point in points]
        sizes = [point.m for point in points]
        ratios = [point.best / mean for point, mean in zip(points, means, strict=True)]
        most = round(nearly_linear(sizes) - 1, 3)
        what = f"exponent of {label} / Mean in m, {kind}"
        checks.append(Check(what, exponent(sizes, ratios), at_most=most))
    return checks


def _linear(study: Complexity, found: Measurements, label: str) -> list[Check]:
    return [
        Check(f"exponent of {label} in d, {kind}", exponent_of(points, "d"), *LINEAR)
        for kind, points in _measured(study, found, label, "d")
    ]


def _quadratic(study: Complexity, found: Measurements, label: str) -> list[Check]:
    checks = []
    for kind, points in _measured(study, found, label, "m"):
        upper = points[min(len(points) // 2, len(points) - 3) :]
        what = f"exponent of {label} in m, from m = {upper[0].m}, {kind}"
        checks.append(Check(what, exponent_of(upper, "m"), *QUADRATIC))
    return checks


def _dearer(study: Complexity, found: Measurements, label: str) -> list[Check]:
    checks = []
    for kind, points in _measured(study, found, label, "m"):
        ours = found.points[("Phocas", *points[-1].key[1:])]
        pairs = zip(points[-1].values, ours.values, strict=True)
        ratios = [theirs / own for theirs, own in pairs]
        # A count has no noise, and so no interval.
        value = (
            interval(ratios) if len(ratios) > 1 else Interval(ratios[0], ratios[0], ratios[0], 1)
        )
        what = f"{label} / Phocas at m = {ours.m}, {kind}"
        checks.append(Check(what, value, at_least=1.0))
    return checks


def _kind(threads: int) -> str:
    if threads == 0:
        return "instructions"
    return "time of 1 thread" if threads == 1 else f"time of {threads} threads"
