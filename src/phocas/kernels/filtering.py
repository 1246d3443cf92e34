"""Generators of kernels that replace outliers by the centre of their column as they read rows.

The marks of each block of columns (:mod:`phocas.kernels.blocks`) determine which values are
outliers. The comparison has the same bits as the comparison that counted the outliers.

``clean`` copies rows. ``masked`` wraps another kernel: for every block of columns it copies the
rows that need filtering to a thread's own memory, which stays in cache. It then calls the kernel on
that block, with a table of rows that points to the copies. The kernels of :mod:`tails` read the
same marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.columns import outside
from phocas.kernels.distances import lesser
from phocas.kernels.emit import Element, Function, Words
from phocas.kernels.mixing import RuleWords, finish
from phocas.kernels.target import Target

MOST_WORDS = 16  # largest number of words of a kernel's arguments


class FilterArguments(NamedTuple):
    """Arguments of ``clean`` and of the kernels of tails.

    ``rows`` is a table of k rows to read. ``out`` is what the kernel writes: a table of k rows for
    ``clean``. The marks of a block have ``size`` bytes. ``chosen`` are the indices of the rows
    among those that were marked. ``scale`` points to the scale of distances, and to further numbers
    for tails.
    """

    rows: int
    out: int
    k: int
    marks: int
    size: int
    scale: int
    chosen: int


class MaskArguments(NamedTuple):
    """Arguments of ``masked``: those of ``clean``, and the kernel that it wraps.

    ``work`` is the address of the wrapped kernel, and ``inner`` points to its arguments. ``step``
    of its items are ``width`` columns, a block or part of one, of ``columns`` in total. A row whose
    entry in ``outs`` is not zero is excluded: the kernel reads the row ``nothing`` instead. Values
    ``ahead`` bytes further on are prefetched, unless the kernel does that itself.

    A kernel may have a second table of ``number`` rows, whose indices are ``others``. The address
    of this table is word ``slot`` of the kernel's arguments. If ``nested`` is not zero, word
    ``nested`` of the arguments points to other words, and ``slot`` counts among these.
    """

    rows: int
    k: int
    marks: int
    size: int
    scale: int
    chosen: int
    outs: int
    nothing: int
    work: int
    inner: int
    step: int
    width: int
    ahead: int
    columns: int
    others: int = 0
    number: int = 0
    slot: int = 0
    nested: int = 0


class MaskWords(NamedTuple):
    """A thread's memory: that of the kernel, two tables of rows, and the copied rows."""

    local: int
    table: int
    second: int
    room: int
    stride: int


def clean_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of ``clean``, which copies rows with outliers replaced.

    The kernel is called for a range of columns. The range begins with the first column of a block.
    """
    f = Function(target, element)
    args = f.named(FilterArguments._fields)
    rows, out = args.pointer("rows"), args.pointer("out")
    with f.loop("%start", "%stop", BLOCK_COLUMNS) as block:
        known = Filtered(f, args, block.index, "%stop", str(BLOCK_COLUMNS))
        with f.loop("0", args.integer("k")) as row:
            source, place = (
                f.at(f.pointer(table, row.index), block.index) for table in (rows, out)
            )
            # A block without implausible values has no marks: it is copied unchanged.
            fine = f.op(f"icmp eq i64 {known.count(row.index)}, 0")
            bytes_ = f.op(f"mul i64 {known.columns}, {element.size}")
            copied = f.op(f"select i1 {fine}, i64 {bytes_}, i64 0")
            f.line(
                f"  call void @llvm.memcpy.p0.p0.i64(ptr {place}, ptr {source}, i64 {copied},"
                " i1 false)"
            )
            known.clean(source, place, fine, str(BLOCK_COLUMNS * element.size))
    return finish(f)


def masked_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of ``masked``, which calls another kernel on rows without outliers.

    ``masked`` is called for a range of items, as the other kernel would be.
    """
    f = Function(target, element)
    args = f.named(MaskArguments._fields)
    local = f.named(MaskWords._fields, "%local")
    table, second, room = (local.pointer(name) for name in ("table", "second", "room"))
    rows, outs, nothing, chosen = (
        args.pointer(name) for name in ("rows", "outs", "nothing", "chosen")
    )
    step, columns, stride = args.integer("step"), args.integer("columns"), local.integer("stride")
    width, ahead = args.integer("width"), args.integer("ahead")
    inner = _patched(f, args, table, second)
    with f.loop("%start", "%stop", step) as item:
        number = f.op(f"udiv i64 {item.index}, {step}")
        begin = f.op(f"mul i64 {number}, {width}")
        known = Filtered(f, args, begin, columns, width)
        back = f.op(f"mul i64 {begin}, {-element.size}")
        with f.loop("0", args.integer("k")) as row:
            own = f.pointer(rows, row.index)
            place = f.at(room, f.op(f"mul i64 {row.index}, {stride}"), "i8")
            which = f.op(f"load i64, ptr {f.at(chosen, row.index, 'i64')}")
            flag = f.op(f"load i64, ptr {f.at(outs, which, 'i64')}")
            out = f.op(f"icmp ne i64 {flag}, 0")
            plausible = f.op(f"icmp eq i64 {known.count(row.index)}, 0")
            fine = f.op(f"or i1 {out}, {plausible}")
            known.clean(f.at(own, begin), place, fine, ahead)
            elsewhere = f.op(f"select i1 {out}, ptr {nothing}, ptr {place}")
            shifted = f.at(elsewhere, back, "i8")
            as_it_is = f.op(f"xor i1 {out}, true")
            as_it_is = f.op(f"and i1 {as_it_is}, {plausible}")
            read = f.op(f"select i1 {as_it_is}, ptr {own}, ptr {shifted}")
            f.line(f"  store ptr {read}, ptr {f.at(table, row.index, 'ptr')}")
        others = args.pointer("others")
        with f.loop("0", args.integer("number")) as other:
            which = f.op(f"load i64, ptr {f.at(others, other.index, 'i64')}")
            f.line(f"  store ptr {f.pointer(table, which)}, ptr {f.at(second, other.index, 'ptr')}")
        last = lesser(f, f.op(f"add i64 {item.index}, {step}"), "%stop")
        f.line(
            f"  call void {args.pointer('work')}(ptr {inner}, ptr {local.pointer('local')},"
            f" i64 {item.index}, i64 {last})"
        )
    return finish(f)


