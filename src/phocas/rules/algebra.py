"""The algebra of rules: clean the cells, mix the rows, reduce each column; two may be left out.

What is implausible in a column is known from its block of columns; which rows are mostly
implausible, and out, is a sum over columns. A rule's mix is worked out from a few small
measurements of the cleaned rows, which are sums over columns too. It is written as a generator that
yields what it wants to know and returns the :class:`Mix`; whoever runs it decides where the rows
are: in one array, on twenty servers or on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import Weighing, Window

if TYPE_CHECKING:
    from phocas.rules.measures import Partial

Floats: TypeAlias = NDArray[np.float64]

# Distances between so many mixes follow from those between rows in milliseconds. The work grows
# with the fourth power of their number: more are faster measured.
DERIVED_ROWS = 64

MOSTLY = 0.5  # the share of a row that is implausible, above which the row is out


@dataclass(frozen=True, slots=True)
class Plausible:
    """Ask what share of each row is implausible: beyond twice the reach of a window.

    ``spreads`` are those of the blocks of columns that are cut, by number; None if there is no more
    than the columns at hand. Only the first ``rows`` rows are looked at, if that is not None.
    """

    window: Window
    spreads: Mapping[int, float] | None = None
    rows: int | None = None

    def radii(self, m: int) -> Radii:
        """Ask for the radii that the spreads of cut blocks are made of."""
        weights = None if self.rows is None else select(m, np.arange(self.rows))
        return Radii(self.window, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Clean:
    """The cleaned rows: the centre of its column stands for each implausible value.

    Rows that are ``out`` are NaN. ``shares`` is what is implausible of each row.
    """

    plausible: Plausible
    shares: Floats
    out: NDArray[np.bool_]

    @property
    def lost(self) -> Floats:
        """Return the share of each row that is not its own any more."""
        return np.where(self.out, 1.0, self.shares)


@dataclass(frozen=True, slots=True)
class Cleanup:
    """How rows are cleaned: what is implausible, and how many rows may be out.

    With ``rows``, only so many are cleaned, the first ones.
    """

    window: Window
    most: int
    rows: int | None = None

    def plausible(self, spreads: Mapping[int, float] | None = None) -> Plausible:
        """Ask what share of each row is implausible."""
        return Plausible(self.window, spreads, self.rows)

    def clean(self, plausible: Plausible, shares: Floats) -> Clean:
        """Put those rows out that are mostly implausible; if they are too many, the worst."""
        worst = np.argsort(-shares, kind="stable")[: self.most]
        out = np.zeros(len(shares), bool)
        out[worst] = shares[worst] > MOSTLY
        return Clean(plausible, shares, out)


@dataclass(frozen=True, slots=True)
class Distances:
    """Ask for the squared distances between the rows, or between ``weights @ rows``.

    ``wide`` asks for double precision, for rows whose squares single precision cannot hold.
    ``scale``, a power of two, is multiplied to the rows first, in double precision: for rows whose
    squares even that cannot hold.
    """

    weights: Floats | None = None
    wide: bool = False
    scale: float = 1.0
    clean: Clean | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """Ask for the squared norms of the rows, or of ``weights @ rows``, times ``scale``."""

    weights: Floats | None = None
    scale: float = 1.0
    clean: Clean | None = None


@dataclass(frozen=True, slots=True)
class Radii:
    """Ask for the radii of a window's columns in those blocks of columns that are cut.

    Whoever holds a block as a whole works its spread out alone.
    """

    window: Window
    weights: Floats | None = None
    clean: Clean | None = None
    weighing: Weighing | None = None


Request: TypeAlias = Distances | Norms
AnyRequest = TypeVar("AnyRequest", Distances, Norms)
Choice = TypeVar("Choice")


def wants_double(request: Request) -> bool:
    """Tell whether a request's squares are added in double precision."""
    return isinstance(request, Norms) or request.wide or request.scale != 1


def _chosen(weights: Floats) -> NDArray[np.intp] | None:
    chosen = weights.argmax(axis=1)
    exact = weights[np.arange(len(chosen)), chosen] == 1
    if exact.all() and np.count_nonzero(weights) == len(chosen):
        return np.asarray(chosen, np.intp)
    return None


