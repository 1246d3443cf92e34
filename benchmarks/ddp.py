# ruff: noqa: INP001 - a script, not a package
"""Time a step of DDP with each rule against plain DDP, as ratios in one run (see steps.py).

python benchmarks/ddp.py [--world-size 4] [--turns 15] [--models mlp cnn] [--warm 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from steps import BATCHES, arguments, compare, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phocas.integrations.ddp import protect

HERACLIUS = "heraclius:b=1"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain DDP": None,
    "mean": {"rule": "mean"},
    "heraclius": {"rule": HERACLIUS},
    "no digests": {"rule": HERACLIUS, "digest_every": 0},
    "digest each step": {"rule": HERACLIUS, "digest_every": 1},
    "confirm": {"rule": HERACLIUS, "confirm": "replay"},
    "watch": {"rule": "monitor:rule=heraclius:b=1"},
    "phocas": {"rule": "phocas:b=1"},
    "phocas, verified": {"rule": "phocas:b=1", "verify": True},
    "geometric-median": {"rule": "geometric-median"},
    "nnm|phocas": {"rule": "nnm:b=1|phocas:b=1"},
}


def mlp() -> nn.Module:
    """Return the paper's MLP."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def cnn() -> nn.Module:
    """Return the paper's CNN, without dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


MODELS = {"mlp": (mlp, (32, 1, 28, 28)), "cnn": (cnn, (32, 3, 32, 32))}


def bench(chosen: argparse.Namespace) -> None:
    """Compare all variants for each model."""
    for name in chosen.models:
        make, shape = MODELS[name]
        drawn = [(torch.randn(shape), torch.randint(10, shape[:1])) for _ in range(BATCHES)]
        batches = cycle(drawn)
        ways: dict[str, nn.Module] = {}
        for way in dict.fromkeys(["plain DDP", *chosen.ways]):
            model = DistributedDataParallel(make())
            if (options := WAYS[way]) is not None:
                protect(model, **options)
            ways[way] = model

        def loss(
            model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = batches
        ) -> torch.Tensor:
            inputs, labels = next(batches)
            return nn.functional.cross_entropy(model(inputs), labels)

        compare(name, ways, loss, chosen)


if __name__ == "__main__":
    start(bench, arguments(__doc__.splitlines()[0], list(MODELS), list(WAYS)))
