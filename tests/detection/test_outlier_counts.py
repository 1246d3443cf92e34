"""Counts of outliers against their definition, on hostile values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phocas.detection.comparison import CUTOFFS, GROSS, OutlierCount, count_outliers


@np.errstate(all="ignore")
def plainly(values: np.ndarray) -> list[OutlierCount]:
    """Count column by column, as the docstring says."""
    m = len(values)
    columns = values.reshape(m, -1).T
    radii, distances = [], []
    for column in columns:
        ordered = sorted(math.inf if math.isnan(value) else value for value in column)
        middle = np.mean(ordered[(m - 1) // 2 : m - (m - 1) // 2])
        apart = [abs(value - middle) for value in column]
        distances.append([math.inf if math.isnan(far) else far for far in apart])
        radii.append(sorted(distances[-1])[m // 2])
    finite = [radius for radius in radii if math.isfinite(radius)]
    usual = (
        math.sqrt(sum(radius**2 for radius in finite) / len(finite)) if any(finite) else math.inf
    )
    found = []
    for cutoff in CUTOFFS:
        beyond = np.array(
            [
                [
                    not math.isfinite(value) or far > cutoff * max(radius, usual)
                    for value, far in zip(column, apart, strict=True)
                ]
                for column, apart, radius in zip(columns, distances, radii, strict=True)
            ]
        )
        rows = int(beyond.any(axis=0).sum())
        found.append(
            OutlierCount(cutoff, int(beyond.sum(axis=1).max()), rows, float(beyond.mean()))
        )
    return found


@pytest.mark.parametrize("m", [1, 2, 3, 6, 7, 20])
@pytest.mark.parametrize("kind", ["noise", "heavy", "sparse", "zero", "hostile", "all wrong"])
def test_counts_match_the_definition(m: int, kind: str) -> None:
    rng = np.random.default_rng(m)
    values = {
        "noise": rng.normal(size=(m, 3, 8)),
        "heavy": rng.standard_cauchy((m, 3, 8)),
        "sparse": rng.normal(size=(m, 3, 8)) * (rng.random((m, 3, 8)) < 0.2),
        "zero": np.zeros((m, 3, 8)),
        "hostile": rng.choice([np.nan, np.inf, -np.inf, 1e300, -3e38, 5e-324, 0.0, 1.0], (m, 3, 8)),
        "all wrong": np.full((m, 3, 8), np.nan),
    }[kind]
    for found, plain in zip(count_outliers(values), plainly(values), strict=True):
        assert (found.cutoff, found.most, found.rows) == (plain.cutoff, plain.most, plain.rows)
        assert found.share == pytest.approx(plain.share)


@pytest.mark.parametrize("q", range(10))
def test_less_than_half_are_counted_whatever_they_send(q: int) -> None:
    rng = np.random.default_rng(q)
    values = rng.normal(size=(20, 32, 32)) * np.repeat([1, 1e-2, 3, 10], 8)[:, None]
    values[:q] = rng.choice([np.nan, -np.inf, 1e5, -1e9], (q, 32, 32))
    gross = next(one for one in count_outliers(values) if one.cutoff == GROSS)
    assert (gross.most, gross.rows) == (q, q)
    assert gross.share == pytest.approx(q / 20)
