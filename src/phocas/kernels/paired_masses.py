"""Column kernels for any number of weighted rows, by comparing every pair of rows.

In one column, u_i is the value of row i, and w_i is the weight (mass) of row i. T is the sum of all
weights. The kernel cuts the mass t from each end of the sorted column. If the window drops values,
the kernel also drops the mass D that is farthest from the mean of the rest.

Sorting values with their weights in registers takes at least five instructions per comparator.
Instead, the position of a value is the mass before the value, with one comparison and one masked
sum for each pair of rows:

    C_i = sum of w_j over u_j < u_i (of equal values, the first row's is before),

so that value i covers the mass from C_i to C_i + w_i. After the cut of t from each end, value i
keeps the mass p_i = min(C_i + w_i, T - t) - max(C_i, t). Let y be the mean of the mass that is kept
and e_i = u_i - y. Then the mass that is farther from y than value i is

    F_i = C_i + T - N_i              if e_i <= 0,
    F_i = T - C_i - w_i + N_i        if e_i > 0,      N_i = sum of w_j over e_j < -e_i.

(Of two values at the same distance the smaller is nearer.) Of the dropped mass D, value i loses D -
F_i, limited to 0 and w_i. One comparison serves both rows of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phocas.kernels.columns import Averaged, prefetch_bytes, within
from phocas.kernels.emit import ColumnArguments, Function
from phocas.kernels.masses import SCALE

TOGETHER = 4
"""Number of rows that are compared with as many others at a time."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The data of one vector of columns on the stack: values, masses, distances and weights."""

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
        """Emit one or two instructions that add a weight to the total where the mask is set."""
        f = self.f
        if f.target.vector_bits >= 512:  # with mask registers, one masked addition
            return f.select(mask, f.add(total, weight), total)
        return f.add(total, f.select(mask, weight, f.splat(0.0)))

    def take_where(self, mask: str, total: str, weight: str) -> str:
        """Emit code for the total minus a weight where the mask is set."""
        f = self.f
        if f.target.vector_bits >= 512:
            return f.select(mask, f.sub(total, weight), total)
        return f.sub(total, f.select(mask, weight, f.splat(0.0)))


@contextmanager
def paired_columns(f: Function, drop: bool) -> Iterator[tuple[str, Averaged]]:
    """Emit the loop over vectors of columns, each with its values in a tile on the stack."""
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
    """Emit code for the mass before each value.

    The code starts with the mass of all later rows, and corrects this mass pair by pair.
    """
    f = tile.f
    later = f.at(tile.units, padded, f.scalar)  # total weight of the rows after each row

    def compare(pair: _Pair) -> None:
        before = f.compare("ole", pair.value, pair.other)
        pair.mass = tile.take_where(before, pair.mass, pair.other_weight)
        pair.other_mass = tile.add_where(before, pair.other_mass, pair.weight)

    with f.loop("0", padded) as each:
        tile.store(tile.masses, each.index, f.broadcast(f.scalar_at(later, each.index)))
    _pairs(tile, tile.values, tile.masses, padded, compare)


@dataclass(slots=True)
class _Pair:
    """Two rows that are compared: their values, weights and masses; masses may change."""

    value: str
    other: str
    weight: str
    other_weight: str
    mass: str
    other_mass: str


def _pairs(
    tile: _Tile, values: str, sums: str, padded: str, compare: Callable[[_Pair], None]
) -> None:
    """Emit the code of ``compare`` for every pair of rows, in groups that fit into registers."""
    f = tile.f
    with f.loop("0", padded, TOGETHER) as group:
        places = [f.op(f"add i64 {group.index}, {i}") for i in range(TOGETHER)]
        mine = [tile.load(values, place) for place in places]
        weights = [tile.weight(place) for place in places]
        masses = [tile.load(sums, place) for place in places]
        for i in range(TOGETHER):
            for j in range(i + 1, TOGETHER):
                pair = _Pair(mine[i], mine[j], weights[i], weights[j], masses[i], masses[j])
                compare(pair)
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
                    compare(pair)
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
    """Emit code that reduces over the rows, with separate results for even and odd rows.

    Each addition depends on the previous one, so two chains take half the time.
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
    return [combine(even, odd) for combine, even, odd in zip(join, *chains, strict=True)]


def _uncut(tile: _Tile, row: str, all_: str, trim: str) -> tuple[str, str]:
    """Emit code for a row's mass between the cut ends, and the mask where it is positive."""
    f = tile.f
    start = tile.load(tile.masses, row)
    end = f.add(start, tile.weight(row))
    mass = f.sub(f.low(end, f.sub(all_, trim)), f.high(start, trim))
    return mass, f.compare("ogt", mass, f.splat(0.0))


