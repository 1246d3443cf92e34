"""Generators of kernels that replace m rows by weighted sums of the rows (mixes).

A mix kernel runs alone, or fused with a column kernel that reduces the mixed rows.

A mix is a sparse matrix in rows of (index, weight). A row without weight is never read, so its NaN
has no effect. Weights that sum to one are applied to the distances from a centre row c, as c + sum
of w (x - c), so that equal rows mix to exactly that row. Distances are scaled down and their sum is
scaled up again, so that neither overflows. Mixes that share no row have centres of their own, so
that a NaN in one does not affect another.
"""

from __future__ import annotations

from typing import NamedTuple

from phocas.kernels.emit import (
    SIGNATURE,
    ColumnArguments,
    Element,
    Function,
    constant,
    declarations,
)
from phocas.kernels.target import Target

UNROLL = 8  # vectors at once: many sums hide the latency of additions and of the loop
# Up to this number of rows, hardware follows every row, if little of each is read at a time: one
# mix of 20 rows then takes 1.0 times their mean, against 1.7 with UNROLL vectors. Of 64 rows it
# would take 1.5 times their mean, against 1.1.
FOLLOWED_ROWS = 32
FEW_VECTORS = 2  # vectors at once for one mix of so few rows
PREFETCHED = 256  # smallest prefetch distance in bytes
LARGEST_STEP = 16 * UNROLL  # columns, with the widest vectors
PLAIN, CONVEX, UNIFORM = range(3)  # modes: any weights, weights that sum to one, all equal


class CombineArguments(NamedTuple):
    """Arguments of the mix alone.

    ``out`` is a table of k pointers to rows of computed values. ``centres`` is a table of the
    centre rows, unless the mode is plain.
    """

    rows: int
    out: int
    k: int
    starts: int
    indices: int
    weights: int
    mode: int
    centres: int


class FusedArguments(NamedTuple):
    """Arguments of a mix fused with a column kernel; ``rule`` points to :class:`RuleWords`."""

    rows: int
    out: int
    k: int
    starts: int
    indices: int
    weights: int
    mode: int
    rule: int


class RuleWords(NamedTuple):
    """A column kernel, its arguments except rows and output, and how tiles are centred.

    There are g centres. ``groups`` has the index of its centre for each of the m rows, then for
    each of the k mixes. ``scales`` are the factors of distances and of their sums. ``memory`` is a
    table of the original rows, whose next tile is prefetched; the rows that are read may be copies.
    """

    work: int
    arguments: int
    centres: int
    m: int
    tile: int
    groups: int
    g: int
    scales: int
    memory: int


class ThreadWords(NamedTuple):
    """A thread's memory: tables of m + g and of k scratch rows, and counts."""

    centred: int
    mixed: int
    counts: int


def combine_few_module(target: Target, element: Element) -> str:
    """Generate the kernel of one mix of at most ``FOLLOWED_ROWS`` rows; the bits are the same."""
    return combine_module(target, element, FEW_VECTORS)


def combine_module(target: Target, element: Element, unroll: int = UNROLL) -> str:
    """Generate the kernel of the mix alone."""
    f = Function(target, element)
    args = f.named(CombineArguments._fields)
    rows, out, centres = (args.pointer(name) for name in ("rows", "out", "centres"))
    starts, indices, weights = (args.pointer(name) for name in ("starts", "indices", "weights"))
    k, mode = args.integer("k"), args.integer("mode")
    around = f.op(f"icmp ne i64 {mode}, {PLAIN}")
    down, up = (_scale(f, around, factor) for factor in (0.5, 2.0))
    columns = f.op("sub i64 %stop, %start")
    step = f.lanes * unroll
    ahead = max(PREFETCHED, step * f.element.size)
    whole = f.op(f"sub i64 %stop, {f.op(f'srem i64 {columns}, {step}')}")
    with f.loop("0", k) as row:
        first, last = _entries(f, starts, row.index)
        place, centre = f.pointer(out, row.index), f.pointer(centres, row.index)
        lanes = f.lanes
        for begin, end, vectors in (("%start", whole, unroll), (whole, "%stop", 1)):
            f.set_lanes(lanes if vectors > 1 else 1)
            with f.loop(begin, end, f.lanes * vectors) as loop:
                offsets = [f.op(f"add i64 {loop.index}, {i * f.lanes}") for i in range(vectors)]
                middles = [_centre(f, centre, offset, around) for offset in offsets]
                scale, inverse = f.broadcast(down), f.broadcast(up)
                minus = [f.negate(f.mul(middle, scale)) for middle in middles]
                with f.loop(first, last) as entry:
                    totals = [entry.carry(f.vector, "zeroinitializer") for _ in offsets]
                    index = f.op(f"load i64, ptr {f.at(indices, entry.index, 'i64')}")
                    weight = f.broadcast(f.scalar_at(weights, entry.index))
                    source = f.pointer(rows, index)
                    for total, less, offset in zip(totals, minus, offsets, strict=True):
                        address = f.at(source, offset)
                        if vectors > 1:
                            f.prefetch(address, ahead)
                        value = f.load(address)
                        distance = f.multiply_add(value, scale, less)
                        entry.update(total, f.multiply_add(distance, weight, total))
                for total, middle, offset in zip(totals, middles, offsets, strict=True):
                    mixed = f.multiply_add(total, inverse, middle)
                    _put(f, mixed, f.at(place, offset, f.scalar))
        f.set_lanes(lanes)
    return finish(f)


