"""The window kernels as Triton source, with the network and closed form of the CPU kernels.

A program processes a block of columns, one per thread. The rows are loaded as one tile, of which
every column is in the registers of one thread. The tile is split into its rows without moving data.
(With m separate loads, Triton's coalescing pass took 20 s at 64 rows and more than 6 minutes at
128.)

A window with a cutoff takes three kernels: the radii of all columns, the spread of each block of
columns, and the weighted means. The last one sorts again, because storing the results of the first
would write and read more than the rows themselves.
"""

from __future__ import annotations

import math

from phocas.kernels.blocks import BLOCK_COLUMNS, LANES, weighted, weights_within
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
from phocas.kernels.triton.writer import HEADER, STORED, FunctionWriter

BLAMED_ROWS = 16  # rows compared at a time
TOGETHER = 8  # blocks per program of the spreads kernel


def window_source(
    element: Element,
    m: int,
    window: Window,
    *,
    blame: bool = False,
    radii: bool = False,
    mean: bool = False,
    interpreted: bool = False,
) -> str:
    """Generate the Triton source of ``kernel(rows, out, tallies, columns, BLOCK)``.

    ``rows`` is a table of m addresses. With ``blame``, a program writes m numbers to ``tallies``:
    how many values of each row are dropped in the program's columns. With ``radii``, the output is
    the radius of every column; with ``mean``, the plain mean of all rows. A window with a cutoff
    takes three more arguments before ``columns``: the spreads of all blocks, the cutoff, and the
    number of the first column in the whole matrix.
    """
    column = FunctionWriter(element, vectors=interpreted)
    by_spread = bool(window.cutoff) and not radii
    values = [column.computed(f"x{i}") for i in range(m)]
    average_of_all = plain_mean(column, values) if mean else ""
    if not window.plain:
        values = [column.nan_to_inf(value) for value in values]
    wires = run_network(column, values, [], window)
    found = average(column, wires, window)
    if by_spread:
        found = _weighed(column, wires, window, found, mean=mean)
    value = found.high if radii else column.rounded(average_of_all or found.value)
    answers = [value, *((found.low, found.high) if blame else ())]
    kernel = FunctionWriter(element)
    kernel.line("program = tl.program_id(0).to(tl.int64)")
    kernel.line("lane = program * BLOCK + tl.arange(0, BLOCK)")
    kernel.line("inside = lane < columns")
    _, tile = _tile(kernel, m, _padded(m), "0")
    taken = _parts(kernel, tile, "BLOCK", _padded(m))[:m]
    if by_spread:
        number = kernel.op(f"(first + lane) // {BLOCK_COLUMNS}")
        taken.append(kernel.op(f"tl.load(spreads + {number}, mask=inside, other=0)"))
        taken.append(kernel.op("tl.load(cutoff)"))
    listed = ", ".join(taken)
    call = f"column({listed})" if interpreted else f"tl.map_elementwise(column, {listed})"
    kernel.line(f"{'result, low, high' if blame else 'result'} = {call}")
    kernel.line("tl.store(out + lane, result, mask=inside)")
    if blame:
        # Loaded again: keeping the rows in registers would leave too few for the network.
        kernel.line(f"for start in range(0, {m}, {BLAMED_ROWS}):")
        with kernel.indented():
            row, tile = _tile(kernel, m, BLAMED_ROWS, "start")
            value = kernel.computed(tile)
            scale = kernel.splat(scale_for(window.kept(m))) if window.drop else None
            lost = outside(kernel, value, "low[:, None]", "high[:, None]", scale)
            kernel.line(f"counts = tl.sum({lost}.to(tl.int32), 0)")
            kernel.line(f"tl.store(tallies + program * {m} + {row}, counts, mask={row} < {m})")
    named = [f"x{i}" for i in range(m)] + (["spread", "cutoff"] if by_spread else [])
    more = "spreads, cutoff, first, " if by_spread else ""
    return f"""{HEADER}
@triton.jit
def column({", ".join(named)}):
{column.text()}
    return {", ".join(answers)}

@triton.jit(do_not_specialize=["columns"{', "first"' if by_spread else ""}])
def kernel(rows, out, tallies, {more}columns, BLOCK: tl.constexpr):
{kernel.text()}
"""


def _weighed(
    f: FunctionWriter, wires: list[str], window: Window, found: Averaged, *, mean: bool
) -> Averaged:
    """Emit code for the weighted mean, and the limits beyond which values are dropped."""
    m = len(wires)
    weights = weights_within(f, found.high, "spread", "cutoff")
    if mean:
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

    value = weighted(f, found.centre, total, weight, f.splat(scale))
    return Averaged(held(f, value, bounds), found.low, weights.limit)


def spreads_source(element: Element) -> str:
    """Generate ``spreads(radii, out, columns)``: :func:`phocas.kernels.spread` of every block.

    A program processes a few blocks, in as many lanes as on the CPU, added in the same order.
    """
    f = FunctionWriter(element)
    lanes = LANES[element.compute]
    mantissa, words = (52, "tl.int64") if element.compute == "double" else (23, "tl.int32")
    top = (1 << (element.compute_bits - 1 - mantissa)) - 2  # stored exponent of the largest numbers
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


def _finite(f: FunctionWriter, lanes: int) -> str:
    """Emit code that loads radii of some columns of each block, with 0 for non-finite radii."""
    place = f.op(f"begin[:, None] + start + tl.arange(0, {lanes})[None, :]")
    radius = f.op(f"tl.load(radii + {place}, mask={place} < end[:, None], other=0)")
    return f.select(f.compare("olt", radius, f.splat(math.inf)), radius, f.splat(0))


def _padded(m: int) -> int:
    """Return the next power of two, which Triton requires for the sides of tiles."""
    return 1 << (m - 1).bit_length()


def _tile(f: FunctionWriter, m: int, rows: int, start: str) -> tuple[str, str]:
    """Emit code that loads a tile of rows, from column ``start`` on; return row indices and tile.

    Rows past m and columns past the last are zero: a zero among zeros is never dropped.
    """
    stored = STORED[f.element.name]
    row = f.op(f"{start} + tl.arange(0, {rows})")
    starts = f.op(f"tl.load(rows + {row}, mask={row} < {m}, other=0).to(tl.pointer_type({stored}))")
    there = f.op(f"inside[:, None] & ({row}[None, :] < {m})")
    return row, f.op(f"tl.load({starts}[None, :] + lane[:, None], mask={there}, other=0)")


def _parts(f: FunctionWriter, tile: str, length: str, width: int) -> list[str]:
    """Emit code that splits a (length, width) tile into its columns.

    The code separates even and odd columns repeatedly.
    """
    parts = [tile]
    while width > 1:
        width //= 2
        halves = [f.op(f"tl.split(tl.reshape({part}, ({length}, {width}, 2)))") for part in parts]
        # Part r of a tile is part r // 2 of half r % 2.
        parts = [f"{half}[{side}]" for side in range(2) for half in halves]
    return [f.op(f"tl.reshape({part}, ({length},))") for part in parts]
