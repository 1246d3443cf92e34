"""Generators of column kernels that process one block of columns at a time.

These kernels are needed for windows with a cutoff, and to count the dropped values of each row.

- Block: a fixed number of columns, counted from column 0 of the whole matrix.
- Radius of a column: the distance from the centre to the farthest value that is always kept.
- Spread of a block: the root mean square of the radii of the columns of the block.
- Counts: the number of dropped values of each row.
- Marks of a block: the centre and the limit of each column, for each row the number of values
  beyond the limits, and the spread. A cell filter and the tail of a window need the marks.

The first pass over a block sorts each column. It writes the bounds of the kept values to scratch
memory and, with a cutoff, which values were dropped. The second pass weights the dropped values by
the spread. The last pass counts dropped values while rows are in cache. It processes a few rows at
a time along the block, so that counters stay in registers.

The spread is summed in a number of lanes that is the same on every processor, so that the spread
has the same bits everywhere. If several shards have parts of a block, the caller passes the spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.columns import (
    Window,
    average,
    held,
    outside,
    plain_mean,
    run_network,
    scale_for,
)
from phocas.kernels.emit import (
    SIGNATURE,
    ColumnArguments,
    Element,
    Function,
    Vectors,
    constant,
    declarations,
    pad_text,
)
from phocas.kernels.target import Target

BLOCK_COLUMNS = 1024
LANES = {"float": 16, "double": 8}  # for the spread; fixed, so that every host adds in one order
LARGEST = {"float": float(np.finfo(np.float32).max), "double": float(np.finfo(np.float64).max)}
TOGETHER = 4  # rows that are compared with the same bounds at once

# Scratch memory has one row of computed values for each of these. A value is kept if it is between
# LOW and HIGH, or, for distances, if its scaled distance from -LOW is at most HIGH. With a cutoff,
# the centre, the sum of the kept distances and each dropped distance follow.
LOW, HIGH, CENTRE, TOTAL, BEYOND = range(5)
FARTHEST = TOTAL  # in marks: the scaled distance of the value that is farthest from the centre

Gives = Literal["values", "mean", "radii", "marks"]
"""The output of a kernel: the means of windows, the plain mean of all rows (the window is only used
to count what it drops), the radii of columns, or the marks of blocks."""

_SWEEP = "ptr noalias %args, ptr noalias %rows, ptr noalias %out, ptr noalias %scratch"
_WHERE = "i64 %column, i64 %place, i64 %count"


def spread(radii: NDArray[np.floating]) -> np.floating:
    """Return the root mean square of a block's radii, with the same bits as the kernels.

    Radii are divided by a power of two near the largest, so that no square overflows. Radii that
    are NaN or infinite count as 0.

    >>> spread(np.array([3, 4, 0, np.inf], np.float32))
    np.float32(2.5)
    """
    kind = radii.dtype.type
    lanes = LANES["double" if kind is np.float64 else "float"]
    padded = np.zeros(-(-len(radii) // lanes) * lanes, kind)
    padded[: len(radii)] = np.where(np.isfinite(radii), radii, kind(0))
    limit = -int(np.finfo(kind).minexp)
    power = min(max(int(np.frexp(padded.max())[1]) - 1, -limit), limit)
    squares = np.square(np.ldexp(padded, -power)).reshape(-1, lanes)
    total = np.add.accumulate(np.add.accumulate(squares, axis=0)[-1])[-1]
    return kind(np.ldexp(np.sqrt(total / kind(len(radii))), power))


@lru_cache(maxsize=256)
def marks_dtype(m: int, kind: np.dtype[np.floating]) -> np.dtype[Any]:
    """Return the dtype of the marks of a block, the data that a cell filter needs.

    A value is an outlier if its scaled distance from the centre of its column is greater than the
    limit of the column. If the block has no outlier, all fields but the spread are zero.
    """
    return np.dtype(
        [
            ("centre", kind, BLOCK_COLUMNS),
            ("limit", kind, BLOCK_COLUMNS),
            ("counts", np.int64, m),
            ("spread", np.float64),
        ]
    )


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The passes of a kernel over a block of columns, as LLVM IR functions.

    ``cutoff`` is the index of the cutoff among the constants of the kernel. The next constant is
    the spread of the block if the caller gives the spread, otherwise NaN.
    """

    first: str
    arrays: int
    second: str = ""
    blame: str = ""
    gives: Gives = "values"
    cutoff: int = 0


