"""The kernels of tails against a slow computation of the same numbers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import OutlierMask, Window
from phocas.rules.measures import rows_of

WINDOW = Window(trim=2, drop=2, cutoff=2.0)


def _marked(rows: NDArray[np.floating]) -> OutlierMask:
    marks = kernels.marks(rows_of(rows), WINDOW)
    scale = kernels.scale_for(WINDOW.kept(len(rows)))
    return OutlierMask(marks, scale, np.zeros(len(rows), bool), np.arange(len(rows)))


def _rows(columns: int, kind: type[np.floating]) -> NDArray[np.floating]:
    rng = np.random.default_rng(columns)
    rows = rng.standard_normal((7, columns)).astype(kind)
    rows[rng.random(rows.shape) < 0.02] *= 50
    rows[1, ::3] = [np.nan, np.inf, 1e30][columns % 3]
    return rows


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 15, 16, 1023, 1024, 1041, 9000])
def test_sums_and_added_tails_follow_from_the_distances(
    columns: int, kind: type[np.floating]
) -> None:
    """The squares of each block have the bits of their definition; lost values are not added."""
    rows = _rows(columns, kind)
    mask, largest = _marked(rows), 60.0
    distances = kernels.tail(rows_of(rows), mask, largest)
    lost = np.isnan(distances)
    kept = np.where(lost, 0, distances)
    assert columns < 1000 or (lost[1].any() and kept.any())

    blocks = -(-columns // kernels.BLOCK_COLUMNS)
    padded = np.zeros((7, blocks * kernels.BLOCK_COLUMNS), kind)
    padded[:, :columns] = kept
    squares = kernels.tail_squares(rows_of(rows), mask, largest)
    for block in range(blocks):
        begin = block * kernels.BLOCK_COLUMNS
        expected = kernels.tail_square_sums(padded[:, begin : begin + kernels.BLOCK_COLUMNS])
        np.testing.assert_array_equal(squares[block], expected)

    factors = np.linspace(0, 1, 7)
    before = np.arange(columns, dtype=kind)
    after = before.copy()
    counted = kernels.add_tail(rows_of(rows), mask, largest, factors, after)
    np.testing.assert_array_equal(counted, lost.sum(axis=1))
    there = np.maximum(7 - lost.sum(axis=0), 1)
    added = 2 * (kept.astype(np.float64) * factors[:, None]).sum(axis=0) / there
    np.testing.assert_allclose(after, before + added, rtol=1e-5, atol=1e-4)
    assert (after == before)[~kept.any(axis=0)].all()