def _centre(tile: _Tile, padded: str, all_: str, trim: str, inverse: str) -> str:
    """Emit code for the scaled mean of the mass between the cut ends.

    This mean is only a point to measure distances from. Its rounding error is corrected when the
    distances are added.
    """
    f = tile.f

    def add(row: str, sums: list[str]) -> list[str]:
        mass, inside = _uncut(tile, row, all_, trim)
        share = f.mul(mass, inverse)
        value = f.mul(tile.load(tile.values, row), f.splat(SCALE))
        return [f.select(inside, f.fma(share, value, sums[0]), sums[0])]

    return _folded(tile, padded, ["zeroinitializer"], add, [f.add])[0]


def _trimmed(tile: _Tile, padded: str, all_: str, trim: str, inverse: str) -> Averaged:
    """Emit code for the mean of the mass between the cut ends, and its bounds.

    Distances are measured from the value that covers the middle of the mass, which is never cut.
    """
    f = tile.f
    half = f.mul(all_, f.splat(0.5))

    def find(row: str, found: list[str]) -> list[str]:
        start = tile.load(tile.masses, row)
        end = f.add(start, tile.weight(row))
        here = f.both(f.compare("olt", start, half), f.compare("oge", end, half))
        return [f.select(here, tile.load(tile.values, row), found[0])]

    (pivot,) = _folded(tile, padded, [f.splat(math.inf)], find, [f.low])
    minus = f.mul(pivot, f.splat(-SCALE))

    def add(row: str, found: list[str]) -> list[str]:
        total, low, high = found
        mass, inside = _uncut(tile, row, all_, trim)
        value = tile.load(tile.values, row)
        distance = f.scaled_add(value, SCALE, minus)
        share = f.mul(mass, inverse)
        return [
            f.select(inside, f.fma(share, distance, total), total),
            f.select(inside, f.low(low, value), low),
            f.select(inside, f.high(high, value), high),
        ]

    starts = ["zeroinitializer", pivot, pivot]
    total, low, high = _folded(tile, padded, starts, add, [f.add, f.low, f.high])
    mean = within(f, f.fma(total, f.splat(1 / SCALE), pivot), low, high)
    return Averaged(mean, low, high)


def _nearest(tile: _Tile, padded: str, centre: str, all_: str, cut: str, inverse: str) -> Averaged:
    """Emit code for the mean and radius of the mass that remains without the farthest values."""
    f = tile.f
    rest, minus = f.sub(all_, cut), f.negate(centre)
    with f.loop("0", padded) as each:
        distance = f.scaled_add(tile.load(tile.values, each.index), SCALE, minus)
        tile.store(tile.distances, each.index, distance)
        below = f.compare("olt", distance, f.splat(0.0))
        own = tile.add_where(below, f.splat(0.0), tile.weight(each.index))
        tile.store(tile.opposite, each.index, own)

    def compare(pair: _Pair) -> None:
        lower = f.compare("olt", pair.other, f.negate(pair.value))
        pair.mass = tile.add_where(lower, pair.mass, pair.other_weight)
        pair.other_mass = tile.add_where(lower, pair.other_mass, pair.weight)

    _pairs(tile, tile.distances, tile.opposite, padded, compare)

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
    y = f.mul(centre, f.splat(1 / SCALE))
    mean = within(f, f.fma(total, f.splat(1 / SCALE), y), low, high)
    return Averaged(mean, minus, radius, y)
