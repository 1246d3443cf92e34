"""The kernels as functions of rows in memory.

The functions take addresses and element types, not arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import blocks, code, mixing, normals
from phocas.kernels.blocks import BLOCK_COLUMNS, Gives
from phocas.kernels.code import (
    EIGHT_WORDS,
    ColumnKernel,
    compiled,
    eight_words,
    weighted_kernel,
    window_kernel,
)
from phocas.kernels.columns import PLAIN_MEAN, Window
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.masking import Patch, clean_chunks, over_columns
from phocas.kernels.masses import Weighing
from phocas.kernels.memory import SCRATCH, Rows, compute_dtype, row_table, tallies_of
from phocas.kernels.mixes import SparseMix, identity
from phocas.kernels.threads import CHUNK_COLUMNS, POOL, address

NORMAL_GROUPS = 256  # groups of normal numbers that a thread draws at a time
TILE_BYTES = 20480  # a mixed tile, its sources and the next tile stay in the L1 cache
_RULE = struct.Struct(f"{len(mixing.RuleWords._fields)}Q").pack


def reduce(
    rows: Rows,
    window: Window,
    out: int,
    counts: NDArray[np.int64] | None = None,
    spread: float | None = None,
    weighing: Weighing | None = None,
    *,
    mean: bool = False,
) -> None:
    """Average a window of every column into ``out``; count the dropped values of each row.

    Args:
        rows: the rows to reduce.
        window: which of the sorted values of a column are averaged. If the window has a cutoff, the
            first column must be the first of a block, unless ``spread`` is given.
        out: address of the result.
        counts: for each row, the number of dropped values is added here.
        spread: root mean square of the radii of a block, if all columns belong to that one block.
        weighing: weights of the rows; if given, they replace the window.
        mean: write the plain mean of all rows to ``out``, and use the window for the counts only.
    """
    m = len(rows.addresses)
    if mean and (counts is None or window.plain or m > code.STRAIGHT_LINE_ROWS):
        if counts is not None and not window.plain:
            unused = np.empty(rows.columns * ELEMENTS[rows.element].size, np.uint8)
            reduce(rows, window, address(unused), counts, spread)
        window, counts, mean = PLAIN_MEAN, None, False
    kernel = _kernel(
        m, rows.element, window, weighing, counts is not None, "mean" if mean else "values"
    )
    if spread is not None:
        kernel = kernel.given(spread)
    words = EIGHT_WORDS(address(rows.addresses), out, *kernel.rest)
    local, alone = None, rows.columns <= CHUNK_COLUMNS and rows.mask is None
    if counts is not None:  # one thread adds to the counts themselves
        local = counts[None] if alone else tallies_of(POOL.size(), m)
    if rows.mask is None:
        POOL.run(kernel.work, words, local, rows.columns, CHUNK_COLUMNS)
    else:
        over_columns(rows, kernel.work, words, local, BLOCK_COLUMNS)
    if counts is not None and local is not None and not alone:
        counts += local.sum(axis=0)


class PreparedCall(NamedTuple):
    """A call of :func:`reduce` for rows and a result at fixed addresses.

    Call ``run(tallies)``. It adds the dropped values of each row to ``tallies``, which has one row
    for each thread that may take part.
    """

    run: Callable[[NDArray[np.int64]], None]
    threads: int | None
    """The number of rows of ``tallies``; None: as many as the pool has threads."""
    kernel: ColumnKernel
    """The kernel, whose constants must stay in memory."""


def prepare(rows: Rows, window: Window, out: int, *, mean: bool = False) -> PreparedCall | None:
    """Return a prepared call of :func:`reduce` with counts; None if it takes several kernels."""
    m = len(rows)
    if rows.mask is not None or (mean and (window.plain or m > code.STRAIGHT_LINE_ROWS)):
        return None
    kernel = _kernel(m, rows.element, window, None, blame=True, gives="mean" if mean else "values")
    words = EIGHT_WORDS(address(rows.addresses), out, *kernel.rest)
    run = partial(POOL.run, kernel.work, words, total=rows.columns, chunk=CHUNK_COLUMNS)
    return PreparedCall(run, 1 if rows.columns <= CHUNK_COLUMNS else None, kernel)


def _kernel(
    m: int,
    element: str,
    window: Window,
    weighing: Weighing | None,
    blame: bool = False,
    gives: Gives = "values",
) -> ColumnKernel:
    """Return the kernel for columns of m values, made when it is first needed."""
    if weighing is not None:
        return weighted_kernel(element, weighing, blame, radii=gives == "radii")
    straight = m <= code.STRAIGHT_LINE_ROWS
    return window_kernel(m, element, window, blame and not window.plain, gives, straight)


def radii(
    rows: Rows, window: Window, mix: SparseMix | None = None, weighing: Weighing | None = None
) -> NDArray[np.floating]:
    """Return the radius of every column, scaled as in :func:`reduce`.

    The radius is the distance from the centre to the farthest value that a window always keeps.
    With a mix, the columns are those of the mixed rows.
    """
    if mix is not None:
        kind = compute_dtype(rows.element)
        mixed = np.empty(rows.columns, kind)
        inner = _kernel(len(mix), kind.name, window, weighing, gives="radii")
        _mix_reduce(rows, mix, inner, mixed, BLOCK_COLUMNS)
        return mixed
    computed = values(rows)  # in the dtype that kernels compute in, whatever the stored dtype
    out = np.empty(rows.columns, computed.dtype)
    kernel = _kernel(len(rows), computed.dtype.name, window, weighing, gives="radii")
    table = row_table(computed)
    words = eight_words(address(table), address(out), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return out


def marks(
    rows: Rows, window: Window, spread: float | None = None, first: int | None = None
) -> NDArray[np.void]:
    """Find the values beyond twice the cutoff of a window; return the marks of every block.

    Marks are records of :func:`blocks.marks_dtype`, one for each block of columns. As for
    :func:`reduce`, the first column starts a block unless all columns belong to one block, whose
    spread is then given. With ``first``, only the first rows are examined.
    """
    if first is not None:
        found = marks(rows.take(np.arange(first)), window, spread)
        wide = np.zeros(len(found), blocks.marks_dtype(len(rows), compute_dtype(rows.element)))
        for name in ("centre", "limit", "spread"):
            wide[name] = found[name]
        wide["counts"][:, :first] = found["counts"]
        return wide
    kernel = _kernel(len(rows), rows.element, window, None, gives="marks").given(spread)
    kind = blocks.marks_dtype(len(rows), compute_dtype(rows.element))
    found = np.zeros(-(-rows.columns // BLOCK_COLUMNS), kind)
    words = eight_words(address(rows.addresses), address(found), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return found


def combine(rows: Rows, mix: SparseMix, out: NDArray[np.floating]) -> None:
    """Write the k mixed rows to ``out``, a (k, columns) array.

    ``out`` has the dtype in which the kernels compute (see ``compute_dtype``), or float64.
    """
    if rows.mask is not None:
        for begin, part in clean_chunks(rows):
            combine(part, mix, out[:, begin : begin + part.columns])
        return
    weights = mix.weights.astype(out.dtype)
    table = row_table(out)
    centres = rows.addresses[mix.centres[mix.groups[len(rows) :]]]
    words = mixing.CombineArguments(
        rows=address(rows.addresses),
        out=address(table),
        k=len(mix),
        starts=address(mix.starts),
        indices=address(mix.indices),
        weights=address(weights),
        mode=mix.mode,
        centres=address(centres),
    )
    few = len(mix) == 1 and len(rows) <= mixing.FOLLOWED_ROWS
    work = compiled("combine_few" if few else "combine", rows.element, out.dtype == np.float64)
    POOL.run(work, eight_words(*words), None, rows.columns, CHUNK_COLUMNS)


def values(rows: Rows) -> NDArray[np.floating]:
    """Return a copy of the rows in the dtype that kernels compute in."""
    out = np.empty((len(rows), rows.columns), compute_dtype(rows.element))
    combine(rows, identity(len(rows)), out)
    return out


def mix_reduce(
    rows: Rows,
    mix: SparseMix,
    window: Window,
    out: NDArray[np.floating],
    counts: NDArray[np.int64] | None = None,
    spread: float | None = None,
    weighing: Weighing | None = None,
) -> None:
    """Mix the rows and average a window of every column, one tile at a time; see :func:`reduce`.

    ``out`` is an array of computed values or of doubles.
    """
    blame = counts is not None
    kernel = _kernel(len(mix), out.dtype.name, window, weighing, blame).given(spread)
    tallies = _mix_reduce(rows, mix, kernel, out, BLOCK_COLUMNS if window.cutoff else None)
    if counts is not None:
        counts += tallies.sum(axis=0)


def _mix_reduce(
    rows: Rows,
    mix: SparseMix,
    inner: ColumnKernel,
    out: NDArray[np.floating],
    tile: int | None,
) -> NDArray[np.int64]:
    """Mix the rows and run a column kernel over the mixed rows, tile by tile; return the counts."""
    m, k, g = len(rows), len(mix), len(mix.centres)
    kind = out.dtype
    step = mixing.LARGEST_STEP
    tile = tile or max(step, TILE_BYTES // ((m + k + g - 1) * kind.itemsize) // step * step)
    centres, scales = rows.addresses[mix.centres], np.array(mix.scales(), kind)
    arguments = bytearray(eight_words(0, 0, *inner.rest))
    rule = mixing.RuleWords(
        work=inner.work,
        arguments=address(arguments),
        centres=address(centres),
        m=m,
        tile=tile,
        groups=address(mix.groups),
        g=g,
        scales=address(scales),
        memory=address(rows.addresses),
    )
    told = bytearray(_RULE(*rule))
    weights = mix.weights.astype(kind)
    words = mixing.FusedArguments(
        rows=address(rows.addresses),
        out=address(out),
        k=k,
        starts=address(mix.starts),
        indices=address(mix.indices),
        weights=address(weights),
        mode=mix.mode,
        rule=address(told),
    )
    threads = POOL.size()
    scratch = SCRATCH.take((threads, m + g + k, tile), kind)
    tables_ = np.stack([row_table(block) for block in scratch])
    tallies = tallies_of(threads, k)
    local = np.stack(
        [
            np.array(
                mixing.ThreadWords(
                    centred=address(table), mixed=address(table[m + g :]), counts=address(tally)
                ),
                np.uint64,
            )
            for table, tally in zip(tables_, tallies, strict=True)
        ]
    )
    work = compiled("fused", rows.element, kind == np.float64)
    fused, rule_words = mixing.FusedArguments._fields, mixing.RuleWords._fields
    patch = Patch(mix.centres, rule_words.index("centres"), fused.index("rule"))
    width = 1 << (min(tile, BLOCK_COLUMNS).bit_length() - 1)  # divides a block
    over_columns(rows, work, eight_words(*words), local, width, patch)
    return tallies


def draw_normals(
    out: NDArray[np.floating], key: tuple[int, int], row: int, start: int, std: float
) -> None:
    """Fill a contiguous array of floats or doubles with a part of a row of normal numbers.

    Each number depends only on the key (two words of 64 bits), the row and the position in the row,
    not on where a part begins. The numbers have the precision of floats.
    """
    size = normals.GROUP
    if misplaced := start % size:
        head = np.empty(size, out.dtype)
        draw_normals(head, key, row, start - misplaced, std)
        kept = min(len(out), size - misplaced)
        out[:kept] = head[misplaced : misplaced + kept]
        out, start = out[kept:], start + kept
    groups = len(out) // size
    words = np.array([half for word in key for half in divmod(word, 1 << 32)], np.uint64)
    deviation = np.array(std, np.float64)
    arguments = normals.NormalArguments(
        out=address(out),
        first=start // size,
        row=row,
        key=address(words),
        std=address(deviation),
    )
    POOL.run(
        compiled("normals", out.dtype.name), eight_words(*arguments), None, groups, NORMAL_GROUPS
    )
    if groups * size < len(out):
        tail = np.empty(size, out.dtype)
        draw_normals(tail, key, row, start + groups * size, std)
        out[groups * size :] = tail[: len(out) - groups * size]