def straight_module(
    target: Target,
    element: Element,
    m: int,
    window: Window,
    blame: bool,
    gives: Gives = "values",
) -> str:
    """Generate the LLVM IR of a kernel over blocks whose sorting network is straight-line code."""
    f = Function(target, element)
    with f.loop("0", "%count", f.lanes) as loop:
        column = f.op(f"add i64 %column, {loop.index}")
        addresses = [f.at(f.pointer("%rows", i), column) for i in range(m)]
        rows = [f.load(address) for address in addresses]
        if gives == "mean":
            f.store(plain_mean(f, rows), f.at("%out", column))
        wires = run_network(f, [f.nan_to_inf(value) for value in rows], addresses, window)
        found = average(f, wires, window)
        left: tuple[str, ...] = (found.low, found.high)
        if window.cutoff and gives in ("marks", "mean"):
            left += (found.centre, _farthest(f, found.beyond))
        elif window.cutoff and gives == "values":
            left += (found.centre, found.total, *found.beyond)
        elif gives == "values":
            f.store(found.value, f.at("%out", column))
        leave(f, left, f.op(f"add i64 %place, {loop.index}"))
    scale = scale_for(window.kept(m)) if window.drop else None

    def weigh(g: Function, weights: Weights, place: str) -> tuple[str, str]:
        total, weight = g.load_vector(slot(g, TOTAL, place)), g.splat(window.kept(m))
        for k in range(window.drop or 0):
            distance = g.load_vector(slot(g, BEYOND + k, place))
            total, weight = weights.add(distance, total, weight)
        return total, weight

    def scaled(g: Function) -> str | None:
        return None if scale is None else g.splat(scale)

    def farthest(g: Function, place: str) -> str:
        if gives != "values":
            return g.load_vector(slot(g, FARTHEST, place))
        ends = (BEYOND, BEYOND + len(found.beyond) - 1)
        return _farthest(g, tuple(g.load_vector(slot(g, row, place)) for row in ends))

    sweeps = Sweeps(
        first_text(f),
        len(left),
        second_text(target, element, scaled, weigh if gives == "values" else None, farthest)
        if window.cutoff and gives != "radii"
        else "",
        blame_text(target, element, scaled) if blame or gives == "marks" else "",
        gives,
    )
    return module_text(f, sweeps)


def _farthest(f: Function, beyond: tuple[str, ...]) -> str:
    """Emit code for the largest dropped distance, which is in the first or the last pair."""
    first, last = f.absolute(beyond[0]), f.absolute(beyond[-1])
    return f.select(f.compare("uge", first, last), first, last)


def first_text(f: Function) -> str:
    """Generate the IR function of the first pass over ``count`` columns, from ``column`` on.

    The scratch memory of these columns starts at ``place``. The last columns, fewer than a vector,
    are processed by the same function on a padded copy, because rows and output are parameters.
    """
    return _define("first", f"{_SWEEP}, {_WHERE}", f)


def leave(f: Function, values: tuple[str, ...], place: str) -> None:
    """Emit code that stores the values of some columns in consecutive rows of scratch memory."""
    for i, value in enumerate(values):
        f.store_vector(value, slot(f, i, place))


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of values by their scaled distance from the centre; zero beyond the limit."""

    f: Vectors
    radius: str
    twice: str
    inverse: str
    limit: str

    def add(
        self, distance: str, total: str, weight: str, share: str | None = None
    ) -> tuple[str, str]:
        """Emit code that adds one distance to the sums of weighted distances and of weights.

        ``share`` is the weight of a value within the cutoff; by default 1.
        """
        f = self.f
        length = f.absolute(distance)
        falling = f.low(f.mul(f.sub(self.twice, length), self.inverse), f.splat(1))
        mine = f.select(f.compare("ole", length, self.radius), f.splat(1), falling)
        if share is not None:
            mine = f.mul(mine, share)
        inside = f.compare("ole", length, self.limit)
        moved = f.select(inside, f.mul(mine, distance), f.splat(0))
        return f.add(total, moved), f.add(weight, f.select(inside, mine, f.splat(0)))

    def bounds(self, distance: str, value: str, low: str, high: str) -> tuple[str, str]:
        """Emit code that includes a value in the bounds, if its weight is not zero.

        The bounds are the smallest and the largest value with a nonzero weight.
        """
        f = self.f
        inside = f.compare("ole", f.absolute(distance), self.limit)
        low = f.low(low, f.select(inside, value, f.splat(math.inf)))
        return low, f.high(high, f.select(inside, value, f.splat(-math.inf)))


def weights_within(f: Vectors, radius: str, spread: str, cutoff: str) -> Weights:
    """Emit code for the weights in a column with this radius, in a block with this spread."""
    # Scaled distances between finite values are at most this, and infinity is beyond twice that.
    largest = f.splat(LARGEST[f.scalar] / 2)
    full = f.low(f.mul(f.high(radius, spread), cutoff), largest)
    twice = f.add(full, full)
    # Infinite if the spread is subnormal: weights are then 1 up to twice the cutoff.
    inverse = f.div(f.splat(1), full)
    return Weights(f, radius, twice, inverse, f.high(radius, twice))


def weighted(f: Vectors, centre: str, total: str, weight: str, scale: str) -> str:
    """Emit code for a column's mean, from the centre and the sums of distances and of weights."""
    return f.add(centre, f.div(total, f.mul(weight, scale)))