def fused_module(target: Target, element: Element) -> str:
    """Generate the kernel of a mix fused with a column kernel, one tile at a time.

    ``local`` is :class:`ThreadWords`: rows are centred into the first table, mixed into the second
    and reduced from there, all in cache. Scratch rows have space for one more vector.
    """
    f = Function(target, element)
    args = f.named(FusedArguments._fields)
    rows, out = args.pointer("rows"), args.pointer("out")
    starts, indices, weights = (args.pointer(name) for name in ("starts", "indices", "weights"))
    k, mode = args.integer("k"), args.integer("mode")
    rule = f.named(RuleWords._fields, args.pointer("rule"))
    work, centres, groups, memory = (
        rule.pointer(name) for name in ("work", "centres", "groups", "memory")
    )
    m, tile, g = (rule.integer(name) for name in ("m", "tile", "g"))
    down, up = (f.scalar_at(rule.pointer("scales"), i) for i in range(2))
    local = f.named(ThreadWords._fields, "%local")
    centred, mixed, counts = (local.pointer(name) for name in ThreadWords._fields)
    size = len(ColumnArguments._fields)
    inner = f.named(ColumnArguments._fields, f.op(f"alloca [{size} x i64], align 8"))
    f.line(
        f"  call void @llvm.memcpy.p0.p0.i64(ptr {inner.table}, ptr {rule.pointer('arguments')},"
        f" i64 {8 * size}, i1 false)"
    )
    f.line(f"  store ptr {mixed}, ptr {inner.slot('rows')}")
    around = f.op(f"icmp ne i64 {mode}, {PLAIN}")
    uniform = f.op(f"icmp eq i64 {mode}, {UNIFORM}")
    with f.loop("%start", "%stop", tile) as loop:
        end = f.op(f"add i64 {loop.index}, {tile}")
        past = f.op(f"icmp sgt i64 {end}, %stop")
        end = f.op(f"select i1 {past}, i64 %stop, i64 {end}")
        columns = f.op(f"sub i64 {end}, {loop.index}")
        _copy_centres(f, centres, centred, m, g, loop.index, columns, around)
        _centre_tile(f, rows, centred, groups, m, loop.index, columns, down)
        with f.loop("0", k) as row:
            _fetch_next(f, memory, m, k, row.index, end, columns)
            first, last = _entries(f, starts, row.index)
            place = f.pointer(mixed, row.index)
            middle_row = _middle_row(f, centred, groups, m, f.op(f"add i64 {m}, {row.index}"))
            inverse = f.broadcast(up)
            with f.loop("0", columns, f.lanes * UNROLL) as step:
                offsets = [f.op(f"add i64 {step.index}, {i * f.lanes}") for i in range(UNROLL)]
                sums = _weighted(f, centred, indices, weights, first, last, offsets, uniform)
                for total, offset in zip(sums, offsets, strict=True):
                    middle = f.load_vector(f.at(middle_row, offset, f.scalar))
                    value = f.multiply_add(total, inverse, middle)
                    _put(f, value, f.at(place, offset, f.scalar))
        f.line(f"  store ptr {f.at(out, loop.index, f.scalar)}, ptr {inner.slot('out')}")
        f.line(f"  call void {work}(ptr {inner.table}, ptr {counts}, i64 0, i64 {columns})")
    return finish(f)


def _fetch_next(f: Function, rows: str, m: str, k: str, row: str, end: str, columns: str) -> None:
    """Emit code that prefetches the next tile of a k-th of the rows.

    All rows at once are more outstanding reads than a core supports. Between the mixes, the reads
    overlap with arithmetic.
    """
    following = f.op(f"add i64 {row}, 1")
    first, last = (
        f.op(f"udiv i64 {f.op(f'mul i64 {number}, {m}')}, {k}") for number in (row, following)
    )
    with f.loop(first, last) as each:
        source = f.at(f.pointer(rows, each.index), end)
        with f.loop("0", columns, f.lanes) as step:
            f.prefetch(f.at(source, step.index), 0)


def _copy_centres(
    f: Function,
    centres: str,
    centred: str,
    m: str,
    g: str,
    start: str,
    columns: str,
    around: str,
) -> None:
    """Emit code that copies a tile of the centre rows behind the m scratch rows.

    Without a centre, zeros are written.
    """
    lanes = f.lanes
    whole = f.op(f"sub i64 {columns}, {f.op(f'srem i64 {columns}, {lanes}')}")
    with f.loop("0", g) as each:
        source = f.pointer(centres, each.index)
        place = f.pointer(centred, f.op(f"add i64 {m}, {each.index}"))
        for begin, end, width in (("0", whole, lanes), (whole, columns, 1)):
            f.set_lanes(width)
            with f.loop(begin, end, width) as step:
                column = f.op(f"add i64 {start}, {step.index}")
                middle = _centre(f, source, column, around)
                _put(f, middle, f.at(place, step.index, f.scalar))
        f.set_lanes(lanes)


