"""Generators of kernels for the tails of rows: weighted distances of outliers from the centre.

The marks of each block of columns (:mod:`phocas.kernels.blocks`) determine which values are
outliers. Distances are from the centre of the column, and halved, so that none overflows. The
weight is what the window took from a value: it rises from 0 at the limit to 1 at twice the limit.
An outlier that is farther than the largest distance is *lost*.

``tail`` writes the distances, ``tail_squares`` sums their squares by block of columns, and
``add_tail`` adds them to a result. Rows without outliers in a block take no time there. All are
called for a range of columns that begins with the first column of a block.

Their arguments are :class:`~phocas.kernels.filtering.FilterArguments`. ``scale`` points to the
scale of distances, the largest distance and, for ``add_tail``, the number of workers, a power of
two p, and p times the factor of each row. ``out`` is a table of rows for ``tail``, the sums of k
rows for each block for ``tail_squares``, and the result for ``add_tail``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.emit import Element, Function, Words
from phocas.kernels.filtering import FilterArguments, Filtered
from phocas.kernels.mixing import finish
from phocas.kernels.target import Target

LANES = 16  # sums of squares; fixed, so that every host adds in one order


def tail_square_sums(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the sum of squares of each row of a block, with the same bits as ``tail_squares``.

    The number of columns must be a multiple of 16.

    >>> tail_square_sums(np.array([[3, 4] + 14 * [0]], np.float32))
    array([25.])
    """
    with np.errstate(over="ignore"):
        squares = np.square(values.astype(np.float64)).reshape(len(values), -1, LANES)
        lanes = np.add.accumulate(squares, axis=1)[:, -1]
        return np.asarray(np.add.accumulate(lanes, axis=1)[:, -1])


def tail_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of ``tail``.

    The result is zero for a value that is no outlier, and NaN for an outlier that is lost.
    """
    f = Function(target, element)
    args = f.named(FilterArguments._fields)
    out = args.pointer("out")
    with f.loop("%start", "%stop", BLOCK_COLUMNS) as block:
        tails = _Tails(f, args, block.index)
        with f.loop("0", args.integer("k")) as row:
            place = f.at(f.pointer(out, row.index), block.index, f.scalar)
            fine = tails.fine(row.index)
            zeros = f.op(f"select i1 {fine}, i64 {tails.bytes()}, i64 0")
            _clear(f, place, zeros)
            tails.write(row.index, place, fine)
    return finish(f)


def squares_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of ``tail_squares``; a lost value counts as zero."""
    f = Function(target, element)
    args = f.named(FilterArguments._fields)
    k, room = args.integer("k"), _room(f)
    zero, wide = "double 0.0", f"<{LANES} x double>"
    with f.loop("%start", "%stop", BLOCK_COLUMNS) as block:
        tails = _Tails(f, args, block.index)
        number = f.op(f"udiv i64 {block.index}, {BLOCK_COLUMNS}")
        sums = f.at(args.pointer("out"), f.op(f"mul i64 {number}, {k}"), "double")
        with f.loop("0", k) as row:
            fine = tails.fine(row.index)
            lanes = f.lanes
            padded = tails.padded(row.index, room, fine, LANES)
            f.set_lanes(LANES)
            with f.loop("0", padded, LANES) as step:
                total = step.carry(wide, "zeroinitializer")
                value = f.load_vector(f.at(room, step.index, f.scalar))
                value = f.select(f.compare("ord", value, value), value, f.splat(0))
                if f.scalar != "double":
                    value = f.op(f"fpext {f.vector} {value} to {wide}")
                square = f.op(f"fmul {wide} {value}, {value}")
                step.update(total, f.op(f"fadd {wide} {total}, {square}"))
            f.set_lanes(lanes)
            name = f"@llvm.vector.reduce.fadd.v{LANES}f64"
            sum_ = f.op(f"call double {name}({zero}, {wide} {total})")
            f.line(f"  store double {sum_}, ptr {f.at(sums, row.index, 'double')}")
    declared = f"declare double @llvm.vector.reduce.fadd.v{LANES}f64(double, {wide})\n"
    return declared + finish(f)


