"""Squared distances of pairs of rows, squared norms and signs, as sums over granules."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import distances, products
from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.code import compiled
from phocas.kernels.masking import FilteredCall, clean_chunks, run_masked
from phocas.kernels.memory import SCRATCH, Rows
from phocas.kernels.target import host
from phocas.kernels.threads import POOL, address

PRODUCT_ROWS = 64  # more rows than this are measured by products
_MEASURED = struct.Struct(f"{len(distances.DistanceArguments._fields)}Q").pack


def pair_sums(rows: Rows, granule: int, wide: bool) -> NDArray[np.float64]:
    """Return the sums of squared differences of all pairs of rows: (granules, padded pairs).

    A granule is a fixed number of columns, and has sums of its own. The last granule may be
    shorter, by a whole number of vectors.
    """
    blocks = _blocks(len(rows))
    side = distances.block_rows(host())
    width = blocks * (blocks + 1) // 2 * side * side
    single = not wide and rows.element != "float64"
    name = "products" if single and len(rows) > PRODUCT_ROWS else "pairs"
    return _granule_sums(rows, granule, name, wide, width)


def origin_sums(rows: Rows, granule: int, origin: int, wide: bool) -> NDArray[np.float64]:
    """Return the sums of squared differences of each row from one row: (granules, padded rows)."""
    width = _blocks(len(rows)) * distances.block_rows(host())
    return _granule_sums(rows, granule, "origin", wide, width, origin)


def square_sums(rows: Rows, granule: int) -> NDArray[np.float64]:
    """Return the sum of squares of each row in each granule: (granules, padded rows)."""
    width = _blocks(len(rows)) * distances.block_rows(host())
    return _granule_sums(rows, granule, "norms", True, width)


def sign_counts(rows: Rows, granule: int) -> NDArray[np.float64]:
    """Count the positive and the negative values of each row: (granules, 2 * padded rows).

    A granule is a fixed number of columns, and has counts of its own.
    """
    width = _blocks(len(rows)) * distances.block_rows(host())
    negative, positive = np.divmod(
        _granule_sums(rows, granule, "signs", True, width), distances.NEGATIVE
    )
    return np.concatenate([positive, negative], axis=1)


def pair_matrix(sums: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """Return the symmetric m x m matrix of a vector of padded pairs."""
    padded = _blocks(m) * distances.block_rows(host())
    above = np.zeros(padded * padded)
    above[_pair_places(padded)] = sums
    matrix = above.reshape(padded, padded)[:m, :m]
    return matrix + matrix.T


def packed_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert sums of granules from other back ends to the layout of these kernels.

    The shape is (granules, m, m) or (granules, m). Of pairs, only those above the diagonal count.
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
    """Return the positions of the padded pairs in a flat square matrix."""
    side = distances.block_rows(host())
    lefts, rights = np.triu_indices(padded // side)
    corners = (lefts * padded + rights) * side
    within = np.arange(side)[:, None] * padded + np.arange(side)
    return (corners[:, None, None] + within).reshape(-1)


def _granule_sums(
    rows: Rows, granule: int, name: str, wide: bool, width: int, origin: int = 0
) -> NDArray[np.float64]:
    m = len(rows)
    masked = rows.mask is not None and granule == BLOCK_COLUMNS and name == "pairs"
    if rows.mask is not None and not masked:
        chunks = (part for _, part in clean_chunks(rows))
        parts = [_granule_sums(part, granule, name, wide, width, origin) for part in chunks]
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
    words = distances.DistanceArguments(
        rows=address(addresses),
        out=address(out),
        blocks=blocks,
        columns=rows.columns,
        granule=granule,
        tile=products.TILE if by_products else distances.tile_columns(m),
        pairs=address(pairs),
        number=len(pairs) if name in ("pairs", "products") else 1,
        panel=panel,
        sampled=address(sampled),
        origin=int(addresses[origin]),
    )
    size = products.SCRATCH_WORDS if by_products else distances.scratch_words(host(), m)
    local = SCRATCH.take((POOL.size(), size), np.dtype(np.uint64))
    work, items = compiled(name, rows.element, wide), granules * words.number
    if masked:
        padded_rows = rows.take(np.resize(np.arange(m), padded))
        run_masked(FilteredCall(padded_rows, work, _MEASURED(*words), local, items, 1), 1, granule)
    else:
        POOL.run(work, _MEASURED(*words), local, items, 1)
    return out