Scale = Callable[[Function], str | None]
"""A function that emits code for the scale of distances; None if values are bounded directly."""


def second_text(
    target: Target,
    element: Element,
    scaled: Scale,
    weigh: Callable[[Function, Weights, str], tuple[str, str]] | None,
    farthest: Callable[[Function, str], str] | None = None,
) -> str:
    """Generate the IR function of the second pass over a block of columns.

    The pass writes the weighted means, from the sums that the code of ``weigh`` computes, and the
    limits that the count of dropped values needs. It returns whether a value of the block may be
    beyond its limit. Without ``farthest``, the code for the largest dropped distance, this is
    always true. It is also true for a column with an infinite limit, so that counts do not depend
    on how a block is split.
    """
    f = Function(target, element)
    cutoff, spread_ = f.broadcast("%cutoff"), f.broadcast("%spread")
    scale = scaled(f) or ""
    with f.loop("0", "%count", f.lanes) as loop:
        place = f.op(f"add i64 %place, {loop.index}")
        weights = weights_within(f, f.load_vector(slot(f, HIGH, place)), spread_, cutoff)
        f.store_vector(weights.limit, slot(f, HIGH, place))
        if farthest is not None:
            found = loop.carry(f.mask, "zeroinitializer")
            beyond = f.either(
                f.compare("ugt", farthest(f, place), weights.limit),
                f.compare("uge", weights.limit, f.splat(math.inf)),
            )
            loop.update(found, f.either(found, beyond))
        if weigh is not None:
            total, weight = weigh(f, weights, place)
            result = weighted(f, f.load_vector(slot(f, CENTRE, place)), total, weight, scale)
            column = f.op(f"add i64 %column, {loop.index}")
            bounds = partial(_kept_bounds, f, weights, column, place, scale)
            f.store(held(f, result, bounds), f.at("%out", column))
    beyond = "true"
    if farthest is not None:
        bits = f.op(f"bitcast {f.mask} {found} to i{f.lanes}")
        beyond = f.op(f"icmp ne i{f.lanes} {bits}, 0")
    parameters = f"{_SWEEP}, {f.scalar} %cutoff, {f.scalar} %spread, {_WHERE}"
    return _define("second", parameters, f, f"i1 {beyond}")


def _kept_bounds(
    f: Function, weights: Weights, column: str, place: str, scale: str
) -> tuple[str, str]:
    """Emit code for the smallest and the largest value with a nonzero weight."""
    minus = f.load_vector(slot(f, LOW, place))
    with f.loop("0", f.named(ColumnArguments._fields).integer("m")) as each:
        low = each.carry(f.vector, f.splat(math.inf))
        high = each.carry(f.vector, f.splat(-math.inf))
        value = f.load(f.at(f.pointer("%rows", each.index), column))
        distance = f.multiply_add(value, scale, minus)
        for carried, found in zip(
            (low, high), weights.bounds(distance, value, low, high), strict=True
        ):
            each.update(carried, found)
    return low, high