def add_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of ``add_tail``, which adds scaled tails to the result of a window.

    The sum over the rows, in their order, is divided by the number of values of the column that are
    not lost. The number of lost values of each row is added to the thread's counts.
    """
    f = Function(target, element)
    args = f.named(FilterArguments._fields)
    k, numbers, out = args.integer("k"), args.pointer("scale"), args.pointer("out")
    room, total, lost = _room(f), _room(f), _room(f)
    workers, power = f.scalar_at(numbers, 2), f.scalar_at(numbers, 3)
    with f.loop("%start", "%stop", BLOCK_COLUMNS) as block:
        tails = _Tails(f, args, block.index)
        with f.loop("0", k) as row:
            found = row.carry("i64", "0")
            row.update(found, f.op(f"add i64 {found}, {tails.known.count(row.index)}"))
        none = f.op(f"icmp eq i64 {found}, 0")
        size = f.op(f"select i1 {none}, i64 0, i64 {_room_bytes(f)}")
        _clear(f, total, size)
        _clear(f, lost, size)
        with f.loop("0", k) as row:
            padded = tails.padded(row.index, room, tails.fine(row.index), f.lanes)
            place = f.op(f"add i64 {row.index}, 4")
            factor = f.broadcast(f.scalar_at(numbers, place))
            with f.loop("0", padded, f.lanes) as step:
                far = step.carry(f.vector, "zeroinitializer")
                value = f.load_vector(f.at(room, step.index, f.scalar))
                beyond = f.compare("uno", value, value)
                one = f.select(beyond, f.splat(1), f.splat(0))
                step.update(far, f.add(far, one))
                added = f.mul(f.select(beyond, f.splat(0), value), factor)
                for place, more in ((total, added), (lost, one)):
                    here = f.at(place, step.index, f.scalar)
                    f.store_vector(f.add(f.load_vector(here), more), here)
            name = f"@llvm.vector.reduce.fadd.{f.suffix}"
            zero = f"{f.scalar} 0.0"
            number = f.op(f"call {f.scalar} {name}({zero}, {f.vector} {far})")
            more = f.op(f"fptosi {f.scalar} {number} to i64")
            where = f.at("%local", row.index, "i64")
            old = f.op(f"load i64, ptr {where}")
            f.line(f"  store i64 {f.op(f'add i64 {old}, {more}')}, ptr {where}")
        lanes = f.lanes
        vectors, columns = (
            f.op(f"select i1 {none}, i64 0, i64 {each}")
            for each in (tails.known.whole, tails.known.columns)
        )
        for first, last, width in (("0", vectors, lanes), (vectors, columns, 1)):
            f.set_lanes(width)
            with f.loop(first, last, width) as step:
                sum_, bad = (_vector(f, f.at(each, step.index, f.scalar)) for each in (total, lost))
                there = f.high(f.sub(f.broadcast(workers), bad), f.splat(1))
                half = f.mul(f.splat(0.5), f.broadcast(power))  # exact, as its product is
                scaled = f.div(sum_, f.mul(there, half))
                here = f.at(f.at(out, block.index), step.index)
                f.store(f.add(f.load(here), scaled), here)
        f.set_lanes(lanes)
    kind = f"{f.scalar}, {f.vector}"
    return f"declare {f.scalar} @llvm.vector.reduce.fadd.{f.suffix}({kind})\n" + finish(f)


def _room_bytes(f: Function) -> int:
    return (BLOCK_COLUMNS + LANES) * f.element.compute_bits // 8


def _room(f: Function) -> str:
    """Emit code that allocates the computed values of a block, and a vector more."""
    return f.op(f"alloca [{BLOCK_COLUMNS + LANES} x {f.scalar}], align 64")


def _clear(f: Function, place: str, size: str) -> None:
    f.line(f"  call void @llvm.memset.p0.i64(ptr {place}, i8 0, i64 {size}, i1 false)")


def _vector(f: Function, place: str) -> str:
    """Emit code that loads values which may not be aligned to a vector."""
    return f.op(f"load {f.vector}, ptr {place}, align {f.element.compute_bits // 8}")


class _Tails:
    """A generator of code that writes the tails of rows in a block of columns."""

    def __init__(self, f: Function, args: Words, begin: str) -> None:
        self.f, self.begin = f, begin
        self.rows = args.pointer("rows")
        self.known = Filtered(f, args, begin, "%stop", str(BLOCK_COLUMNS))
        self.largest = f.scalar_at(args.pointer("scale"), 1)

    def fine(self, row: str) -> str:
        """Emit code for the flag of a row without outliers in this block."""
        return self.f.op(f"icmp eq i64 {self.known.count(row)}, 0")

    def bytes(self) -> str:
        """Emit code for the size of a row of computed values."""
        return self.f.op(f"mul i64 {self.known.columns}, {self.f.element.compute_bits // 8}")

    def padded(self, row: str, room: str, fine: str, lanes: int) -> str:
        """Emit code that writes the tail of a row, with zeros up to a whole vector.

        Return the number of values: a multiple of ``lanes``, or 0 if the row has no outliers.
        """
        f = self.f
        up = f.op(f"add i64 {self.known.columns}, {lanes - 1}")
        columns = f.op(f"select i1 {fine}, i64 0, i64 {f.op(f'and i64 {up}, {-lanes}')}")
        last = f.op(f"and i64 {self.known.columns}, {-lanes}")
        size = f.op(f"select i1 {fine}, i64 0, i64 {lanes * f.element.compute_bits // 8}")
        _clear(f, f.at(room, last, f.scalar), size)
        self.write(row, room, fine)
        return columns

    def write(self, row: str, place: str, fine: str) -> None:
        """Emit code that writes the tail of a row; nothing if the row has no outliers."""
        f = self.f
        source = f.at(f.pointer(self.rows, row), self.begin)
        for step, value, centre, limit, outlier in self.known.values(source, fine):
            distance = f.sub(f.mul(value, f.splat(0.5)), f.mul(centre, f.splat(0.5)))
            near = f.compare("ole", f.absolute(distance), f.broadcast(self.largest))
            # The limit is a scaled distance, the quotient has no unit. Infinite if the limit is 0.
            double = f.mul(f.broadcast(self.known.scale), f.splat(2))
            scaled = f.mul(f.absolute(distance), double)
            weight = f.low(f.sub(f.div(scaled, limit), f.splat(1)), f.splat(1))
            kept = f.select(near, f.mul(distance, weight), f.splat(math.nan))
            result = f.select(outlier, kept, f.splat(0))
            size = f.element.compute_bits // 8
            f.line(f"  store {f.vector} {result}, ptr {f.at(place, step, f.scalar)}, align {size}")
