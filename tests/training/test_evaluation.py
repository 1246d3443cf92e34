"""Evaluation: accuracy if targets are classes, and only a loss if they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from phocas.training.evaluation import Metrics, evaluate
from phocas.training.pool import DeterministicPool
from phocas.training.samples import Samples

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(2500, 5, generator=GENERATOR)
CLASSES = torch.randint(0, 5, (2500,), generator=GENERATOR)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def judge(
    outputs: torch.Tensor, targets: torch.Tensor, loss: Loss, threads: int = 1, **options: Any
) -> Metrics:
    """Evaluate a model that returns its inputs."""
    model = nn.Identity().train()
    with DeterministicPool(threads) as pool:
        found = evaluate(
            model, loss, Samples((outputs, targets), (outputs, targets)), pool, **options
        )
    assert model.training
    return found


def test_classification_has_accuracies() -> None:
    found = judge(SCORES, CLASSES, functional.cross_entropy)
    ranks = (SCORES.gather(1, CLASSES[:, None]) < SCORES).sum(1)
    assert found.loss == pytest.approx(float(functional.cross_entropy(SCORES, CLASSES)), rel=1e-5)
    assert found.top1 == int((ranks < 1).sum()) / 2500
    assert found.top3 == int((ranks < 3).sum()) / 2500
    for threads in (2, 3):
        other = judge(SCORES, CLASSES, functional.cross_entropy, threads)
        assert (other.loss, other.top1, other.top3) == (found.loss, found.top1, found.top3)


def test_top_3_accuracy_is_defined_for_two_classes() -> None:
    found = judge(SCORES[:, :2], CLASSES % 2, functional.cross_entropy)
    assert found.top3 == 1


def by_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def counts(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.poisson_nll_loss(outputs[:, 0], targets.to(outputs.dtype))


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (SCORES, SCORES + 1, functional.mse_loss),
        (SCORES[:, 0], SCORES[:, 1], functional.mse_loss),
        (SCORES.view(100, 25, 5), CLASSES.view(100, 25), by_token),
        (SCORES, (SCORES > 0).float(), functional.binary_cross_entropy_with_logits),
        (SCORES[:, :1], CLASSES, counts),
    ],
    ids=["regression", "one number", "tokens", "several labels", "counts"],
)
def test_targets_other_than_classes_have_only_a_loss(
    outputs: torch.Tensor, targets: torch.Tensor, loss: Loss
) -> None:
    found = judge(outputs, targets, loss)
    assert found.loss == pytest.approx(float(loss(outputs, targets)), rel=1e-5)
    assert found.top1 is None
    assert found.top3 is None


def test_samples_with_many_targets_are_evaluated_in_smaller_batches() -> None:
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(targets.numel())
        return by_token(outputs, targets)

    judge(SCORES.view(5, 500, 5), CLASSES.view(5, 500), loss)
    assert seen == [1000, 1000, 500]


def test_non_finite_loss_is_nan() -> None:
    bad = SCORES.clone()
    bad[7] = float("inf")
    found = judge(bad, CLASSES, functional.cross_entropy)
    assert np.isnan(found.loss)
    assert found.top1 is not None
