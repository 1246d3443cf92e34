"""Kernels that reduce each column of m values to one: a window of the sorted values, averaged.

Median, trimmed mean, Phocas and MeaMed differ only in their :class:`Window`. One vector register
holds one row of as many columns as fit, a sorting network runs across the registers, and what is
averaged follows in closed form, without a branch or an index:

    with u_1 <= ... <= u_m and y the centre, the m - b values nearest to y are u_{b+1..m-b} and, for
    k = 1..b, the nearer to y of u_k and u_{m-b+k}.

(y - u_k falls and u_{m-b+k} - y rises with k, so the choice flips at most once.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from phocas.kernels.emit import Element, Function
from phocas.kernels.networks import Comparator, batcher, prune
from phocas.kernels.target import Target

# Straight-line code beats the table up to here (measured, AVX-512: 64 wires 1.2x, 128 wires 2x).
STRAIGHT_LINE_ROWS = 96


@dataclass(frozen=True, slots=True)
class Window:
    """Which of a column's m sorted values are averaged.

    The centre is the mean of what is left when ``trim`` values are cut from each end. With
    ``drop`` it is only the point to measure from: all but the ``drop`` values farthest from it
    are averaged. ``plain`` is the mean of everything, NaN included.
    """

    trim: int = 0
    drop: int | None = None
    plain: bool = False

    def kept(self, m: int) -> int:
        """Return how many of m values are averaged."""
        return m - 2 * self.trim if self.drop is None else m - self.drop


MEAN = Window(plain=True)


def groups(window: Window, m: int) -> dict[int, Hashable]:
    """Name the sorted positions that the window needs, for :func:`prune`."""
    centre: dict[int, Hashable] = {i: "centre" for i in range(window.trim, m - window.trim)}
    if window.drop is None:
        return centre
    wanted: dict[int, Hashable] = {i: "middle" for i in range(window.drop, m - window.drop)}
    wanted.update(centre)
    for k in range(window.drop):
        wanted[k] = ("low", k)
        wanted[m - window.drop + k] = ("high", k)
    return wanted


def column_module(
    target: Target, element: Element, m: int, window: Window, blame: bool
) -> str:
    """Write the module of one straight-line kernel, exported as ``kernel``."""
    f = Function(target, element)
    if blame:
        f.line(f"  %counters = alloca [{m} x <{f.lanes} x i32>], align 64")
        for i in range(m):
            slot = f.op(f"getelementptr <{f.lanes} x i32>, ptr %counters, i64 {i}")
            f.line(f"  store <{f.lanes} x i32> zeroinitializer, ptr {slot}, align 64")
    with f.loop("%start", "%stop", f.lanes) as loop:
        rows = []
        addresses = []
        for i in range(m):
            address = f.at(f.pointer("%rows", i), loop.index)
            addresses.append(address)
            value = f.load(address)
            rows.append(value if window.plain else f.nan_to_inf(value))
        network = () if window.plain else prune(batcher(m), groups(window, m))
        wires = _run_network(f, rows, network, addresses)
        result, kept = _average(f, wires, window)
        f.store(result, f.at("%out", loop.index))
        if blame:
            for i, value in enumerate(rows):
                _count_outside(f, i, value, low, high)
    if blame:
        for i in range(m):
            _flush_counter(f, i)
    return module_text(f, m)


import os
PF=int(os.environ.get('PF','0'))
def _run_network(f: Function, rows: list[str], network: tuple[Comparator, ...], addresses) -> list[str]:
    wires = list(rows)
    todo = list(addresses)
    every = max(1, len(network) // max(1,len(addresses)))
    for n, step in enumerate(network):
        if PF and n % every == 0 and todo:
            a = f.op(f"getelementptr i8, ptr {todo.pop(0)}, i64 {PF}")
            f.line(f"  call void @llvm.prefetch.p0(ptr {a}, i32 0, i32 3, i32 1)")
        a, b = wires[step.low], wires[step.high]
        if step.keep_low:
            wires[step.low] = f.low(a, b)
        if step.keep_high:
            wires[step.high] = f.high(a, b)
    return wires


def _average(f: Function, wires: list[str], window: Window) -> tuple[str, Kept]:
    """Return the window's mean, and what tells kept values from dropped ones."""
    m = len(wires)
    if window.plain:
        return _plain_mean(f, wires), Kept()
    centre = wires[window.trim : m - window.trim]
    y = _mean_from(f, centre[0], centre[1:], len(centre))
    if window.drop is None:
        return y, Kept(values=centre)
    b = window.drop
    # Halved at least, so that no finite distance overflows to that of an infinity.
    scale = 0.5 ** max(1, math.ceil(math.log2(2 * (m - b))))
    scaled_y = f.mul(y, f.splat(scale))
    minus_y = f.op(f"fneg {f.vector} {scaled_y}")
    edges = [f.sub(scaled_y, f.mul(wires[b], f.splat(scale)))]
    total = None
    kept = []
    for k in range(b):
        down = f.scaled_add(wires[k], -scale, scaled_y)
        up = f.scaled_add(wires[m - b + k], scale, minus_y)
        nearer = f.select(f.compare("ole", down, up), f.op(f"fneg {f.vector} {down}"), up)
        total = nearer if total is None else f.add(total, nearer)
    # The centre's own distances to its mean add up to nothing.
    for wire in wires[b : window.trim] + wires[m - window.trim : m - b]:
        distance = f.scaled_add(wire, scale, minus_y)
        total = distance if total is None else f.add(total, distance)
    if total is None:
        return y, Kept(values=centre)
    return f.fma(total, f.splat(1 / (scale * (m - b))), y), Kept()


