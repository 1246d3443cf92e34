"""The column kernel for many rows: a network as a program, run over a tile in cache.

Straight-line code grows with the network (24,000 comparators for 1024 rows). This one kernel works
for any number of rows. The tile has one vector per row. The program is a bitonic sort in steps of
32 wires that run in registers: each step sorts 32 wires, or does up to five layers of a merge.

A bitonic merge has more comparators than Batcher's, but divides into such steps exactly. At 1024
rows, single comparators from memory took 216 ms, Batcher's network in blocks with wide layers
between them 118 ms, this 79 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from phocas.kernels import blocks
from phocas.kernels.columns import Averaged, Window, prefetch_bytes, scale_for, within
from phocas.kernels.emit import ColumnArguments, Element, Function, module_text
from phocas.kernels.networks import sorting_network
from phocas.kernels.target import Target

BLOCK = 32
LAYERS = 5  # layers of comparators between 32 wires
SORT = 0  # kinds of steps: 0 sorts, k > 0 does k layers of a merge

Step = tuple[int, int, int, int]


def padded_rows(m: int) -> int:
    """Return the number of rows of the tile; rows past m are +inf, so that they stay last."""
    return max(BLOCK, 1 << (m - 1).bit_length())


@lru_cache(maxsize=16)
def program(m: int) -> np.ndarray:
    """Return the network as rows of (kind, first wire, stride, unit).

    Wire number g * (32 >> kind) + c of a step is at first + g * stride + c * unit. A negative unit
    reverses the order, so the step sorts in descending order.
    """
    return np.array(list(_sort_steps(0, padded_rows(m), 1, m)), np.int32).reshape(-1, 4)


def _sort_steps(first: int, length: int, direction: int, m: int) -> Iterator[Step]:
    if first >= m:
        return
    begin = first if direction > 0 else first + length - 1
    if length == BLOCK:
        yield SORT, begin, 0, direction
        return
    half = length // 2
    yield from _sort_steps(first, half, 1, m)
    yield from _sort_steps(first + half, half, -1, m)
    if direction > 0 and first + half >= m:
        return  # the upper half is +inf only
    yield from _merge_steps(begin, length, direction)


def _merge_steps(begin: int, length: int, direction: int) -> Iterator[Step]:
    layers = length.bit_length() - 1
    region = length
    while layers:
        kind = (layers - 1) % LAYERS + 1
        stride = region >> kind
        together = BLOCK >> kind
        for part in range(0, length, region):
            for c in range(0, stride, together):
                yield kind, begin + direction * (part + c), direction * stride, direction
        layers -= kind
        region = stride


def constants(window: Window, m: int, kind: type[np.floating]) -> np.ndarray:
    """Return the scales and inverse scales of the two means, the cutoff, and NaN (no spread)."""
    centre = m - 2 * window.trim
    kept = window.kept(m)
    first, second = scale_for(centre), scale_for(kept)
    inverses = 1 / (first * centre), 1 / (second * kept)
    return np.array([first, inverses[0], second, inverses[1], window.cutoff, np.nan], kind)


def table_module(target: Target, element: Element, drop: bool) -> str:
    """Generate the LLVM IR of the kernel for any number of rows."""
    f = Function(target, element)
    args = f.named(ColumnArguments._fields)
    rows, out = args.pointer("rows"), args.pointer("out")
    with _columns(f, rows, "%start", "%stop", drop) as (column, found):
        f.store(found.value, f.at(out, column))
    return module_text(f) + _sort_function(target, element)


def blocks_module(
    target: Target,
    element: Element,
    drop: bool,
    cutoff: bool,
    blame: bool,
    gives: blocks.Gives = "values",
) -> str:
    """Generate the LLVM IR of the kernel that processes one block of columns at a time.

    Args:
        target: the processor.
        element: the type of the values.
        drop: whether the window drops the values farthest from the centre.
        cutoff: whether the window has a cutoff.
        blame: whether to count the dropped values of each row.
        gives: what the kernel writes to its output.
    """
    f = Function(target, element)
    end = f.op("add i64 %column, %count")
    with _columns(f, "%rows", "%column", end, drop) as (column, found):
        left: tuple[str, ...] = (found.low, found.high)
        if gives == "marks" or (cutoff and gives == "values"):
            left += (found.centre,)
        elif gives == "values":
            f.store(found.value, f.at("%out", column))
        place = f.op(f"add i64 %place, {f.op(f'sub i64 {column}, %column')}")
        blocks.leave(f, left, place)

    def weigh(g: Function, weights: blocks.Weights, place: str) -> tuple[str, str]:
        """Emit code that sums the weighted dropped values of a column.

        The code reads the rows again, because the dropped values of a block of many rows do not fit
        into a cache.
        """
        column = g.op(f"add i64 %column, {g.op(f'sub i64 {place}, %place')}")
        minus = g.load_vector(blocks.slot(g, blocks.LOW, place))
        with g.loop("0", g.named(ColumnArguments._fields).integer("m")) as each:
            total = each.carry(g.vector, "zeroinitializer")
            weight = each.carry(g.vector, "zeroinitializer")
            value = g.load(g.at(g.pointer("%rows", each.index), column))
            distance = g.multiply_add(value, scaled(g) or "", minus)
            more = weights.add(distance, total, weight)
            each.update(total, more[0])
            each.update(weight, more[1])
        return total, weight

    def scaled(g: Function) -> str | None:
        numbers = g.named(ColumnArguments._fields).pointer("constants")
        return g.broadcast(g.scalar_at(numbers, 2)) if drop else None

    sweeps = blocks.Sweeps(
        blocks.first_text(f),
        len(left),
        blocks.second_text(target, element, scaled, None if gives == "marks" else weigh)
        if cutoff and gives != "radii"
        else "",
        blocks.blame_text(target, element, scaled) if blame or gives == "marks" else "",
        gives,
        cutoff=4,
    )
    return blocks.module_text(f, sweeps) + _sort_function(target, element)


@contextmanager
def _columns(
    f: Function, rows: str, start: str, stop: str, drop: bool
) -> Iterator[tuple[str, Averaged]]:
    """Emit the loop that sorts vectors of columns and averages their windows."""
    args = f.named(ColumnArguments._fields)
    m, steps, trim, b = (args.integer(name) for name in ("m", "steps", "trim", "drop"))
    text, numbers = args.pointer("program"), args.pointer("constants")
    scale1, inverse1, scale2, inverse2 = (f.broadcast(f.scalar_at(numbers, i)) for i in range(4))
    tile, padded = _tile(f, m)
    with f.loop(m, padded) as each:
        f.store_vector(f.splat(float("inf")), f.at(tile, each.index, f.vector))
    last = f.op(f"sub i64 {m}, {trim}")
    with f.loop(start, stop, f.lanes) as loop:
        with f.loop("0", m) as each:
            address = f.at(f.pointer(rows, each.index), loop.index)
            f.store_vector(f.nan_to_inf(f.load(address)), f.at(tile, each.index, f.vector))
            f.prefetch(address, prefetch_bytes(1024))
        f.line(f"  call void @sort(ptr {tile}, ptr {text}, i64 {steps})")
        pivot = f.load_vector(f.at(tile, trim, f.vector))
        high = f.load_vector(f.at(tile, f.op(f"sub i64 {last}, 1"), f.vector))
        minus = f.negate(f.mul(pivot, scale1))
        with f.loop(f.op(f"add i64 {trim}, 1"), last) as each:
            total = each.carry(f.vector, "zeroinitializer")
            value = f.load_vector(f.at(tile, each.index, f.vector))
            each.update(total, f.add(total, f.fma(value, scale1, minus)))
        y = f.fma(total, inverse1, pivot)
        found = Averaged(within(f, y, pivot, high), pivot, high)
        if drop:
            result, radius, minus_y = _nearest(f, tile, m, trim, b, y, scale2, inverse2)
            found = Averaged(result, minus_y, radius, centre=y)
        yield loop.index, found


def _tile(f: Function, m: str) -> tuple[str, str]:
    """Emit code that allocates the padded tile on the stack; return the tile and its row count."""
    less = f.op(f"sub i64 {m}, 1")
    zeros = f.op(f"call i64 @llvm.ctlz.i64(i64 {less}, i1 false)")
    power = f.op(f"shl i64 1, {f.op(f'sub i64 64, {zeros}')}")
    small = f.op(f"icmp slt i64 {power}, {BLOCK}")
    padded = f.op(f"select i1 {small}, i64 {BLOCK}, i64 {power}")
    return f.op(f"alloca {f.vector}, i64 {padded}, align 64"), padded


def _sort_function(target: Target, element: Element) -> str:
    """Generate the IR function that executes a sorting program on a tile."""
    f = Function(target, element)
    row_bytes = f.lanes * element.compute_bits // 8
    with f.loop("0", "%steps") as loop:
        entry = f.at("%program", loop.index, "<4 x i32>")
        kind, *places = (f.op(f"load i32, ptr {f.at(entry, str(i), 'i32')}") for i in range(4))
        first, stride, unit = (
            f.op(f"mul i64 {f.op(f'sext i32 {place} to i64')}, {row_bytes}") for place in places
        )
        start = f.at("%tile", first, "i8")
        cases = " ".join(f"i32 {k}, label %kind{k}" for k in range(1, LAYERS + 1))
        f.line(f"  switch i32 {kind}, label %kind{SORT} [ {cases} ]")
        for k in range(LAYERS + 1):
            f.label(f"kind{k}")
            network = sorting_network(BLOCK) if k == SORT else _bitonic_layers(k)
            _in_registers(f, _wires(f, start, stride, unit, 1 << k), network)
            f.line("  br label %next")
        f.label("next")
    body = "\n".join(f.lines)
    return f"""
