"""Kernels for values that have weights: a window of the mass of each column, averaged.

Weights are whole numbers, few enough in all that any sum of them and of their halves is exact in
single precision. So what is cut is cut to the unit, in whatever order weights are added: rounded,
a share of 1e-8 of a lie of 1e38 would be left.

There is no order in registers to be had for values and weights at less than five instructions a
comparator. Instead each value's place is the mass before it, one comparison and one masked sum for
each pair of rows:

    C_i = sum of w_j over u_j < u_i (of equal values, the first row's is before),

so that value i covers the mass from C_i to C_i + w_i, and what is left of it when t is cut from
both ends of the total T is p_i = min(C_i + w_i, T - t) - max(C_i, t). With y the mean of that and
e_i = u_i - y, the mass that is farther from y than value i is

    F_i = C_i + T - N_i              if e_i <= 0,
    F_i = T - C_i - w_i + N_i        if e_i > 0,      N_i = sum of w_j over e_j < -e_i,

(of two values at the same distance the smaller is nearer), and of the mass D that is dropped, value
i loses D - F_i, within 0 and w_i. One comparison serves both rows of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import blocks
from phocas.kernels.columns import Averaged, prefetch_bytes, within
from phocas.kernels.emit import ColumnArguments, Element, Function
from phocas.kernels.networks import Comparator, prune, sorting_network, valley_network
from phocas.kernels.target import Target

LARGEST_TOTAL = 1 << 22
"""Of so many units, halves too are exact in single precision."""
SORTED_ROWS = 32
"""Up to so many rows are sorted in straight-line code."""
TOGETHER = 4  # rows that are compared with as many others at a time
_SCALE = 0.5  # of distances, so that none between finite values overflows
_REACH = 6  # where the reach is among the constants


@dataclass(frozen=True, slots=True)
class Masses:
    """Which mass of a column is averaged, in units of weight: as :class:`Window` in values.

    ``trim`` is cut from each end of the sorted column, and with ``drop`` all but so much that is
    farthest from the mean of the rest is averaged. ``reach`` is that of a window.
    """

    trim: float
    drop: float | None = None
    reach: float = 0.0

    def kept(self, total: float) -> float:
        """Return how much of a total is averaged."""
        return total - 2 * self.trim if self.drop is None else total - self.drop


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """The weights of rows, in whole units of at most ``LARGEST_TOTAL``, and what is cut of them."""

    units: NDArray[np.int64]
    masses: Masses


@dataclass(frozen=True, slots=True)
class Sure:
    """What is known of every column whatever its values are, as counts of values.

    ``cut`` are cut from either end of the sorted column, all of each, and nothing but the ``outer``
    ones at either end loses anything, of which the innermost never lose all. All of each is lost of
    the ``dropped`` that are farthest from the centre, nothing of as many nearest as are ``kept``,
    and not all of the next.
    """

    cut: int
    outer: int
    dropped: int = 0
    kept: int = 0

    @staticmethod
    def of(weighing: Weighing) -> Sure:
        """Compare what is cut with the mass of the heaviest and of the lightest."""
        units, trim, drop = np.sort(weighing.units), weighing.masses.trim, weighing.masses.drop
        lightest, heaviest = np.cumsum(units), np.cumsum(units[::-1])
        cut = int(np.count_nonzero(heaviest <= trim))
        outer = 1 + int(np.count_nonzero(lightest <= max(trim, drop or 0.0)))
        if not drop:
            return Sure(cut, outer)
        dropped = int(np.count_nonzero(heaviest <= drop))
        return Sure(cut, outer, dropped, int(np.count_nonzero(heaviest < heaviest[-1] - drop)))

    def inner(self, m: int) -> range:
        """Return the places in the sorted column that lose nothing."""
        return range(self.outer, m - self.outer)


def padded_weights(units: NDArray[np.int64], kind: type[np.floating]) -> NDArray[np.floating]:
    """Return two rows of numbers: weights, and the weights of all later rows.

    Zeros follow up to a whole number of groups of rows.
    """
    found = np.zeros((2, -(-len(units) // TOGETHER) * TOGETHER), kind)
    found[0, : len(units)] = units
    found[1, : len(units)] = units.sum() - np.cumsum(units)
    return found


def constants(masses: Masses, total: int, kind: type[np.floating]) -> NDArray[np.floating]:
    """Return the total, what is cut, what makes means of sums, the reach and no given spread."""
    drop = masses.drop or 0.0
    return np.array(
        [
            total,
            masses.trim,
            drop,
            1 / (total - 2 * masses.trim),
            1 / (total - drop),
            1 / total,
            masses.reach,
            np.nan,
        ],
        kind,
    )


def weighted_module(
    target: Target,
    element: Element,
    drop: bool,
    reach: bool,
    blame: bool,
    radii: bool,
    straight: tuple[int, Sure] | None = None,
) -> str:
    """Write the kernel over blocks of columns: straight-line code for m rows, or for any number."""
    f = Function(target, element)
    loop = _columns(f, drop) if straight is None else _sorted_columns(f, *straight, drop)
    with loop as (index, found):
        left: tuple[str, ...] = (found.low, found.high)
        column = f.op(f"add i64 %column, {index}")
        if reach and not radii:
            left += (found.centre,)
        elif not radii:
            f.store(found.value, f.at("%out", column))
        blocks.leave(f, left, f.op(f"add i64 %place, {index}"))

    def weigh(g: Function, weights: blocks.Weights, place: str) -> tuple[str, str]:
        args = g.named(ColumnArguments._fields)
        column = g.op(f"add i64 %column, {g.op(f'sub i64 {place}, %place')}")
        minus = g.load_vector(blocks.slot(g, blocks.LOW, place))
        units, numbers = args.pointer("program"), args.pointer("constants")
        inverse = g.scalar_at(numbers, 5)
        with g.loop("0", args.integer("m")) as each:
            total = each.carry(g.vector, "zeroinitializer")
            weight = each.carry(g.vector, "zeroinitializer")
            value = g.load(g.at(g.pointer("%rows", each.index), column))
            distance = g.multiply_add(value, g.splat(_SCALE), minus)
            unit = g.scalar_at(units, each.index)
            share = g.broadcast(g.op(f"fmul {g.scalar} {unit}, {inverse}"))
            more = weights.add(distance, total, weight, share)
            each.update(total, more[0])
            each.update(weight, more[1])
        return total, weight

    def scaled(g: Function) -> str | None:
        return g.splat(_SCALE) if drop else None

    sweeps = blocks.Sweeps(
        blocks.first_text(f),
        len(left),
        blocks.second_text(target, element, scaled, weigh) if reach and not radii else "",
        blocks.blame_text(target, element, scaled) if blame else "",
        "radii" if radii else "values",
        reach=_REACH,
    )
    return blocks.module_text(f, sweeps)


class _Limits(NamedTuple):
    """The first of the constants, in every lane."""

    all: str
    trim: str
    drop: str
    trimmed: str
    kept: str


@contextmanager
def _sorted_columns(f: Function, m: int, sure: Sure, drop: bool) -> Iterator[tuple[str, Averaged]]:
    """Write the loop over vectors of columns that are sorted in registers, with their weights."""
    args = f.named(ColumnArguments._fields)
    units, numbers = args.pointer("program"), args.pointer("constants")
    limits = _Limits(*(f.broadcast(f.scalar_at(numbers, i)) for i in range(5)))
    weights = [f.broadcast(f.scalar_at(units, i)) for i in range(m)]
    ahead = prefetch_bytes(m)
    with f.loop("0", "%count", f.lanes) as loop:
        column = f.op(f"add i64 %column, {loop.index}")
        addresses = [f.at(f.pointer("%rows", i), column) for i in range(m)]
        for address in addresses:
            f.prefetch(address, ahead)
        values = [f.nan_to_inf(f.load(address)) for address in addresses]
        masses = list(weights)
        wanted: dict[int, Hashable] = {i: i for i in range(m)}
        if not drop:  # of what is cut, no more is asked than how much is below
            wanted = {i: i for i in range(sure.cut, m - sure.cut)}
            wanted |= dict.fromkeys(range(sure.cut), "below")
        wanted |= dict.fromkeys(sure.inner(m), "inner")
        for step in prune(sorting_network(m), wanted):
            a, b = values[step.low], values[step.high]
            in_order = f.compare("ole", a, b)
            if step.keep_low:
                values[step.low] = f.low(a, b)
            if step.keep_high:
                values[step.high] = f.high(a, b)
            _exchange(f, step, in_order, masses)
        yield loop.index, _sorted_mean(f, values, masses, sure, limits, drop)


def _exchange(f: Function, step: Comparator, in_order: str, masses: list[str]) -> None:
    """Let masses follow what they are of."""
    a, b = masses[step.low], masses[step.high]
    if step.keep_low:
        masses[step.low] = f.select(in_order, a, b)
    if step.keep_high:
        masses[step.high] = f.select(in_order, b, a)


def _sorted_mean(
    f: Function, values: list[str], masses: list[str], sure: Sure, limits: _Limits, drop: bool
) -> Averaged:
    """Return the mean of the mass that is kept of sorted values."""
    m = len(values)
    inner = sure.inner(m)
    places = range(sure.cut, m - sure.cut)
    rest = f.sub(limits.all, limits.trim)
    mass = f.splat(0.0)
    for each in masses[: sure.cut]:
        mass = f.add(mass, each)
    ends = {places[-1]: rest}
    for place in places[:-1]:
        mass = f.add(mass, masses[place])
        whole = place in inner or place + 1 in inner
        ends[place] = mass if whole else f.low(f.high(mass, limits.trim), rest)
    left, start = {}, limits.trim
    for place in places:
        left[place] = masses[place] if place in inner else f.sub(ends[place], start)
        start = ends[place]

    def summed(distances: Mapping[int, str]) -> str:
        total = f.splat(0.0)
        for place, distance in distances.items():
            added = f.fma(f.mul(left[place], limits.trimmed), distance, total)
            total = added if place in inner else f.select(inside[place], added, total)
        return total

    inside = {
        place: f.compare("ogt", left[place], f.splat(0.0)) for place in places if place not in inner
    }
    if drop:
        centre = summed({place: f.mul(values[place], f.splat(_SCALE)) for place in places})
        return _sorted_nearest(f, values, masses, centre, sure, limits)
    if inner:
        pivot = values[inner[0]]
    else:
        pivot = values[places[-1]]
        half = f.mul(limits.all, f.splat(0.5))
        for place in reversed(places[:-1]):
            pivot = f.select(f.compare("oge", ends[place], half), values[place], pivot)
    minus = f.mul(pivot, f.splat(-_SCALE))
    total = summed({place: f.scaled_add(values[place], _SCALE, minus) for place in places})
    low = high = pivot
    for place, here in inside.items():
        low = f.select(here, f.low(low, values[place]), low)
        high = f.select(here, f.high(high, values[place]), high)
    mean = within(f, f.fma(total, f.splat(1 / _SCALE), pivot), low, high)
    return Averaged(mean, low, high)


def _sorted_nearest(
    f: Function,
    values: list[str],
    masses: list[str],
    centre: str,
    sure: Sure,
    limits: _Limits,
) -> Averaged:
    """Return the mean of the mass nearest to the scaled centre.

    Distances of sorted values fall and then rise, so half a bitonic sort puts them in order, and
    less of it does for those at which the mass may end. They are compared as whole numbers, the
    sign last: of equal ones that of the smaller value is first.
    """
    m = len(values)
    minus = f.negate(centre)
    signed = [f.scaled_add(value, _SCALE, minus) for value in values]
    total, left = f.splat(0.0), f.sub(limits.all, limits.drop)
    inner = sure.inner(m)
    for place in inner:
        total = f.fma(f.mul(masses[place], limits.kept), signed[place], total)
        left = f.sub(left, masses[place])
    outer = [place for place in range(m) if place not in inner]
    keys = [_key(f, signed[place]) for place in outer]
    masses = [masses[place] for place in outer]
    words = _words(f)
    kept = max(0, sure.kept - len(inner))
    ranks = range(len(outer) - sure.dropped)
    wanted = {rank: rank for rank in ranks} | dict.fromkeys(ranks[:kept], "kept")
    for step in prune(valley_network(len(outer)), wanted):
        a, b = keys[step.low], keys[step.high]
        in_order = f.op(f"icmp ule {words} {a}, {b}")
        kind = f"select {f.mask} {in_order}, {words}"
        if step.keep_low:
            keys[step.low] = f.op(f"{kind} {a}, {words} {b}")
        if step.keep_high:
            keys[step.high] = f.op(f"{kind} {b}, {words} {a}")
        _exchange(f, step, in_order, masses)
    for rank in ranks[:kept]:
        total = f.fma(f.mul(masses[rank], limits.kept), _distance(f, keys[rank]), total)
        left = f.sub(left, masses[rank])
    radius = f.splat(0.0)
    for rank in ranks[kept:]:
        distance = _distance(f, keys[rank])
        inside = f.compare("ogt", left, f.splat(0.0))
        share = f.mul(f.low(left, masses[rank]), limits.kept)
        total = f.select(inside, f.fma(share, distance, total), total)
        radius = f.select(inside, f.absolute(distance), radius)
        left = f.sub(left, masses[rank])
    # The first that is kept has so many after it, and the last so many before.
    low, high, lowest = f.splat(math.inf), f.splat(-math.inf), f.negate(radius)
    for place in outer:
        value, distance = values[place], signed[place]
        if place < min(m - sure.kept, inner.start if inner else m):
            low = f.select(f.compare("oge", distance, lowest), f.low(low, value), low)
        if place >= max(sure.kept, inner.stop if inner else 0):
            high = f.select(f.compare("ole", distance, radius), f.high(high, value), high)
    y = f.mul(centre, f.splat(1 / _SCALE))
    mean = within(f, f.fma(total, f.splat(1 / _SCALE), y), low, high)
    return Averaged(mean, minus, radius, y)


def _words(f: Function) -> str:
    return f"<{f.lanes} x i{f.element.compute_bits}>"


def _key(f: Function, distance: str) -> str:
    """Return a whole number that grows with the length of a distance; above is farther than below.

    The sign goes from the first bit, turned around, to the last.
    """
    words, bits = _words(f), f.element.compute_bits
    word = f.op(f"bitcast {f.vector} {distance} to {words}")
    length = f.op(f"shl {words} {word}, splat (i{bits} 1)")
    sign = f.op(f"lshr {words} {word}, splat (i{bits} {bits - 1})")
    above = f.op(f"xor {words} {sign}, splat (i{bits} 1)")
    return f.op(f"or {words} {length}, {above}")


def _distance(f: Function, key: str) -> str:
    """Return the distance that a key stands for."""
    words, bits = _words(f), f.element.compute_bits
    length = f.op(f"lshr {words} {key}, splat (i{bits} 1)")
    turned = f.op(f"xor {words} {key}, splat (i{bits} 1)")
    sign = f.op(f"shl {words} {turned}, splat (i{bits} {bits - 1})")
    return f.op(f"bitcast {words} {f.op(f'or {words} {length}, {sign}')} to {f.vector}")


@dataclass(frozen=True, slots=True)
class _Tile:
    """A vector of columns on the stack: values, masses and distances, with the rows' weights."""

    f: Function
    values: str
    masses: str
    distances: str
    opposite: str
    units: str

    def load(self, array: str, row: str) -> str:
        return self.f.load_vector(self.f.at(array, row, self.f.vector))

    def store(self, array: str, row: str, value: str) -> None:
        self.f.store_vector(value, self.f.at(array, row, self.f.vector))

    def weight(self, row: str) -> str:
        return self.f.broadcast(self.f.scalar_at(self.units, row))

    def add_where(self, mask: str, total: str, weight: str) -> str:
        """Return the total with a weight more where the mask is set, in one or two instructions."""
        f = self.f
        if f.target.vector_bits >= 512:  # where masks are registers, additions take one
            return f.select(mask, f.add(total, weight), total)
        return f.add(total, f.select(mask, weight, f.splat(0.0)))

    def take_where(self, mask: str, total: str, weight: str) -> str:
        """Return the total with a weight less where the mask is set."""
        f = self.f
        if f.target.vector_bits >= 512:
            return f.select(mask, f.sub(total, weight), total)
        return f.sub(total, f.select(mask, weight, f.splat(0.0)))


