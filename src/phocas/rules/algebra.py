"""The algebra of rules: filter the cells, mix the rows, reduce each column.

The filter and the mix are optional. Whether a cell is replaced depends on its block of columns
alone. Which rows are excluded depends on a sum over columns. The mix depends on a few measurements
of the filtered rows, such as distances, which are sums over columns as well. A generator computes
the mix: it yields requests for measurements and returns the :class:`Mix`.
:mod:`phocas.rules.execution` runs the generator and measures, wherever the rows are stored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Weighing, Window
from phocas.provenance import defined_in

Floats: TypeAlias = NDArray[np.float64]

# Up to this number of mixed rows, their distances are derived from those between rows, which takes
# milliseconds. The work grows with the fourth power of the number: beyond it, measuring is faster.
DERIVED_ROWS = 64

MOSTLY = 0.5  # a row with a larger share of replaced cells is excluded


@dataclass(frozen=True, slots=True)
class OutlierShares:
    """A request for the share of each row's cells that are beyond twice the cutoff of a window.

    Attributes:
        window: the window around each column's centre.
        rows: the number of rows to consider, from the first; None: all rows.
        spreads: the scale of each block of columns that is split between servers, by block number;
            None: no block is split.
    """

    window: Window
    rows: int | None = None
    spreads: Mapping[int, float] | None = None

    def radii(self, m: int) -> Radii:
        """Return the request for the radii from which the scales of split blocks are computed."""
        return Radii(self.window, None if self.rows is None else select(m, np.arange(self.rows)))


@dataclass(frozen=True, slots=True)
class Filtering:
    """A cell filter: it replaces outlying cells by their column's centre, and may exclude rows.

    Attributes:
        request: the request for the share of replaced cells of each row.
        most: the largest number of rows that may be excluded.
    """

    request: OutlierShares
    most: int

    def excluded(self, shares: Floats) -> NDArray[np.bool_]:
        """Exclude rows with more than half of their cells replaced, worst first, at most ``most``.

        Args:
            shares: the share of replaced cells of each row.
        """
        worst = np.argsort(-shares, kind="stable")[: self.most]
        out = np.zeros(len(shares), bool)
        out[worst] = shares[worst] > MOSTLY
        return out


@dataclass(frozen=True, slots=True)
class Tail:
    """An allowance for the outliers of a window with a cutoff: values that few workers have.

    The window gives a value the weight w, which falls from 1 at the cutoff to 0 at twice the
    cutoff. The tail of a row are the distances of its values from the centres of their columns,
    times 1 - w. If any value is beyond twice the cutoff, the tails are added to the result of the
    window, up to a limit: ``factor`` times the root of the sum of the squared radii of all columns.
    A value beyond the limit is dropped. A tail is scaled down to the limit, and to the (b+1)-th
    longest tail, which is no longer than some honest one. All distances, lengths and limits are
    halved in the code, so that no finite distance overflows.

    Attributes:
        factor: the limit, in units of the root of the sum of squared radii.
        b: the number of Byzantine rows.
    """

    factor: float
    b: int

    def outliers(self, window: Window, spreads: Mapping[int, float] | None) -> OutlierShares:
        """Return the request for the values whose weight is less than 1."""
        return OutlierShares(replace(window, cutoff=window.cutoff / 2), spreads=spreads)

    def limit(self, squares: float) -> float:
        """Return half the limit, from the sum of the squared radii of all columns."""
        return min(self.factor * math.sqrt(squares) / 2, sys.float_info.max)

    def allowance(self, squared: Floats, limit: float) -> Allowance:
        """Return how much of each tail is added, from the squared lengths of halved tails."""
        order = np.argsort(-squared, kind="stable")
        longest = min(limit, math.sqrt(squared[order[self.b]]))
        return Allowance(limit, shrinking(squared, longest), order)


@dataclass(frozen=True, slots=True, eq=False)
class Allowance:
    """The part of each row's tail that is added to a result.

    Attributes:
        limit: half the distance from the centre beyond which an outlier is dropped.
        scales: the factor by which the tail of each row is scaled down.
        order: the rows, longest tail first: the order of the sum.
    """

    limit: float
    scales: Floats
    order: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SquaredRadii:
    """A request for the sum of the squared radii of a window in all columns."""


@dataclass(frozen=True, slots=True)
class TailNorms:
    """A request for the squared length of each row's tail (see :class:`Tail`).

    Attributes:
        limit: half the distance from the centre beyond which an outlier is dropped.
    """

    limit: float


@dataclass(frozen=True, slots=True)
class Distances:
    """A request for the squared distances between the rows, or between ``weights @ rows``.

    Attributes:
        weights: the mix that is measured; None: the rows.
        wide: whether to compute in double precision, for squares outside the range of single.
        scale: a power of two by which the rows are multiplied first, in double precision, for
            squares outside the range of double precision.
        origin: the index of a row: the answer has the m distances from this row, which take no
            longer than m norms; None: the answer has the (m, m) distances of all pairs.

    >>> planning = measured_distances()
    >>> next(planning)
    Distances(weights=None, wide=False, scale=1.0, origin=None)
    """

    weights: Floats | None = None
    wide: bool = False
    scale: float = 1.0
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """A request for the squared norms of the rows, or of ``weights @ rows``, times ``scale``.

    Attributes:
        weights: the mix that is measured; None: the rows.
        scale: a power of two by which the rows are multiplied first.

    >>> def planning(m):
    ...     squared = yield Norms()
    ...     return Mix.average(1 / np.sqrt(squared))
    >>> next(planning(3))
    Norms(weights=None, scale=1.0)
    """

    weights: Floats | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Signs:
    """A request for the numbers of positive, zero and negative values of each row: a (3, m) array.

    NaN counts as zero.

    Attributes:
        weights: the mix whose values are counted; None: the rows.
        scale: always 1, as signs do not depend on a scale.
    """

    weights: Floats | None = None
    scale: ClassVar[float] = 1.0


@dataclass(frozen=True, slots=True)
class Radii:
    """A request for the radius of a window in each column of split blocks.

    The radius is the distance from the centre to the farthest value that the window always keeps.
    A block of columns is split if several servers have a part of its columns. The scale of a block
    (root mean square of its radii) that one server has as a whole needs no request.
    """

    window: Window
    weights: Floats | None = None
    weighing: Weighing | None = None


Request: TypeAlias = Distances | Norms | Signs
AnyRequest = TypeVar("AnyRequest", Distances, Norms)
Choice = TypeVar("Choice")


def wants_double(request: Request) -> bool:
    """Tell whether the squares of a request are added in double precision."""
    wide = isinstance(request, Norms) or (isinstance(request, Distances) and request.wide)
    return wide or request.scale != 1


def of_pairs(request: object) -> bool:
    """Tell whether the answer to a request is a matrix of all pairs of rows."""
    return isinstance(request, Distances) and request.origin is None


def _chosen(weights: Floats) -> NDArray[np.intp] | None:
    chosen = weights.argmax(axis=1)
    exact = weights[np.arange(len(chosen)), chosen] == 1
    if exact.all() and np.count_nonzero(weights) == len(chosen):
        return np.asarray(chosen, np.intp)
    return None


@dataclass(frozen=True, eq=False)
class Mix:
    """The rows to reduce: all m of them, or ``weights @ rows``.

    ``planning`` of a rule returns it. :meth:`selection` and :meth:`average` make the usual ones.

    Attributes:
        weights: one row of weights for each mixed row; None: the rows are not mixed.
        fair: the weight of a worker in the mixed rows if nothing of the worker is dropped.
        norms: a function that returns the squared norms of the mixed rows if they are known without
            measuring.

    >>> Mix.average(np.array([1.0, 1.0, 2.0])).weights
    array([[0.25, 0.25, 0.5 ]])
    """

    weights: Floats | None = None
    fair: float | Floats = 1.0
    norms: Callable[[Norms], Floats] | None = None
    selected: NDArray[np.intp] | None = field(init=False)
    """The indices of the selected rows if the mix only selects rows, else None."""

    def __post_init__(self) -> None:
        """Find out whether the mix only selects rows.

        This is not a cached_property: its lock would block a child process forever that was forked
        while the lock was held.
        """
        object.__setattr__(
            self, "selected", None if self.weights is None else _chosen(self.weights)
        )

    @classmethod
    def selection(cls, m: int, indices: NDArray[np.intp]) -> Mix:
        """Return the mix that keeps the rows with these indices, of m rows.

        >>> Mix.selection(3, np.array([0, 2])).weights.tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        """
        return cls(select(m, np.asarray(indices)))

    @classmethod
    def average(cls, weights: Floats) -> Mix:
        """Return the mix that averages the rows by their weights, which are at least 0.

        The dropped share of a worker is the part of the equal weight 1/m that it does not have.

        >>> Mix.average(np.array([1.0, 3.0])).weights.tolist()
        [[0.25, 0.75]]
        """
        share = np.asarray(weights, np.float64)
        if share.ndim != 1 or not (share >= 0).all() or not 0 < share.sum() < np.inf:
            raise ValueError(
                f"Mix.average needs one weight >= 0 for each row, and one above 0: got {weights}"
            )
        return cls((share / share.sum())[None, :], fair=1 / len(share))

    def after(self, first: Mix) -> Mix:
        """Return the mix that applies ``first`` and then this mix."""
        if first.weights is None:
            return self
        if self.weights is None:
            return first
        # The weights of a rule without a result are NaN (see lost), also times zero.
        with np.errstate(invalid="ignore"):
            weights = self.weights @ first.weights
        fair = self.fair
        if np.ndim(fair) and np.ndim(first.fair):  # buckets of buckets
            fair = np.asarray(fair)[first.weights.argmax(axis=0)]
        return Mix(weights, fair * first.fair, self.norms)


UNMIXED = Mix()
Planning: TypeAlias = Generator[Request, Floats, Mix]


def select(m: int, indices: NDArray[np.intp]) -> Floats:
    """Return the weights that select rows."""
    weights = np.zeros((len(indices), m))
    weights[np.arange(len(indices)), indices] = 1
    return weights


def weighing(weights: Floats) -> Mix:
    """Return the mix that averages the rows by weights: a selection if the weights are 0 or equal.

    The mean of selected rows that are equal is exact; a weighted sum would round.
    """
    used = np.flatnonzero(weights)
    if len(used) and np.ptp(weights[used]) == 0 and abs(weights[used].sum() - 1) < 1e-9:
        return Mix(select(len(weights), used))
    return Mix(weights[None, :], fair=1 / len(weights))


def heaviest(units: NDArray[np.int64], count: int) -> int:
    """Return the sum of the ``count`` largest weights."""
    return int(np.sort(units)[::-1][:count].sum())


def weighted_mean(mix: Mix, units: NDArray[np.int64]) -> Mix:
    """Return the weighted mean of the rows that a mix selects; other mixes stay unchanged."""
    if mix.weights is None:
        return Mix((units / units.sum())[None, :])
    if mix.selected is None:
        return mix
    chosen = units[mix.selected]
    return Mix((chosen / chosen.sum())[None, :] @ mix.weights)


def lost(m: int) -> Mix:
    """Return the mix of a rule without a valid result: a row of NaN."""
    return Mix(np.full((1, m), np.nan))


def measured_distances(
    typical: Callable[[Floats], float] | None = None, origin: int | None = None
) -> Generator[Request, Floats, tuple[Floats, Distances]]:
    """Request distances, and again in double precision if the typical square is out of range.

    Args:
        typical: a function that returns the square that matters, from the squared distances; None:
            a typical square between honest rows.
        origin: the index of the row from which distances are measured; None: all pairs of rows.

    Returns:
        The squared distances, and the request that defines their scale.

    >>> def planning(m):
    ...     squared, _ = yield from measured_distances()
    ...     return Mix.selection(m, np.argsort(squared.sum(axis=1))[: m - 1])
    >>> steps = planning(3)
    >>> next(steps)
    Distances(weights=None, wide=False, scale=1.0, origin=None)
    """
    size = _typical if typical is None else typical
    request = Distances(origin=origin)
    squared = yield request
    if len(squared) > 1 and not 1e-24 < size(squared) < 1e36:
        squared, request = yield from _in_range(replace(request, wide=True), size)
    return squared, request


def chosen(choose: Callable[[Floats], tuple[Choice, bool]]) -> Generator[Request, Floats, Choice]:
    """Choose rows by their squared distances, and again if the choice uses an infinite distance.

    ``choose`` returns its choice, and whether all distances that it used are finite. The square of
    1e20 is infinite in single precision and finite in double precision, so double precision can
    compare distant rows. Norms are measured first, because they are cheaper: they show which rows
    have no NaN and inf, and only those justify measuring distances again.
    """
    squared, request = yield from measured_distances()
    found, finite = choose(squared)
    if not finite and not request.wide:
        present = np.isfinite((yield Norms()))
        if np.isinf(squared[np.ix_(present, present)]).any():
            found, _ = choose((yield Distances(wide=True)))
    return found


def centred_gram(squared: Floats) -> Floats:
    """Return the inner products of rows minus their mean, from the squared distances of the rows.

    Its eigenvectors are the principal components of the rows, as one number for each row. All
    distances must be finite: leave out rows with NaN or inf, which are at infinite distance.

    Args:
        squared: the squared distances, (m, m).

    >>> rows = np.array([[0.0, 1.0], [2.0, 1.0], [4.0, 4.0]])
    >>> squared = np.square(rows[:, None] - rows).sum(axis=2)
    >>> centred = rows - rows.mean(axis=0)
    >>> bool(np.allclose(centred_gram(squared), centred @ centred.T))
    True
    """
    means = squared.mean(axis=0)
    return np.asarray(0.5 * (means + means[:, None] - squared - means.mean()), np.float64)


def measured_norms(
    typical: Callable[[Floats], float],
) -> Generator[Request, Floats, tuple[Floats, Norms]]:
    """Request squared norms, scaled if the typical one would be out of range.

    Returns the squared norms, and the request that defines their scale.
    """
    return (yield from _in_range(Norms(), typical))


def _in_range(
    request: AnyRequest, typical: Callable[[Floats], float]
) -> Generator[Request, Floats, tuple[Floats, AnyRequest]]:
    """Send a request, and again with scaled rows if squares overflow or underflow.

    Times 2^600, the square of the smallest number is 1e-287; times 2^-600, that of the largest is
    1e255.
    """
    squared = yield request
    size = typical(squared)
    if 1e-250 < size < 1e250:
        return squared, request
    probe = replace(request, scale=2.0 ** (600 if size < 1 else -600))
    probed = yield probe
    found = typical(probed)
    if not 0 < found < np.inf:
        return squared, request  # the typical rows are equal, or have NaN or inf
    if size > 1:
        return probed, probe
    # The smallest scale that suffices: the squares of distant rows should not overflow.
    fitting = replace(request, scale=probe.scale * 2.0 ** -(415 + math.frexp(found)[1] // 2))
    return (yield fitting), fitting


def _typical(squared: Floats) -> float:
    """Return the median of the rows' median squared distances.

    The result is a typical squared distance of honest rows if most rows are honest.
    """
    middle = max(1, (len(squared) - 1) // 2)
    return float(np.sort(np.sort(squared, axis=1)[:, middle])[middle])


def fitting_norms(radius: float, weights: Floats | None = None) -> Norms:
    """Return a request for norms, with a scale at which the squared radius is in range."""
    exponent = math.frexp(radius)[1]
    return Norms(weights, 2.0**-exponent if abs(exponent) > 400 else 1.0)


def fitting_distances(radius: float, origin: int | None = None) -> Distances:
    """Return a request for distances, with a precision and scale for the squared radius."""
    wide, scale = not 1e-12 < radius < 1e16, fitting_norms(radius).scale
    return Distances(wide=wide, scale=scale, origin=origin)


def clipped(squared: Floats, request: Norms, longest: float) -> Mix:
    """Return the mix that scales rows down so that no squared norm exceeds ``longest``.

    ``squared`` and ``longest`` are multiplied by the squared scale of the request. The mix states
    the norms of its rows, so that all clipped rows have the same norm to the last bit. Measured
    norms would differ by rounding.
    """
    norms = np.where(np.isfinite(squared), np.minimum(squared, longest), 0.0)

    def known(other: Norms) -> Floats:
        ratio = other.scale / request.scale
        with np.errstate(over="ignore", under="ignore"):
            return norms * ratio * ratio

    return Mix(np.diag(shrinking(squared, math.sqrt(longest))), norms=known)


def shrinking(squared: Floats, radius: float) -> Floats:
    """Return the factors that scale rows down to a radius; 0 for a row of infinite norm."""
    lengths = np.sqrt(squared)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(lengths > radius, radius / lengths, 1.0)
        # Subnormal numbers are sparse: a factor rounded up would make a row exceed the radius.
        factors = np.where(factors * lengths > radius, np.nextafter(factors, 0.0), factors)
    return np.where(np.isfinite(lengths), factors, 0.0)


def needs_double(weights: Floats) -> bool:
    """Tell whether some weight is subnormal or zero in single precision."""
    return bool(np.any((weights != 0) & (np.abs(weights) < np.finfo(np.float32).tiny)))


def of_mixed(squared: Floats, weights: Floats) -> Floats:
    """Return the squared distances between convex mixes, computed from those between the rows.

    The weights of a convex mix add up to one, so the differences a of the weights of two mixes add
    up to zero. Then the squared distance between the two mixes is
    |sum a_i x_i|^2 = - sum a_i a_j |x_i - x_j|^2 / 2. A row x_i at infinite distance from others
    counts only if a_i is not zero.
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
    """Run a planning generator on the rows that the mix ``first`` makes.

    A planning generator yields requests for measurements and returns a mix. Requests are rewritten
    so that they measure the original rows. The returned mix applies both mixes.
    """
    if first.weights is None:
        return (yield from planning)
    weights = first.weights
    # The tolerance is the rounding of the sum: rows clipped by a millionth are no convex mix.
    rounding = weights.shape[1] * np.finfo(np.float64).eps
    convex = bool(np.all(weights >= 0) and np.all(np.abs(weights.sum(axis=1) - 1) <= rounding))
    reply: Floats | None = None
    while True:
        try:
            request = planning.send(reply) if reply is not None else next(planning)
        except StopIteration as stop:
            result: Mix = stop.value
            return result.after(first)
        few = len(weights) <= DERIVED_ROWS
        if request.weights is None and isinstance(request, Norms) and first.norms is not None:
            reply = first.norms(request)
        elif request.weights is None and isinstance(request, Distances) and convex and few:
            reply = of_mixed((yield replace(request, origin=None)), weights)
            reply = reply if request.origin is None else reply[request.origin]
        else:
            inner = weights if request.weights is None else request.weights @ weights
            asked = replace(request, weights=inner)
            if isinstance(asked, Distances) and not convex:
                # Clipped rows far from the origin differ by less than rounding to single precision.
                asked = replace(asked, wide=True)
            reply = yield asked


