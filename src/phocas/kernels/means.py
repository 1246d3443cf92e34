"""The mean of many rows: a loop over the rows, with a tile of columns in registers.

Straight-line code for 5000 rows took 22 s to compile. The loop adds rows in the same order, so the
bits are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phocas.kernels.columns import plain_scale
from phocas.kernels.emit import ColumnArguments, Element, Function, module_text
from phocas.kernels.target import Target

UNROLL = 8  # vectors of columns at once, so that a few cache lines of a row are read at a time


def constants(m: int, kind: type[np.floating]) -> NDArray[np.floating]:
    """Return the scale that prevents overflow of sums, and the factor from a sum to the mean."""
    scale = plain_scale(m)
    return np.array([scale, 1 / (scale * m)], kind)


def mean_module(target: Target, element: Element) -> str:
    """Generate the LLVM IR of the kernel that computes the plain mean of any number of rows."""
    f = Function(target, element)
    args = f.named(ColumnArguments._fields)
    rows, out, m = args.pointer("rows"), args.pointer("out"), args.integer("m")
    scale, inverse = (f.broadcast(f.scalar_at(args.pointer("constants"), i)) for i in range(2))
    step = f.lanes * UNROLL
    columns = f.op("sub i64 %stop, %start")
    whole = f.op(f"sub i64 %stop, {f.op(f'srem i64 {columns}, {step}')}")
    for begin, end, vectors in (("%start", whole, UNROLL), (whole, "%stop", 1)):
        with f.loop(begin, end, f.lanes * vectors) as loop:
            with f.loop("0", m) as each:
                start = f.at(f.pointer(rows, each.index), loop.index)
                for i in range(vectors):
                    total = each.carry(f.vector, "zeroinitializer")
                    address = f.at(start, str(i * f.lanes))
                    if vectors > 1:
                        f.prefetch(address, step * element.size)
                    value = f.mul(f.load(address), scale)
                    each.update(total, f.add(total, value))
            for i, total in enumerate(each.carried()):
                f.store(f.mul(total, inverse), f.at(f.at(out, loop.index), str(i * f.lanes)))
    return module_text(f)