@contextmanager
def _columns(f: Function, drop: bool) -> Iterator[tuple[str, Averaged]]:
    """Write the loop over vectors of columns, each with its values in a tile on the stack."""
    args = f.named(ColumnArguments._fields)
    m, padded = args.integer("m"), args.integer("steps")
    units, numbers = args.pointer("program"), args.pointer("constants")
    all_, trim, cut, trimmed, kept, _ = (f.broadcast(f.scalar_at(numbers, i)) for i in range(6))
    values, masses, distances, opposite = (
        f.op(f"alloca {f.vector}, i64 {padded}, align 64") for _ in range(4)
    )
    tile = _Tile(f, values, masses, distances, opposite, units)
    with f.loop(m, padded) as each:
        tile.store(tile.values, each.index, f.splat(math.inf))
    ahead = prefetch_bytes(1)
    with f.loop("0", "%count", f.lanes) as loop:
        column = f.op(f"add i64 %column, {loop.index}")
        with f.loop("0", m) as each:
            address = f.at(f.pointer("%rows", each.index), column)
            tile.store(tile.values, each.index, f.nan_to_inf(f.load(address)))
            f.prefetch(address, ahead)
        _masses_before(tile, padded)
        if drop:
            found = _nearest(
                tile, padded, _centre(tile, padded, all_, trim, trimmed), all_, cut, kept
            )
        else:
            found = _trimmed(tile, padded, all_, trim, trimmed)
        yield loop.index, found


