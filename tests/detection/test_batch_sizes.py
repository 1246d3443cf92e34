"""Rows of batches of different sizes, made comparable."""

from __future__ import annotations

import numpy as np
import pytest

from phocas.detection.batch_sizes import equalised
from phocas.detection.detector import Detector
from phocas.detection.observer import RankObserver, Segment

torch = pytest.importorskip("torch")


def test_mixed_rows_have_one_mean_and_uncorrelated_noise_of_one_size() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 64, size=7).astype(float)
    mix = equalised(np.eye(7), sizes)  # the weights themselves
    np.testing.assert_allclose(mix.sum(axis=1), 1)
    np.testing.assert_allclose(
        mix @ np.diag(1 / sizes) @ mix.T, np.eye(7) / sizes.mean(), atol=1e-9
    )


def test_equal_sizes_change_nothing() -> None:
    rows = np.random.default_rng(1).normal(size=(5, 9))
    np.testing.assert_allclose(equalised(rows, np.full(5, 32.0)), rows, rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_row_that_is_not_finite_does_not_spread(value: float) -> None:
    rows = np.random.default_rng(2).normal(size=(4, 6))
    rows[1, 3] = value
    sizes = np.array([32.0, 16.0, 8.0, 4.0])
    found = equalised(rows, sizes)
    np.testing.assert_array_equal(found[1], rows[1])
    others = [0, 2, 3]
    np.testing.assert_allclose(found[others], equalised(rows[others], sizes[others]))
    rows[:, 3] = value
    np.testing.assert_array_equal(equalised(rows, sizes), rows)


@pytest.mark.parametrize("sizes", [(32, 32, 32, 8), (32, 4, 16, 8)])
@pytest.mark.parametrize("known", [True, False])
def test_small_batches_are_flagged_only_if_their_sizes_are_not_known(
    sizes: tuple[int, ...], known: bool
) -> None:
    rng = np.random.default_rng(3)
    detector = Detector(4, 1, threat="faults")
    observer = RankObserver(4, 1, 0, None, "faults", 2)
    segments = [Segment(0, 0, 300), Segment(1, 300, 400)]
    for _ in range(120):
        rows = [0.1 + rng.normal(size=400) / np.sqrt(size) for size in sizes]
        observer.sizes = np.array(sizes, float) if known else None
        observer.see(torch.tensor(np.array(rows, np.float32)), segments, 0)
        observer.bet()
        report = observer.report().numpy().view(np.float64)
        detector.hear(np.stack([report] * 4), np.zeros((4, 4)), 400)
        observer.end()
        observer.follow(detector)
    assert detector.flagged() == (() if known else (int(np.argmin(sizes)),))
