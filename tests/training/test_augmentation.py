"""Random changes of training images, and the ResNet that the field trains with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phocas.data import load
from phocas.seeds import Stream, generator
from phocas.training import Trainer
from phocas.training.augmentation import MARGIN, crop_and_flip

IMAGES = torch.arange(3 * 5 * 2 * 6 * 7.0).reshape(3, 5, 2, 6, 7) + 1


def slow_crop_and_flip(images: torch.Tensor, seed: int, number: int) -> torch.Tensor:
    """Change one image after the other, by the same random numbers."""
    m, n, _, height, width = images.shape
    rng = generator(Stream.AUGMENTATION, seed, number)
    corners, mirrored = rng.integers(0, 2 * MARGIN + 1, (2, m, n)), rng.random((m, n)) < 0.5
    out = torch.zeros_like(images)
    for i, j in np.ndindex(m, n):
        for y, x in np.ndindex(height, width):
            from_y = y + corners[0, i, j] - MARGIN
            from_x = (width - 1 - x if mirrored[i, j] else x) + corners[1, i, j] - MARGIN
            if 0 <= from_y < height and 0 <= from_x < width:
                out[i, j, :, y, x] = images[i, j, :, from_y, from_x]
    return out


@pytest.mark.parametrize("number", range(3))
def test_every_image_is_shifted_and_mirrored_by_its_own_draw(number: int) -> None:
    changed = crop_and_flip(IMAGES, 7, number)
    assert torch.equal(changed, slow_crop_and_flip(IMAGES, 7, number))
    assert not torch.equal(changed, crop_and_flip(IMAGES, 8, number))


def test_a_part_of_the_workers_gets_the_same_images() -> None:
    part = slice(1, 3)
    some = crop_and_flip(IMAGES[part], 7, 4, part, m=3)
    assert torch.equal(some, crop_and_flip(IMAGES, 7, 4)[part])


OPTIONS: dict[str, Any] = {
    "data": load("synthetic:train=60,test=9"),
    "rule": "median",
    "num_workers": 3,
    "batch_size": 4,
}


def test_only_training_batches_change() -> None:
    with (
        Trainer("softmax", **OPTIONS) as plain,
        Trainer("softmax", augmentation="crop-flip", **OPTIONS) as changed,
    ):
        before, after = plain.task.batches(2), changed.task.batches(2)
        assert torch.equal(after[0], crop_and_flip(before[0], 0, 2))
        assert torch.equal(before[1], after[1])
        assert torch.equal(changed.task.batches(2, 1, 3)[0], after[0][1:])
        assert plain.evaluate().loss == changed.evaluate().loss
        assert plain.task.identity() != changed.task.identity()


def test_inputs_that_are_no_images_are_rejected() -> None:
    data = (np.zeros((9, 5), np.float32), np.zeros(9, np.int64))
    with pytest.raises(ValueError, match=r"needs images of \(channels, height, width\).*\(5,\)"):
        Trainer("softmax", augmentation="crop-flip", **{**OPTIONS, "data": data})
    with pytest.raises(ValueError, match="augmentation"):
        Trainer("softmax", augmentation="mirror", **OPTIONS)  # type: ignore[arg-type]


def test_resnet_learns_and_has_the_same_gradients_in_every_path() -> None:
    rows = []
    for path in (None, "vectorised", "looped"):
        options = {**OPTIONS, "gradient_path": path, "lr": 0.1}
        with Trainer("resnet18:width=8", augmentation="crop-flip", **options) as trainer:
            next(trainer.rounds(1))
            rows.append(trainer.server.rows.clone())
    for other in rows[1:]:
        torch.testing.assert_close(rows[0], other, rtol=1e-3, atol=1e-5)
    with Trainer("resnet18:width=8", schedule="cosine:rounds=9", lr=0.1, **OPTIONS) as trainer:
        losses = [done.loss for done in trainer.rounds(9)]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])


def test_groups_that_do_not_divide_the_width_are_rejected() -> None:
    with pytest.raises(ValueError, match="groups that divide width: got groups=8 with width=12"):
        Trainer("resnet18:width=12", **OPTIONS)
