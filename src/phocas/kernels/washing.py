"""Rows with dirt in them, cleaned on their way to a kernel: no second matrix is made."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import cleaning, distances
from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.code import compiled, eight_words
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.memory import Rows, aligned, compute_dtype, row_table, stored_dtype, stored_nan
from phocas.kernels.threads import CHUNK_COLUMNS, POOL, address

CHUNK_BYTES = 1 << 22  # of cleaned rows, which stay in a cache until they are read
BETWEEN = 16  # values between copied rows: a power of two would crowd the cache's sets
_WASHED = struct.Struct(f"{len(cleaning.WashArguments._fields)}Q").pack


def cleaned(rows: Rows) -> NDArray[Any]:
    """Return a copy of rows, as they are stored, cleaned."""
    out = np.empty((len(rows), rows.columns), stored_dtype(rows.element))
    for begin, part in clean_chunks(rows):
        table = row_table(out[:, begin : begin + part.columns])
        copy = ctypes.memmove
        for to, source in zip(table, part.addresses, strict=True):
            copy(int(to), int(source), part.columns * out.itemsize)
    return out


def clean_chunks(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield rows in chunks of columns, with where they begin; each lasts until the next.

    Those with dirt are copied. Chunks end where granules do, if the rows begin with one.
    """
    dirt = rows.dirt
    if dirt is None:
        yield 0, rows
        return
    granule = distances.granule_columns(len(rows))
    kind = stored_dtype(rows.element)
    step = max(1, CHUNK_BYTES // (len(rows) * granule * kind.itemsize)) * granule
    room = aligned((len(rows), min(step, rows.columns) + BETWEEN), kind)
    table, number = row_table(room), np.array([dirt.scale], compute_dtype(rows.element))
    for begin in range(0, rows.columns, step):
        part = rows.shifted(begin, min(rows.columns, begin + step))
        known = dirt.marks[begin // BLOCK_COLUMNS :]
        words = cleaning.Arguments(
            rows=address(part.addresses),
            out=address(table),
            k=len(rows),
            marks=address(known),
            size=known.itemsize,
            scale=address(number),
            chosen=address(dirt.chosen),
        )
        work = compiled("clean", rows.element)
        POOL.run(work, eight_words(*words), None, part.columns, CHUNK_COLUMNS)
        room[dirt.out[dirt.chosen], : part.columns] = stored_nan(rows.element)
        yield begin, Rows(table, part.columns, rows.element, room)


def over_columns(
    rows: Rows,
    work: int,
    words: bytes,
    local: NDArray[Any] | None,
    width: int,
    patch: Patch | None = None,
) -> None:
    """Run a kernel over all columns of rows; if they have dirt in them, so many at a time."""
    if rows.dirt is None:
        POOL.run(work, words, local, rows.columns, CHUNK_COLUMNS)
    else:
        wash(Job(rows, work, words, local, rows.columns, CHUNK_COLUMNS), width, width, patch)


class Patch(NamedTuple):
    """A second table of rows that a kernel reads: which they are, and where its place is."""

    others: NDArray[np.intp]
    slot: int
    nested: int = 0


class Job(NamedTuple):
    """A kernel, what it takes, and how many items it is to be run over, so many at a time."""

    rows: Rows
    work: int
    words: bytes
    local: NDArray[Any] | None
    items: int
    chunk: int


def wash(job: Job, step: int, width: int, patch: Patch | None = None) -> None:
    """Run a kernel on rows with dirt, of which ``step`` items are so many columns."""
    rows, local = job.rows, job.local
    dirt = rows.dirt
    if dirt is None:
        raise ValueError("there is no dirt")
    threads, k = POOL.size(), len(rows)
    room = aligned((threads, k, width + BETWEEN), stored_dtype(rows.element))
    nothing = np.full(width, stored_nan(rows.element))
    number = np.array([dirt.scale], compute_dtype(rows.element))
    outs = dirt.out.astype(np.int64)
    others = np.zeros(1, np.intp) if patch is None else patch.others
    inner = job.words.ljust(8 * cleaning.MOST_WORDS, b"\0")
    pointers = np.frombuffer(inner, np.uint8)
    named = cleaning.WashArguments(
        rows=address(rows.addresses),
        k=k,
        marks=address(dirt.marks),
        size=dirt.marks.itemsize,
        scale=address(number),
        chosen=address(dirt.chosen),
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
                cleaning.WashWords(
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
    POOL.run(compiled("wash", rows.element), _WASHED(*named), owned, job.items, job.chunk)
