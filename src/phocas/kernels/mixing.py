"""Kernels that replace m rows by weighted sums of them, alone or in one go with a column rule.

A mix is a sparse matrix in rows of (index, weight): a row that has no weight is never touched, so
that its NaN stays where it is. A row of weights that add up to one is taken around its first
member p, as p + sum of w (x - p): equal rows then mix to exactly that row.
"""

from __future__ import annotations

from phocas.kernels.emit import SIGNATURE, Element, Function, declarations
from phocas.kernels.target import Target

UNROLL = 4


def combine_module(target: Target, element: Element) -> str:
    """Write the kernel of the mix alone.

    args are (rows, out, k, starts, indices, weights, convex). ``out`` is a table of k pointers to
    rows of computed values.
    """
    f = Function(target, element)
    names = ("rows", "out", "starts", "indices", "weights", "convex")
    loads = [f.pointer("%args", i) for i in (0, 1, 3, 4, 5, 6)]
    k = f.integer("%args", 2)
    given = ", ".join(f"ptr {value}" for value in loads)
    f.line(f"  call void @combine({given}, i64 {k}, i64 %start, i64 %stop, i64 0)")
    return _finish(f, _combine(target, element, names))


def fused_module(target: Target, element: Element) -> str:
    """Write the kernel of a mix and a column kernel on its tiles.

    args are (rows, out, k, starts, indices, weights, convex, rule): ``rule`` points to the column
    kernel and its own eight args. ``local`` holds (table of k scratch rows, counts). One chunk is
    one tile.
    """
    f = Function(target, element)
    names = ("rows", "out", "starts", "indices", "weights", "convex")
    rows, out, starts, indices, weights, convex, rule = (
        f.pointer("%args", i) for i in (0, 1, 3, 4, 5, 6, 7)
    )
    k = f.integer("%args", 2)
    table, counts = f.pointer("%local", 0), f.pointer("%local", 1)
    given = ", ".join(f"ptr {v}" for v in (rows, table, starts, indices, weights, convex))
    f.line(f"  call void @combine({given}, i64 {k}, i64 %start, i64 %stop, i64 %start)")
    inner = f.op("alloca [8 x i64], align 8")
    template = f.at(rule, "1", "i64")
    f.line(f"  call void @llvm.memcpy.p0.p0.i64(ptr {inner}, ptr {template}, i64 64, i1 false)")
    f.line(f"  store ptr {table}, ptr {inner}")
    place = f.at(out, "%start", f.scalar)
    f.line(f"  store ptr {place}, ptr {f.at(inner, '1', 'i64')}")
    columns = f.op("sub i64 %stop, %start")
    work = f.op(f"load ptr, ptr {rule}")
    f.line(f"  call void {work}(ptr {inner}, ptr {counts}, i64 0, i64 {columns})")
    return _finish(f, _combine(target, element, names))


def _combine(target: Target, element: Element, names: tuple[str, ...]) -> str:
    """Write the function that mixes columns start..stop into rows that begin at an origin."""
    f = Function(target, element)
    step = f.lanes * UNROLL
    with f.loop("0", "%k") as row:
        first = f.op(f"load i64, ptr {f.at('%starts', row.index, 'i64')}")
        following = f.op(f"add i64 {row.index}, 1")
        last = f.op(f"load i64, ptr {f.at('%starts', following, 'i64')}")
        flag = f.op(f"load i64, ptr {f.at('%convex', row.index, 'i64')}")
        around = f.op(f"icmp ne i64 {flag}, 0")
        begin = f.op(f"add i64 {first}, {flag}")
        index = f.op(f"load i64, ptr {f.at('%indices', first, 'i64')}")
        pivot = f.pointer("%rows", index)
        out = f.pointer("%out", row.index)
        columns = f.op("sub i64 %stop, %start")
        whole = f.op(f"sub i64 %stop, {f.op(f'srem i64 {columns}, {step}')}")
        with f.loop("%start", whole, step) as loop:
            _mix(f, loop.index, UNROLL, around, begin, last, pivot, out)
        f.set_lanes(1)
        with f.loop(whole, "%stop") as loop:
            _mix(f, loop.index, 1, around, begin, last, pivot, out)
        f.set_lanes(step // UNROLL)
    body = "\n".join(f.lines)
    parameters = ", ".join(f"ptr noalias %{name}" for name in names)
    f.set_lanes(1)
    scalar = f"declare {f.vector} @llvm.fma.{f.suffix}({f.vector}, {f.vector}, {f.vector})"
    return f"""
{scalar}

define internal void @combine({parameters}, i64 %k, i64 %start, i64 %stop, i64 %origin) {{
entry:
{body}
  ret void
}}
"""


def _mix(
    f: Function,
    column: str,
    vectors: int,
    around: str,
    begin: str,
    last: str,
    pivot: str,
    out: str,
) -> None:
    """Write one row's mix of ``vectors`` vectors of columns."""
    columns = [f.op(f"add i64 {column}, {i * f.lanes}") for i in range(vectors)]
    centres = []
    for place in columns:
        value = f.load(f.at(pivot, place))
        # Without a pivot its values are not used, not even multiplied by zero.
        centres.append(f.op(f"select i1 {around}, {f.vector} {value}, {f.vector} zeroinitializer"))
    with f.loop(begin, last) as entry:
        totals = [entry.carry(f.vector, "zeroinitializer") for _ in columns]
        index = f.op(f"load i64, ptr {f.at('%indices', entry.index, 'i64')}")
        weight = f.broadcast(f.scalar_at("%weights", entry.index))
        row = f.pointer("%rows", index)
        for total, centre, place in zip(totals, centres, columns, strict=True):
            distance = f.sub(f.load(f.at(row, place)), centre)
            if f.target.has_fma:
                entry.update(total, f.fma(distance, weight, total))
            else:
                entry.update(total, f.add(total, f.mul(distance, weight)))
    for total, centre, place in zip(totals, centres, columns, strict=True):
        target_place = f.at(out, f.op(f"sub i64 {place}, %origin"), f.scalar)
        size = f.element.compute_bits // 8
        f.line(f"  store {f.vector} {f.add(total, centre)}, ptr {target_place}, align {size}")


def _finish(f: Function, helper: str) -> str:
    body = "\n".join(f.lines)
    return f"""{declarations(f)}
{helper}
define void @kernel{SIGNATURE} {{
entry:
{body}
  ret void
}}
"""
