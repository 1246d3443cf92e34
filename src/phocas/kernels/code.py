"""Selection of the machine code for a call, compiled on first use, and its arguments."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import (
    blocks,
    columns,
    distances,
    filtering,
    jit,
    means,
    mixing,
    normals,
    products,
    programs,
    tails,
    weighted,
)
from phocas.kernels.columns import Window
from phocas.kernels.emit import ELEMENTS, ColumnArguments
from phocas.kernels.masses import Sure, Weighing
from phocas.kernels.memory import compute_dtype
from phocas.kernels.sorted_masses import SORTED_ROWS
from phocas.kernels.target import Target
from phocas.kernels.threads import address

# Straight-line code is faster than the table program up to here: 200 rows take 2.9 against 4.3
# times the mean. For more rows, compiling takes longer than a second.
STRAIGHT_LINE_ROWS = 192
EIGHT_WORDS = struct.Struct("8Q").pack
_ZEROS = (0,) * 8


def eight_words(*words: int) -> bytes:
    """Return the eight words that a kernel takes, zeros for those that are missing."""
    return EIGHT_WORDS(*words, *_ZEROS[len(words) :])


def compiled(name: str, element: str, wide: bool = False) -> int:
    """Return the address of a named kernel for an element; ``wide`` computes in doubles."""
    writers = {
        "clean": filtering.clean_module,
        "tail": tails.tail_module,
        "tail_squares": tails.squares_module,
        "add_tail": tails.add_module,
        "masked": filtering.masked_module,
        "combine": mixing.combine_module,
        "combine_few": mixing.combine_few_module,
        "fused": mixing.fused_module,
        "pairs": distances.pairs_module,
        "norms": distances.norms_module,
        "origin": distances.origin_module,
        "signs": distances.signs_module,
        "products": products.products_module,
        "normals": normals.normals_module,
    }
    kind = ELEMENTS[element].wide() if wide else ELEMENTS[element]
    return jit.address((name, kind.name, kind.compute), partial(_write, writers[name], kind))


def _write(writer: object, kind: object, target: Target) -> str:
    return writer(target, kind)  # type: ignore[operator, no-any-return]


class ColumnKernel(NamedTuple):
    """A compiled kernel, its arguments besides rows and output, and the arrays they point to."""

    work: int
    rest: tuple[int, ...]
    constants: NDArray[np.floating]
    alive: object = None

    def given(self, spread: float | None) -> ColumnKernel:
        """Return the kernel for a block of columns whose spread is known."""
        if spread is None:
            return self
        constants = self.constants.copy()
        constants[-1] = spread
        return self._replace(rest=(*self.rest[:-1], address(constants)), constants=constants)


def weighted_kernel(element: str, weighing: Weighing, blame: bool, radii: bool) -> ColumnKernel:
    """Return the kernel for columns whose values have weights."""
    kind, number = ELEMENTS[element], compute_dtype(element).type
    drop, cutoff = bool(weighing.masses.drop), bool(weighing.masses.cutoff)
    m = len(weighing.units)
    straight = (m, Sure.of(weighing)) if m <= SORTED_ROWS else None
    work = jit.address(
        ("weighted", element, drop, cutoff, blame, radii, straight),
        lambda target: weighted.weighted_module(target, kind, drop, cutoff, blame, radii, straight),
    )
    units = weighted.padded_weights(weighing.units, number)
    numbers = weighted.constants(weighing.masses, int(weighing.units.sum()), number)
    return _column_arguments(
        work, numbers, units, m=m, program=address(units), steps=units.shape[1]
    )


@lru_cache(maxsize=1024)
def window_kernel(
    m: int, element: str, window: Window, blame: bool, gives: blocks.Gives, straight: bool
) -> ColumnKernel:
    """Return the kernel for a window of columns of m values, in straight-line code or not."""
    kind = ELEMENTS[element]
    cutoff = bool(window.cutoff)
    number = compute_dtype(element).type
    if straight:
        numbers = np.array([window.cutoff, np.nan], number)
        code = replace(window, cutoff=float(cutoff))  # the cutoff's value is data, not code
        work = jit.address(
            ("straight", element, m, code, blame, gives),
            lambda target: (
                blocks.straight_module(target, kind, m, code, blame, gives)
                if cutoff or blame
                else columns.straight_module(target, kind, m, code)
            ),
        )
        return _column_arguments(work, numbers, m=m)
    if window.plain:
        work = jit.address(("mean", element), lambda target: means.mean_module(target, kind))
        return _column_arguments(work, means.constants(m, number), m=m)
    drop = bool(window.drop)
    work = jit.address(
        ("table", element, drop, cutoff, blame, gives),
        lambda target: (
            programs.blocks_module(target, kind, drop, cutoff, blame, gives)
            if cutoff or blame
            else programs.table_module(target, kind, drop)
        ),
    )
    steps = programs.program(m)
    return _column_arguments(
        work,
        programs.constants(window, m, number),
        steps,
        m=m,
        program=address(steps),
        steps=len(steps),
        trim=window.trim,
        drop=window.drop or 0,
    )


def _column_arguments(
    work: int, constants: NDArray[np.floating], *alive: NDArray[Any], **words: int
) -> ColumnKernel:
    named = ColumnArguments(rows=0, out=0, **words, constants=address(constants))
    return ColumnKernel(work, named[2:], constants, alive)
