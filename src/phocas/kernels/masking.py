"""Rows with masked outliers, filtered while a kernel reads them, without a second matrix."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import distances, filtering
from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.code import compiled, eight_words
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.memory import (
    OutlierMask,
    Rows,
    aligned,
    compute_dtype,
    row_table,
    stored_dtype,
    stored_nan,
    tallies_of,
)
from phocas.kernels.threads import CHUNK_COLUMNS, POOL, address

CHUNK_BYTES = 1 << 22  # of filtered rows, which stay in a cache until they are read
BETWEEN = 16  # values between copied rows: a power-of-two stride would cause cache conflicts
_MASKED = struct.Struct(f"{len(filtering.MaskArguments._fields)}Q").pack


def cleaned(rows: Rows) -> NDArray[Any]:
    """Return a copy of rows with outliers replaced by column centres, in the stored dtype."""
    out = np.empty((len(rows), rows.columns), stored_dtype(rows.element))
    for begin, part in clean_chunks(rows):
        table = row_table(out[:, begin : begin + part.columns])
        copy = ctypes.memmove
        for to, source in zip(table, part.addresses, strict=True):
            copy(int(to), int(source), part.columns * out.itemsize)
    return out


def tail(rows: Rows, mask: OutlierMask, largest: float) -> NDArray[np.floating]:
    """Return half the weighted distances of outliers from the centres of their columns.

    The weight rises from 0 at the limit of the column to 1 at twice the limit. The result is zero
    where a value is no outlier, and NaN where an outlier is farther than ``largest``. The first
    column of the rows is the first column of a block.
    """
    out = np.empty((len(rows), rows.columns), compute_dtype(rows.element))
    table = row_table(out)
    _run_tail("tail", rows, mask, (largest,), table, None)
    return out


def tail_squares(rows: Rows, mask: OutlierMask, largest: float) -> NDArray[np.float64]:
    """Return the sum of squares of each row's tail (see :func:`tail`) in each block of columns."""
    out = np.empty((-(-rows.columns // BLOCK_COLUMNS), len(rows)))
    _run_tail("tail_squares", rows, mask, (largest,), out, None)
    return out


def add_tail(
    rows: Rows,
    mask: OutlierMask,
    largest: float,
    factors: NDArray[np.float64],
    out: NDArray[np.floating],
) -> NDArray[np.int64]:
    """Add the tails of rows, each times its factor, to a result, in the order of the rows.

    The sum is divided by the number of workers whose value is not lost: farther than ``largest``.
    Return the number of lost values of each row.
    """
    lost = tallies_of(POOL.size(), len(rows))
    power = 2.0 ** -len(rows).bit_length()  # so that no sum of finite distances overflows
    numbers = (largest, len(rows), power, *(factors * power))
    _run_tail("add_tail", rows, mask, numbers, out, lost)
    return np.asarray(lost.sum(axis=0))


def _run_tail(
    name: str,
    rows: Rows,
    mask: OutlierMask,
    numbers: tuple[float, ...],
    out: NDArray[Any],
    local: NDArray[Any] | None,
) -> None:
    """Run a kernel of tails; ``numbers`` begin with the largest distance."""
    kind = compute_dtype(rows.element)
    largest = min(numbers[0], float(np.finfo(kind).max))
    values = np.array([mask.scale, largest, *numbers[1:]], kind)
    _run(name, rows, mask, mask.marks, values, out, local)


def _run(
    name: str,
    rows: Rows,
    mask: OutlierMask,
    marks: NDArray[Any],
    numbers: NDArray[Any],
    out: NDArray[Any],
    local: NDArray[Any] | None = None,
) -> None:
    """Run a kernel with ``FilterArguments``; ``numbers`` begin with the scale of distances."""
    words = filtering.FilterArguments(
        rows=address(rows.addresses),
        out=address(out),
        k=len(rows),
        marks=address(marks),
        size=marks.itemsize,
        scale=address(numbers),
        chosen=address(mask.chosen),
    )
    POOL.run(compiled(name, rows.element), eight_words(*words), local, rows.columns, CHUNK_COLUMNS)


def clean_chunks(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield the rows in chunks of columns, with outliers replaced, as (first column, rows).

    Rows without a mask are one chunk and are not copied. Otherwise a chunk is a copy, which the
    next chunk overwrites. The width of a chunk is a multiple of the granule, the fixed number of
    columns that the distance kernels sum at a time.
    """
    mask = rows.mask
    if mask is None:
        yield 0, rows
        return
    granule = distances.granule_columns(len(rows))
    kind = stored_dtype(rows.element)
    step = max(1, CHUNK_BYTES // (len(rows) * granule * kind.itemsize)) * granule
    room = aligned((len(rows), min(step, rows.columns) + BETWEEN), kind)
    table, number = row_table(room), np.array([mask.scale], compute_dtype(rows.element))
    for begin in range(0, rows.columns, step):
        part = rows.shifted(begin, min(rows.columns, begin + step))
        known = mask.marks[begin // BLOCK_COLUMNS :]
        _run("clean", part, mask, known, number, table)
        room[mask.out[mask.chosen], : part.columns] = stored_nan(rows.element)
        yield begin, Rows(table, part.columns, rows.element, room)


def over_columns(
    rows: Rows,
    work: int,
    words: bytes,
    local: NDArray[Any] | None,
    width: int,
    patch: Patch | None = None,
) -> None:
    """Run a kernel over all columns of rows.

    If the rows have an outlier mask, the kernel reads ``width`` filtered columns at a time.
    """
    if rows.mask is None:
        POOL.run(work, words, local, rows.columns, CHUNK_COLUMNS)
    else:
        run_masked(
            FilteredCall(rows, work, words, local, rows.columns, CHUNK_COLUMNS), width, width, patch
        )


class Patch(NamedTuple):
    """A second table of rows that a kernel reads, and which must be filtered like the first.

    Attributes:
        others: the indices of its rows in the first table.
        slot: the index of the word that points to the table, among the arguments of the kernel.
        nested: if not 0, the argument that points to the words among which ``slot`` counts.
    """

    others: NDArray[np.intp]
    slot: int
    nested: int = 0


class FilteredCall(NamedTuple):
    """A kernel that is to read rows without their outliers.

    ``work`` is the address of the kernel, ``words`` are its arguments, and ``local`` is the memory
    of each thread. The kernel processes ``items``, in chunks of ``chunk`` per thread.
    """

    rows: Rows
    work: int
    words: bytes
    local: NDArray[Any] | None
    items: int
    chunk: int


def run_masked(job: FilteredCall, step: int, width: int, patch: Patch | None = None) -> None:
    """Run a kernel on rows without their outliers; ``step`` items of it are ``width`` columns."""
    rows, local = job.rows, job.local
    mask = rows.mask
    if mask is None:
        raise ValueError("the rows have no outlier mask")
    threads, k = POOL.size(), len(rows)
    room = aligned((threads, k, width + BETWEEN), stored_dtype(rows.element))
    nothing = np.full(width, stored_nan(rows.element))
    number = np.array([mask.scale], compute_dtype(rows.element))
    outs = mask.out.astype(np.int64)
    others = np.zeros(1, np.intp) if patch is None else patch.others
    inner = job.words.ljust(8 * filtering.MOST_WORDS, b"\0")
    pointers = np.frombuffer(inner, np.uint8)
    named = filtering.MaskArguments(
        rows=address(rows.addresses),
        k=k,
        marks=address(mask.marks),
        size=mask.marks.itemsize,
        scale=address(number),
        chosen=address(mask.chosen),
        outs=address(outs),
        nothing=address(nothing),
        work=job.work,
        inner=address(pointers),
        step=step,
        width=width,
        ahead=0 if patch is not None else width * ELEMENTS[rows.element].size,
        columns=rows.columns,
        others=address(others),
        number=0 if patch is None else len(others),
        slot=0 if patch is None else patch.slot,
        nested=0 if patch is None else patch.nested,
    )
    tables_ = np.zeros((threads, k + len(others)), np.uint64)
    owned = np.stack(
        [
            np.array(
                filtering.MaskWords(
                    local=0 if local is None else address(local[i]),
                    table=address(tables_[i]),
                    second=address(tables_[i, k:]),
                    room=address(room[i]),
                    stride=room.strides[1],
                ),
                np.uint64,
            )
            for i in range(threads)
        ]
    )
    POOL.run(compiled("masked", rows.element), _MASKED(*named), owned, job.items, job.chunk)
