"""Generators of kernels that sum (a - b)^2 for pairs of rows, one granule at a time.

The pairs are all pairs of rows, or one row with each other row.

- Granule: a fixed number of columns, counted from column 0 of the whole matrix. The sums of a
  granule are computed in a fixed order. So servers that hold ranges of columns get the same granule
  sums as one server, and adding these in order gives the same bits.
- Block: here, a few consecutive rows whose pairs have their accumulators in registers.
- Panel: consecutive blocks that stay in cache together.
- Tile: the columns of a granule that are processed at a time.

Differences are squared directly or, for many rows, computed by products
(:mod:`phocas.kernels.products`). A sum that overflows or contains NaN is +inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.emit import SIGNATURE, Element, Function, Words, constant, declarations
from phocas.kernels.target import Target

LANES = {"float": 16, "double": 8}  # fixed, so that every host adds in the same order
PANEL_ROWS = 64
NEGATIVE = 2.0**26  # more than the columns of a granule, for counts of negative values


def block_rows(target: Target) -> int:
    """Return the number of rows of a block, whose pairs all have accumulators in registers."""
    return 4 if target.vector_bits >= 512 else 2


def granule_columns(m: int) -> int:
    """Return the number of columns of a granule, the unit in which squares are summed.

    The sums of a granule take at most 1/32 of the memory of the values.
    """
    return 1024 * max(1, -(-m // 64))


def tile_columns(m: int) -> int:
    """Return the number of columns of a tile, such that two panels and their sums stay in cache."""
    return 128 if m <= 32 else 256 if m <= 64 else 512


def scratch_words(target: Target, m: int) -> int:
    """Return the size of a thread's memory in words: one vector per pair of rows of two panels."""
    side = block_rows(target)
    rows = min(PANEL_ROWS, -(-m // side) * side)
    return rows * rows * 8


@lru_cache(maxsize=64)
def panel_pairs(m: int, panel: int) -> NDArray[np.int64]:
    """Return the pairs (I, J), I <= J, of panels (groups of blocks of rows) of m rows."""
    return np.stack(np.triu_indices(-(-m // panel)), axis=1).astype(np.int64)


class DistanceArguments(NamedTuple):
    """Arguments of the kernels; ``rows`` is padded to whole blocks, columns to whole vectors."""

    rows: int
    out: int
    blocks: int
    columns: int
    granule: int
    tile: int
    pairs: int = 0
    number: int = 1  # number of pairs of panels
    panel: int = 0  # rows per panel
    sampled: int = 0  # table of the rows that give the centre of products
    origin: int = 0  # the row from which all rows are measured


def pairs_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of the kernel that sums squared differences of all pairs of rows.

    The kernel iterates over granules and, in each granule, over pairs of panels.

    For each granule and each pair of blocks I <= J, ``out`` receives the sums of block I's rows
    against block J's, as doubles. For a block with itself it receives those of rows i < j. Blocks
    are processed in panels: 64 rows against 64 rows are read from memory once and stay in cache.
    """
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    args = f.named(DistanceArguments._fields)
    rows = args.pointer("rows")
    square = [(i, j) for i in range(side) for j in range(side)]
    with f.loop("%start", "%stop") as item:
        panels = open_panels(f, args, item.index, side)
        clear(f, panels.number, len(square))
        with tiles(f, args, panels.granule) as (begin, end), f.loop(*panels.rows) as row:
            line = panels.line(f, row.index)
            lefts = row_block(f, rows, row.index, side)
            with panels.diagonal(f, row.index, panels.same):
                diagonal = [(i, j) for i, j in square if i < j]
                slot = f.op(f"add i64 {line}, {row.index}")
                accumulate(f, lefts, lefts, begin, end, diagonal, slot)
            later = panels.fetching(f, row.index, line)
            with f.loop(panels.beyond(f, row.index), panels.columns[1]) as column:
                rights = row_block(f, rows, column.index, side)
                slot = f.op(f"add i64 {line}, {column.index}")
                fetch = panels.fetched(f, rows, f.op(f"add i64 {later}, {column.index}"))
                accumulate(f, lefts, rights, begin, end, square, slot, fetch)
        with panels.blocks(f, args, len(square)) as (_, _, slot, where):
            store_sums(f, block_sums(f, slot, len(square)), len(square), where)
    return finish(f)


@dataclass(frozen=True, slots=True)
class Panels:
    """Two panels of a granule, the second not before the first, as ranges of blocks.

    LLVM does not hoist code out of loops here, so values that do not change are computed once.
    """

    granule: str
    rows: tuple[str, str]
    columns: tuple[str, str]
    height: str
    width: str
    same: str
    number: str  # number of pairs of blocks
    above: str  # number of rows of the first panel
    everyone: str  # number of rows of both panels
    to_first: str  # offset from an index among those rows to the row in the first panel
    to_second: str  # the same for the second panel

    def line(self, f: Function, row: str) -> str:
        """Emit code for a number that, added to a block of the second panel, gives its pair index.

        The pairs are those of block ``row`` of the first panel.
        """
        i = f.op(f"sub i64 {row}, {self.rows[0]}")
        upper = f.op(f"sub i64 {triangle(f, i, self.width)}, {i}")
        whole = f.op(f"mul i64 {i}, {self.width}")
        start = f.op(f"select i1 {self.same}, i64 {upper}, i64 {whole}")
        return f.op(f"sub i64 {start}, {self.columns[0]}")

    @contextmanager
    def diagonal(self, f: Function, row: str, condition: str) -> Iterator[None]:
        """Emit the code of a block with itself, if the condition holds."""
        following = f.op(f"add i64 {row}, 1")
        with f.loop(row, f.op(f"select i1 {condition}, i64 {following}, i64 {row}")):
            yield

    def beyond(self, f: Function, row: str, past: int = 1) -> str:
        """Emit code for the first block to pair with a block of rows.

        The pairs with earlier blocks are already done.
        """
        following = f.op(f"add i64 {row}, {past}")
        return f.op(f"select i1 {self.same}, i64 {following}, i64 {self.columns[0]}")

    @contextmanager
    def blocks(self, f: Function, args: Words, size: int) -> Iterator[tuple[str, str, str, str]]:
        """Emit the loops over pairs of blocks; yield row, column, pair index, output address."""
        blocks = args.integer("blocks")
        before = f.op(f"mul i64 {self.granule}, {triangle(f, blocks, blocks)}")
        sums = sums_at(f, args.pointer("out"), before, size)
        with f.loop(*self.rows) as row:
            line = self.line(f, row.index)
            base = f.op(f"sub i64 {triangle(f, row.index, blocks)}, {row.index}")
            with f.loop(self.beyond(f, row.index, past=0), self.columns[1]) as column:
                slot, to = (f.op(f"add i64 {start}, {column.index}") for start in (line, base))
                yield row.index, column.index, slot, sums_at(f, sums, to, size)

    def fetching(self, f: Function, row: str, line: str) -> str:
        """Emit code for the same number as :meth:`line`, if only different blocks form a pair."""
        i = f.op(f"sub i64 {row}, {self.rows[0]}")
        skipped = f.op(f"select i1 {self.same}, i64 {f.op(f'add i64 {i}, 1')}, i64 0")
        return f.op(f"sub i64 {line}, {skipped}")

    def fetched(self, f: Function, rows: str, number: str) -> list[str]:
        """Emit code for two of the panels' rows to prefetch, different ones for every pair."""
        place = f.op(f"urem i64 {f.op(f'shl i64 {number}, 1')}, {self.everyone}")
        upper = f.op(f"icmp slt i64 {place}, {self.above}")
        shift = f.op(f"select i1 {upper}, i64 {self.to_first}, i64 {self.to_second}")
        found = f.op(f"add i64 {place}, {shift}")
        return [f.pointer(rows, f.op(f"add i64 {found}, {k}")) for k in range(2)]


def open_panels(f: Function, args: Words, item: str, side: int) -> Panels:
    """Emit code for the panels of a work item."""
    blocks, pairs = args.integer("blocks"), args.integer("number")
    granule = f.op(f"udiv i64 {item}, {pairs}")
    place = f.op(f"shl i64 {f.op(f'urem i64 {item}, {pairs}')}, 1")
    pair = f.at(args.pointer("pairs"), place, "i64")
    size = f.op(f"udiv i64 {args.integer('panel')}, {side}")
    rows, columns = (_panel(f, pair, i, blocks, size) for i in range(2))
    height, width = (f.op(f"sub i64 {last}, {first}") for first, last in (rows, columns))
    same = f.op(f"icmp eq i64 {rows[0]}, {columns[0]}")
    upper, whole = triangle(f, width, width), f.op(f"mul i64 {height}, {width}")
    above, beside = (f.op(f"mul i64 {size}, {side}") for size in (height, width))
    more = f.op(f"select i1 {same}, i64 0, i64 {beside}")
    top, left = (f.op(f"mul i64 {first}, {side}") for first, _ in (rows, columns))
    return Panels(
        granule=granule,
        rows=rows,
        columns=columns,
        height=height,
        width=width,
        same=same,
        number=f.op(f"select i1 {same}, i64 {upper}, i64 {whole}"),
        above=above,
        everyone=f.op(f"add i64 {above}, {more}"),
        to_first=top,
        to_second=f.op(f"sub i64 {left}, {above}"),
    )


def norms_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of the kernel that sums the squares of each row in each granule."""
    return _row_sums(target, element, from_origin=False)


def origin_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of the kernel that sums each row's squared differences from one row.

    The sums of a granule have the same bits as those of :func:`pairs_module`.
    """
    return _row_sums(target, element, from_origin=True)


def _row_sums(target: Target, element: Element, *, from_origin: bool) -> str:
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    args = f.named(DistanceArguments._fields)
    rows, blocks = args.pointer("rows"), args.integer("blocks")
    origin = [args.pointer("origin")] if from_origin else []
    with f.loop("%start", "%stop") as granule:
        clear(f, blocks, side)
        with tiles(f, args, granule.index) as (begin, end), f.loop("0", blocks) as row:
            lefts = row_block(f, rows, row.index, side)
            accumulate(f, lefts, origin, begin, end, [(i, 0) for i in range(side)], row.index)
        before = f.op(f"mul i64 {granule.index}, {blocks}")
        sums = sums_at(f, args.pointer("out"), before, side)
        with f.loop("0", blocks) as row:
            where = sums_at(f, sums, row.index, side)
            store_sums(f, block_sums(f, row.index, side), side, where)
    return finish(f)


def signs_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of the kernel that counts the signs of each row in each granule.

    It adds 1 for a positive and ``NEGATIVE`` for a negative value, so one double has both counts.
    """
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    args = f.named(DistanceArguments._fields)
    rows, blocks = args.pointer("rows"), args.integer("blocks")
    one, many, zero = f.splat(1.0), f.splat(NEGATIVE), "zeroinitializer"
    with f.loop("%start", "%stop") as granule, f.loop("0", blocks) as row:
        begin, end = granule_range(f, args, granule.index)
        sources = row_block(f, rows, row.index, side)
        with f.loop(begin, end, f.lanes) as loop:
            totals = [loop.carry(f.vector, zero) for _ in sources]
            for source, total in zip(sources, totals, strict=True):
                value = f.load(f.at(source, loop.index))
                below = f.select(f.compare("olt", value, zero), many, zero)
                added = f.select(f.compare("ogt", value, zero), one, below)
                loop.update(total, f.add(total, added))
        place = f.op(f"add i64 {f.op(f'mul i64 {granule.index}, {blocks}')}, {row.index}")
        sums = lane_sums(f, totals)
        store_sums(f, sums, side, sums_at(f, args.pointer("out"), place, side))
    return finish(f)


def _panel(f: Function, pair: str, which: int, blocks: str, size: str) -> tuple[str, str]:
    """Emit code for the range of blocks of one panel of a pair."""
    first = f.op(f"mul i64 {f.integer(pair, which)}, {size}")
    return first, lesser(f, f.op(f"add i64 {first}, {size}"), blocks)


def triangle(f: Function, row: str, blocks: str) -> str:
    """Emit code for the number of pairs of blocks (I, J), I <= J, before those with I = row."""
    above = f.op(f"mul i64 {row}, {f.op(f'sub i64 {row}, 1')}")
    return f.op(f"sub i64 {f.op(f'mul i64 {row}, {blocks}')}, {f.op(f'lshr i64 {above}, 1')}")


def lesser(f: Function, a: str, b: str) -> str:
    """Emit code for the smaller of two integers."""
    return f.op(f"select i1 {f.op(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def clear(f: Function, blocks: str, size: int, start: str = "%local") -> None:
    """Emit code that sets the accumulators of some blocks to zero."""
    bytes_ = f.op(f"mul i64 {blocks}, {size * 64}")
    f.line(f"  call void @llvm.memset.p0.i64(ptr {start}, i8 0, i64 {bytes_}, i1 false)")


def granule_range(f: Function, args: Words, granule: str) -> tuple[str, str]:
    """Emit code for the range of columns of a granule; the last granule may be shorter."""
    size = args.integer("granule")
    begin = f.op(f"mul i64 {granule}, {size}")
    return begin, lesser(f, f.op(f"add i64 {begin}, {size}"), args.integer("columns"))


@contextmanager
def tiles(f: Function, args: Words, granule: str) -> Iterator[tuple[str, str]]:
    """Emit the loop over the tiles of a granule."""
    begin, end = granule_range(f, args, granule)
    tile = args.integer("tile")
    with f.loop(begin, end, tile) as loop:
        yield loop.index, lesser(f, f.op(f"add i64 {loop.index}, {tile}"), end)


def sums_at(f: Function, out: str, block: str, size: int) -> str:
    """Emit code for the address of the sums of a block."""
    return f.at(out, f.op(f"mul i64 {block}, {size}"), "double")


def block_sums(f: Function, block: str, size: int, start: str = "%local") -> str:
    """Emit code for the sums of the lanes of a block's accumulators, as doubles."""
    total = lane_sums(f, [f.load_vector(place) for place in slots(f, block, size, start)])
    if f.scalar == "double":
        return total
    return f.op(f"fpext <{size} x float> {total} to <{size} x double>")


def store_sums(f: Function, sums: str, size: int, where: str) -> None:
    """Emit code that stores doubles, with infinity in place of NaN."""
    kind, mask = f"<{size} x double>", f"<{size} x i1>"
    lost = f.op(f"fcmp uno {kind} {sums}, {sums}")
    infinite = f"splat (double {constant(float('inf'), 'double')})"
    sums = f.op(f"select {mask} {lost}, {kind} {infinite}, {kind} {sums}")
    f.line(f"  store {kind} {sums}, ptr {where}, align 8")


def slots(f: Function, block: str, size: int, start: str = "%local") -> list[str]:
    """Emit code for the addresses of a block's accumulators."""
    first = f.at(start, f.op(f"mul i64 {block}, {size}"), f.vector)
    return [f.at(first, str(i), f.vector) for i in range(size)]


def row_block(f: Function, rows: str, block: str, side: int) -> list[str]:
    """Emit code that loads the pointers to a block's rows."""
    start = f.op(f"mul i64 {block}, {side}")
    return [f.pointer(rows, f.op(f"add i64 {start}, {i}")) for i in range(side)]


def accumulate(
    f: Function,
    lefts: list[str],
    rights: list[str],
    begin: str,
    end: str,
    pairs: list[tuple[int, int]],
    block: str,
    fetch: Sequence[str] = (),
) -> None:
    """Emit code that adds squared differences of rows over a tile to the accumulators of a block.

    Pair (i, j) has slot i * (number of rights) + j. Without ``rights``, rows are squared
    themselves. ``fetch`` are rows whose next tile is prefetched.
    """
    width = max(1, len(rights))
    places = slots(f, block, len(lefts) * width)
    used = [places[i * width + j] for i, j in pairs]
    ahead = f.op(f"sub i64 {end}, {begin}")
    following = [f.at(row, ahead) for row in fetch]
    initial = [f.load_vector(slot) for slot in used]
    with f.loop(begin, end, f.lanes) as loop:
        totals = [loop.carry(f.vector, value) for value in initial]
        left = [f.load(f.at(row, loop.index)) for row in lefts]
        for row in following:
            # Prefetch the next tile while this one is processed, a little in every iteration.
            f.prefetch(f.at(row, loop.index), 0)
        right = left if rights is lefts else [f.load(f.at(row, loop.index)) for row in rights]
        for total, (i, j) in zip(totals, pairs, strict=True):
            difference = f.sub(left[i], right[j]) if rights else left[i]
            loop.update(total, f.multiply_add(difference, difference, total))
    for total, slot in zip(totals, used, strict=True):
        f.store_vector(total, slot)


def lane_sums(f: Function, vectors: list[str]) -> str:
    """Emit code that sums the lanes of each vector; the sums are the lanes of one vector.

    Neighbouring lanes are added first.
    """
    size, lanes, step = len(vectors), f.lanes, 1
    if size > lanes:
        halves = [lane_sums(f, vectors[:lanes]), lane_sums(f, vectors[lanes:])]
        return _shuffle(f, halves[0], halves[1], list(range(size)))
    while step < lanes:
        paired = len(vectors) > 1
        near, far = [], []
        for lane in range(lanes):
            group, within = divmod(lane, 2 * step)
            from_second = lanes if paired and within >= step else 0
            start = group * 2 * step + within % step
            near.append(start + from_second)
            far.append(start + step + from_second)
        others = vectors[1::2] if paired else vectors
        vectors = [
            f.add(_shuffle(f, a, b, near), _shuffle(f, a, b, far))
            for a, b in zip(vectors[::2] if paired else vectors, others, strict=True)
        ]
        step *= 2
    return _shuffle(f, vectors[0], vectors[0], list(range(size)))


def _shuffle(f: Function, a: str, b: str, order: list[int]) -> str:
    lanes = ", ".join(f"i32 {lane}" for lane in order)
    return f.op(f"shufflevector {f.vector} {a}, {f.vector} {b}, <{len(order)} x i32> <{lanes}>")


def finish(f: Function) -> str:
    """Return the LLVM IR of a kernel with the given body."""
    body = "\n".join(f.lines)
    return f"""{declarations(f)}
define void @kernel{SIGNATURE} {{
entry:
{body}
  ret void
}}
"""
