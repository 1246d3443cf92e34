# ruff: noqa: INP001 - a script, not a package
"""Time a step of FSDP2 with each rule against plain FSDP2, as ratios in one run (see steps.py).

python benchmarks/fsdp.py [--world-size 4] [--turns 15] [--warm 64]
python benchmarks/fsdp.py --world-size 8 --models tensor  # four rows of two tensor-parallel ranks
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import BATCHES, arguments, compare, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from phocas.integrations import fsdp

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import fsdp_mixture_of_experts as gpt
from fsdp_language_model import BATCH, CHARACTERS, CONTEXT, Transformer
from fsdp_mixture_of_experts import GPT

HERACLIUS = "heraclius:b=1"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain FSDP2": None,
    "mean": {"rule": "mean"},
    "heraclius": {"rule": HERACLIUS},
    "confirm": {"rule": HERACLIUS, "confirm": "replay"},
    "phocas": {"rule": "phocas:b=1"},
    "watch": {"rule": "monitor:rule=heraclius:b=1"},
}


def blocks() -> nn.Module:
    """Return eight blocks of 512 x 512."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)])


def transformer() -> nn.Module:
    """Return the model of examples/fsdp_language_model.py."""
    return Transformer()


def experts() -> nn.Module:
    """Return the model of examples/fsdp_mixture_of_experts.py."""
    return GPT()


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded on their own."""
    if isinstance(model, GPT):
        return [*(block.experts for block in model.blocks), *model.blocks]  # type: ignore[union-attr, misc]
    return list(model.layers if isinstance(model, Transformer) else model.children())


def in_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the layers of pairs of blocks over the ranks of a mesh."""
    for number, block in enumerate(model.children()):
        parallelize_module(
            block, mesh, {"0": RowwiseParallel() if number % 2 else ColwiseParallel()}
        )
    return model


def words(number: int, length: int) -> torch.Tensor:
    """Return random text."""
    return torch.randint(CHARACTERS, (number, length))


MODELS = {
    "blocks": (blocks, lambda: torch.randn(32, 512)),
    "transformer": (transformer, lambda: words(BATCH, CONTEXT)),
    "experts": (experts, lambda: words(gpt.BATCH, gpt.CONTEXT + 1)),
    "tensor": (blocks, lambda: torch.randn(32, 512)),
}


def bench(chosen: argparse.Namespace) -> None:
    """Compare all variants for each model."""
    for name in chosen.models:
        make, batch = MODELS[name]
        mesh = None
        ways_of_mesh = list(chosen.ways)
        if name == "tensor":
            if chosen.world_size < 6:
                if dist.get_rank() == 0:
                    print("tensor: needs three rows of two ranks, --world-size 6 or more")
                continue
            shape = (chosen.world_size // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            ways_of_mesh = [way for way in ways_of_mesh if way != "confirm"]  # rejected there
        batches = cycle([batch() for _ in range(BATCHES)])
        ways: dict[str, nn.Module] = {}
        for way in dict.fromkeys(["plain FSDP2", *ways_of_mesh]):
            model = make() if mesh is None else in_parallel(make(), mesh["tp"])
            for part in parts(model):
                fully_shard(part, mesh=mesh and mesh["dp"])
            fully_shard(model, mesh=mesh and mesh["dp"])
            if (options := WAYS[way]) is not None:
                fsdp.protect(model, **options)
            ways[way] = model

        def loss(model: nn.Module, batches: Iterator[torch.Tensor] = batches) -> torch.Tensor:
            return model(next(batches)).square().mean()  # type: ignore[no-any-return]

        compare(name, ways, loss, chosen)


if __name__ == "__main__":
    start(bench, arguments(__doc__.splitlines()[0], list(MODELS), list(WAYS)))