def _centre_tile(
    f: Function,
    rows: str,
    centred: str,
    groups: str,
    m: str,
    start: str,
    columns: str,
    down: str,
) -> None:
    """Emit the scaled x - c for every row of a tile."""
    lanes = f.lanes
    whole = f.op(f"sub i64 {columns}, {f.op(f'srem i64 {columns}, {lanes}')}")
    with f.loop("0", m) as row:
        source, place = f.pointer(rows, row.index), f.pointer(centred, row.index)
        middle_row = _middle_row(f, centred, groups, m, row.index)
        for begin, end, width in (("0", whole, lanes), (whole, columns, 1)):
            f.set_lanes(width)
            scale = f.broadcast(down)
            with f.loop(begin, end, width) as step:
                column = f.op(f"add i64 {start}, {step.index}")
                middle = f.op(
                    f"load {f.vector}, ptr {f.at(middle_row, step.index, f.scalar)}, align 4"
                )
                distance = f.multiply_add(
                    f.load(f.at(source, column)), scale, f.negate(f.mul(middle, scale))
                )
                _put(f, distance, f.at(place, step.index, f.scalar))
        f.set_lanes(lanes)


def _middle_row(f: Function, centred: str, groups: str, m: str, place: str) -> str:
    """Emit code for the scratch row of the centre of a row or mix."""
    group = f.op(f"load i64, ptr {f.at(groups, place, 'i64')}")
    return f.pointer(centred, f.op(f"add i64 {m}, {group}"))


def _weighted(
    f: Function,
    rows: str,
    indices: str,
    weights: str,
    first: str,
    last: str,
    offsets: list[str],
    uniform: str,
) -> list[str]:
    """Emit code for the weighted sums of centred rows.

    If all weights are equal, the rows are only added, and the scale contains the weight.
    """
    tag = f.name()[1:]
    f.line(f"  br i1 {uniform}, label %same{tag}, label %each{tag}")
    results = []
    for label in (f"same{tag}", f"each{tag}"):
        f.label(label)
        with f.loop(first, last) as entry:
            totals = [entry.carry(f.vector, "zeroinitializer") for _ in offsets]
            index = f.op(f"load i64, ptr {f.at(indices, entry.index, 'i64')}")
            source = f.pointer(rows, index)
            same = label.startswith("same")
            weight = "" if same else f.broadcast(f.scalar_at(weights, entry.index))
            for total, offset in zip(totals, offsets, strict=True):
                value = f.load_vector(f.at(source, offset, f.scalar))
                entry.update(
                    total, f.add(total, value) if same else f.multiply_add(value, weight, total)
                )
        results.append((f.block, totals))
        f.line(f"  br label %join{tag}")
    f.label(f"join{tag}")
    (one, sums), (other, others) = results
    return [
        f.op(f"phi {f.vector} [ {a}, %{one} ], [ {b}, %{other} ]")
        for a, b in zip(sums, others, strict=True)
    ]


def _entries(f: Function, starts: str, row: str) -> tuple[str, str]:
    following = f.op(f"add i64 {row}, 1")
    first = f.op(f"load i64, ptr {f.at(starts, row, 'i64')}")
    return first, f.op(f"load i64, ptr {f.at(starts, following, 'i64')}")


def _centre(f: Function, centre: str, offset: str, around: str) -> str:
    """Emit code that loads the values of the centre row, with zeros in place of NaN and inf.

    Without a centre, all values are zero.

    Around -inf, a mix with -inf would be NaN.
    """
    value = f.load(f.at(centre, offset))
    finite = f.compare("olt", f.absolute(value), f.splat(float("inf")))
    value = f.select(finite, value, "zeroinitializer")
    return f.op(f"select i1 {around}, {f.vector} {value}, {f.vector} zeroinitializer")


def _scale(f: Function, around: str, factor: float) -> str:
    """Emit code that loads a factor of distances; the factor is 1 without a centre."""
    given, one = (constant(value, f.scalar) for value in (factor, 1.0))
    return f.op(f"select i1 {around}, {f.scalar} {given}, {f.scalar} {one}")


def _put(f: Function, value: str, address: str) -> None:
    size = f.element.compute_bits // 8
    f.line(f"  store {f.vector} {value}, ptr {address}, align {size}")


def finish(f: Function) -> str:
    """Generate a ``kernel`` from a body that works on vectors and on single values."""
    body = "\n".join(f.lines)
    lanes = f.lanes
    f.set_lanes(1)
    single = "\n".join(line for line in declarations(f).splitlines() if "@llvm.f" in line)
    f.set_lanes(lanes)
    return f"""{declarations(f)}
{single}
define void @kernel{SIGNATURE} {{
entry:
{body}
  ret void
}}
"""