@dataclass(frozen=True, eq=False)
class Mix:
    """The rows that are reduced: all m of them, or ``weights @ rows``.

    ``fair`` is the weight that a worker has in them if nothing of it is lost, for blame. ``norms``
    answers requests for the squared norms of the mixed rows where they are known without measuring.
    """

    weights: Floats | None = None
    fair: float | Floats = 1.0
    norms: Callable[[Norms], Floats] | None = None
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
        fair = self.fair
        if np.ndim(fair) and np.ndim(first.fair):  # buckets of buckets: each worker is in one
            fair = np.asarray(fair)[first.weights.argmax(axis=0)]
        return Mix(weights, fair * first.fair, self.norms)


UNMIXED = Mix()
Planning: TypeAlias = Generator[Request, Floats, Mix]


def select(m: int, indices: NDArray[np.intp]) -> Floats:
    """Return the weights that select rows."""
    weights = np.zeros((len(indices), m))
    weights[np.arange(len(indices)), indices] = 1
    return weights


def heaviest(units: NDArray[np.int64], count: int) -> int:
    """Return the mass of so many of the heaviest."""
    return int(np.sort(units)[::-1][:count].sum())


def weighted_mean(mix: Mix, units: NDArray[np.int64]) -> Mix:
    """Return the mean, by weight, of the rows that a mix selects; one mixed row is its own mean."""
    if mix.weights is None:
        return Mix((units / units.sum())[None, :])
    if mix.selected is None:
        return mix
    chosen = units[mix.selected]
    return Mix((chosen / chosen.sum())[None, :] @ mix.weights)


def lost(m: int) -> Mix:
    """Return the mix of a rule that finds nothing to hold on to: NaN, for everyone to see."""
    return Mix(np.full((1, m), np.nan))


def measured_distances() -> Generator[Request, Floats, tuple[Floats, Distances]]:
    """Ask for distances, and again if most of their squares are out of single precision's range.

    Returns them with the request that got them: squares are as scaled there.
    """
    request = Distances()
    squared = yield request
    if len(squared) > 1 and not 1e-24 < _typical(squared) < 1e36:
        squared, request = yield from _in_range(Distances(wide=True), _typical)
    return squared, request


def chosen(choose: Callable[[Floats], tuple[Choice, bool]]) -> Generator[Request, Floats, Choice]:
    """Choose rows by their squared distances, and again if the choice rests on an infinite one.

    ``choose`` returns its choice, and whether all distances that the choice rests on are finite.
    The square of 1e20 is infinite in single precision and finite in double precision, in which
    far rows are distinguished from farther ones. Norms show first, for less, whether
    any distance of rows without NaN and inf is infinite.
    """
    squared, request = yield from measured_distances()
    found, finite = choose(squared)
    if not finite and not request.wide:
        present = np.isfinite((yield Norms()))
        if np.isinf(squared[np.ix_(present, present)]).any():
            found, _ = choose((yield Distances(wide=True)))
    return found


def measured_norms(
    typical: Callable[[Floats], float],
) -> Generator[Request, Floats, tuple[Floats, Norms]]:
    """Ask for norms, whose squares are scaled if the typical one would be out of range.

    Returns them with the request that got them: squares are as scaled there.
    """
    return (yield from _in_range(Norms(), typical))


