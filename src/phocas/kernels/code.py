"""Which machine code does what is asked, made when it is first needed, and what it is told."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import (
    blocks,
    cleaning,
    columns,
    distances,
    jit,
    means,
    mixing,
    normals,
    products,
    programs,
    weighted,
)
from phocas.kernels.columns import Window
from phocas.kernels.emit import ELEMENTS, ColumnArguments
from phocas.kernels.masses import Sure, Weighing
from phocas.kernels.memory import compute_dtype
from phocas.kernels.sorted_masses import SORTED_ROWS
from phocas.kernels.target import Target
from phocas.kernels.threads import address

# Straight-line code beats the program up to here: 200 rows 2.9 against 4.3 times the mean; past
# it, compiling takes more than a second.
STRAIGHT_LINE_ROWS = 192
_EIGHT, _ZEROS = struct.Struct("8Q").pack, (0,) * 8


def eight_words(*words: int) -> bytes:
    """Return the eight words that a kernel takes."""
    return _EIGHT(*words, *_ZEROS[len(words) :])


def compiled(name: str, element: str, wide: bool = False) -> int:
    """Return the address of the kernel of a name for an element, or one that adds up doubles."""
    writers = {
        "clean": cleaning.clean_module,
        "wash": cleaning.wash_module,
        "combine": mixing.combine_module,
        "fused": mixing.fused_module,
        "pairs": distances.pairs_module,
        "norms": distances.norms_module,
        "products": products.products_module,
        "normals": normals.normals_module,
    }
    kind = ELEMENTS[element].wide() if wide else ELEMENTS[element]
    return jit.address((name, kind.name, kind.compute), partial(_write, writers[name], kind))


def _write(writer: object, kind: object, target: Target) -> str:
    return writer(target, kind)  # type: ignore[operator, no-any-return]


class ColumnKernel(NamedTuple):
    """A kernel, its arguments after rows and output, and what they point to."""

    work: int
    rest: tuple[int, ...]
    constants: NDArray[np.floating]
    alive: object = None

    def given(self, spread: float | None) -> ColumnKernel:
        """Return the kernel for a block whose spread is known."""
        if spread is None:
            return self
        constants = self.constants.copy()
        constants[-1] = spread
        return self._replace(rest=(*self.rest[:-1], address(constants)), constants=constants)


def column_kernel(
    m: int, element: str, window: Window, blame: bool, weighing: Weighing | None
) -> ColumnKernel:
    """Return the kernel that averages a window, or a weighing, of columns of m values."""
    if weighing is not None:
        return _weighted_kernel(element, weighing, blame, radii=False)
    straight = m <= STRAIGHT_LINE_ROWS
    return _chosen_kernel(m, element, window, blame and not window.plain, straight)


def knowing_kernel(
    m: int, element: str, window: Window, gives: blocks.Gives, weighing: Weighing | None = None
) -> ColumnKernel:
    """Return the kernel that tells how far a window goes: its radii, or marks of what is beyond."""
    if weighing is not None:
        return _weighted_kernel(element, weighing, blame=False, radii=True)
    straight = m <= STRAIGHT_LINE_ROWS
    return _chosen_kernel(m, element, window, blame=False, straight=straight, gives=gives)


def _weighted_kernel(element: str, weighing: Weighing, blame: bool, radii: bool) -> ColumnKernel:
    kind, number = ELEMENTS[element], compute_dtype(element).type
    drop, reach = bool(weighing.masses.drop), bool(weighing.masses.reach)
    m = len(weighing.units)
    straight = (m, Sure.of(weighing)) if m <= SORTED_ROWS else None
    work = jit.address(
        ("weighted", element, drop, reach, blame, radii, straight),
        lambda target: weighted.weighted_module(target, kind, drop, reach, blame, radii, straight),
    )
    units = weighted.padded_weights(weighing.units, number)
    numbers = weighted.constants(weighing.masses, int(weighing.units.sum()), number)
    return _column_arguments(
        work, numbers, units, m=m, program=address(units), steps=units.shape[1]
    )


@lru_cache(maxsize=1024)
def _chosen_kernel(
    m: int,
    element: str,
    window: Window,
    blame: bool,
    straight: bool,
    gives: blocks.Gives = "values",
) -> ColumnKernel:
    kind = ELEMENTS[element]
    reach = bool(window.reach)
    number = compute_dtype(element).type
    if straight:
        numbers = np.array([window.reach, np.nan], number)
        code = replace(window, reach=float(reach))  # the reach itself is a number, not code
        work = jit.address(
            ("straight", element, m, code, blame, gives),
            lambda target: (
                blocks.straight_module(target, kind, m, code, blame, gives)
                if reach or blame
                else columns.straight_module(target, kind, m, code)
            ),
        )
        return _column_arguments(work, numbers, m=m)
    if window.plain:
        work = jit.address(("mean", element), lambda target: means.mean_module(target, kind))
        return _column_arguments(work, means.constants(m, number), m=m)
    drop = bool(window.drop)
    work = jit.address(
        ("table", element, drop, reach, blame, gives),
        lambda target: (
            programs.blocks_module(target, kind, drop, reach, blame, gives)
            if reach or blame
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
