"""The effect of each attack, exactly or in distribution, compared with a slow reference."""

from __future__ import annotations

import math
import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest
import torch

from phocas.attacks import (
    BitFlip,
    ConstantRows,
    Crash,
    Gambler,
    Gaussian,
    InnerProduct,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    Omniscient,
    RandomCells,
    SignFlip,
    SilentCorruption,
    Straggler,
    Stuck,
    attack_rng,
)
from phocas.attacks.cells import bernoulli, distinct
from phocas.attacks.geometry import Direction
from phocas.attacks.memory import WritableMatrix
from phocas.floats import FORMATS
from phocas.kernels import draw_normals
from phocas.sharding import shard_bounds

M, D = 20, 3000


def gradients(dtype: type = np.float32, seed: int = 0, d: int = D) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 1, d) + rng.normal(0, 1, (M, d))).astype(dtype)


def test_gaussian_rows_are_normal_and_independent() -> None:
    G = gradients(d=200_000)
    Gaussian(q=6, std=200.0).corrupt(G, rng=attack_rng(1, 0))
    bad = G[:6].astype(np.float64)
    n = bad.size
    assert abs(bad.mean()) < 5 * 200 / math.sqrt(n)
    assert bad.std() == pytest.approx(200, rel=5 / math.sqrt(2 * n))
    # Kolmogorov-Smirnov against the normal distribution: 1.95 / sqrt(n) is the 0.1% point.
    ranked = np.sort(bad.ravel())[::97]
    cdf = np.array([NormalDist(0, 200).cdf(value) for value in ranked])
    places = np.arange(0, n, 97) / n
    assert np.abs(cdf - places).max() < 1.95 / math.sqrt(n) + 1 / n
    # Rows, and the streams within a row, are independent.
    correlation = np.corrcoef(np.vstack([bad[:, :65536], bad[:, 65536:131072]]))
    assert np.abs(correlation - np.eye(12)).max() < 5 / math.sqrt(65536)


def test_gaussian_is_drawn_as_documented() -> None:
    G = gradients(d=70_000)
    first, second = attack_rng(3, 1).integers(1 << 63, size=2).tolist()
    expected = np.empty(70_000, np.float32)
    draw_normals(expected, (first, second), 1, 0, 200.0)
    Gaussian(q=2).corrupt(G, rng=attack_rng(3, 1))
    assert np.array_equal(G[1], expected)


@pytest.mark.parametrize("who", ["fixed", "resampled"])
def test_omniscient_rows_are_minus_the_sum_of_honest_rows(who: str) -> None:
    G = gradients(np.float64)
    before = G.copy()
    touched = Omniscient(q=6, scale=1e20, who=who).corrupt(G, rng=attack_rng(5, 2))  # type: ignore[arg-type]
    correct = np.setdiff1d(np.arange(M), touched.rows)
    expected = -1e20 * sum(before[i] for i in correct)
    for row in touched.rows:
        np.testing.assert_allclose(G[row], expected, rtol=1e-12)
    assert len(touched.rows) == 6