def _patched(f: Function, args: Words, table: str, second: str) -> str:
    """Emit code that copies a kernel's arguments and inserts the tables of rows."""
    inner = f.op(f"alloca [{MOST_WORDS} x i64], align 8")
    nested = f.op(f"alloca [{len(RuleWords._fields)} x i64], align 8")
    given = args.pointer("inner")
    _copy(f, inner, given, f"{8 * MOST_WORDS}")
    f.line(f"  store ptr {table}, ptr {inner}")  # rows are the first word of every kernel
    where, slot = args.integer("nested"), args.integer("slot")
    is_nested = f.op(f"icmp ne i64 {where}, 0")
    source = f.pointer(given, where)
    _copy(
        f, nested, source, f.op(f"select i1 {is_nested}, i64 {8 * len(RuleWords._fields)}, i64 0")
    )
    for target_, pointer, index in ((inner, nested, where), ("", second, slot)):
        base = target_ or f.op(f"select i1 {is_nested}, ptr {nested}, ptr {inner}")
        # Without a second or a nested table, word 0 is written again.
        value = f.op(f"select i1 {f.op(f'icmp ne i64 {index}, 0')}, ptr {pointer}, ptr {table}")
        f.line(f"  store ptr {value}, ptr {f.at(base, index, 'i64')}")
    return inner


def _copy(f: Function, to: str, source: str, size: str) -> None:
    f.line(f"  call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {source}, i64 {size}, i1 false)")


class Filtered:
    """A generator of code that filters the rows in some columns of a block, by their marks."""

    def __init__(self, f: Function, args: Words, begin: str, stop: str, width: str) -> None:
        self.f = f
        end = lesser(f, f.op(f"add i64 {begin}, {width}"), stop)
        self.columns = f.op(f"sub i64 {end}, {begin}")
        self.whole = f.op(f"sub i64 {self.columns}, {f.op(f'srem i64 {self.columns}, {f.lanes}')}")
        number = f.op(f"udiv i64 {begin}, {BLOCK_COLUMNS}")
        offset = f.op(f"mul i64 {number}, {args.integer('size')}")
        block = f.at(args.pointer("marks"), offset, "i8")
        within = f.op(f"urem i64 {begin}, {BLOCK_COLUMNS}")
        self.centres = f.at(block, within, f.scalar)
        self.limits = f.at(self.centres, str(BLOCK_COLUMNS), f.scalar)
        self.counts = f.at(block, str(2 * BLOCK_COLUMNS), f.scalar)
        self.chosen = args.pointer("chosen")
        self.scale = f.scalar_at(args.pointer("scale"), 0)

    def count(self, row: str) -> str:
        """Emit code that loads the number of outliers of a row in this block of columns."""
        which = self.f.op(f"load i64, ptr {self.f.at(self.chosen, row, 'i64')}")
        return self.f.op(f"load i64, ptr {self.f.at(self.counts, which, 'i64')}")

    def clean(self, source: str, place: str, fine: str, ahead: str) -> None:
        """Emit code that copies a row with outliers replaced by the centres of their columns.

        Args:
            source: address of the row.
            place: address of the copy.
            fine: flag of one bit; if it is set, the row has no outlier and nothing is copied.
            ahead: number of bytes from a value that is read to the value that is prefetched.
        """
        f = self.f
        for step, value, centre, _, lost in self.values(source, fine, ahead):
            f.store(f.select(lost, centre, value), f.at(place, step))

    def values(
        self, source: str, fine: str, ahead: str | None = None
    ) -> Iterator[tuple[str, str, str, str, str]]:
        """Emit loops over a row, by vectors and then by single values.

        Yield the column, the value, the centre and the limit of the column, and the mask of
        outliers, for the body of each loop.
        """
        f, lanes = self.f, self.f.lanes
        vectors, columns = (
            f.op(f"select i1 {fine}, i64 0, i64 {size}") for size in (self.whole, self.columns)
        )
        for first, last, width in (("0", vectors, lanes), (vectors, columns, 1)):
            f.set_lanes(width)
            scale = f.broadcast(self.scale)
            with f.loop(first, last, width) as step:
                centre, limit = (self._known(of, step.index) for of in (self.centres, self.limits))
                address = f.at(source, step.index)
                if width > 1 and ahead is not None:
                    f.prefetch(f.at(address, ahead, "i8"), 0)
                value = f.load(address)
                minus = f.negate(f.mul(centre, scale))
                yield step.index, value, centre, limit, outside(f, value, minus, limit, scale)
        f.set_lanes(lanes)

    def _known(self, values: str, index: str) -> str:
        f = self.f
        size = f.element.compute_bits // 8
        return f.op(f"load {f.vector}, ptr {f.at(values, index, f.scalar)}, align {size}")
