"""Column kernels for few weighted rows, sorted in registers by straight-line code."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from phocas.kernels.columns import Averaged, prefetch_bytes, within
from phocas.kernels.emit import ColumnArguments, Function
from phocas.kernels.masses import SCALE, Sure
from phocas.kernels.networks import Comparator, prune, sorting_network, valley_network

SORTED_ROWS = 32
"""Largest number of rows that are sorted in registers."""


class _Limits(NamedTuple):
    """The limits of the averaged mass: names of vectors with the same number in every lane.

    The fields are the first constants of the kernel, in the order of
    :func:`phocas.kernels.weighted.constants`. Mass is the total weight of some values.
    """

    all: str
    trim: str
    drop: str
    trimmed: str
    kept: str


@contextmanager
def sorted_columns(f: Function, m: int, sure: Sure, drop: bool) -> Iterator[tuple[str, Averaged]]:
    """Emit the loop over vectors of columns, sorted in registers with their weights."""
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
        if not drop:  # of the cut values only their total mass is needed
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
        yield loop.index, _mean(f, values, masses, sure, limits, drop)


def _exchange(f: Function, step: Comparator, in_order: str, masses: list[str]) -> None:
    """Emit code that applies a comparator's exchange to the masses."""
    a, b = masses[step.low], masses[step.high]
    if step.keep_low:
        masses[step.low] = f.select(in_order, a, b)
    if step.keep_high:
        masses[step.high] = f.select(in_order, b, a)


def _mean(
    f: Function, values: list[str], masses: list[str], sure: Sure, limits: _Limits, drop: bool
) -> Averaged:
    """Emit code for the mean of the mass that is kept of sorted values."""
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
        centre = summed({place: f.mul(values[place], f.splat(SCALE)) for place in places})
        return _nearest(f, values, masses, centre, sure, limits)
    if inner:
        pivot = values[inner[0]]
    else:
        pivot = values[places[-1]]
        half = f.mul(limits.all, f.splat(0.5))
        for place in reversed(places[:-1]):
            pivot = f.select(f.compare("oge", ends[place], half), values[place], pivot)
    minus = f.mul(pivot, f.splat(-SCALE))
    total = summed({place: f.scaled_add(values[place], SCALE, minus) for place in places})
    low = high = pivot
    for place, here in inside.items():
        low = f.select(here, f.low(low, values[place]), low)
        high = f.select(here, f.high(high, values[place]), high)
    mean = within(f, f.fma(total, f.splat(1 / SCALE), pivot), low, high)
    return Averaged(mean, low, high)


def _nearest(
    f: Function,
    values: list[str],
    masses: list[str],
    centre: str,
    sure: Sure,
    limits: _Limits,
) -> Averaged:
    """Emit code for the mean of the mass nearest to the scaled centre.

    Distances of sorted values fall and then rise, so half a bitonic sort orders them. Even less is
    needed, because only the ranks at which the mass may end must be exact. Distances are compared
    as integers with the sign as the last bit, so that of equal distances the smaller value comes
    first.
    """
    m = len(values)
    minus = f.negate(centre)
    signed = [f.scaled_add(value, SCALE, minus) for value in values]
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
    # The first kept value has sure.kept values after it, and the last has as many before it.
    low, high, lowest = f.splat(math.inf), f.splat(-math.inf), f.negate(radius)
    for place in outer:
        value, distance = values[place], signed[place]
        if place < min(m - sure.kept, inner.start if inner else m):
            low = f.select(f.compare("oge", distance, lowest), f.low(low, value), low)
        if place >= max(sure.kept, inner.stop if inner else 0):
            high = f.select(f.compare("ole", distance, radius), f.high(high, value), high)
    y = f.mul(centre, f.splat(1 / SCALE))
    mean = within(f, f.fma(total, f.splat(1 / SCALE), y), low, high)
    return Averaged(mean, minus, radius, y)


def _words(f: Function) -> str:
    return f"<{f.lanes} x i{f.element.compute_bits}>"


def _key(f: Function, distance: str) -> str:
    """Emit code for an integer key that grows with the absolute value of a distance.

    The sign is moved from the first bit to the last and inverted, so that of two equal distances
    the value above the centre has the larger key.
    """
    words, bits = _words(f), f.element.compute_bits
    word = f.op(f"bitcast {f.vector} {distance} to {words}")
    length = f.op(f"shl {words} {word}, splat (i{bits} 1)")
    sign = f.op(f"lshr {words} {word}, splat (i{bits} {bits - 1})")
    above = f.op(f"xor {words} {sign}, splat (i{bits} 1)")
    return f.op(f"or {words} {length}, {above}")


def _distance(f: Function, key: str) -> str:
    """Emit code for the distance of a key."""
    words, bits = _words(f), f.element.compute_bits
    length = f.op(f"lshr {words} {key}, splat (i{bits} 1)")
    turned = f.op(f"xor {words} {key}, splat (i{bits} 1)")
    sign = f.op(f"shl {words} {turned}, splat (i{bits} {bits - 1})")
    return f.op(f"bitcast {words} {f.op(f'or {words} {length}, {sign}')} to {f.vector}")