def test_omniscient_overflows_to_infinity_and_not_to_nan() -> None:
    G = np.full((4, 3), 1e3, np.float16)
    G[:, 2] = 0
    Omniscient(q=1).corrupt(G, rng=attack_rng(0, 0))
    assert G[0].tolist() == [-math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_words_compare_bit_for_bit(kind: str) -> None:
    bits = FORMATS[kind].paper_bits()
    G = torch.tensor(gradients(np.float64)).to(getattr(torch, kind))
    before = WritableMatrix(G).words.copy()
    touched = BitFlip(columns=1000, per_column=2, bits=bits).corrupt(G, rng=attack_rng(9, 4))
    mask = touched.mask()
    assert mask[:, :1000].sum(axis=0).tolist() == [2] * 1000
    assert not mask[:, 1000:].any()
    after = WritableMatrix(G).words
    for word, flipped in zip(before[mask].tolist(), after[mask].tolist(), strict=True):
        width = FORMATS[kind].bits
        old, new = f"{word:0{width}b}", f"{flipped:0{width}b}"
        different = {width - i for i in range(width) if old[i] != new[i]}
        assert different == set(bits)


def test_the_papers_bits_of_a_float32() -> None:
    assert BitFlip().bits == FORMATS["float32"].paper_bits() == (22, 30, 31, 32)
    G = np.ones((1, 1000), np.float32)
    BitFlip().corrupt(G, rng=attack_rng(0, 0))
    # 1.0 is 0 01111111 000...: its sign, the top of its exponent (127 becomes 191) and a quarter.
    assert G[0, 0] == -1.25 * 2.0**64


def test_bit_flip_draws_a_worker_for_each_column() -> None:
    G = gradients()
    rows = BitFlip().corrupt(G, rng=attack_rng(2, 0)).cell_rows
    hits = np.bincount(rows, minlength=M)
    assert hits.sum() == 1000
    # Chi-square with 19 degrees of freedom: 43.8 is the 0.1% point.
    assert ((hits - 50) ** 2 / 50).sum() < 43.8


def test_distinct_draws_every_subset_equally_often() -> None:
    drawn = np.sort(distinct(np.random.default_rng(0), 5, 3, 20_000), axis=0)
    codes = np.bincount((drawn * np.array([[25], [5], [1]])).sum(axis=0))
    counts = codes[codes > 0]
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # 9 degrees of freedom, 0.1%


@pytest.mark.parametrize("server", [0, 7, 19])
def test_the_gambler_hits_one_server_and_multiplies(server: int) -> None:
    G = gradients(d=D + 7)
    before = G.copy()
    attack = Gambler(servers=20, server=server, probability=0.01, scale=-1e20)
    mask = attack.corrupt(G, rng=attack_rng(1, 1)).mask()
    start, stop = shard_bounds(D + 7, 20)[server]
    assert mask[:, start:stop].any()
    assert not mask[:, :start].any()
    assert not mask[:, stop:].any()
    assert np.array_equal(G[mask], before[mask] * np.float32(-1e20))


def test_the_gamblers_hits_are_binomial() -> None:
    counts, rows, columns = [], [], []
    attack = Gambler(servers=3, server=1, probability=0.003)
    cells = M * 1000
    for t in range(400):
        touched = attack.corrupt(np.ones((M, D), np.float32), rng=attack_rng(11, t), round=t)
        counts.append(touched.count)
        rows.append(touched.cell_rows)
        columns.append(touched.cell_columns)
    mean, variance = cells * 0.003, cells * 0.003 * 0.997
    assert np.mean(counts) == pytest.approx(mean, abs=4 * math.sqrt(variance / 400))
    assert np.var(counts) == pytest.approx(variance, rel=4 * math.sqrt(2 / 400))
    by_row = np.bincount(np.concatenate(rows), minlength=M)
    expected = by_row.sum() / M
    assert ((by_row - expected) ** 2 / expected).sum() < 43.8
    by_part = np.bincount((np.concatenate(columns) - 1000) // 100, minlength=10)
    assert ((by_part - by_row.sum() / 10) ** 2 / (by_row.sum() / 10)).sum() < 27.9


@pytest.mark.parametrize("p", [1e-300, 1e-12, 0.003, 0.4, 0.999, 1.0, 0.0])
def test_bernoulli_agrees_with_independent_coins(p: float) -> None:
    size, times = 500, 400
    rng = np.random.default_rng(3)
    hits = np.zeros(size)
    for _ in range(times):
        places = bernoulli(rng, size, p)
        assert (np.diff(places) > 0).all()
        assert places.size == 0 or (places[0] >= 0 and places[-1] < size)
        hits[places] += 1
    spread = math.sqrt(size * times * p * (1 - p))
    assert abs(hits.sum() - size * times * p) <= 4 * spread
    # The first and the last position are as likely as any other.
    edge = math.sqrt(times * p * (1 - p))
    assert abs(hits[0] - times * p) <= 4 * edge + 1e-9
    assert abs(hits[-1] - times * p) <= 4 * edge + 1e-9


def test_sign_flip_and_inner_product() -> None:
    G = gradients(np.float64)
    before = G.copy()
    SignFlip(q=3, scale=2.0).corrupt(G, rng=attack_rng(0, 0))
    np.testing.assert_array_equal(G[:3], -2 * before[:3])
    G = before.copy()
    InnerProduct(q=3, epsilon=0.5).corrupt(G, rng=attack_rng(0, 0))
    for row in range(3):
        np.testing.assert_allclose(G[row], -0.5 * before[3:].mean(axis=0), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
@pytest.mark.parametrize("cls", [MinMax, MinSum])
def test_min_max_and_min_sum_take_the_largest_allowed_step(
    cls: type[MinMax | MinSum], direction: Direction
) -> None:
    G = gradients(np.float64, d=300)
    cls(q=6, direction=direction).corrupt(G, rng=attack_rng(0, 0))
    honest, lie = G[6:], G[0]
    assert (G[:6] == lie).all()
    mean = honest.mean(axis=0)
    p = {"unit": -mean, "std": -honest.std(axis=0), "sign": -np.sign(mean)}[direction]
    step = float(np.linalg.norm(lie - mean) / np.linalg.norm(p))
    np.testing.assert_allclose(lie, mean + step * p, atol=1e-9)
    pairs = ((honest[:, None] - honest[None]) ** 2).sum(axis=2)

    def excess(step: float) -> float:
        distances = ((mean + step * p - honest) ** 2).sum(axis=1)
        if cls is MinMax:
            return float(distances.max() / pairs.max())
        return float(distances.sum() / pairs.sum(axis=0).max())

    assert excess(step) == pytest.approx(1, abs=1e-9)
    assert excess(step * 1.01) > 1


def test_mimic_copies_the_given_or_the_farthest_worker() -> None:
    G = gradients()
    G[13] = G[13] + 5 * gradients(seed=9)[0]
    before = G.copy()
    Mimic(q=4, worker=8).corrupt(G, rng=attack_rng(0, 0))
    assert (G[:4] == before[8]).all()
    G = before.copy()
    Mimic(q=4).corrupt(G, rng=attack_rng(0, 0))
    assert (G[:4] == before[13]).all()
    G = before.copy()
    G[9] = np.nan
    Mimic(q=4).corrupt(G, rng=attack_rng(0, 0))
    assert (G[:4] == before[4]).all()


def test_label_flip_is_its_own_inverse_and_rejects_invalid_labels() -> None:
    labels = torch.randint(10, (M, 32), generator=torch.Generator().manual_seed(0))
    before = labels.clone()
    attack = LabelFlip(q=5, who="resampled")
    touched = attack.corrupt_labels(labels, 10, rng=attack_rng(0, 3), round=3)
    flipped = touched.mask()[:, 0]
    assert torch.equal(labels[flipped], 9 - before[flipped])
    assert torch.equal(labels[~flipped], before[~flipped])
    attack.corrupt_labels(labels, 10, rng=attack_rng(0, 3), round=3)
    assert torch.equal(labels, before)
    with pytest.raises(ValueError, match=r"labels in 0..4: got labels from 0 to 9"):
        attack.corrupt_labels(labels, 5, rng=attack_rng(0, 0))
    with pytest.raises(ValueError, match="integer labels"):
        attack.corrupt_labels(np.zeros((M, 3)), 5, rng=attack_rng(0, 0))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf, 7.5, 1e300])
@pytest.mark.parametrize("kind", FORMATS)
def test_constant_rows(value: float, kind: str) -> None:
    G = torch.ones(4, 5, dtype=getattr(torch, kind))
    ConstantRows(q=2, value=value).corrupt(G, rng=attack_rng(0, 0))
    expected = torch.full((2, 5), value, dtype=torch.float64).to(G.dtype)
    torch.testing.assert_close(G[:2], expected, rtol=0, atol=0, equal_nan=True)


def test_crashed_worker_stays_nan() -> None:
    attack = Crash(worker=3, round=2)
    for t in range(5):
        G = gradients()
        touched = attack.corrupt(G, rng=attack_rng(0, t), round=t)
        assert touched.rows.tolist() == ([3] if t >= 2 else [])
        assert np.isnan(G[3]).all() == (t >= 2)


def test_straggler_sends_the_previous_rounds_row() -> None:
    attack = Straggler(q=2)
    rounds = [gradients(seed=t) for t in range(3)]
    previous = None
    for t, computed in enumerate(rounds):
        G = computed.copy()
        attack.corrupt(G, rng=attack_rng(0, t), round=t, previous=previous)
        if t == 0:
            assert np.isnan(G[:2]).all()
        else:
            assert np.array_equal(G[:2], rounds[t - 1][:2])
        previous = computed
    with pytest.raises(ValueError, match="needs previous, the rows of the round before"):
        attack.corrupt(rounds[0], rng=attack_rng(0, 1), round=1)
    with pytest.raises(ValueError, match="in the same shape"):
        attack.corrupt(rounds[0], rng=attack_rng(0, 1), round=1, previous=rounds[1][:, 1:])
    with pytest.raises(TypeError, match="previous rows in float32: got float64"):
        attack.corrupt(rounds[0], rng=attack_rng(0, 1), round=1, previous=gradients(np.float64))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", FORMATS)
def test_stuck_bits(at: int, kind: str) -> None:
    top = FORMATS[kind].bits
    for value in (-1.0, 0.0, 3.0):
        G = torch.full((3, 4), value, dtype=getattr(torch, kind))
        before = WritableMatrix(G).words.copy()
        touched = Stuck(worker=1, column=2, bits=(top, 2), at=at).corrupt(G, rng=attack_rng(0, 0))
        word, was = int(WritableMatrix(G).words[1, 2]), int(before[1, 2])
        mask = (1 << (top - 1)) | 2
        assert word == (was | mask if at else was & ~mask)
        assert np.argwhere(touched.mask()).tolist() == [[1, 2]]


@pytest.mark.parametrize("kind", FORMATS)
def test_random_cells_hold_any_bits(kind: str) -> None:
    G = torch.zeros(M, 5000, dtype=getattr(torch, kind))
    touched = RandomCells(rate=0.1).corrupt(G, rng=attack_rng(0, 0))
    cells = M * 5000
    assert touched.count == pytest.approx(0.1 * cells, abs=4 * math.sqrt(cells * 0.09))
    words = WritableMatrix(G).words[touched.cell_rows, touched.cell_columns]
    for bit in range(FORMATS[kind].bits):
        share = np.mean((words >> words.dtype.type(bit)) & words.dtype.type(1))
        assert share == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(touched.count))