def _masses_before(tile: _Tile, padded: str) -> None:
    """Find the mass before each value: all that comes later, and what turns out otherwise."""
    f = tile.f
    later = f.at(tile.units, padded, f.scalar)  # the weights of all rows after each

    def meet(pair: _Pair) -> None:
        before = f.compare("ole", pair.value, pair.other)
        pair.mass = tile.take_where(before, pair.mass, pair.other_weight)
        pair.other_mass = tile.add_where(before, pair.other_mass, pair.weight)

    with f.loop("0", padded) as each:
        tile.store(tile.masses, each.index, f.broadcast(f.scalar_at(later, each.index)))
    _pairs(tile, tile.values, tile.masses, padded, meet)


@dataclass(slots=True)
class _Pair:
    """Two rows that meet: their values, weights and masses, which may change."""

    value: str
    other: str
    weight: str
    other_weight: str
    mass: str
    other_mass: str


def _pairs(tile: _Tile, values: str, sums: str, padded: str, meet: Callable[[_Pair], None]) -> None:
    """Let every row meet every later one, in groups that registers hold."""
    f = tile.f
    with f.loop("0", padded, TOGETHER) as group:
        places = [f.op(f"add i64 {group.index}, {i}") for i in range(TOGETHER)]
        mine = [tile.load(values, place) for place in places]
        weights = [tile.weight(place) for place in places]
        masses = [tile.load(sums, place) for place in places]
        for i in range(TOGETHER):
            for j in range(i + 1, TOGETHER):
                pair = _Pair(mine[i], mine[j], weights[i], weights[j], masses[i], masses[j])
                meet(pair)
                masses[i], masses[j] = pair.mass, pair.other_mass
        after = f.op(f"add i64 {group.index}, {TOGETHER}")
        with f.loop(after, padded, TOGETHER) as others:
            carried = [others.carry(f.vector, mass) for mass in masses]
            more = list(carried)
            for j in range(TOGETHER):
                place = f.op(f"add i64 {others.index}, {j}")
                other, weight = tile.load(values, place), tile.weight(place)
                mass = tile.load(sums, place)
                for i in range(TOGETHER):
                    pair = _Pair(mine[i], other, weights[i], weight, more[i], mass)
                    meet(pair)
                    more[i], mass = pair.mass, pair.other_mass
                tile.store(sums, place, mass)
            for name, mass in zip(carried, more, strict=True):
                others.update(name, mass)
        for place, mass in zip(places, carried, strict=True):
            tile.store(sums, place, mass)


