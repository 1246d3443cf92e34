"""The algebra of rules: an optional mix of the rows, then a reduction of each column.

A rule's mix is worked out from a few small measurements of the rows, which are sums over columns.
It is written as a generator that yields what it wants to know and returns the :class:`Mix`; whoever
runs it decides where the rows are: in one array, on twenty servers or on an accelerator.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Window

Floats: TypeAlias = NDArray[np.float64]

# Distances between so many mixes follow from those between rows in milliseconds. The work grows
# with the fourth power of their number: more are faster measured.
DERIVED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Distances:
    """Ask for the squared distances between the rows, or between ``weights @ rows``.

    ``wide`` asks for double precision, for rows whose squares single precision cannot hold.
    """

    weights: Floats | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """Ask for the squared norms of the rows, or of ``weights @ rows``."""

    weights: Floats | None = None


@dataclass(frozen=True, slots=True)
class Radii:
    """Ask for the radii of a window's columns in those blocks of columns that are cut.

    Whoever holds a block as a whole works its spread out alone.
    """

    window: Window
    weights: Floats | None = None


Request: TypeAlias = Distances | Norms


def _chosen(weights: Floats) -> NDArray[np.intp] | None:
    chosen = weights.argmax(axis=1)
    exact = weights[np.arange(len(chosen)), chosen] == 1
    if exact.all() and np.count_nonzero(weights) == len(chosen):
        return np.asarray(chosen, np.intp)
    return None


@dataclass(frozen=True, eq=False)
class Mix:
    """The rows that are reduced: all m of them, or ``weights @ rows``.

    ``fair`` is the weight that a worker has in them if nothing of it is lost, for blame.
    """

    weights: Floats | None = None
    fair: float | Floats = 1.0
    selected: NDArray[np.intp] | None = field(init=False)
    """The indices of the rows if the mix only selects some."""

    def __post_init__(self) -> None:
        """Find out whether rows are only selected.

        Not when it is first asked: a cached_property has a lock, which a child of a process that
        was forked in that moment would wait for without end.
        """
        object.__setattr__(
            self, "selected", None if self.weights is None else _chosen(self.weights)
        )

    def after(self, first: Mix) -> Mix:
        """Return the mix that does ``first`` and then this one."""
        if first.weights is None:
            return self
        if self.weights is None:
            return first
        # NumPy multiplies zeros too, and a rule that is lost has NaN weights only.
        with np.errstate(invalid="ignore"):
            weights = self.weights @ first.weights
        return Mix(weights, self.fair * first.fair)


UNMIXED = Mix()
Planning: TypeAlias = Generator[Request, Floats, Mix]


def select(m: int, indices: NDArray[np.intp]) -> Floats:
    """Return the weights that select rows."""
    weights = np.zeros((len(indices), m))
    weights[np.arange(len(indices)), indices] = 1
    return weights


def lost(m: int) -> Mix:
    """Return the mix of a rule that finds nothing to hold on to: NaN, for everyone to see."""
    return Mix(np.full((1, m), np.nan))


def measured_distances() -> Generator[Request, Floats, Floats]:
    """Ask for distances, again in double precision if most of them are out of single's range."""
    squared = yield Distances()
    m = len(squared)
    if m < 2:
        return squared
    typical = np.sort(np.sort(squared, axis=1)[:, (m + 1) // 2])[m // 2]
    if not 1e-24 < typical < 1e36:
        squared = yield Distances(wide=True)
    return squared


def of_mixed(squared: Floats, weights: Floats) -> Floats:
    """Return the squared distances between convex mixes of rows from those between the rows.

    For weights a that add up to zero, |sum a_i x_i|^2 = - sum a_i a_j |x_i - x_j|^2 / 2. A row at
    infinite distance counts only where its weight is not zero.
    """
    k = len(weights)
    finite = np.isfinite(squared)
    safe = np.where(finite, squared, 0.0)
    infinite = None if finite.all() else (~finite).astype(np.float64)
    result = np.zeros((k, k))
    # One row at a time: all differences at once are k * k * m values.
    for i in range(k - 1):
        differences = weights[i] - weights[i + 1 :]
        lengths = np.maximum(-0.5 * ((differences @ safe) * differences).sum(axis=1), 0.0)
        if infinite is not None:
            touched = (differences != 0).astype(np.float64)
            lengths[((touched @ infinite) * touched).any(axis=1)] = np.inf
        result[i, i + 1 :] = lengths
    return result + result.T


def through(first: Mix, planning: Planning) -> Planning:
    """Run a plan on the rows that ``first`` makes."""
    if first.weights is None:
        return (yield from planning)
    weights = first.weights
    convex = bool(np.all(weights >= 0) and np.allclose(weights.sum(axis=1), 1))
    reply: Floats | None = None
    while True:
        try:
            request = planning.send(reply) if reply is not None else next(planning)
        except StopIteration as stop:
            result: Mix = stop.value
            return result.after(first)
        few = len(weights) <= DERIVED_ROWS
        if isinstance(request, Distances) and request.weights is None and convex and few:
            squared = yield replace(request, weights=None)
            reply = of_mixed(squared, weights)
        else:
            inner = weights if request.weights is None else request.weights @ weights
            reply = yield replace(request, weights=inner)


@dataclass(slots=True, eq=False)
class Decision:
    """What remains when a rule has been planned: a mix, and a window of each column.

    ``spreads`` are those of the blocks of columns that are cut, by number, for a window that
    reaches by them; None if there is no more than the columns at hand.
    """

    mix: Mix
    window: Window
    spreads: Mapping[int, float] | None = None
