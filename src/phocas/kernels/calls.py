"""The kernels as functions of rows in memory. Knows addresses and element types, nothing else."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.columns import PLAIN_MEAN, Window
from phocas.kernels.emit import ELEMENTS, ColumnArguments
from phocas.kernels.target import Target, host
from phocas.kernels.threads import POOL, address
from phocas.kernels.weighted import Sure, Weighing

CHUNK_COLUMNS = 4096
NORMAL_GROUPS = 256  # of normal numbers that a thread draws at a time
CHUNK_BYTES = 1 << 22  # of cleaned rows, which stay in a cache until they are read
BETWEEN = 16  # values between copied rows: a power of two would crowd the cache's sets
TILE_BYTES = 20480  # a mixed tile, its sources and the next tile stay in L1
# Straight-line code beats the program up to here: 200 rows 2.9 against 4.3 times the mean; past
# it, compiling takes more than a second.
STRAIGHT_LINE_ROWS = 192
PRODUCT_ROWS = 64  # more than so many are measured by products


@dataclass(frozen=True, slots=True, eq=False)
class Dirt:
    """What of rows is to be read as something else: implausible values as their centre.

    ``marks`` are those of the blocks from the first column on, ``scale`` that of their window.
    ``chosen`` says which of the marked rows these are; those of them that are ``out`` are NaN.
    """

    marks: NDArray[np.void]
    scale: float
    out: NDArray[np.bool_]
    chosen: NDArray[np.intp]


@dataclass(slots=True, eq=False)  # not frozen: that takes a microsecond to make
class Rows:
    """Where m rows of ``columns`` adjacent values begin, and what keeps them alive.

    With dirt in them, the rows begin where a block does.
    """

    addresses: NDArray[np.uint64]
    columns: int
    element: str
    owner: object
    dirt: Dirt | None = None

    def __len__(self) -> int:
        return len(self.addresses)

    def shifted(self, start: int, stop: int) -> Rows:
        """Return a range of columns of the same rows."""
        offset = np.uint64(start * ELEMENTS[self.element].size)
        dirt = self.dirt
        if dirt is not None:
            dirt = replace(dirt, marks=dirt.marks[start // BLOCK_COLUMNS :])
        return Rows(self.addresses + offset, stop - start, self.element, self.owner, dirt)

    def take(self, indices: NDArray[np.intp]) -> Rows:
        """Return some of the rows."""
        dirt = self.dirt
        if dirt is not None:
            dirt = replace(dirt, chosen=dirt.chosen[indices])
        return Rows(self.addresses[indices], self.columns, self.element, self.owner, dirt)


@dataclass(frozen=True, slots=True)
class SparseMix:
    """A k x m matrix of weights as its nonzero entries, row by row.

    If the weights of every row add up to one, it is mixed around a row of ``centres``: that of the
    group of each of the m rows, and then of each of the k mixes. Mixes of rows that nobody else
    has are groups of their own; otherwise the centre is the row that most of them have. Around a
    far row of small weight, the near ones would be lost to rounding.
    """

    starts: NDArray[np.int64]
    indices: NDArray[np.int64]
    weights: NDArray[np.float64]
    mode: int
    centres: NDArray[np.intp]
    groups: NDArray[np.int64]

    @staticmethod
    def of(matrix: NDArray[np.float64]) -> SparseMix:
        """Return the nonzero entries of each row."""
        k, m = matrix.shape
        rows, indices = np.nonzero(matrix)
        weights = matrix[rows, indices]
        starts = np.searchsorted(rows, np.arange(k + 1))
        mode = mixing.PLAIN
        if np.all(np.abs(matrix.sum(axis=1) - 1) < 1e-12):
            even = len(weights) > 0 and weights.min() == weights.max()
            mode = mixing.UNIFORM if even else mixing.CONVEX
        centres, groups = np.zeros(1, np.intp), np.zeros(m + k, np.int64)
        if mode != mixing.PLAIN:
            sharing = np.bincount(indices, minlength=m)
            heaviest = np.abs(matrix)
            if sharing.max() == 1:
                centres = heaviest.argmax(axis=1)
                groups[indices], groups[m:] = rows, np.arange(k)
            else:
                most = np.where(sharing == sharing.max(), heaviest.sum(axis=0), -1)
                centres = np.array([most.argmax()])
        return SparseMix(starts, np.append(indices, 0), weights, mode, centres, groups)

    def scales(self) -> tuple[float, float]:
        """Return what distances are scaled by, so that no sum overflows, and their sums then."""
        if self.mode == mixing.PLAIN:
            return 1.0, 1.0
        if self.mode == mixing.CONVEX:
            return 0.5, 2.0
        scale = columns.scale_for(int(self.starts[1]))
        return scale, float(self.weights[0]) / scale

    def __len__(self) -> int:
        return len(self.starts) - 1


@lru_cache(maxsize=64)
def _identity(m: int) -> SparseMix:
    everyone = np.arange(m + 1)
    groups = np.zeros(2 * m, np.int64)
    return SparseMix(everyone, everyone, np.ones(m), mixing.PLAIN, np.zeros(1, np.intp), groups)


def _memory(element: str) -> np.dtype[Any]:
    """Return what NumPy has an element's values as."""
    return np.dtype(np.uint16 if element == "bfloat16" else element)


