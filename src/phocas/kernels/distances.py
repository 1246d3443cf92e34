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

from phocas.kernels.emit import SIGNATURE, Element, Function, constant, declarations
from phocas.kernels.target import Target

LANES = {"float": 16, "double": 8}  # fixed, so that every host adds in the same order


def block_rows(target: Target) -> int:
    """Return the side of a block of pairs: as many accumulators as registers allow."""
    return 4 if target.vector_bits >= 512 else 2


def granule_columns(m: int) -> int:
    """Return the columns of a granule; its sums weigh at most 1/32 of its values."""
    return 1024 * max(1, -(-m // 64))


def tile_columns(m: int) -> int:
    """Return the columns worked on at a time: m rows and their accumulators stay in L1 or L2."""
    return 128 if m <= 32 else 256 if m <= 64 else 1024


def scratch_words(target: Target, m: int) -> int:
    """Return a thread's memory in words: a vector for every pair of padded rows."""
    side = block_rows(target)
    blocks = -(-m // side)
    return blocks * (blocks + 1) // 2 * side * side * 8


def pairs_module(target: Target, element: Element) -> str:
    """Write the kernel of pairwise sums over a range of granules.

    args are (rows, out, blocks, first column, granule columns, tile columns). ``rows`` is padded to
    whole blocks. ``out`` gets, as doubles, for each granule and each pair of blocks I <= J, the
    sums of block I's rows against block J's; of a block with itself, those of rows i < j.
    """
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    rows, out, blocks = f.pointer("%args", 0), f.pointer("%args", 1), f.integer("%args", 2)
    above = f.op(f"add i64 {blocks}, 1")
    pairs = f.op(f"lshr i64 {f.op(f'mul i64 {blocks}, {above}')}, 1")
    square = [(i, j) for i in range(side) for j in range(side)]
    height = f.op(f"mul i64 {blocks}, {side}")
    with _tiles(f, pairs, len(square), out) as (begin, end), f.loop("0", blocks) as row:
        # The pair (I, J) is number I * blocks - I * (I - 1) / 2 + J - I.
        skipped = f.op(f"mul i64 {row.index}, {f.op(f'sub i64 {row.index}, 1')}")
        skipped = f.op(f"lshr i64 {skipped}, 1")
        base = f.op(f"sub i64 {f.op(f'mul i64 {row.index}, {blocks}')}, {skipped}")
        lefts = _block(f, rows, row.index, side)
        diagonal = [(i, j) for i, j in square if i < j]
        _accumulate(f, lefts, lefts, begin, end, diagonal, base)
        with f.loop(f.op(f"add i64 {row.index}, 1"), blocks) as column:
            rights = _block(f, rows, column.index, side)
            number = f.op(f"add i64 {base}, {f.op(f'sub i64 {column.index}, {row.index}')}")
            # Off the diagonal, this is number (number - I - 1): two rows each of the next tile.
            following = f.op(f"sub i64 {number}, {f.op(f'add i64 {row.index}, 1')}")
            place = f.op(f"urem i64 {f.op(f'mul i64 {following}, 2')}, {height}")
            later = [f.pointer(rows, f.op(f"add i64 {place}, {i}")) for i in range(2)]
            _accumulate(f, lefts, rights, begin, end, square, number, later)
    return _finish(f)


def norms_module(target: Target, element: Element) -> str:
    """Write the kernel of sums of squares: args as above, out gets one sum for each row."""
    side = block_rows(target)
    f = Function(target, element, LANES[element.compute])
    rows, out, blocks = f.pointer("%args", 0), f.pointer("%args", 1), f.integer("%args", 2)
    with _tiles(f, blocks, side, out) as (begin, end), f.loop("0", blocks) as row:
        lefts = _block(f, rows, row.index, side)
        _accumulate(f, lefts, [], begin, end, [(i, 0) for i in range(side)], row.index)
    return _finish(f)


@contextmanager
def _tiles(f: Function, blocks: str, size: int, out: str) -> Iterator[tuple[str, str]]:
    """Write the loops over granules and their tiles, around the accumulators' life in ``local``.

    A block has ``size`` accumulators. They begin at zero, and end as sums in ``out``.
    """
    first, granule, tile = (f.integer("%args", i) for i in (3, 4, 5))
    width = f.op(f"mul i64 {blocks}, {size}")
    bytes_ = f.op(f"mul i64 {width}, 64")
    with f.loop("%start", "%stop") as outer:
        f.line(f"  call void @llvm.memset.p0.i64(ptr %local, i8 0, i64 {bytes_}, i1 false)")
        begin = f.op(f"add i64 {first}, {f.op(f'mul i64 {outer.index}, {granule}')}")
        with f.loop(begin, f.op(f"add i64 {begin}, {granule}"), tile) as inner:
            yield inner.index, f.op(f"add i64 {inner.index}, {tile}")
        sums = f.at(out, f.op(f"mul i64 {outer.index}, {width}"), "double")
        with f.loop("0", blocks) as each:
            total = _reduce(f, [f.load_vector(place) for place in _slots(f, each.index, size)])
            kind, mask = f"<{size} x {f.scalar}>", f"<{size} x i1>"
            lost = f.op(f"fcmp uno {kind} {total}, {total}")
            infinite = f"splat ({f.scalar} {constant(float('inf'), f.scalar)})"
            total = f.op(f"select {mask} {lost}, {kind} {infinite}, {kind} {total}")
            if f.scalar == "float":
                total = f.op(f"fpext {kind} {total} to <{size} x double>")
            where = f.at(sums, f.op(f"mul i64 {each.index}, {size}"), "double")
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
