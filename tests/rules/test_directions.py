"""DnC, FLAME and FoolsGold do what their papers say, and where they fail is where they say."""

from __future__ import annotations

import numpy as np
import pytest

from phocas import FLAME, DnC, FoolsGold, ShardedAggregation

M, D = 12, 3000


def honest(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(M, D)) * 0.1 + rng.normal(size=D)


@pytest.mark.parametrize("far", [30.0, 1e9])
def test_dnc_misses_a_hidden_row_only_if_it_is_not_far(far: float) -> None:
    rows = honest()
    scale = np.linalg.norm(rows[4] - rows[5])
    rows[:3] = rows[3:].mean(axis=0)
    rows[0, 0] += 1.1 * far * scale
    rows[1, 0] -= 1.1 * far * scale
    rows[2, 1] += far * scale  # in another direction than the first two
    told = DnC(b=3).explain(rows)
    assert (told.dropped[:3] == [1, 1, far > 100]).all()
    error = np.linalg.norm(told.value - rows[3:].mean(axis=0))
    bound = DnC(b=3).error_bound(M, 3)
    assert bound is not None
    assert error <= bound * np.sqrt(np.sum(rows[3:].var(axis=0)))


def test_flame_takes_the_densest_majority_and_clips_it() -> None:
    rows = honest()
    rows[:4] *= -1
    rows[4] *= 50  # in the honest direction, and too long
    told = FLAME().explain(rows)
    assert (told.dropped[:4] == 1).all()
    assert (told.dropped[5:] < 1).sum() >= M // 2
    assert np.linalg.norm(told.value) <= np.median(np.linalg.norm(rows, axis=1)) * (1 + 1e-12)


def test_foolsgold_silences_sybils_and_pardons_a_similar_honest_worker() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(M, D))  # data that differ: nearly orthogonal
    rows[:5] = rows[0] + 0.01 * rng.normal(size=(5, D))
    rows[5] = 0.6 * rows[0] + rows[5]  # honest, and a little like the sybils
    dropped = FoolsGold().explain(rows).dropped
    assert (dropped[:5] == 1).all()
    assert (dropped[5:] == 0).all()


def test_foolsgold_has_no_defence_against_one_row() -> None:
    """It is against sybils: one row that is like no other has all its weight, at any length."""
    rows = honest()
    rows[0] = 1e6 * np.random.default_rng(2).normal(size=D)
    assert FoolsGold().explain(rows).dropped[0] == 0


@pytest.mark.parametrize("rule", [DnC(b=2), FLAME(), FoolsGold()], ids=str)
@pytest.mark.parametrize("cut", [1, 1023, 1024, 2500])
def test_servers_get_the_same_bits(rule: DnC | FLAME | FoolsGold, cut: int) -> None:
    rows = honest(3).astype(np.float32)
    rows[2] = np.nan
    servers = [(ShardedAggregation(rule, M, d=D), a, b) for a, b in ((0, cut), (cut, D))]
    while servers[0][0].request is not None:
        parts = [server.partial(rows[:, a:b], start=a) for server, a, b in servers]
        for server, _, _ in servers:
            server.answer(parts)
    joined = np.concatenate([server.finish(rows[:, a:b], a) for server, a, b in servers])
    assert joined.tobytes() == rule(rows).tobytes()


@pytest.mark.parametrize("rule", [DnC(b=1), FLAME(), FoolsGold()], ids=str)
def test_rows_without_a_value_or_a_direction(rule: DnC | FLAME | FoolsGold) -> None:
    assert np.isnan(rule(np.full((3, 5), np.nan))).all()
    np.testing.assert_array_equal(rule(np.zeros((5, 4))), np.zeros(4))
    rows = np.ones((5, 4))
    rows[0] = 0.0
    np.testing.assert_allclose(rule(rows), np.ones(4) if rule != FoolsGold() else np.zeros(4))


def test_confidence_is_positive() -> None:
    with pytest.raises(ValueError, match="FoolsGold needs a finite confidence > 0"):
        FoolsGold(confidence=0.0)