def _nan(element: str) -> np.generic:
    """Return a NaN as it is stored."""
    return np.uint16(0x7FC0) if element == "bfloat16" else _memory(element).type(np.nan)


def half_supported(element: str) -> bool:
    """Tell whether the host converts the element's values by itself."""
    return element != "float16" or host().has_half


def compute_dtype(element: str) -> np.dtype[np.floating]:
    """Return the type that an element's values are computed in."""
    return np.dtype(np.float64 if element == "float64" else np.float32)


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
    if window.watched and (counts is None or m > STRAIGHT_LINE_ROWS):
        if counts is not None:
            unused = np.empty(rows.columns * ELEMENTS[rows.element].size, np.uint8)
            reduce(rows, replace(window, watched=False), address(unused), counts, spread)
        window, counts = PLAIN_MEAN, None
    blame = counts is not None
    kernel = _column_kernel(m, rows.element, window, blame, weighing).given(spread)
    words = _words(address(rows.addresses), out, *kernel.rest)
    local = None if counts is None else _tallies(POOL.size(), m)
    _over_columns(rows, kernel.work, words, local, BLOCK_COLUMNS)
    if counts is not None and local is not None:
        counts += local.sum(axis=0)


def radii(
    rows: Rows, window: Window, mix: SparseMix | None = None, weighing: Weighing | None = None
) -> NDArray[np.floating]:
    """Return the radius of every column, or column of a mix, scaled as :func:`reduce` has it."""
    if mix is not None:
        kind = compute_dtype(rows.element)
        mixed = np.empty(rows.columns, kind)
        inner = _knowing_kernel(len(mix), kind.name, window, "radii", weighing)
        _mix_reduce(rows, mix, inner, mixed, BLOCK_COLUMNS)
        return mixed
    computed = values(rows)  # as the columns of a kernel are, whatever they are stored as
    out = np.empty(rows.columns, computed.dtype)
    kernel = _knowing_kernel(len(rows), computed.dtype.name, window, "radii", weighing)
    table = row_table(computed)
    words = _words(address(table), address(out), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return out


def marks(rows: Rows, window: Window, spread: float | None = None) -> NDArray[np.void]:
    """Return what is implausible in every block: beyond twice the reach of a window.

    They are of :func:`blocks.marks_dtype`. As for :func:`reduce`, the first column begins a block
    unless all are part of one block, whose spread is given then.
    """
    kernel = _knowing_kernel(len(rows), rows.element, window, "marks").given(spread)
    kind = blocks.marks_dtype(len(rows), compute_dtype(rows.element))
    found = np.zeros(-(-rows.columns // BLOCK_COLUMNS), kind)
    words = _words(address(rows.addresses), address(found), *kernel.rest)
    POOL.run(kernel.work, words, None, rows.columns, CHUNK_COLUMNS)
    return found


def cleaned(rows: Rows) -> NDArray[Any]:
    """Return a copy of rows, as they are stored, cleaned."""
    out = np.empty((len(rows), rows.columns), _memory(rows.element))
    for begin, part in _cleaned(rows):
        table = row_table(out[:, begin : begin + part.columns])
        copy = ctypes.memmove
        for to, source in zip(table, part.addresses, strict=True):
            copy(int(to), int(source), part.columns * out.itemsize)
    return out


def _cleaned(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield rows in chunks of columns, with where they begin; each lasts until the next.

    Those with dirt are copied. Chunks end where granules do, if the rows begin with one.
    """
    dirt = rows.dirt
    if dirt is None:
        yield 0, rows
        return
    granule = distances.granule_columns(len(rows))
    kind = _memory(rows.element)
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
        work = _compiled("clean", rows.element)
        POOL.run(work, _words(*words), None, part.columns, CHUNK_COLUMNS)
        room[dirt.out[dirt.chosen], : part.columns] = _nan(rows.element)
        yield begin, Rows(table, part.columns, rows.element, room)


def _over_columns(
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
        _wash(Job(rows, work, words, local, rows.columns, CHUNK_COLUMNS), width, width, patch)


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


def _wash(job: Job, step: int, width: int, patch: Patch | None = None) -> None:
    """Run a kernel on rows with dirt, of which ``step`` items are so many columns."""
    rows, local = job.rows, job.local
    dirt = rows.dirt
    if dirt is None:
        raise ValueError("there is no dirt")
    threads, k = POOL.size(), len(rows)
    room = aligned((threads, k, width + BETWEEN), _memory(rows.element))
    nothing = np.full(width, _nan(rows.element))
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
    POOL.run(_compiled("wash", rows.element), _WASHED(*named), owned, job.items, job.chunk)


def combine(rows: Rows, mix: SparseMix, out: NDArray[np.floating]) -> None:
    """Write the mixed rows to ``out``, a (k, columns) array of computed values or of doubles."""
    if rows.dirt is not None:
        for begin, part in _cleaned(rows):
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
    work = _compiled("combine", rows.element, out.dtype == np.float64)
    POOL.run(work, _words(*words), None, rows.columns, CHUNK_COLUMNS)


def values(rows: Rows) -> NDArray[np.floating]:
    """Return a copy of the rows in the type that they are computed in."""
    out = np.empty((len(rows), rows.columns), compute_dtype(rows.element))
    combine(rows, _identity(len(rows)), out)
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
    kernel = _column_kernel(len(mix), out.dtype.name, window, blame, weighing).given(spread)
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
    arguments = bytearray(_words(0, 0, *inner.rest))
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
    packed = bytearray(_RULE(*rule))
    weights = mix.weights.astype(kind)
    words = mixing.FusedArguments(
        rows=address(rows.addresses),
        out=address(out),
        k=k,
        starts=address(mix.starts),
        indices=address(mix.indices),
        weights=address(weights),
        mode=mix.mode,
        rule=address(packed),
    )
    threads = POOL.size()
    scratch = _SCRATCH.take((threads, m + g + k, tile), kind)
    tables_ = np.stack([row_table(block) for block in scratch])
    tallies = _tallies(threads, k)
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
    work = _compiled("fused", rows.element, kind == np.float64)
    fused, rule_words = mixing.FusedArguments._fields, mixing.RuleWords._fields
    patch = Patch(mix.centres, rule_words.index("centres"), fused.index("rule"))
    width = 1 << (min(tile, BLOCK_COLUMNS).bit_length() - 1)  # whole parts of a block
    _over_columns(rows, work, _words(*words), local, width, patch)
    return tallies


def pair_sums(rows: Rows, granule: int, wide: bool) -> NDArray[np.float64]:
    """Return the sums of squared differences of granules: (granules, padded pairs).

    The last granule may be cut short, after a whole number of vectors.
    """
    blocks = _blocks(len(rows))
    side = distances.block_rows(host())
    width = blocks * (blocks + 1) // 2 * side * side
    single = not wide and rows.element != "float64"
    name = "products" if single and len(rows) > PRODUCT_ROWS else "pairs"
    return _granule_sums(rows, granule, name, wide, width)


def square_sums(rows: Rows, granule: int) -> NDArray[np.float64]:
    """Return the sums of squares of granules: (granules, padded rows)."""
    width = _blocks(len(rows)) * distances.block_rows(host())
    return _granule_sums(rows, granule, "norms", True, width)


def pair_matrix(sums: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """Return the symmetric m x m matrix that a vector of padded pairs stands for."""
    padded = _blocks(m) * distances.block_rows(host())
    above = np.zeros(padded * padded)
    above[_pair_places(padded)] = sums
    matrix = above.reshape(padded, padded)[:m, :m]
    return matrix + matrix.T


def packed_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums of granules that others made, (granules, m, m) or (granules, m), as ours are.

    Of pairs, those above the diagonal count.
    """
    granules, m = sums.shape[:2]
    padded = _blocks(m) * distances.block_rows(host())
    wide = np.zeros((granules, *[padded] * (sums.ndim - 1)))
    wide[(slice(None), *[slice(m)] * (sums.ndim - 1))] = np.triu(sums, 1) if sums.ndim > 2 else sums
    return wide.reshape(granules, -1)[:, _pair_places(padded)] if sums.ndim > 2 else wide


def _blocks(m: int) -> int:
    return -(-m // distances.block_rows(host()))


@lru_cache(maxsize=16)
def _pair_places(padded: int) -> NDArray[np.intp]:
    """Return where each of the padded pairs stands in a flat square matrix."""
    side = distances.block_rows(host())
    lefts, rights = np.triu_indices(padded // side)
    corners = (lefts * padded + rights) * side
    within = np.arange(side)[:, None] * padded + np.arange(side)
    return (corners[:, None, None] + within).reshape(-1)


def _granule_sums(
    rows: Rows, granule: int, name: str, wide: bool, width: int
) -> NDArray[np.float64]:
    m = len(rows)
    washed = rows.dirt is not None and granule == BLOCK_COLUMNS and name == "pairs"
    if rows.dirt is not None and not washed:
        parts = [_granule_sums(part, granule, name, wide, width) for _, part in _cleaned(rows)]
        return np.concatenate(parts)
    blocks = _blocks(m)
    padded = blocks * distances.block_rows(host())
    granules = -(-rows.columns // granule)
    addresses = rows.addresses
    if m < padded:
        addresses = np.resize(addresses, padded)  # the padding repeats rows
    by_products = name == "products"
    panel = products.panel_rows(m, granules) if by_products else distances.PANEL_ROWS
    pairs = distances.panel_pairs(m, panel)
    sampled = rows.addresses[:: -(-m // products.SAMPLED)].copy() if by_products else addresses
    out = np.empty((granules, width))
    words = distances.Arguments(
        rows=address(addresses),
        out=address(out),
        blocks=blocks,
        columns=rows.columns,
        granule=granule,
        tile=products.TILE if by_products else distances.tile_columns(m),
        pairs=address(pairs),
        number=1 if name == "norms" else len(pairs),
        panel=panel,
        sampled=address(sampled),
    )
    size = products.SCRATCH_WORDS if by_products else distances.scratch_words(host(), m)
    local = _SCRATCH.take((POOL.size(), size), np.dtype(np.uint64))
    work, items = _compiled(name, rows.element, wide), granules * words.number
    if washed:
        padded_rows = rows.take(np.resize(np.arange(m), padded))
        _wash(Job(padded_rows, work, _MEASURED(*words), local, items, 1), 1, granule)
    else:
        POOL.run(work, _MEASURED(*words), local, items, 1)
    return out


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
    POOL.run(_compiled("normals", out.dtype.name), _words(*arguments), None, groups, NORMAL_GROUPS)
    if groups * size < len(out):
        tail = np.empty(size, out.dtype)
        draw_normals(tail, key, row, start + groups * size, std)
        out[groups * size :] = tail[: len(out) - groups * size]


def aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array at the start of a cache line."""
    size = math.prod(shape) * kind.itemsize
    block = np.empty(size + 64, np.uint8)
    skip = -address(block) % 64
    return block[skip : skip + size].view(kind).reshape(shape)


class _Scratch(threading.local):
    """Memory that a caller's thread keeps from call to call.

    Fresh memory comes page by page: 1000 faults, 3.5 ms of processor time, in a Krum of 100 rows.
    """

    block = np.empty(0, np.uint64)

    def take(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        """Return memory whose values are anybody's, until the thread takes some again."""
        words = -(-math.prod(shape) * kind.itemsize // 8)
        if len(self.block) < words:
            self.block = aligned((words,), np.dtype(np.uint64))
        return self.block[:words].view(kind)[: math.prod(shape)].reshape(shape)


_SCRATCH = _Scratch()


def _tallies(threads: int, size: int) -> NDArray[np.int64]:
    """Return a row of zeros for each thread, on lines that it shares with no other."""
    rows = aligned((threads, -(-size // 16) * 16), np.dtype(np.int64))
    rows[:] = 0
    return rows[:, :size]


def row_table(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return where each row of an array begins."""
    return _steps(len(rows), rows.strides[0]) + np.uint64(address(rows))


@lru_cache(maxsize=256)
def _steps(m: int, stride: int) -> NDArray[np.uint64]:
    """Return how far from the first each of m rows is; backwards is the long way round."""
    return (np.arange(m) * stride).astype(np.uint64)


def _words(*words: int) -> bytes:
    """Return the eight words that a kernel takes."""
    return _EIGHT(*words, *_ZEROS[len(words) :])


_EIGHT, _ZEROS = struct.Struct("8Q").pack, (0,) * 8
_RULE = struct.Struct(f"{len(mixing.RuleWords._fields)}Q").pack
_WASHED = struct.Struct(f"{len(cleaning.WashArguments._fields)}Q").pack
_MEASURED = struct.Struct(f"{len(distances.Arguments._fields)}Q").pack


def _compiled(name: str, element: str, wide: bool = False) -> int:
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


def _column_kernel(
    m: int, element: str, window: Window, blame: bool, weighing: Weighing | None
) -> ColumnKernel:
    if weighing is not None:
        return _weighted_kernel(element, weighing, blame, radii=False)
    straight = m <= STRAIGHT_LINE_ROWS
    return _chosen_kernel(m, element, window, blame and not window.plain, straight)


def _knowing_kernel(
    m: int, element: str, window: Window, gives: blocks.Gives, weighing: Weighing | None = None
) -> ColumnKernel:
    if weighing is not None:
        return _weighted_kernel(element, weighing, blame=False, radii=True)
    straight = m <= STRAIGHT_LINE_ROWS
    return _chosen_kernel(m, element, window, blame=False, straight=straight, gives=gives)


def _weighted_kernel(element: str, weighing: Weighing, blame: bool, radii: bool) -> ColumnKernel:
    kind, number = ELEMENTS[element], compute_dtype(element).type
    drop, reach = bool(weighing.masses.drop), bool(weighing.masses.reach)
    m = len(weighing.units)
    straight = (m, Sure.of(weighing)) if m <= weighted.SORTED_ROWS else None
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
