"""The token model's gradients against autograd, and the data of the study."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.nn import functional

from phocas.experiments.reproduction.rare.model import TokenModel
from phocas.experiments.reproduction.rare.simulation import SimulationSettings, build, draw, octaves

MODELS = [(False, 0), (True, 0), (False, 3), (True, 3)]


def loss(
    views: Mapping[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Compute the mean loss of a batch of tokens, as one writes it in torch."""
    hidden = views["embedding"][tokens]
    if "router" in views:
        shares = functional.softmax(hidden @ views["router"].T, dim=1)
        chosen = shares.argmax(1)
        rows = torch.arange(len(tokens))
        inner = torch.einsum("nhw,nw->nh", views["up"][chosen], hidden).relu()
        outer = torch.einsum("nwh,nh->nw", views["down"][chosen], inner)
        hidden = hidden + shares[rows, chosen][:, None] * outer
    if "middle" in views:
        hidden = functional.linear(hidden, views["middle"])
    head = views["head"] if "head" in views else views["embedding"]
    return functional.cross_entropy(functional.linear(hidden, head), targets[tokens])


def autograd(model: TokenModel, batch: torch.Tensor) -> torch.Tensor:
    flat = model.parameters.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(loss(model.split(flat), batch, model.targets), flat)
    return slope


def batches(setting: SimulationSettings, step: int) -> list[torch.Tensor]:
    """Return the tokens of each rank, one by one."""
    tokens, shares = draw(setting, step)
    counts = (shares * setting.tokens).round().long()
    return [tokens.repeat_interleave(row) for row in counts]


@pytest.mark.parametrize(("tied", "experts"), MODELS)
def test_gradients_of_all_ranks_equal_autograd(tied: bool, experts: int) -> None:
    setting = SimulationSettings(
        lr=1.0, vocabulary=67, ranks=3, tokens=40, tied=tied, experts=experts, seed=5
    )
    model = build(setting)
    rows = torch.full((3, len(model.parameters)), torch.nan)  # whatever was there before
    for step in (0, 1):  # the second pass reuses the memory of the first
        model.gradients(*draw(setting, step), rows)
        for row, batch in zip(rows, batches(setting, step), strict=True):
            assert len(batch) == 40
            expected = autograd(model, batch)
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)
            assert float(expected.norm()) > 0.01
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize(("tied", "experts"), MODELS)
def test_losses_equal_cross_entropy(tied: bool, experts: int) -> None:
    model = build(SimulationSettings(lr=1.0, vocabulary=67, tied=tied, experts=experts))
    every = torch.arange(67)
    expected = [loss(model.views, token[None], model.targets) for token in every]
    torch.testing.assert_close(model.losses(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    if experts:
        shares = model.views["embedding"] @ model.views["router"].T
        assert set(shares.argmax(1).tolist()) == set(range(experts))  # every expert has tokens


def test_tokens_are_drawn_by_zipfs_law() -> None:
    setting = SimulationSettings(lr=1.0, vocabulary=64, ranks=2, tokens=5000)
    counts = np.zeros(64)
    for step in range(20):
        tokens, shares = draw(setting, step)
        counts[tokens] += shares.sum(0).numpy() * 5000
    assert counts.sum() == pytest.approx(200_000)
    expected = 1 / np.arange(1, 65)
    expected *= counts.sum() / expected.sum()
    assert (((counts - expected) ** 2 / expected).sum()) < 63 + 5 * np.sqrt(2 * 63)  # chi-squared


def test_octaves_cover_the_vocabulary() -> None:
    for size in (2, 3, 64, 67, 2048):
        ranges = octaves(size)
        assert [token for low, high in ranges for token in range(low, high)] == list(range(size))
