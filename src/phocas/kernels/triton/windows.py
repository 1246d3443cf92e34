"""The window kernels as Triton source: the network and the closed form of the processor's kernels.

A program has a block of columns, one a thread. The rows come in as one tile, whose every column
lies in one thread's registers, and is split into its rows without moving anything. (As m separate
loads, Triton's coalescing pass took 20 s at 64 rows and more than 6 minutes at 128.)

A window with a reach takes three kernels: the radii of all columns, the spread of each block of
them, and the weighted means. The last one sorts again: to keep what the first one found would be
more to write and read than the rows.
"""

from __future__ import annotations

import math

from phocas.kernels.blocks import BLOCK_COLUMNS, LANES, reaching, weighted
from phocas.kernels.columns import (
    Averaged,
    Window,
    average,
    held,
    outside,
    plain_mean,
    run_network,
    scale_for,
)
from phocas.kernels.emit import Element
from phocas.kernels.triton.writer import HEADER, STORED, Source

BLAMED_ROWS = 16  # at a time
TOGETHER = 8  # blocks whose spreads a program works out


def window_source(
    element: Element,
    m: int,
    window: Window,
    *,
    blame: bool = False,
    radii: bool = False,
    interpreted: bool = False,
) -> str:
    """Write ``kernel(rows, out, tallies, columns, BLOCK)``.

    ``rows`` is a table of m addresses. With blame, ``tallies`` gets m numbers from each program:
    how many values of its columns each row lost. With ``radii``, the output is the radius of every
    column. A window with a reach takes three more arguments before ``columns``: the spreads of all
    blocks, the reach, and which column of all is the first.
    """
    column = Source(element, vectors=interpreted)
    by_spread = bool(window.reach) and not radii
    values = [column.computed(f"x{i}") for i in range(m)]
    mean = plain_mean(column, values) if window.watched else ""
    if not window.plain:
        values = [column.nan_to_inf(value) for value in values]
    wires = run_network(column, values, [], window)
    found = average(column, wires, window)
    if by_spread:
        found = _weighed(column, wires, window, found)
    value = found.high if radii else column.rounded(mean or found.value)
    answers = [value, *((found.low, found.high) if blame else ())]
    kernel = Source(element)
    kernel.line("program = tl.program_id(0).to(tl.int64)")
    kernel.line("lane = program * BLOCK + tl.arange(0, BLOCK)")
    kernel.line("inside = lane < columns")
    _, tile = _tile(kernel, m, _padded(m), "0")
    taken = _parts(kernel, tile, "BLOCK", _padded(m))[:m]
    if by_spread:
        number = kernel.op(f"(first + lane) // {BLOCK_COLUMNS}")
        taken.append(kernel.op(f"tl.load(spreads + {number}, mask=inside, other=0)"))
        taken.append(kernel.op("tl.load(reach)"))
    listed = ", ".join(taken)
    call = f"column({listed})" if interpreted else f"tl.map_elementwise(column, {listed})"
    kernel.line(f"{'result, low, high' if blame else 'result'} = {call}")
    kernel.line("tl.store(out + lane, result, mask=inside)")
    if blame:
        # Loaded again: kept in registers they would crowd out the network.
        kernel.line(f"for start in range(0, {m}, {BLAMED_ROWS}):")
        with kernel.indented():
            row, tile = _tile(kernel, m, BLAMED_ROWS, "start")
            value = kernel.computed(tile)
            scale = kernel.splat(scale_for(window.kept(m))) if window.drop else None
            lost = outside(kernel, value, "low[:, None]", "high[:, None]", scale)
            kernel.line(f"counts = tl.sum({lost}.to(tl.int32), 0)")
            kernel.line(f"tl.store(tallies + program * {m} + {row}, counts, mask={row} < {m})")
    named = [f"x{i}" for i in range(m)] + (["spread", "reach"] if by_spread else [])
    more = "spreads, reach, first, " if by_spread else ""
    return f"""{HEADER}
@triton.jit
def column({", ".join(named)}):
{column.text()}
    return {", ".join(answers)}

@triton.jit(do_not_specialize=["columns"{', "first"' if by_spread else ""}])
def kernel(rows, out, tallies, {more}columns, BLOCK: tl.constexpr):
{kernel.text()}
"""


