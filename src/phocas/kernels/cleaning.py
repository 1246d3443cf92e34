"""The kernel that copies rows and puts a column's centre where a value is implausible.

What is implausible is known from the marks of each block of columns (:mod:`phocas.kernels.blocks`):
the comparison is the one that they were counted by, to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.columns import outside
from phocas.kernels.distances import lesser
from phocas.kernels.emit import Element, Function
from phocas.kernels.mixing import finish
from phocas.kernels.target import Target


class Arguments(NamedTuple):
    """What the kernel takes: tables of k rows to read and to write, and marks of so many bytes.

    ``chosen`` says which of the rows that were marked they are.
    """

    rows: int
    out: int
    k: int
    marks: int
    size: int
    scale: int
    chosen: int


def clean_module(target: Target, element: Element) -> str:
    """Write the kernel; its range is over columns, from the start of a block."""
    f = Function(target, element)
    args = f.named(Arguments._fields)
    rows, out, marks, chosen = (args.pointer(name) for name in ("rows", "out", "marks", "chosen"))
    k, size = args.integer("k"), args.integer("size")
    number = f.scalar_at(args.pointer("scale"), 0)
    lanes = f.lanes
    with f.loop("%start", "%stop", BLOCK_COLUMNS) as block:
        end = lesser(f, f.op(f"add i64 {block.index}, {BLOCK_COLUMNS}"), "%stop")
        columns = f.op(f"sub i64 {end}, {block.index}")
        whole = f.op(f"sub i64 {columns}, {f.op(f'srem i64 {columns}, {lanes}')}")
        offset = f.op(f"mul i64 {f.op(f'udiv i64 {block.index}, {BLOCK_COLUMNS}')}, {size}")
        centres = f.at(marks, offset, "i8")
        limits = f.at(centres, str(BLOCK_COLUMNS), f.scalar)
        counts = f.at(limits, str(BLOCK_COLUMNS), f.scalar)
        with f.loop("0", k) as row:
            source, place = (
                f.at(f.pointer(table, row.index), block.index) for table in (rows, out)
            )
            number_of_row = f.op(f"load i64, ptr {f.at(chosen, row.index, 'i64')}")
            count = f.op(f"load i64, ptr {f.at(counts, number_of_row, 'i64')}")
            # Of a block in which nothing is implausible there are no marks: it is copied.
            fine = f.op(f"icmp eq i64 {count}, 0")
            vectors, end_of_row = (
                f.op(f"select i1 {fine}, i64 0, i64 {size}") for size in (whole, columns)
            )
            bytes_ = f.op(f"mul i64 {columns}, {element.size}")
            copied = f.op(f"select i1 {fine}, i64 {bytes_}, i64 0")
            f.line(
                f"  call void @llvm.memcpy.p0.p0.i64(ptr {place}, ptr {source}, i64 {copied},"
                " i1 false)"
            )
            for first, last, width in (("0", vectors, lanes), (vectors, end_of_row, 1)):
                f.set_lanes(width)
                scale = f.broadcast(number)
                with f.loop(first, last, width) as step:
                    centre, limit = (_known(f, values, step.index) for values in (centres, limits))
                    value = f.load(f.at(source, step.index))
                    minus = f.negate(f.mul(centre, scale))
                    lost = outside(f, value, minus, limit, scale)
                    f.store(f.select(lost, centre, value), f.at(place, step.index))
            f.set_lanes(lanes)
    return finish(f)


def _known(f: Function, values: str, index: str) -> str:
    size = f.element.compute_bits // 8
    return f.op(f"load {f.vector}, ptr {f.at(values, index, f.scalar)}, align {size}")
