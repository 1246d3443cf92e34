# ruff: noqa: INP001 - a script, not a package
"""Train a small GPT with a mixture of experts while one rank corrupts an expert silently.

    torchrun --nproc-per-node 4 examples/fsdp_mixture_of_experts.py

The embedding and the head share their weight, and each token uses one of four experts. From step 13
on, bits of the gradient of one expert layer flip on rank 2. Plain FSDP2 has a loss of NaN soon. The
guard drops the wrong values, flags the rank, and replays its last micro-batch on another rank.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import phocas
from phocas.attacks import SilentCorruption, attack_rng
from phocas.integrations import fsdp

FAULTY = 2
CONTEXT, CHARACTERS, BATCH = 32, 128, 8
WIDTH, HEADS, EXPERTS, HIDDEN = 32, 4, 4, 64


class Corrupted(torch.autograd.Function):
    """A weight whose gradient is corrupted by a broken device."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, attack: SilentCorruption, step: int) -> Any:
        """Return the weight unchanged."""
        ctx.attack, ctx.step = attack, step
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Flip bits of the gradient."""
        wrong = gradient.clone(memory_format=torch.contiguous_format).view(1, -1)
        ctx.attack.corrupt(wrong, rng=attack_rng(0, ctx.step), round=ctx.step)
        return wrong.view_as(gradient), None, None


class Experts(nn.Module):
    """Feed-forward layers, of which each token uses the one that the router prefers."""

    attack: SilentCorruption | None = None
    step = 0

    def __init__(self) -> None:
        """Make the router and the experts."""
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the results of the experts, times the probability of the choice."""
        up: Any = self.up
        if self.attack is not None:
            up = Corrupted.apply(up, self.attack, self.step)  # type: ignore[no-untyped-call]
        best, choice = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            mine = (choice == expert).nonzero().squeeze(1)
            hidden = (tokens[mine] @ up[expert]).relu()
            result = result.index_add(0, mine, hidden @ self.down[expert])
        return result * best.unsqueeze(1)


class Block(nn.Module):
    """A causal attention layer and a mixture of experts."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.before_attention, self.before_experts = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the outputs of both layers to the input."""
        batch, length, _ = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(x.shape))
        return x + self.experts(self.before_experts(x).flatten(0, 1)).view(x.shape)


class GPT(nn.Module):
    """A language model of characters, whose embedding is its head, too."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next character."""
        x = self.characters(text[:, :-1]) + self.places(torch.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def library() -> torch.Tensor:
    """Return modules of Python's standard library as a tensor of characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("a*.py")))
    kept = bytes(character for character in sources if character < CHARACTERS)
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8).long()


def train(text: torch.Tensor, arguments: argparse.Namespace, rule: str | None) -> fsdp.Guard | None:
    """Train from the same weights, plain or protected; print the mean loss of some steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    guard = None if rule is None else fsdp.protect(model, rule, confirm="replay")
    broken: Any = model.blocks[1].experts  # type: ignore[union-attr]
    if rank == FAULTY:
        broken.attack = SilentCorruption(worker=0, round=arguments.begin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    torch.manual_seed(1 + rank)
    for step in range(arguments.steps):
        broken.step = step
        places = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        optimizer.zero_grad()
        loss = model(text[places])
        loss.backward()
        optimizer.step()
        if step + 1 in (1, arguments.begin, arguments.steps):
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"{rule or 'plain FSDP2'}: step {step + 1}, loss {total / world:.3f}")
    return guard


def main() -> None:
    """Train twice, and print the report of the guard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default="heraclius:b=1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--begin", type=int, default=12, help="the number of steps before the fault"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    dist.init_process_group("gloo")
    text = library()
    train(text, arguments, None)
    guard = train(text, arguments, arguments.rule)
    assert guard is not None
    report = guard.report_text()
    if dist.get_rank() == 0:
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
