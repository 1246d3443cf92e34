"""The kernels as functions of rows in memory. Knows addresses and element types, nothing else."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import blocks, code, mixing, normals
from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.code import ColumnKernel, column_kernel, compiled, eight_words, knowing_kernel
from phocas.kernels.columns import PLAIN_MEAN, Window
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.masses import Weighing
from phocas.kernels.memory import SCRATCH, Rows, compute_dtype, row_table, tallies_of
from phocas.kernels.mixes import SparseMix, identity
from phocas.kernels.threads import CHUNK_COLUMNS, POOL, address
from phocas.kernels.washing import Patch, clean_chunks, over_columns

NORMAL_GROUPS = 256  # of normal numbers that a thread draws at a time
TILE_BYTES = 20480  # a mixed tile, its sources and the next tile stay in L1
_RULE = struct.Struct(f"{len(mixing.RuleWords._fields)}Q").pack


def reduce(
    rows: Rows,
    window: Window,
    out: int,
    counts: NDArray[np.int64] | None = None,
    spread: float | None = None,
    weighing: Weighing | None = None,
) -> None:
    """Average a window of every column into ``out``; add dropped values to ``counts``.

    With a reach, the first column must begin a block, unless the columns are part of one block only
    and its spread is given. With a weighing, that says what is averaged, and not the window.
    """
    m = len(rows)
    if window.watched and (counts is None or m > code.STRAIGHT_LINE_ROWS):
        if counts is not None:
            unused = np.empty(rows.columns * ELEMENTS[rows.element].size, np.uint8)
            reduce(rows, replace(window, watched=False), address(unused), counts, spread)
        window, counts = PLAIN_MEAN, None
    blame = counts is not None
    kernel = column_kernel(m, rows.element, window, blame, weighing).given(spread)
    words = eight_words(address(rows.addresses), out, *kernel.rest)
    local = None if counts is None else tallies_of(POOL.size(), m)
    over_columns(rows, kernel.work, words, local, BLOCK_COLUMNS)
    if counts is not None and local is not None:
        counts += local.sum(axis=0)


def radii(
    rows: Rows, window: Window, mix: SparseMix | None = None, weighing: Weighing | None = None
) -> NDArray[np.floating]:
    """Return the radius of every column, or column of a mix, scaled as :func:`reduce` has it."""
    if mix is not None:
        kind = compute_dtype(rows.element)
        mixed = np.empty(rows.columns, kind)
        inner = knowing_kernel(len(mix), kind.name, window, "radii", weighing)
        _mix_reduce(rows, mix, inner, mixed, BLOCK_COLUMNS)
        return mixed
    computed = values(rows)  # as the columns of a kernel are, whatever they are stored as
    out = np.empty(rows.columns, computed.dtype)
    kernel = knowing_kernel(len(rows), computed.dtype.name, window, "radii", weighing)
    table = row_table(computed)
    words = eight_words(address(table), address(out), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return out


def marks(
    rows: Rows, window: Window, spread: float | None = None, first: int | None = None
) -> NDArray[np.void]:
    """Return what is implausible in every block: beyond twice the reach of a window.

    They are of :func:`blocks.marks_dtype`. As for :func:`reduce`, the first column begins a block
    unless all are part of one block, whose spread is given then. With ``first``, only so many rows
    are looked at, and there is nothing implausible in the others.
    """
    if first is not None:
        found = marks(rows.take(np.arange(first)), window, spread)
        wide = np.zeros(len(found), blocks.marks_dtype(len(rows), compute_dtype(rows.element)))
        wide["centre"], wide["limit"] = found["centre"], found["limit"]
        wide["counts"][:, :first] = found["counts"]
        return wide
    kernel = knowing_kernel(len(rows), rows.element, window, "marks").given(spread)
    kind = blocks.marks_dtype(len(rows), compute_dtype(rows.element))
    found = np.zeros(-(-rows.columns // BLOCK_COLUMNS), kind)
    words = eight_words(address(rows.addresses), address(found), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return found


def combine(rows: Rows, mix: SparseMix, out: NDArray[np.floating]) -> None:
    """Write the mixed rows to ``out``, a (k, columns) array of computed values or of doubles."""
    if rows.dirt is not None:
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
    work = compiled("combine", rows.element, out.dtype == np.float64)
    POOL.run(work, eight_words(*words), None, rows.columns, CHUNK_COLUMNS)


def values(rows: Rows) -> NDArray[np.floating]:
    """Return a copy of the rows in the type that they are computed in."""
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
    """Mix the rows and average a window of every column, a tile at a time; see :func:`reduce`.

    ``out`` is an array of computed values or of doubles.
    """
    blame = counts is not None
    kernel = column_kernel(len(mix), out.dtype.name, window, blame, weighing).given(spread)
    tallies = _mix_reduce(rows, mix, kernel, out, BLOCK_COLUMNS if window.reach else None)
    if counts is not None:
        counts += tallies.sum(axis=0)


def _mix_reduce(
    rows: Rows,
    mix: SparseMix,
    inner: ColumnKernel,
    out: NDArray[np.floating],
    tile: int | None,
) -> NDArray[np.int64]:
    """Mix the rows and run a column kernel over them, a tile at a time; return its tallies."""
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
    width = 1 << (min(tile, BLOCK_COLUMNS).bit_length() - 1)  # whole parts of a block
    over_columns(rows, work, eight_words(*words), local, width, patch)
    return tallies


def draw_normals(
    out: NDArray[np.floating], key: tuple[int, int], row: int, start: int, std: float
) -> None:
    """Fill floats or doubles that lie side by side with a part of a row of normal numbers.

    The numbers of a key of two words of 64 bits and a row are always the same, and do not depend on
    where a part of them begins. They have the precision of floats.
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
    arguments = normals.Arguments(
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
