"""Buffers of the server: the median of what the workers sent, whatever Byzantine ones send."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from phocas.training import Trainer
from phocas.training.buffers import take_median

WRONG = [math.nan, math.inf, -math.inf, 1e30]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("other", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_median_is_between_honest_values(wrong: float, other: float, dtype: torch.dtype) -> None:
    sent = torch.tensor([[1.0, wrong], [wrong, 2.0], [3.0, 3.0], [other, other], [5.0, 4.0]])
    buffer = torch.zeros(2, dtype=dtype)
    take_median(buffer, list(sent.to(dtype)))
    assert 1 <= buffer[0] <= 5
    assert 2 <= buffer[1] <= 4


def test_median_of_finite_values_is_that_of_torch() -> None:
    sent = torch.randn(6, 3, 4)
    buffer = torch.zeros(3, 4)
    take_median(buffer, list(sent))
    assert torch.equal(buffer, sent.median(0).values)


def test_coordinate_that_is_finite_for_few_workers_keeps_its_value() -> None:
    """So one Byzantine worker cannot replace the -inf of an attention mask."""
    buffer = torch.tensor([-math.inf, 7.0, 7.0])
    honest = torch.tensor([-math.inf, math.nan, 2.0])
    take_median(buffer, [torch.tensor([5.0, 5.0, math.nan]), honest, honest])
    assert buffer.tolist() == [-math.inf, 7.0, 2.0]


def test_whole_numbers_truth_values_and_scalars_have_a_median() -> None:
    count = torch.tensor(3)
    take_median(count, [torch.tensor(value) for value in (4, -(2**62), 4)])
    assert count.item() == 4
    mask = torch.tensor([True, False])
    honest = mask.clone()
    take_median(mask, [~honest, honest, honest])
    assert torch.equal(mask, honest)
    scalar = torch.tensor(1.0)
    take_median(scalar, [torch.tensor(value) for value in (math.nan, 2.0, 2.0)])
    assert scalar.item() == 2


@pytest.mark.parametrize("steps", [1, 2])
def test_inputs_of_nan_at_one_worker_do_not_reach_the_running_means(steps: int) -> None:
    def part(worker: int | None, num_workers: int) -> tuple[torch.Tensor, torch.Tensor]:
        del num_workers
        generator = torch.Generator().manual_seed(99 if worker is None else worker)
        inputs = torch.randn(64, 8, generator=generator)
        targets = (inputs.sum(1) > 0).long()
        return (torch.full_like(inputs, math.nan) if worker == 0 else inputs), targets

    torch.manual_seed(1)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), nn.Linear(8, 2))
    with Trainer(
        model,
        functional.cross_entropy,
        part,
        rule="median",
        num_workers=5,
        batch_size=16,
        lr=0.1,
        local_steps=steps,
    ) as trainer:
        assert len(list(trainer.rounds(3))) == 3
        assert bool(trainer.server.vector.isfinite().all())
        trained = trainer.model[1]  # type: ignore[index]
        assert bool(trained.running_mean.isfinite().all())
        assert bool(trained.running_mean.any())
        assert trained.num_batches_tracked == 3 * steps
        assert math.isfinite(trainer.evaluate().loss)