def blame_text(target: Target, element: Element, scaled: Scale) -> str:
    """Generate the IR function of the pass that counts the dropped values of each row."""
    f = Function(target, element)
    m = f.named(ColumnArguments._fields).integer("m")
    scale = scaled(f)
    kind = f"<{f.lanes} x i{element.compute_bits}>"
    some = f.op(f"sub i64 {m}, {f.op(f'urem i64 {m}, {TOGETHER}')}")
    for begin, end, rows in (("0", some, TOGETHER), (some, m, 1)):
        with f.loop(begin, end, rows) as group:
            numbers = [f.op(f"add i64 {group.index}, {i}") for i in range(rows)]
            sources = [f.at(f.pointer("%rows", number), "%column") for number in numbers]
            with f.loop("0", "%count", f.lanes) as loop:
                counts = [loop.carry(kind, "zeroinitializer") for _ in numbers]
                place = f.op(f"add i64 %place, {loop.index}")
                low = f.load_vector(slot(f, LOW, place))
                high = f.load_vector(slot(f, HIGH, place))
                for source, count in zip(sources, counts, strict=True):
                    value = f.load(f.at(source, loop.index))
                    lost = outside(f, value, low, high, scale)
                    loop.update(count, _counted(f, kind, count, lost))
            for number, count in zip(numbers, counts, strict=True):
                bits = element.compute_bits
                sum_ = f.op(
                    f"call i{bits} @llvm.vector.reduce.add.v{f.lanes}i{bits}({kind} {count})"
                )
                wide = f.op(f"zext i32 {sum_} to i64") if bits == 32 else sum_
                where = f.at("%local", number, "i64")
                old = f.op(f"load i64, ptr {where}")
                f.line(f"  store i64 {f.op(f'add i64 {old}, {wide}')}, ptr {where}")
    return _define("blame", f"ptr noalias %local, {_SWEEP}, {_WHERE}", f)


def _counted(f: Function, kind: str, count: str, mask: str) -> str:
    """Emit one instruction that adds one to the counters where the mask is set."""
    bits = f.element.compute_bits
    if f.target.vector_bits >= 512:  # AVX-512 has mask registers
        more = f.op(f"add {kind} {count}, splat (i{bits} 1)")
        return f.op(f"select {f.mask} {mask}, {kind} {more}, {kind} {count}")
    return f.op(f"sub {kind} {count}, {f.op(f'sext {f.mask} {mask} to {kind}')}")


def slot(f: Function, row: int, place: str) -> str:
    """Emit code for the address of a column in a row of scratch memory."""
    return f.at(f.at("%scratch", str(row * BLOCK_COLUMNS), f.scalar), place, f.scalar)


def _spread_text(target: Target, element: Element) -> str:
    """Generate the IR function of :func:`spread` for one block.

    Radii past the last column must be 0.
    """
    f = Function(target, element, LANES[element.compute])
    bits, mantissa = element.compute_bits, 52 if element.compute == "double" else 23
    top = (1 << (bits - 1 - mantissa)) - 2  # stored exponent of the largest numbers

    def finite(index: str) -> str:
        radius = f.load_vector(f.at("%radii", index, f.scalar))
        return f.select(f.compare("olt", radius, f.splat(math.inf)), radius, "zeroinitializer")

    with f.loop("0", str(BLOCK_COLUMNS), f.lanes) as loop:
        largest = loop.carry(f.vector, "zeroinitializer")
        loop.update(largest, f.high(largest, finite(loop.index)))
    highest = f.op(f"call {f.scalar} @llvm.vector.reduce.fmax.{f.suffix}({f.vector} {largest})")
    word = f.op(f"bitcast {f.scalar} {highest} to i{bits}")
    power = f.op(f"lshr i{bits} {word}, {mantissa}")
    for name, edge in (("umax", 1), ("umin", top - 1)):
        power = f.op(f"call i{bits} @llvm.{name}.i{bits}(i{bits} {power}, i{bits} {edge})")
    opposite = f.op(f"sub i{bits} {top}, {power}")
    up, down = (
        f.op(f"bitcast i{bits} {f.op(f'shl i{bits} {each}, {mantissa}')} to {f.scalar}")
        for each in (power, opposite)
    )
    factor = f.broadcast(down)
    with f.loop("0", str(BLOCK_COLUMNS), f.lanes) as loop:
        sums = loop.carry(f.vector, "zeroinitializer")
        scaled = f.mul(finite(loop.index), factor)
        loop.update(sums, f.add(sums, f.mul(scaled, scaled)))
    zero = constant(0.0, f.scalar)
    total = f.op(
        f"call {f.scalar} @llvm.vector.reduce.fadd.{f.suffix}({f.scalar} {zero}, {f.vector} {sums})"
    )
    mean = f.op(f"fdiv {f.scalar} {total}, {f.op(f'sitofp i64 %columns to {f.scalar}')}")
    root = f.op(f"call {f.scalar} @llvm.sqrt.f{bits}({f.scalar} {mean})")
    result = f.op(f"fmul {f.scalar} {root}, {up}")
    body = "\n".join(f.lines)
    return f"""
declare {f.scalar} @llvm.vector.reduce.fadd.{f.suffix}({f.scalar}, {f.vector})
declare {f.scalar} @llvm.vector.reduce.fmax.{f.suffix}({f.vector})
declare {f.scalar} @llvm.sqrt.f{bits}({f.scalar})
declare i{bits} @llvm.umax.i{bits}(i{bits}, i{bits})
declare i{bits} @llvm.umin.i{bits}(i{bits}, i{bits})

define internal {f.scalar} @spread(ptr noalias %radii, i64 %columns) noinline {{
entry:
{body}
  ret {f.scalar} {result}
}}
"""