def _folded(
    tile: _Tile,
    padded: str,
    starts: Sequence[str],
    add: Callable[[str, list[str]], list[str]],
    join: Sequence[Callable[[str, str], str]],
) -> list[str]:
    """Go over the rows with several results in hand, even rows and odd rows apart.

    Each addition waits for the one before: two chains of them take half the time.
    """
    f = tile.f
    with f.loop("0", padded, TOGETHER) as group:
        chains = [[group.carry(f.vector, start) for start in starts] for _ in range(2)]
        found = [list(chain) for chain in chains]
        for i in range(TOGETHER):
            row = f.op(f"add i64 {group.index}, {i}")
            found[i % 2] = add(row, found[i % 2])
        for chain, values in zip(chains, found, strict=True):
            for name, value in zip(chain, values, strict=True):
                group.update(name, value)
    return [meet(even, odd) for meet, even, odd in zip(join, *chains, strict=True)]


def _uncut(tile: _Tile, row: str, all_: str, trim: str) -> tuple[str, str]:
    """Return what is left of a row's mass between the ends that are cut, and where it is any."""
    f = tile.f
    start = tile.load(tile.masses, row)
    end = f.add(start, tile.weight(row))
    mass = f.sub(f.low(end, f.sub(all_, trim)), f.high(start, trim))
    return mass, f.compare("ogt", mass, f.splat(0.0))


