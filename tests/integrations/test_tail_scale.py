"""Rare features in shards that have nothing else, with a scale that all ranks know."""

import numpy as np
import pytest
import torch

from phocas import Heraclius, Phocas, ShardedAggregation
from phocas.integrations.tail_scale import STEPS, TailScale

M, WIDTH = 4, 2048


def _shards() -> list[torch.Tensor]:
    """Return the rows of a dense shard, and of one in which each column has a value of one rank."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(M, WIDTH, generator=generator)
    rare = torch.zeros(M, WIDTH)
    rare[torch.arange(WIDTH) % M, torch.arange(WIDTH)] = 1.0
    return [dense, dense + 1, dense - 1, rare]


def _round(step: int, scales: list[TailScale], shards: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for scale, shard in zip(scales, shards, strict=True):
        aggregation = ShardedAggregation(Heraclius(b=1), M, whole_blocks=False)
        scale.measure(step, aggregation, shard)
        results.append(aggregation.explain(shard, 0).value)
    sums = np.array([scale.report().view(torch.float64).item() for scale in scales])
    for scale in scales:
        scale.hear(sums)
    return results


def test_a_shard_of_rare_features_keeps_them_once_the_scale_is_known() -> None:
    """In the first step the shard has no scale; from the second step on it has that of all."""
    scales, shards = [TailScale(M, 1) for _ in range(M)], _shards()
    assert not _round(0, scales, shards)[-1].any()
    known = scales[0].known
    assert known > 0
    for step in (1, STEPS - 1, STEPS):
        torch.testing.assert_close(_round(step, scales, shards)[-1], shards[-1].mean(dim=0))
        assert {scale.known for scale in scales} == {known}


def test_the_squared_radii_are_those_of_the_definition() -> None:
    """The radius of a column is the distance of the b-th farthest value from the trimmed mean."""
    (rows, *_), aggregation = _shards(), ShardedAggregation(Heraclius(b=1), M, whole_blocks=False)
    trimmed = rows.sort(dim=0).values[1:-1].mean(dim=0)
    radii = (rows - trimmed).abs().sort(dim=0).values[-2]
    assert aggregation.squared_radii(rows) == pytest.approx(float(radii.square().sum()), rel=1e-4)
    assert ShardedAggregation(Phocas(b=1), M).squared_radii(rows) == 0.0  # it has no tail


@pytest.mark.parametrize("lie", [np.nan, np.inf, -1.0, 0.0, 1e300])
def test_one_rank_does_not_set_the_scale(lie: float) -> None:
    """Whatever one rank reports, the scale is that of an honest rank."""
    scale = TailScale(M, 1)
    scale.hear(np.array([3.0, lie, 2.0, 1.0]))
    assert scale.known in (M * 2.0, M * 3.0)
    scale.hear(np.full(M, np.nan))
    assert scale.known in (M * 2.0, M * 3.0)