def beside(planning: Planning, m: int) -> Planning:
    """Run the planning generator of m rows on m + 1 rows, of which the last stays unchanged."""
    reply: Floats | None = None
    while True:
        try:
            request = planning.send(reply) if reply is not None else next(planning)
        except StopIteration as stop:
            mix: Mix = stop.value
            break
        if request.weights is not None:
            padded = np.column_stack([request.weights, np.zeros(len(request.weights))])
            reply = yield replace(request, weights=padded)
        else:
            reply = (yield request)[(slice(m),) * (1 + of_pairs(request))]
    if mix.weights is None:
        return mix
    weights = np.zeros((len(mix.weights) + 1, m + 1))
    weights[:-1, :-1], weights[-1, -1] = mix.weights, 1.0
    fair = np.append(mix.fair, 1.0) if np.ndim(mix.fair) else mix.fair
    return Mix(weights, fair)


Function: TypeAlias = Callable[[NDArray[Any]], Any]


def by_function(function: Function, rows: NDArray[Any]) -> NDArray[Any]:
    """Reduce rows by a function; raise ValueError unless it returns a number for each column."""
    values = np.asarray(function(rows))
    if values.shape != rows.shape[1:] or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{defined_in(function)}: the function of a rule must return a number for each of"
            f" {rows.shape[1]} columns:"
            f" got {values.dtype} of shape {values.shape}"
        )
    return values.astype(rows.dtype, copy=False)