def _centre(tile: _Tile, padded: str, all_: str, trim: str, inverse: str) -> str:
    """Return the mean of the mass between the ends that are cut, scaled.

    It is a point to measure from: what is rounded here is added again with the distances.
    """
    f = tile.f

    def add(row: str, sums: list[str]) -> list[str]:
        mass, inside = _uncut(tile, row, all_, trim)
        share = f.mul(mass, inverse)
        value = f.mul(tile.load(tile.values, row), f.splat(_SCALE))
        return [f.select(inside, f.fma(share, value, sums[0]), sums[0])]

    return _folded(tile, padded, ["zeroinitializer"], add, [f.add])[0]


def _trimmed(tile: _Tile, padded: str, all_: str, trim: str, inverse: str) -> Averaged:
    """Return the mean of the mass between the ends that are cut, and its bounds.

    Distances are from the value that covers the middle of the mass, which is never cut.
    """
    f = tile.f
    half = f.mul(all_, f.splat(0.5))

    def find(row: str, found: list[str]) -> list[str]:
        start = tile.load(tile.masses, row)
        end = f.add(start, tile.weight(row))
        here = f.both(f.compare("olt", start, half), f.compare("oge", end, half))
        return [f.select(here, tile.load(tile.values, row), found[0])]

    (pivot,) = _folded(tile, padded, [f.splat(math.inf)], find, [f.low])
    minus = f.mul(pivot, f.splat(-_SCALE))

    def add(row: str, found: list[str]) -> list[str]:
        total, low, high = found
        mass, inside = _uncut(tile, row, all_, trim)
        value = tile.load(tile.values, row)
        distance = f.scaled_add(value, _SCALE, minus)
        share = f.mul(mass, inverse)
        return [
            f.select(inside, f.fma(share, distance, total), total),
            f.select(inside, f.low(low, value), low),
            f.select(inside, f.high(high, value), high),
        ]

    starts = ["zeroinitializer", pivot, pivot]
    total, low, high = _folded(tile, padded, starts, add, [f.add, f.low, f.high])
    mean = within(f, f.fma(total, f.splat(1 / _SCALE), pivot), low, high)
    return Averaged(mean, low, high)


