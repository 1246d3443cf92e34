"""Generators of kernels for weighted rows: the average of a window of the weight of each column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import blocks
from phocas.kernels.emit import ColumnArguments, Element, Function
from phocas.kernels.masses import SCALE, Masses, Sure
from phocas.kernels.paired_masses import TOGETHER, paired_columns
from phocas.kernels.sorted_masses import sorted_columns
from phocas.kernels.target import Target

_CUTOFF = 6  # index of the cutoff among the constants


def padded_weights(units: NDArray[np.int64], kind: type[np.floating]) -> NDArray[np.floating]:
    """Return two rows of numbers: the weights, and the total weight of all later rows.

    Zeros are appended up to a whole number of groups of rows.
    """
    found = np.zeros((2, -(-len(units) // TOGETHER) * TOGETHER), kind)
    found[0, : len(units)] = units
    found[1, : len(units)] = units.sum() - np.cumsum(units)
    return found


def constants(masses: Masses, total: int, kind: type[np.floating]) -> NDArray[np.floating]:
    """Return the constants of a kernel for weighted rows.

    The constants are the total weight, the weight cut from each end, the dropped weight, the
    factors from three sums to means, the cutoff, and NaN (the spread of the block is not known).
    """
    drop = masses.drop or 0.0
    return np.array(
        [
            total,
            masses.trim,
            drop,
            1 / (total - 2 * masses.trim),
            1 / (total - drop),
            1 / total,
            masses.cutoff,
            np.nan,
        ],
        kind,
    )


def weighted_module(
    target: Target,
    element: Element,
    drop: bool,
    cutoff: bool,
    blame: bool,
    radii: bool,
    straight: tuple[int, Sure] | None = None,
) -> str:
    """Generate the LLVM IR of the kernel for weighted rows, which processes blocks of columns.

    With ``straight``, the kernel sorts a fixed number of rows by straight-line code. Otherwise it
    compares every pair of any number of rows.
    """
    f = Function(target, element)
    loop = paired_columns(f, drop) if straight is None else sorted_columns(f, *straight, drop)
    with loop as (index, found):
        left: tuple[str, ...] = (found.low, found.high)
        column = f.op(f"add i64 %column, {index}")
        if cutoff and not radii:
            left += (found.centre,)
        elif not radii:
            f.store(found.value, f.at("%out", column))
        blocks.leave(f, left, f.op(f"add i64 %place, {index}"))

    def weigh(g: Function, weights: blocks.Weights, place: str) -> tuple[str, str]:
        args = g.named(ColumnArguments._fields)
        column = g.op(f"add i64 %column, {g.op(f'sub i64 {place}, %place')}")
        minus = g.load_vector(blocks.slot(g, blocks.LOW, place))
        units, numbers = args.pointer("program"), args.pointer("constants")
        inverse = g.scalar_at(numbers, 5)
        with g.loop("0", args.integer("m")) as each:
            total = each.carry(g.vector, "zeroinitializer")
            weight = each.carry(g.vector, "zeroinitializer")
            value = g.load(g.at(g.pointer("%rows", each.index), column))
            distance = g.multiply_add(value, g.splat(SCALE), minus)
            unit = g.scalar_at(units, each.index)
            share = g.broadcast(g.op(f"fmul {g.scalar} {unit}, {inverse}"))
            more = weights.add(distance, total, weight, share)
            each.update(total, more[0])
            each.update(weight, more[1])
        return total, weight

    def scaled(g: Function) -> str | None:
        return g.splat(SCALE) if drop else None

    sweeps = blocks.Sweeps(
        blocks.first_text(f),
        len(left),
        blocks.second_text(target, element, scaled, weigh) if cutoff and not radii else "",
        blocks.blame_text(target, element, scaled) if blame else "",
        "radii" if radii else "values",
        cutoff=_CUTOFF,
    )
    return blocks.module_text(f, sweeps)
