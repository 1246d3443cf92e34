"""Random changes of training images, the usual ones for CIFAR-10."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch.nn.functional import pad

from phocas.seeds import Stream, generator

Augmentation = Literal["none", "crop-flip"]
AUGMENTATIONS = get_args(Augmentation)
MARGIN = 4
"""Zeros around an image before it is cropped to its size."""


def crop_and_flip(
    images: torch.Tensor, seed: int, number: int, workers: slice = slice(None), m: int | None = None
) -> torch.Tensor:
    """Return images that are padded by four zeros, cropped at random, and mirrored or not.

    Every image is changed by random numbers of its own, which depend on the seed, the batch and
    the image's place in it only.

    Args:
        images: images (workers, n, channels, height, width).
        seed: the seed of the run.
        number: the number of the batch in the run.
        workers: the workers that the images belong to.
        m: the number of all workers; by default as many as there are images for.

    >>> image = torch.arange(1.0, 10.0).reshape(1, 1, 1, 3, 3)
    >>> crop_and_flip(image, seed=2, number=0)[0, 0, 0]
    tensor([[3., 2., 1.],
            [6., 5., 4.],
            [9., 8., 7.]])
    """
    k, n, _, height, width = images.shape
    rng = generator(Stream.AUGMENTATION, seed, number)
    shape = (k if m is None else m, n)
    corners = rng.integers(0, 2 * MARGIN + 1, (2, *shape))[:, workers].reshape(2, -1, 1)
    mirrored = rng.random(shape)[workers].reshape(-1, 1) < 0.5
    down = corners[0] + np.arange(height)
    right = corners[1] + np.where(mirrored, np.arange(width)[::-1], np.arange(width))
    padded = pad(images.flatten(0, 1), (MARGIN,) * 4)
    index = [np.arange(k * n)[:, None, None], down[:, :, None], right[:, None, :]]
    who, rows, columns = (torch.from_numpy(each).to(images.device) for each in index)
    return padded[who, :, rows, columns].permute(0, 3, 1, 2).reshape(images.shape)
