"""Kernels that sum (a - b)^2 for every pair of rows, a granule of columns at a time.

A granule is a fixed number of columns, counted from column 0 of the whole matrix, and its sums are
taken in a fixed order. Servers that hold column ranges therefore get the same granule sums as one
server would, and adding those up in order gives the same bits.

Differences are squared directly: the Gram form |a|^2 + |b|^2 - 2ab cancels when rows nearly agree
at an offset, and its one multiplication a pair is no faster where a core has one unit for 512-bit
products (measured: 112 ns for 16 columns of 20 rows, against 81 ns). A sum that overflows or
meets NaN is +inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.emit import SIGNATURE, Element, Function, Words, constant, declarations
from phocas.kernels.target import Target

LANES = {"float": 16, "double": 8}  # fixed, so that every host adds in the same order
PANEL_ROWS = 64


def block_rows(target: Target) -> int:
    """Return the side of a block of pairs: as many accumulators as registers allow."""
    return 4 if target.vector_bits >= 512 else 2


def granule_columns(m: int) -> int:
    """Return the columns of a granule; its sums weigh at most 1/32 of its values."""
    return 1024 * max(1, -(-m // 64))


def tile_columns(m: int) -> int:
    """Return the columns worked on at a time: two panels of rows and their sums stay in cache."""
    return 128 if m <= 32 else 256 if m <= 64 else 512


def scratch_words(target: Target, m: int) -> int:
    """Return a thread's memory in words: a vector for every pair of rows of two panels."""
    side = block_rows(target)
    rows = min(PANEL_ROWS, -(-m // side) * side)
    return rows * rows * 8


@lru_cache(maxsize=64)
def panel_pairs(m: int) -> NDArray[np.int64]:
    """Return the pairs of panels (I, J), I <= J, that m rows fall into."""
    return np.stack(np.triu_indices(-(-m // PANEL_ROWS)), axis=1).astype(np.int64)


class Arguments(NamedTuple):
    """What the kernels take: ``rows`` is padded to whole blocks, columns to whole vectors."""

    rows: int
    out: int
    blocks: int
    columns: int
    granule: int
    tile: int
    pairs: int = 0
    number: int = 1  # of pairs of panels


def pairs_module(target: Target, element: Element) -> str:
    """Write the kernel of pairwise sums; its range is over pairs of panels, granule by granule.

    ``out`` gets, as doubles, for each granule and each pair of blocks I <= J, the sums of block
    I's rows against block J's; of a block with itself, those of rows i < j. Blocks are worked on
    in panels: 64 rows against 64 are read once from memory and meet in cache.
    """
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    args = f.named(Arguments._fields)
    rows, blocks, number = args.pointer("rows"), args.integer("blocks"), args.integer("number")
    square = [(i, j) for i in range(side) for j in range(side)]
    with f.loop("%start", "%stop") as item:
        granule = f.op(f"udiv i64 {item.index}, {number}")
        place = f.op(f"shl i64 {f.op(f'urem i64 {item.index}, {number}')}, 1")
        pair = f.at(args.pointer("pairs"), place, "i64")
        (top, bottom), (left, right) = (_panel(f, pair, i, blocks, side) for i in range(2))
        height, width = f.op(f"sub i64 {bottom}, {top}"), f.op(f"sub i64 {right}, {left}")
        same = f.op(f"icmp eq i64 {top}, {left}")
        _clear(f, f.op(f"mul i64 {height}, {width}"), len(square))
        with _tiles(f, args, granule) as (begin, end), f.loop(top, bottom) as row:
            i = f.op(f"sub i64 {row.index}, {top}")
            line = f.op(f"sub i64 {f.op(f'mul i64 {i}, {width}')}, {left}")
            lefts = _block(f, rows, row.index, side)
            following = f.op(f"add i64 {row.index}, 1")
            with f.loop(row.index, f.op(f"select i1 {same}, i64 {following}, i64 {row.index}")):
                diagonal = [(i, j) for i, j in square if i < j]
                slot = f.op(f"add i64 {line}, {row.index}")
                _accumulate(f, lefts, lefts, begin, end, diagonal, slot)
            first = f.op(f"select i1 {same}, i64 {following}, i64 {left}")
            with f.loop(first, right) as column:
                rights = _block(f, rows, column.index, side)
                slot = f.op(f"add i64 {line}, {column.index}")
                later = _later(f, rows, (top, height), (left, width), slot, i, same, side)
                _accumulate(f, lefts, rights, begin, end, square, slot, later)
        total = _triangle(f, blocks, blocks)
        sums = _sums_at(f, args.pointer("out"), f.op(f"mul i64 {granule}, {total}"), len(square))
        with f.loop(top, bottom) as row:
            i = f.op(f"sub i64 {row.index}, {top}")
            line = f.op(f"sub i64 {f.op(f'mul i64 {i}, {width}')}, {left}")
            base = f.op(f"sub i64 {_triangle(f, row.index, blocks)}, {row.index}")
            first = f.op(f"select i1 {same}, i64 {row.index}, i64 {left}")
            with f.loop(first, right) as column:
                slot, to = (f.op(f"add i64 {start}, {column.index}") for start in (line, base))
                _store_sums(f, slot, len(square), _sums_at(f, sums, to, len(square)))
    return _finish(f)


def norms_module(target: Target, element: Element) -> str:
    """Write the kernel of sums of squares over a range of granules: one sum for each row."""
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    args = f.named(Arguments._fields)
    rows, blocks = args.pointer("rows"), args.integer("blocks")
    with f.loop("%start", "%stop") as granule:
        _clear(f, blocks, side)
        with _tiles(f, args, granule.index) as (begin, end), f.loop("0", blocks) as row:
            lefts = _block(f, rows, row.index, side)
            _accumulate(f, lefts, [], begin, end, [(i, 0) for i in range(side)], row.index)
        before = f.op(f"mul i64 {granule.index}, {blocks}")
        sums = _sums_at(f, args.pointer("out"), before, side)
        with f.loop("0", blocks) as row:
            _store_sums(f, row.index, side, _sums_at(f, sums, row.index, side))
    return _finish(f)


def _panel(f: Function, pair: str, which: int, blocks: str, side: int) -> tuple[str, str]:
    """Return the range of blocks of one panel of a pair."""
    size = PANEL_ROWS // side
    first = f.op(f"mul i64 {f.integer(pair, which)}, {size}")
    return first, _lesser(f, f.op(f"add i64 {first}, {size}"), blocks)


def _triangle(f: Function, row: str, blocks: str) -> str:
    """Return how many pairs of blocks (I, J), I <= J, come before those with I = row."""
    above = f.op(f"mul i64 {row}, {f.op(f'sub i64 {row}, 1')}")
    return f.op(f"sub i64 {f.op(f'mul i64 {row}, {blocks}')}, {f.op(f'lshr i64 {above}, 1')}")


def _later(
    f: Function,
    rows: str,
    tops: tuple[str, str],
    lefts: tuple[str, str],
    slot: str,
    i: str,
    same: str,
    side: int,
) -> list[str]:
    """Return two of the panels' rows, others for every block, whose next tile to ask for.

    Off the diagonal of a panel with itself, a block's number skips those below the diagonal.
    """
    one, two = (f.op(f"add i64 {i}, {k}") for k in (1, 2))
    skipped = f.op(f"lshr i64 {f.op(f'mul i64 {one}, {two}')}, 1")
    number = f.op(f"sub i64 {slot}, {f.op(f'select i1 {same}, i64 {skipped}, i64 0')}")
    heights = [f.op(f"mul i64 {size}, {side}") for _, size in (tops, lefts)]
    below = f.op(f"select i1 {same}, i64 0, i64 {heights[1]}")
    everything = f.op(f"add i64 {heights[0]}, {below}")
    place = f.op(f"urem i64 {f.op(f'shl i64 {number}, 1')}, {everything}")
    upper = f.op(f"icmp slt i64 {place}, {heights[0]}")
    firsts = [f.op(f"mul i64 {first}, {side}") for first, _ in (tops, lefts)]
    other = f.op(f"sub i64 {firsts[1]}, {heights[0]}")
    row = f.op(f"add i64 {place}, {f.op(f'select i1 {upper}, i64 {firsts[0]}, i64 {other}')}")
    return [f.pointer(rows, f.op(f"add i64 {row}, {k}")) for k in range(2)]


def _lesser(f: Function, a: str, b: str) -> str:
    """Return the smaller of two integers."""
    return f.op(f"select i1 {f.op(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def _clear(f: Function, blocks: str, size: int) -> None:
    """Set the accumulators of some blocks to zero."""
    bytes_ = f.op(f"mul i64 {blocks}, {size * 64}")
    f.line(f"  call void @llvm.memset.p0.i64(ptr %local, i8 0, i64 {bytes_}, i1 false)")


@contextmanager
def _tiles(f: Function, args: Words, granule: str) -> Iterator[tuple[str, str]]:
    """Write the loop over the tiles of a granule, the last of which may be cut short."""
    size, tile = args.integer("granule"), args.integer("tile")
    begin = f.op(f"mul i64 {granule}, {size}")
    end = _lesser(f, f.op(f"add i64 {begin}, {size}"), args.integer("columns"))
    with f.loop(begin, end, tile) as loop:
        yield loop.index, _lesser(f, f.op(f"add i64 {loop.index}, {tile}"), end)


def _sums_at(f: Function, out: str, block: str, size: int) -> str:
    """Return where the sums of a block begin."""
    return f.at(out, f.op(f"mul i64 {block}, {size}"), "double")


def _store_sums(f: Function, block: str, size: int, where: str) -> None:
    """Add up the lanes of a block's accumulators, and store them as doubles."""
    total = _reduce(f, [f.load_vector(place) for place in _slots(f, block, size)])
    kind, mask = f"<{size} x {f.scalar}>", f"<{size} x i1>"
    lost = f.op(f"fcmp uno {kind} {total}, {total}")
    infinite = f"splat ({f.scalar} {constant(float('inf'), f.scalar)})"
    total = f.op(f"select {mask} {lost}, {kind} {infinite}, {kind} {total}")
    if f.scalar == "float":
        total = f.op(f"fpext {kind} {total} to <{size} x double>")
    f.line(f"  store <{size} x double> {total}, ptr {where}, align 8")


def _slots(f: Function, block: str, size: int) -> list[str]:
    """Return the addresses of a block's accumulators."""
    start = f.at("%local", f.op(f"mul i64 {block}, {size}"), f.vector)
    return [f.at(start, str(i), f.vector) for i in range(size)]


def _block(f: Function, rows: str, block: str, side: int) -> list[str]:
    """Load the pointers of a block's rows."""
    start = f.op(f"mul i64 {block}, {side}")
    return [f.pointer(rows, f.op(f"add i64 {start}, {i}")) for i in range(side)]


def _accumulate(
    f: Function,
    lefts: list[str],
    rights: list[str],
    begin: str,
    end: str,
    pairs: list[tuple[int, int]],
    block: str,
    fetch: Sequence[str] = (),
) -> None:
    """Add squared differences of pairs of rows over a tile to the accumulators of a block.

    Pair (i, j) has slot i * (rows on the right) + j. Without rows on the right, the differences
    are to the origin.
    """
    width = max(1, len(rights))
    slots = _slots(f, block, len(lefts) * width)
    used = [slots[i * width + j] for i, j in pairs]
    ahead = f.op(f"sub i64 {end}, {begin}")
    initial = [f.load_vector(slot) for slot in used]
    with f.loop(begin, end, f.lanes) as loop:
        totals = [loop.carry(f.vector, value) for value in initial]
        left = [f.load(f.at(row, loop.index)) for row in lefts]
        for row in fetch:
            # The next tile is asked for while this one is worked on, a little in every turn.
            f.prefetch(f.at(row, f.op(f"add i64 {loop.index}, {ahead}")), 0)
        right = left if rights is lefts else [f.load(f.at(row, loop.index)) for row in rights]
        for total, (i, j) in zip(totals, pairs, strict=True):
            difference = f.sub(left[i], right[j]) if rights else left[i]
            loop.update(total, f.multiply_add(difference, difference, total))
    for total, slot in zip(totals, used, strict=True):
        f.store_vector(total, slot)


def _reduce(f: Function, vectors: list[str]) -> str:
    """Return the sums of the lanes of each vector, as one vector, adding neighbours first."""
    size, lanes, step = len(vectors), f.lanes, 1
    if size > lanes:
        halves = [_reduce(f, vectors[:lanes]), _reduce(f, vectors[lanes:])]
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


def _finish(f: Function) -> str:
    body = "\n".join(f.lines)
    return f"""{declarations(f)}
define void @kernel{SIGNATURE} {{
entry:
{body}
  ret void
}}
"""
