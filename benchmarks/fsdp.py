# ruff: noqa: INP001 - a script, not a package
"""Time a step of FSDP2 with each rule against plain FSDP2, as ratios in one run (see steps.py).

python benchmarks/fsdp.py [--world-size 4] [--turns 15] [--warm 64]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from steps import BATCHES, arguments, compare, start
from torch import nn
from torch.distributed.fsdp import fully_shard

from phocas.integrations import fsdp

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from fsdp_language_model import BATCH, CHARACTERS, CONTEXT, Transformer

WAYS = {
    "plain FSDP2": None,
    "mean": "mean",
    "heraclius": "heraclius:b=1",
    "phocas": "phocas:b=1",
    "watch": "monitor:rule=heraclius:b=1",
}


def blocks() -> nn.Module:
    """Return eight blocks of 512 x 512."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])


def transformer() -> nn.Module:
    """Return the model of examples/fsdp_language_model.py."""
    return Transformer()


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded on their own."""
    return list(model.layers if isinstance(model, Transformer) else model.children())


MODELS = {
    "blocks": (blocks, lambda: torch.randn(32, 512)),
    "transformer": (transformer, lambda: torch.randint(CHARACTERS, (BATCH, CONTEXT))),
}


def bench(chosen: argparse.Namespace) -> None:
    """Compare all variants for each model."""
    for name in chosen.models:
        make, batch = MODELS[name]
        batches = cycle([batch() for _ in range(BATCHES)])
        ways: dict[str, nn.Module] = {}
        for way in dict.fromkeys(["plain FSDP2", *chosen.ways]):
            model = make()
            for part in parts(model):
                fully_shard(part)
            fully_shard(model)
            if (rule := WAYS[way]) is not None:
                fsdp.protect(model, rule)
            ways[way] = model

        def loss(model: nn.Module, batches: Iterator[torch.Tensor] = batches) -> torch.Tensor:
            return model(next(batches)).square().mean()  # type: ignore[no-any-return]

        compare(name, ways, loss, chosen)


if __name__ == "__main__":
    start(bench, arguments(__doc__.splitlines()[0], list(MODELS), list(WAYS)))