def _mean_from(f: Function, pivot: str, others: list[str], size: int) -> str:
    """Return the mean of ``size`` values as one of them plus the mean of the distances to it.

    Equal values give exactly that value, no sum overflows, and the mean of up to 4096 values
    cannot be rounded to beyond the smallest or largest of them.
    """
    if not others:
        return pivot
    scale = 0.5 ** math.ceil(math.log2(2 * size))
    minus = f.mul(pivot, f.splat(-scale))
    total = f.scaled_add(others[0], scale, minus)
    for value in others[1:]:
        total = f.add(total, f.scaled_add(value, scale, minus))
    return f.fma(total, f.splat(1 / (scale * size)), pivot)


def _plain_mean(f: Function, values: list[str]) -> str:
    """Return the mean without overflow: values are scaled by a power of two before the sum."""
    scale = 0.5 ** math.ceil(math.log2(len(values)))
    total = f.mul(values[0], f.splat(scale))
    for value in values[1:]:
        total = f.scaled_add(value, scale, total)
    return f.mul(total, f.splat(1 / (scale * len(values))))


@dataclass
class Kept:
    values: list[str] | None = None


def _count_outside(f: Function, i: int, value: str, low: str, high: str) -> None:
    outside = f.op(f"or {f.mask} {f.compare('olt', value, low)}, {f.compare('ogt', value, high)}")
    words = f"<{f.lanes} x i32>"
    slot = f.op(f"getelementptr {words}, ptr %counters, i64 {i}")
    old = f.op(f"load {words}, ptr {slot}, align 64")
    one = f.op(f"zext {f.mask} {outside} to {words}")
    new = f.op(f"add {words} {old}, {one}")
    f.line(f"  store {words} {new}, ptr {slot}, align 64")


def _flush_counter(f: Function, i: int) -> None:
    words = f"<{f.lanes} x i32>"
    slot = f.op(f"getelementptr {words}, ptr %counters, i64 {i}")
    lanes = f.op(f"load {words}, ptr {slot}, align 64")
    total = f.op(f"call i32 @llvm.vector.reduce.add.v{f.lanes}i32({words} {lanes})")
    wide = f.op(f"zext i32 {total} to i64")
    where = f.op(f"getelementptr i64, ptr %counts, i64 {i}")
    old = f.op(f"load i64, ptr {where}")
    f.line(f"  store i64 {f.op(f'add i64 {old}, {wide}')}, ptr {where}")


def module_text(f: Function, m: int) -> str:
    """Wrap a body over whole vectors into a kernel over any number of columns.

    The last columns are copied into a padded scratch block, so that the body is compiled once.
    Padding is zeros in every row, of which none is ever outside a window.
    """
    lanes, kind, size = f.lanes, f.element.memory, f.element.size
    body = "\n".join(f.lines)
    return f"""
declare i32 @llvm.vector.reduce.add.v{lanes}i32(<{lanes} x i32>)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare {f.vector} @llvm.fma.v{lanes}f{f.element.compute_bits}({f.vector}, {f.vector}, {f.vector})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define internal void @body(ptr noalias %rows, i64 %start, i64 %stop, ptr noalias %out, ptr noalias %counts) noinline {{
entry:
{body}
  ret void
}}

define void @kernel(ptr %rows, i64 %start, i64 %stop, ptr %out, ptr %counts) {{
entry:
  %n = sub i64 %stop, %start
  %rest = srem i64 %n, {lanes}
  %whole = sub i64 %stop, %rest
  call void @body(ptr %rows, i64 %start, i64 %whole, ptr %out, ptr %counts)
  %any = icmp sgt i64 %rest, 0
  br i1 %any, label %tail, label %done
tail:
  %scratch = alloca [{(m + 1) * lanes} x {kind}], align 64
  %table = alloca [{m} x ptr], align 8
  call void @llvm.memset.p0.i64(ptr %scratch, i8 0, i64 {(m + 1) * lanes * size}, i1 false)
  %bytes = mul i64 %rest, {size}
  br label %copy
copy:
  %i = phi i64 [ 0, %tail ], [ %next, %copy ]
  %slot = getelementptr ptr, ptr %rows, i64 %i
  %row = load ptr, ptr %slot
  %from = getelementptr {kind}, ptr %row, i64 %whole
  %offset = mul i64 %i, {lanes}
  %to = getelementptr {kind}, ptr %scratch, i64 %offset
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %entry_slot = getelementptr ptr, ptr %table, i64 %i
  store ptr %to, ptr %entry_slot
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, {m}
  br i1 %more, label %copy, label %finish
finish:
  %answer = getelementptr {kind}, ptr %scratch, i64 {m * lanes}
  call void @body(ptr %table, i64 0, i64 {lanes}, ptr %answer, ptr %counts)
  %place = getelementptr {kind}, ptr %out, i64 %whole
  call void @llvm.memcpy.p0.p0.i64(ptr %place, ptr %answer, i64 %bytes, i1 false)
  br label %done
done:
  ret void
}}
"""