declare i64 @llvm.ctlz.i64(i64, i1)

define internal void @sort(ptr noalias %tile, ptr noalias %program, i64 %steps) noinline {{
entry:
{body}
  ret void
}}
"""


def _bitonic_layers(count: int) -> tuple[tuple[int, int], ...]:
    """Return the comparators of ``count`` halving layers between 32 wires."""
    pairs = []
    distance = BLOCK // 2
    for _ in range(count):
        pairs += [(i, i + distance) for i in range(BLOCK) if not i & distance]
        distance //= 2
    return tuple(pairs)


def _wires(f: Function, start: str, stride: str, unit: str, groups: int) -> list[str]:
    """Emit code for the addresses of a step's 32 wires."""
    addresses = []
    group = start
    for g in range(groups):
        if g:
            group = f.at(group, stride, "i8")
        address = group
        for c in range(BLOCK // groups):
            if c:
                address = f.at(address, unit, "i8")
            addresses.append(address)
    return addresses


def _in_registers(f: Function, addresses: list[str], network: tuple[tuple[int, int], ...]) -> None:
    wires = [f.load_vector(address) for address in addresses]
    for low, high in network:
        a, b = wires[low], wires[high]
        wires[low], wires[high] = f.low(a, b), f.high(a, b)
    for value, address in zip(wires, addresses, strict=True):
        f.store_vector(value, address)


def _nearest(
    f: Function, tile: str, m: str, trim: str, b: str, y: str, scale: str, inverse: str
) -> tuple[str, str, str]:
    """Emit code for the mean of the m - b values nearest to y, and for scaled radius and -y."""
    minus_y = f.negate(f.mul(y, scale))
    beyond = f.op(f"sub i64 {m}, {b}")
    fewer = f.op(f"icmp slt i64 {b}, {beyond}")
    places = f.op(f"select i1 {fewer}, i64 {b}, i64 {beyond}")
    # The middle, if there is one, is kept in any case.
    smallest = _or(f, fewer, f.at(tile, b, f.vector), float("inf"))
    largest = _or(f, fewer, f.at(tile, f.op(f"sub i64 {beyond}, 1"), f.vector), float("-inf"))
    with f.loop("0", places) as each:
        total = each.carry(f.vector, "zeroinitializer")
        radius = each.carry(f.vector, "zeroinitializer")
        low, high = each.carry(f.vector, smallest), each.carry(f.vector, largest)
        below = f.load_vector(f.at(tile, each.index, f.vector))
        first = f.fma(below, scale, minus_y)
        # One iteration, or more if b is more than half of m.
        with f.loop(f.op(f"add i64 {beyond}, {each.index}"), m, beyond) as partner:
            nearest, value = partner.carry(f.vector, first), partner.carry(f.vector, below)
            above = f.load_vector(f.at(tile, partner.index, f.vector))
            other = f.fma(above, scale, minus_y)
            nearer = f.compare("ole", f.absolute(nearest), f.absolute(other))
            partner.update(nearest, f.select(nearer, nearest, other))
            partner.update(value, f.select(nearer, value, above))
        each.update(low, f.low(low, value))
        each.update(high, f.high(high, value))
        each.update(total, f.add(total, nearest))
        each.update(radius, f.high(radius, f.absolute(nearest)))
    # The distances of the centre's values from their mean add up to zero, so only the values around
    # it are added.
    last = f.op(f"sub i64 {m}, {trim}")
    for begin, end in ((b, trim), (last, beyond)):
        with f.loop(begin, end) as each:
            more, wider = each.carry(f.vector, total), each.carry(f.vector, radius)
            value = f.load_vector(f.at(tile, each.index, f.vector))
            distance = f.fma(value, scale, minus_y)
            each.update(more, f.add(more, distance))
            each.update(wider, f.high(wider, f.absolute(distance)))
        total, radius = more, wider
    for edge in (trim, f.op(f"sub i64 {last}, 1")):
        value = f.load_vector(f.at(tile, edge, f.vector))
        radius = f.high(radius, f.absolute(f.fma(value, scale, minus_y)))
    return within(f, f.fma(total, inverse, y), low, high), radius, minus_y


def _or(f: Function, condition: str, address: str, otherwise: float) -> str:
    """Emit code for the vector at an address if a condition holds, otherwise a constant."""
    value = f.load_vector(address)
    return f.op(f"select i1 {condition}, {f.vector} {value}, {f.vector} {f.splat(otherwise)}")