def _marked(f: Function) -> tuple[list[str], list[str]]:
    """Emit code that stores the spread of a block, and code that stores its other marks."""
    bytes_ = f.element.compute_bits // 8
    size = BLOCK_COLUMNS * bytes_
    copy = "call void @llvm.memcpy.p0.p0.i64"
    wide = "%spread" if f.scalar == "double" else "%wide_spread"
    widen = [] if f.scalar == "double" else [f"{wide} = fpext float %spread to double"]
    always = [
        f"%number_of_block = udiv i64 %begin, {BLOCK_COLUMNS}",
        "%size_of_counts = mul i64 %m, 8",
        f"%at_spread = add i64 %size_of_counts, {2 * size}",
        "%size_of_mark = add i64 %at_spread, 8",
        "%offset_of_mark = mul i64 %number_of_block, %size_of_mark",
        "%centres_to = getelementptr i8, ptr %out, i64 %offset_of_mark",
        "%spread_to = getelementptr i8, ptr %centres_to, i64 %at_spread",
        *widen,
        f"store double {wide}, ptr %spread_to",
    ]
    if_beyond = [
        f"%limits_to = getelementptr i8, ptr %centres_to, i64 {size}",
        f"%counts_to = getelementptr i8, ptr %limits_to, i64 {size}",
        f"%centres = getelementptr {f.scalar}, ptr %scratch, i64 {CENTRE * BLOCK_COLUMNS}",
        f"%size = mul i64 %n, {bytes_}",
        f"{copy}(ptr %centres_to, ptr %centres, i64 %size, i1 false)",
        f"{copy}(ptr %limits_to, ptr %radii, i64 %size, i1 false)",
    ]
    return always, if_beyond


def _define(name: str, parameters: str, f: Function, result: str = "void") -> str:
    body = "\n".join(f.lines)
    return f"""
define internal {result.split(maxsplit=1)[0]} @{name}({parameters}) noinline {{
entry:
{body}
  ret {result}
}}
"""


