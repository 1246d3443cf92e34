"""Sums of squares over granules of columns, and mixes of rows, as Triton source.

Both follow the CPU kernels step by step (:mod:`phocas.kernels.distances` and
:mod:`phocas.kernels.mixing`). A fixed number of lanes adds columns at that stride, neighbouring
lanes are added first, and granules are added one after another. So the bits are the same
everywhere.
"""

from __future__ import annotations

from phocas.kernels.distances import LANES
from phocas.kernels.emit import Element
from phocas.kernels.triton.writer import HEADER, STORED, TYPES

SIDE = 8  # rows per block; a program computes the pairs of two blocks

_VALUES = """
@triton.jit
def values(rows, columns, mask):
    stored = tl.load(rows.to(tl.pointer_type(STORED)) + columns, mask=mask, other=0)
    if STORED == tl.uint16:
        stored = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return stored.to(TYPE)
"""

_SUMS = """
@triton.jit(do_not_specialize=["m", "columns", "granule"])
def pairs(rows, out, m, columns, granule):
    number, left, right = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if right < left:
        return
    i = left * SIDE + tl.arange(0, SIDE)
    j = right * SIDE + tl.arange(0, SIDE)
    one = tl.load(rows + i, mask=i < m, other=0)[:, None, None]
    other = tl.load(rows + j, mask=j < m, other=0)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    last = tl.minimum((number + 1) * granule, columns)
    total = tl.zeros((SIDE, SIDE, LANES), TYPE)
    for start in range(number * granule, last, LANES):
        column = start + lane
        inside = column < last
        a = values(one, column, inside & (i < m)[:, None, None])
        b = values(other, column, inside & (j < m)[None, :, None])
        difference = a - b
        total = tl.fma(difference, difference, total)
NEIGHBOURS_OF_PAIRS
    blocks = tl.num_programs(1)
    place = ((number * blocks + left) * blocks + right) * SIDE * SIDE
    cell = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(out + place + cell, tl.reshape(total, (SIDE, SIDE)).to(tl.float64))


@triton.jit(do_not_specialize=["m", "columns", "granule"])
def squares(rows, out, m, columns, granule):
    number, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * SIDE + tl.arange(0, SIDE)
    starts = tl.load(rows + i, mask=i < m, other=0)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    last = tl.minimum((number + 1) * granule, columns)
    total = tl.zeros((SIDE, LANES), TYPE)
    for start in range(number * granule, last, LANES):
        column = start + lane
        a = values(starts, column, (column < last) & (i < m)[:, None])
        total = tl.fma(a, a, total)
NEIGHBOURS_OF_ROWS
    place = (number * tl.num_programs(1) + block) * SIDE
    tl.store(out + place + tl.arange(0, SIDE), tl.reshape(total, (SIDE,)).to(tl.float64))
"""

_TOTAL = """
@triton.jit(do_not_specialize=["granules", "width"])
def add_up(sums, total, granules, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    value = tl.load(total + place, mask=inside, other=0)
    following = sums + place
    for _ in range(granules):
        value += tl.load(following, mask=inside, other=0)
        following += width
    tl.store(total + place, value, mask=inside)
"""

_MIX = """
@triton.jit(do_not_specialize=["m", "k", "columns"])
def mix(rows, weights, centres, scales, out, m, k, columns, AROUND: tl.constexpr,
        SAME: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr):
    lane = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    number = (tl.program_id(1) * MIXES + tl.arange(0, MIXES))[:, None]
    inside = (lane < columns) & (number < k)
    down, up = tl.load(scales), tl.load(scales + 1)
    middle = tl.zeros((MIXES, BLOCK), TYPE)
    if AROUND:
        middle = values(tl.load(centres + number, mask=number < k, other=0), lane, inside)
        # Around -inf, a mix with -inf would be NaN.
        middle = tl.where(tl.abs(middle) < float("inf"), middle, 0.0)
    less = (middle * down) * -1.0
    total = tl.zeros((MIXES, BLOCK), TYPE)
    for i in range(m):
        value = values(tl.load(rows + i), lane, lane < columns)
        weight = tl.load(weights + number * m + i, mask=number < k, other=0)
        distance = tl.fma(value, down, less)
        more = total + distance if SAME else tl.fma(distance, weight, total)
        # A row that has no weight is not touched: its NaN stays where it is.
        total = tl.where(weight != 0, more, total)
    mixed = tl.fma(total, up, middle)
    tl.store(out + number.to(tl.int64) * columns + lane, mixed, mask=inside)
"""


def sums_source(element: Element) -> str:
    """Generate ``pairs`` and ``squares`` over granules of columns, and ``add_up`` over granules.

    ``pairs`` is launched over (granules, blocks, blocks) and writes (granule, block, block, SIDE,
    SIDE) doubles, for blocks I <= J. ``squares`` is launched over (granules, blocks). Both take
    (rows, out, m, columns, granule).
    """
    text = _SUMS
    lanes = LANES[element.compute]
    for name, rows in (("NEIGHBOURS_OF_PAIRS", "SIDE, SIDE"), ("NEIGHBOURS_OF_ROWS", "SIDE")):
        lines, width = "", lanes
        while width > 1:
            width //= 2
            lines += f"    first, second = tl.split(tl.reshape(total, ({rows}, {width}, 2)))\n"
            lines += "    total = first + second\n"
        # A sum that overflows or contains NaN is infinite.
        lines += "    total = tl.where(total == total, total, float('inf'))"
        text = text.replace(name, lines)
    return _filled(element, _VALUES + text + _TOTAL, SIDE=SIDE, LANES=lanes)


def mix_source(element: Element) -> str:
    """Generate ``mix``: k sums of the m rows, each around a centre row unless weights are plain.

    It takes (rows, weights, centres, scales, out, m, k, columns): k x m weights, the addresses of k
    centres, the factors of distances and of their sums, and a (k, columns) output.
    """
    return _filled(element, _VALUES + _MIX)


def _filled(element: Element, text: str, **words: int) -> str:
    kinds = {"STORED": STORED[element.name], "TYPE": TYPES[element.compute]}
    for name, word in {**kinds, **words}.items():
        text = text.replace(name, str(word))
    return HEADER + text
