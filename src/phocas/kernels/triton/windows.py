"""The window kernels as Triton source: the network and the closed form of the processor's kernels.

A program has a block of columns, one a thread. The rows come in as one tile, whose every column
lies in one thread's registers, and is split into its rows without moving anything. (As m separate
loads, Triton's coalescing pass took 20 s at 64 rows and more than 6 minutes at 128.)
"""

from __future__ import annotations

from phocas.kernels.columns import Window, average, outside, run_network, scale_for
from phocas.kernels.emit import Element
from phocas.kernels.triton.writer import HEADER, STORED, Source

BLAMED_ROWS = 16  # at a time


def window_source(
    element: Element, m: int, window: Window, *, blame: bool = False, interpreted: bool = False
) -> str:
    """Write ``kernel(rows, out, tallies, columns, BLOCK)``.

    ``rows`` is a table of m addresses. With blame, ``tallies`` gets m numbers from each program:
    how many values of its columns each row lost.
    """
    column = Source(element, vectors=interpreted)
    values = [column.computed(f"x{i}") for i in range(m)]
    if not window.plain:
        values = [column.nan_to_inf(value) for value in values]
    found = average(column, run_network(column, values, [], window), window)
    answers = [column.rounded(found.value), *((found.low, found.high) if blame else ())]
    kernel = Source(element)
    kernel.line("program = tl.program_id(0).to(tl.int64)")
    kernel.line("lane = program * BLOCK + tl.arange(0, BLOCK)")
    kernel.line("inside = lane < columns")
    _, tile = _tile(kernel, m, _padded(m), "0")
    rows = ", ".join(_rows(kernel, tile, m))
    call = f"column({rows})" if interpreted else f"tl.map_elementwise(column, {rows})"
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
    return f"""{HEADER}
@triton.jit
def column({", ".join(f"x{i}" for i in range(m))}):
{column.text()}
    return {", ".join(answers)}

@triton.jit(do_not_specialize=["columns"])
def kernel(rows, out, tallies, columns, BLOCK: tl.constexpr):
{kernel.text()}
"""


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


def _rows(f: Source, tile: str, m: int) -> list[str]:
    """Split a tile into its rows: first even ones from odd ones, then each half again."""
    width = _padded(m)
    parts = [tile]
    while width > 1:
        width //= 2
        halves = [f.op(f"tl.split(tl.reshape({part}, (BLOCK, {width}, 2)))") for part in parts]
        # Row r of a tile is row r // 2 of half r % 2.
        parts = [f"{half}[{side}]" for side in range(2) for half in halves]
    return [f.op(f"tl.reshape({part}, (BLOCK,))") for part in parts[:m]]