@pytest.mark.parametrize("kind", FORMATS)
def test_silent_corruption_is_periodic_and_hardly_ever_nan(kind: str) -> None:
    """As published: one bit in 38%, several in the rest, NaN in 1%, always the same addresses."""
    attack = SilentCorruption(worker=2, round=5, stride=3, first=1)
    before = torch.full((M, 90_000), 0.01, dtype=getattr(torch, kind))
    early = before.clone()
    assert attack.corrupt(early, rng=attack_rng(0, 4), round=4).count == 0
    assert torch.equal(early, before)
    for round in (5, 6):
        G = before.clone()
        touched = attack.corrupt(G, rng=attack_rng(0, round), round=round)
        assert touched.rows.tolist() == [2]
        assert touched.cell_columns.tolist() == list(range(1, 90_000, 3))
        values = G[2, 1::3].double()
        assert not values.isinf().any()
        lost = int(values.isnan().sum())
        assert lost == pytest.approx(300, abs=4 * math.sqrt(300))
        flipped = (WritableMatrix(G).words ^ WritableMatrix(before).words)[2, 1::3]
        kept = flipped[~values.isnan().numpy()]
        ones = np.array([int(word).bit_count() for word in kept])
        assert np.mean(ones == 1) == pytest.approx(0.38, abs=0.02)
        assert ones.min() == 1
        assert ones.max() == 8
        assert (values.abs() > 1e3).any()
        assert (values.abs() < 1e-3).any()


@pytest.mark.parametrize("value", [1.0, 1.00390625, 1.01171875, -3.3e38, 3.4e38, 1e-40, 0.0, -0.0])
def test_bfloat16_is_rounded_as_torch_rounds(value: float) -> None:
    G = torch.zeros(1, 2, dtype=torch.bfloat16)
    ConstantRows(q=1, value=value).corrupt(G, rng=attack_rng(0, 0))
    expected = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16)
    assert G[0, 0].view(torch.int16) == expected.view(torch.int16)[0]


@pytest.mark.parametrize("attack", [Gambler(servers=1), BitFlip(), RandomCells(rate=0.0005)])
def test_drawing_cells_takes_time_proportional_to_their_number(
    attack: Gambler | BitFlip | RandomCells,
) -> None:
    G = np.ones((M, 200_000), np.float32)
    attack.corrupt(G, rng=attack_rng(0, 0))
    tracemalloc.start()
    touched = attack.corrupt(G, rng=attack_rng(0, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # About twelve 8-byte numbers per cell, far less than the 4 million cells of the matrix.
    assert 900 < touched.count < 2500
    assert peak < 100 * touched.count + 50_000