def module_text(f: Function, sweeps: Sweeps) -> str:
    """Generate the LLVM IR of a ``kernel`` that applies the passes to one block after the other.

    The first block starts at column 0.
    """
    kind, scalar, lanes = f.element.memory, f.scalar, f.lanes
    bits, bytes_ = f.element.compute_bits, f.element.compute_bits // 8
    whole = "ptr %args, ptr %rows, ptr %out, ptr %scratch"
    last = "ptr %args, ptr %table, ptr %answer, ptr %scratch"
    at_whole, at_last = "i64 %begin, i64 0, i64 %whole", f"i64 0, i64 %whole, i64 {lanes}"
    middle: list[str] = []
    tail: list[str] = []
    swept: list[str] = []
    blamed: list[str] = []
    if sweeps.second:
        numbers = f"{scalar} %cutoff, {scalar} %spread"
        middle = [
            f"%own = call {scalar} @spread(ptr %radii, i64 %n)",
            f"%known = fcmp ord {scalar} %given, %given",
            f"%spread = select i1 %known, {scalar} %given, {scalar} %own",
            f"%beyond_whole = call i1 @second({whole}, {numbers}, {at_whole})",
        ]
        tail = [
            f"%beyond_last = call i1 @second({last}, {numbers}, {at_last})",
            "%beyond_any = or i1 %beyond_whole, %beyond_last",
        ]
        swept = ["%beyond = phi i1 [ %beyond_whole, %sorted ], [ %beyond_any, %padded ]"]
    marks = sweeps.gives == "marks"
    counts = "%counts_to" if marks else "%local"
    if marks:
        always, blamed = _marked(f)
        swept += always
    if sweeps.blame:
        # Without a cutoff, every column has values beyond the bounds.
        swept.append(
            f"br i1 {'%beyond' if sweeps.second else 'true'}, label %blame, label %finished"
        )
        blamed = [
            "blame:",
            *blamed,
            f"call void @blame(ptr {counts}, {whole}, {at_whole})",
            "br i1 %any, label %blame_last, label %finished",
            "blame_last:",
            f"call void @blame(ptr {counts}, {last}, {at_last})",
        ]
    if sweeps.gives == "radii":
        middle += [
            f"%to = getelementptr {scalar}, ptr %out, i64 %begin",
            f"%size = mul i64 %n, {bytes_}",
            "call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %radii, i64 %size, i1 false)",
        ]
    elif not marks:
        tail += [
            f"%to_last = getelementptr {kind}, ptr %out, i64 %column",
            f"%size_last = mul i64 %rest, {f.element.size}",
            "call void @llvm.memcpy.p0.p0.i64(ptr %to_last, ptr %answer, i64 %size_last, i1 false)",
        ]
    newline = "\n  "
    names = ColumnArguments._fields
    rows, out, m, numbers_at = (names.index(name) for name in ("rows", "out", "m", "constants"))
    return f"""{declarations(f)}{pad_text(f)}
declare i{bits} @llvm.vector.reduce.add.v{lanes}i{bits}(<{lanes} x i{bits}>)
{sweeps.first}{sweeps.second}{sweeps.blame}
{_spread_text(f.target, f.element)}
define void @kernel{SIGNATURE} {{
entry:
  %rows_slot = getelementptr ptr, ptr %args, i64 {rows}
  %rows = load ptr, ptr %rows_slot
  %out_slot = getelementptr ptr, ptr %args, i64 {out}
  %out = load ptr, ptr %out_slot
  %m_slot = getelementptr i64, ptr %args, i64 {m}
  %m = load i64, ptr %m_slot
  %numbers_slot = getelementptr ptr, ptr %args, i64 {numbers_at}
  %numbers = load ptr, ptr %numbers_slot
  %cutoff_slot = getelementptr {scalar}, ptr %numbers, i64 {sweeps.cutoff}
  %cutoff = load {scalar}, ptr %cutoff_slot
  %given_slot = getelementptr {scalar}, ptr %numbers, i64 {sweeps.cutoff + 1}
  %given = load {scalar}, ptr %given_slot
  %scratch = alloca {scalar}, i64 {sweeps.arrays * BLOCK_COLUMNS}, align 64
  %radii = getelementptr {scalar}, ptr %scratch, i64 {HIGH * BLOCK_COLUMNS}
  %number = mul i64 %m, {lanes}
  %cells = alloca {kind}, i64 %number, align 64
  %answer = alloca {kind}, i64 {lanes}, align 64
  %table = alloca ptr, i64 %m, align 8
  br label %next
next:
  %begin = phi i64 [ %start, %entry ], [ %end, %finished ]
  %more = icmp slt i64 %begin, %stop
  br i1 %more, label %block, label %done
block:
  %limit = add i64 %begin, {BLOCK_COLUMNS}
  %over = icmp sgt i64 %limit, %stop
  %end = select i1 %over, i64 %stop, i64 %limit
  %n = sub i64 %end, %begin
  %rest = and i64 %n, {lanes - 1}
  %whole = sub i64 %n, %rest
  %column = add i64 %begin, %whole
  %any = icmp ne i64 %rest, 0
  call void @llvm.memset.p0.i64(ptr %radii, i8 0, i64 {BLOCK_COLUMNS * bytes_}, i1 false)
  call void @first({whole}, {at_whole})
  br i1 %any, label %pad, label %sorted
pad:
  call void @pad(ptr %rows, i64 %m, i64 %column, i64 %rest, ptr %table, ptr %cells)
  call void @first({last}, {at_last})
  br label %sorted
sorted:
  {newline.join(middle)}
  br i1 %any, label %padded, label %swept
padded:
  {newline.join(tail)}
  br label %swept
swept:
  {newline.join(swept + blamed)}
  br label %finished
finished:
  br label %next
done:
  ret void
}}
"""