def _weighed(f: Source, wires: list[str], window: Window, found: Averaged) -> Averaged:
    """Return the mean with what is within reach, and who is beyond it."""
    m = len(wires)
    weights = reaching(f, found.high, "spread", "reach")
    if window.watched:
        return Averaged("", found.low, weights.limit)
    scale = scale_for(window.kept(m))
    total, weight = found.total, f.splat(window.kept(m))
    for distance in found.beyond:
        total, weight = weights.add(distance, total, weight)

    def bounds() -> tuple[str, str]:
        low, high = f.splat(math.inf), f.splat(-math.inf)
        for wire in wires:
            distance = f.scaled_add(wire, scale, found.low)
            low, high = weights.bounds(distance, wire, low, high)
        return low, high

    mean = weighted(f, found.centre, total, weight, f.splat(scale))
    return Averaged(held(f, mean, bounds), found.low, weights.limit)


def spreads_source(element: Element) -> str:
    """Write ``spreads(radii, out, columns)``, :func:`phocas.kernels.spread` of every block.

    A program has a few blocks, in as many lanes as on the processor, which are added in its order.
    """
    f = Source(element)
    lanes = LANES[element.compute]
    mantissa, words = (52, "tl.int64") if element.compute == "double" else (23, "tl.int32")
    top = (1 << (element.compute_bits - 1 - mantissa)) - 2  # the exponent of the largest numbers
    zeros = f"tl.zeros(({TOGETHER}, {lanes}), {f.type})"
    f.line(f"number = tl.program_id(0).to(tl.int64) * {TOGETHER} + tl.arange(0, {TOGETHER})")
    f.line(f"begin = number * {BLOCK_COLUMNS}")
    f.line(f"end = tl.minimum(begin + {BLOCK_COLUMNS}, columns)")
    f.line(f"largest = {zeros}")
    f.line(f"for start in range(0, {BLOCK_COLUMNS}, {lanes}):")
    with f.indented():
        f.line(f"largest = {f.high('largest', _finite(f, lanes))}")
    f.line(f"power = tl.max(largest, 1).to({words}, bitcast=True) >> {mantissa}")
    f.line(f"power = tl.minimum(tl.maximum(power, 1), {top - 1})")
    f.line(f"up = (power << {mantissa}).to({f.type}, bitcast=True)")
    f.line(f"down = (({top} - power) << {mantissa}).to({f.type}, bitcast=True)")
    f.line(f"sums = {zeros}")
    f.line(f"for start in range(0, {BLOCK_COLUMNS}, {lanes}):")
    with f.indented():
        scaled = f.mul(_finite(f, lanes), "down[:, None]")
        f.line(f"sums = {f.add('sums', f.mul(scaled, scaled))}")
    total, *others = _parts(f, "sums", str(TOGETHER), lanes)
    for other in others:
        total = f.add(total, other)
    size = f.op(f"tl.maximum(end - begin, 1).to({f.type})")
    result = f.mul(f.root(f.div(total, size)), "up")
    f.line(f"tl.store(out + number, {result}, mask=begin < columns)")
    return f"""{HEADER}
@triton.jit(do_not_specialize=["columns"])
def spreads(radii, out, columns):
{f.text()}
"""


def _finite(f: Source, lanes: int) -> str:
    """Load radii of a few columns of each block; those that are lost count as 0."""
    place = f.op(f"begin[:, None] + start + tl.arange(0, {lanes})[None, :]")
    radius = f.op(f"tl.load(radii + {place}, mask={place} < end[:, None], other=0)")
    return f.select(f.compare("olt", radius, f.splat(math.inf)), radius, f.splat(0))


def _padded(m: int) -> int:
    """Return the next power of two, which Triton wants its tiles to have."""
    return 1 << (m - 1).bit_length()


def _tile(f: Source, m: int, rows: int, start: str) -> tuple[str, str]:
    """Load a tile of rows from a first one on, and return their numbers and the tile.

    Past m, and past the last column, all is zero: a zero among zeros is never dropped.
    """
    stored = STORED[f.element.name]
    row = f.op(f"{start} + tl.arange(0, {rows})")
    starts = f.op(f"tl.load(rows + {row}, mask={row} < {m}, other=0).to(tl.pointer_type({stored}))")
    there = f.op(f"inside[:, None] & ({row}[None, :] < {m})")
    return row, f.op(f"tl.load({starts}[None, :] + lane[:, None], mask={there}, other=0)")


def _parts(f: Source, tile: str, length: str, width: int) -> list[str]:
    """Split a (length, width) tile along its width: even ones from odd ones, each half again."""
    parts = [tile]
    while width > 1:
        width //= 2
        halves = [f.op(f"tl.split(tl.reshape({part}, ({length}, {width}, 2)))") for part in parts]
        # Part r of a tile is part r // 2 of half r % 2.
        parts = [f"{half}[{side}]" for side in range(2) for half in halves]
    return [f.op(f"tl.reshape({part}, ({length},))") for part in parts]