def _in_range(
    request: AnyRequest, typical: Callable[[Floats], float]
) -> Generator[Request, Floats, tuple[Floats, AnyRequest]]:
    """Ask, and again with scaled rows if squares overflow or vanish in double precision.

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
        return squared, request  # rows that are equal, or lost
    if size > 1:
        return probed, probe
    # No larger than need be: rows far away are to be told from those farther away.
    fitting = replace(request, scale=probe.scale * 2.0 ** -(415 + math.frexp(found)[1] // 2))
    return (yield fitting), fitting


def _typical(squared: Floats) -> float:
    """Return the median of the rows' median distances, that of honest rows if most are honest."""
    middle = max(1, (len(squared) - 1) // 2)
    return float(np.sort(np.sort(squared, axis=1)[:, middle])[middle])


def fitting_norms(radius: float, weights: Floats | None = None) -> Norms:
    """Ask for norms, scaled so that the square of a radius is in range."""
    exponent = math.frexp(radius)[1]
    return Norms(weights, 2.0**-exponent if abs(exponent) > 400 else 1.0)


def clipped(squared: Floats, request: Norms, longest: float) -> Mix:
    """Return the mix that makes no row longer than ``longest``, a squared norm as requested.

    The norms of the mixed rows are known: clipped rows are all as long, to the last bit. Rounded
    products would decide which of them is longer.
    """
    norms = np.where(np.isfinite(squared), np.minimum(squared, longest), 0.0)

    def known(other: Norms) -> Floats:
        ratio = other.scale / request.scale
        with np.errstate(over="ignore", under="ignore"):
            return norms * ratio * ratio

    return Mix(np.diag(shrinking(squared, math.sqrt(longest))), norms=known)


def shrinking(squared: Floats, radius: float) -> Floats:
    """Return what rows are multiplied by so that none is longer; an infinite one is left out."""
    lengths = np.sqrt(squared)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(lengths > radius, radius / lengths, 1.0)
        # Subnormal numbers are sparse: rounded up, a row would be longer than the radius.
        factors = np.where(factors * lengths > radius, np.nextafter(factors, 0.0), factors)
    return np.where(np.isfinite(lengths), factors, 0.0)


def needs_double(weights: Floats) -> bool:
    """Tell whether some weight has few digits, or none, in single precision."""
    return bool(np.any((weights != 0) & (np.abs(weights) < np.finfo(np.float32).tiny)))


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
    # Up to the rounding of the sum: rows clipped by a millionth are no convex mixes of rows.
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
            squared = yield replace(request, weights=None)
            reply = of_mixed(squared, weights)
        else:
            inner = weights if request.weights is None else request.weights @ weights
            asked = replace(request, weights=inner)
            # Clipped rows far from the origin differ by less than rounding to single precision.
            reply = yield asked if convex or isinstance(asked, Norms) else replace(asked, wide=True)


Function: TypeAlias = Callable[[NDArray[Any]], Any]


@dataclass(slots=True, eq=False)
class Decision:
    """What remains when a rule has been planned: cleaned rows, a mix, a window of each column.

    A ``function`` of the mixed rows takes the window's place if there is one. ``spreads`` are those
    of the blocks of columns that are cut, by number, for a window that reaches by them; None if
    there is no more than the columns at hand. With a ``weighing``, workers have weights, and that
    says what is averaged instead of the window. ``plain`` selects the rows that a watched window
    averages; None: all.
    """

    mix: Mix
    window: Window
    function: Function | None = None
    spreads: Mapping[int, float] | None = None
    clean: Clean | None = None
    weighing: Weighing | None = None
    plain: Mix | None = None

    def radii(self) -> Radii:
        """Ask for the radii that a window with a reach goes by."""
        return Radii(self.window, self.mix.weights, self.clean, self.weighing)


def by_function(function: Function, rows: NDArray[Any]) -> NDArray[Any]:
    """Reduce rows by a function, and see to it that the answer is a value for every column."""
    values = np.asarray(function(rows))
    if values.shape != rows.shape[1:] or values.dtype.kind not in "fiu":
        raise ValueError(
            f"a rule's function must return a number for each of {rows.shape[1]} columns:"
            f" got {values.dtype} of shape {values.shape}"
        )
    return values.astype(rows.dtype, copy=False)


class Matrix(Protocol):
    """The m x d rows as a rule sees them, wherever they are: all it may ask, and all it may do."""

    @property
    def m(self) -> int:
        """Return the number of rows."""

    @property
    def d(self) -> int:
        """Return the number of columns."""

    def measure(self, request: Request | Plausible) -> Floats:
        """Answer a rule's question about whole rows."""

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None) -> Any:
        """Clean, mix and reduce, in the form of the rows; count what is dropped of mixed rows."""


class Columns(Matrix, Protocol):
    """Rows that may be a range of the columns of longer ones."""

    def partial(self, request: Request | Radii | Plausible, start: int = 0) -> Partial:
        """Return what these columns contribute, if they begin at column ``start`` of more."""

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None, start: int = 0) -> Any:
        """Clean, mix and reduce; with spreads of cut blocks, columns begin at ``start`` of more."""