def _nearest(tile: _Tile, padded: str, centre: str, all_: str, cut: str, inverse: str) -> Averaged:
    """Return the mean of all but the mass farthest from the scaled centre, and its radius."""
    f = tile.f
    rest, minus = f.sub(all_, cut), f.negate(centre)
    with f.loop("0", padded) as each:
        distance = f.scaled_add(tile.load(tile.values, each.index), _SCALE, minus)
        tile.store(tile.distances, each.index, distance)
        below = f.compare("olt", distance, f.splat(0.0))
        own = tile.add_where(below, f.splat(0.0), tile.weight(each.index))
        tile.store(tile.opposite, each.index, own)

    def meet(pair: _Pair) -> None:
        lower = f.compare("olt", pair.other, f.negate(pair.value))
        pair.mass = tile.add_where(lower, pair.mass, pair.other_weight)
        pair.other_mass = tile.add_where(lower, pair.other_mass, pair.weight)

    _pairs(tile, tile.distances, tile.opposite, padded, meet)

    def add(row: str, found: list[str]) -> list[str]:
        total, radius, low, high = found
        start, lower = (tile.load(array, row) for array in (tile.masses, tile.opposite))
        distance, weight = tile.load(tile.distances, row), tile.weight(row)
        above = f.compare("ogt", distance, f.splat(0.0))
        ahead = f.sub(start, lower)
        mass = f.select(above, f.sub(rest, ahead), f.add(f.add(rest, ahead), weight))
        mass = f.low(mass, weight)
        inside = f.compare("ogt", mass, f.splat(0.0))
        share = f.mul(mass, inverse)
        value = tile.load(tile.values, row)
        return [
            f.select(inside, f.fma(share, distance, total), total),
            f.select(inside, f.high(radius, f.absolute(distance)), radius),
            f.select(inside, f.low(low, value), low),
            f.select(inside, f.high(high, value), high),
        ]

    starts = ["zeroinitializer", "zeroinitializer", f.splat(math.inf), f.splat(-math.inf)]
    joins = [f.add, f.high, f.low, f.high]
    total, radius, low, high = _folded(tile, padded, starts, add, joins)
    y = f.mul(centre, f.splat(1 / _SCALE))
    mean = within(f, f.fma(total, f.splat(1 / _SCALE), y), low, high)
    return Averaged(mean, minus, radius, y)
