"""Measurement of the bounds: each rule's error under the worst attack, for several distributions.

``python -m phocas.theory.measure`` prints the table of docs/theory.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phocas.rules import Heraclius, Phocas, TrimmedMean, parse_rule
from phocas.specs import unknown
from phocas.theory import bounds, extremes

Array: TypeAlias = NDArray[np.float64]
Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]

RARE = 0.05


def _rare(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw 1 with probability 0.05 and 0 otherwise, scaled to mean 0 and variance 1."""
    hits = (rng.random(shape) < RARE).astype(np.float64)
    return (hits - RARE) / math.sqrt(RARE * (1 - RARE))


def _log_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return (np.exp(rng.normal(size=shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)


DISTRIBUTIONS: Mapping[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(scale=math.sqrt(0.5), size=shape),
    "student3": lambda rng, shape: rng.standard_t(3, size=shape) / math.sqrt(3),
    "lognormal": _log_normal,
    "rare": _rare,
}
"""Distributions with mean 0 and variance 1, so that V = 1."""


@dataclasses.dataclass(frozen=True)
class MeasuredError:
    """The mean squared error under one attacker, in units of V.

    Attributes:
        error: the mean squared error.
        standard_error: the standard error of ``error``.
        distribution: name of the distribution of the honest values.
    """

    error: float
    standard_error: float
    distribution: str


def measure(
    rule: str, m: int, q: int, b: int, *, distribution: str, after: bool, trials: int, seed: int
) -> MeasuredError:
    """Measure a rule's mean squared error under the worst attack found, in units of V.

    >>> found = measure("trimmed-mean", 3, 1, 1, distribution="rare", after=False, trials=9, seed=0)
    >>> found.distribution
    'rare'
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(unknown("distribution", distribution, DISTRIBUTIONS))
    draw = DISTRIBUTIONS[distribution]
    rng = np.random.default_rng(seed)
    squares = MEASURED[rule](draw(rng, (m, trials)), q, b, after=after)
    return MeasuredError(
        float(squares.mean()), float(squares.std() / math.sqrt(len(squares))), distribution
    )


def worst_of(
    rule: str,
    m: int,
    q: int,
    b: int,
    *,
    after: bool,
    trials: int,
    seed: int = 0,
    distributions: Iterable[str] = tuple(DISTRIBUTIONS),
) -> MeasuredError:
    """Return the largest error over the distributions, with the name of the distribution."""
    found = [
        measure(rule, m, q, b, distribution=name, after=after, trials=trials, seed=seed)
        for name in distributions
    ]
    return max(found, key=lambda measured: measured.error)


def two_point_error(m: int, q: int, b: int, p: float) -> float:
    """Return the exact worst error of the trimmed mean, in units of V, for two-point values.

    The attacker chooses after seeing the values. Each value is low with probability p and high
    otherwise, with mean 0 and variance 1. The number of low values in a column is binomial and
    determines the error, so rare events need no sampling.

    >>> round(two_point_error(3, 1, 1, 0.5), 12)  # every value is off by 1, and so is the worst
    1.0
    """
    lows = np.arange(m + 1)
    ways = np.array(
        [math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1) for k in lows]
    )
    chance = np.exp(ways + lows * math.log(p) + (m - lows) * math.log1p(-p))
    low, high = -math.sqrt((1 - p) / p), math.sqrt(p / (1 - p))
    width = m - 2 * b
    errors = []
    for start in (b - q, b + q):  # first order statistic that remains, pushed down or up
        taken = np.clip(lows - start, 0, width)
        errors.append(np.abs(taken * low + (width - taken) * high) / width)
    return float(chance @ np.maximum(*errors) ** 2)


def _trimmed_mean_squares(columns: Array, q: int, b: int, *, after: bool) -> Array:
    return extremes.worst_trimmed_mean(columns, q, b, after=after) ** 2


def _phocas_squares(columns: Array, q: int, b: int, *, after: bool) -> Array:
    return extremes.worst_error(Phocas(b), TrimmedMean(b), columns, q, after=after) ** 2


def _heraclius_squares(columns: Array, q: int, b: int, *, after: bool) -> Array:
    rule = Heraclius(b, tail=0)
    centre = TrimmedMean(b)
    worst = extremes.worst_error(rule, centre, columns, q, after=after, cutoff=rule.cutoff)
    return worst**2


def _krum_squares(columns: Array, q: int, b: int, *, after: bool) -> Array:
    return extremes.worst_krum(columns.T[:, :, None], q, b, after=after)


MEASURED = {
    "krum": _krum_squares,
    "trimmed-mean": _trimmed_mean_squares,
    "phocas": _phocas_squares,
    "heraclius": _heraclius_squares,
}

GRID = (
    (3, 1, 1),
    (5, 1, 1),
    (5, 1, 2),
    (5, 2, 2),
    (7, 3, 3),
    (10, 2, 2),
    (10, 2, 4),
    (10, 3, 3),
    (20, 3, 3),
    (20, 6, 6),
    (20, 6, 9),
    (20, 8, 8),
)


def main(trials: int = 20_000) -> None:
    """Print the measured errors beside the bounds, for a grid of m, q and b, as Markdown."""
    print("| rule | m | q | b | printed | chosen before | chosen after | after/printed | proven |")
    print("|---|---|---|---|---|---|---|---|---|")
    for rule in MEASURED:
        for m, q, b in GRID:
            core = ",tail=0" if rule == "heraclius" else ""  # the errors are those of the core
            bound = bounds.judge(parse_rule(f"{rule}:b={b}{core}"), m, q)
            if bound.printed is None or bound.adaptive is None:
                continue
            number = trials if rule == "trimmed-mean" else trials // 10
            cells = [worst_of(rule, m, q, b, after=after, trials=number) for after in (False, True)]
            before, after = (f"{cell.error:.3g} ({cell.distribution})" for cell in cells)
            print(
                f"| {rule} | {m} | {q} | {b} | {bound.printed:.3g} | {before} | {after} |"
                f" {cells[1].error / bound.printed:.2f} | {bound.adaptive:.3g} |"
            )


if __name__ == "__main__":
    main()
