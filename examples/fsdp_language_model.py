# ruff: noqa: INP001 - a script, not a package
"""Train a small language model under FSDP2 while one rank's device corrupts gradients silently.

    python examples/fsdp_language_model.py
    python examples/fsdp_language_model.py --figure curves.png

The text is the source of Python's standard library, character by character. Four ranks on this
machine train twice: with plain FSDP2, and with a robust rule in the reduce-scatter. From step 50
on, bits of one layer's gradient flip on one rank, as they do on a broken device.

The guard warns of rare characters: about half of the 128 are not in a rank's batch. The rule drops
the gradient of a character that only one rank has. Models with many tokens lose far more: use
``fsdp.watch`` for them.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import phocas
from phocas.attacks import SilentCorruption, attack_rng
from phocas.integrations import fsdp

WORLD = 4
CONTEXT = 64
CHARACTERS = 128
BATCH = 8


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
        wrong = gradient.clone().view(1, -1)
        ctx.attack.corrupt(wrong, rng=attack_rng(0, ctx.step), round=ctx.step)
        return wrong.view_as(gradient), None, None


class Projection(nn.Linear):
    """A linear layer, on a device that may be broken."""

    attack: SilentCorruption | None = None
    step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        weight = self.weight
        if self.attack is not None:
            weight = Corrupted.apply(weight, self.attack, self.step)  # type: ignore[no-untyped-call]
        return functional.linear(inputs, weight, self.bias)


class Block(nn.Module):
    """A causal attention layer and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = Projection(width, 3 * width)
        self.joined = Projection(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            Projection(width, 4 * width), nn.GELU(), Projection(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the outputs of both layers to the input."""
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.before_feed_forward(x))


class Transformer(nn.Module):
    """A character-level language model."""

    def __init__(self, layers: int = 3, width: int = 64, heads: int = 4) -> None:
        """Make the layers."""
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, at each position."""
        x = self.characters(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.last(x))
        return logits.clone()  # FSDP2 warns of views


def library() -> torch.Tensor:
    """Return the source of Python's standard library as a tensor of characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    kept = bytes(character for character in sources if character < CHARACTERS)
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8).long()


def train(
    rank: int, text: torch.Tensor, arguments: argparse.Namespace, rule: str | None
) -> tuple[list[float], fsdp.Guard | None]:
    """Train from the same weights, plain or protected; return the mean loss of each step."""
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    guard = None if rule is None else fsdp.protect(model, rule)
    broken = model.get_submodule(arguments.layer)
    if rank == arguments.faulty:
        broken.attack = SilentCorruption(worker=0, round=arguments.begin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    losses = []
    for step in range(arguments.steps):
        broken.step = step
        places = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        batch = text[places]
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    means = (total / WORLD).tolist()
    if rank == 0:
        for step in range(arguments.begin - 1, arguments.steps, 30):
            print(f"{rule or 'plain FSDP2'}: step {step + 1}, loss {means[step]:.3f}", flush=True)
    return means, guard


def run(rank: int, arguments: argparse.Namespace, meet: str) -> None:
    """Train twice, and print the report of the guard."""
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    dist.init_process_group("gloo", meet, rank=rank, world_size=WORLD)
    text = library()
    plain, _ = train(rank, text, arguments, None)
    protected, guard = train(rank, text, arguments, arguments.rule)
    if rank == 0 and guard is not None:
        print(guard.report_text())
        if arguments.figure is not None:
            draw(arguments, plain, protected)
    dist.destroy_process_group()


def draw(arguments: argparse.Namespace, plain: list[float], protected: list[float]) -> None:
    """Draw the two loss curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only for figures
    from matplotlib.figure import Figure  # noqa: PLC0415

    from phocas.report import figures, palette  # noqa: PLC0415

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(1, arguments.steps + 1)
    finite = [loss if abs(loss) < 10 else float("nan") for loss in plain]
    gone = next((i for i, loss in enumerate(finite) if loss != loss), None)  # noqa: PLR0124 - NaN
    styles = palette.Palette()
    mean, rule = styles.style("mean").colour, styles.style(arguments.rule).colour
    axes.plot(steps, finite, color=mean, label="plain FSDP2", linewidth=1.8)
    axes.plot(steps, protected, color=rule, label=arguments.rule, linewidth=1.2)
    axes.axvline(arguments.begin + 1, color="0.6", linewidth=0.8, linestyle=":")
    if gone:
        axes.plot(gone, finite[gone - 1], "x", color=mean, markersize=9, markeredgewidth=2)
        axes.annotate(
            f"not finite from step {gone + 1} on",
            (gone, finite[gone - 1]),
            xytext=(12, 45),
            textcoords="offset points",
            color=mean,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss a character, nats")
    axes.set_xlim(0, arguments.steps)
    axes.legend(frameon=False)
    figures.plain(axes)
    figures.save_figure(figure, arguments.figure)


def main() -> None:
    """Start four ranks on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default="heraclius:b=1")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--faulty", type=int, default=3, help="the faulty rank, -1 for none")
    parser.add_argument("--layer", default="layers.2.attention", help="the layer with the fault")
    parser.add_argument(
        "--begin", type=int, default=50, help="the number of steps before the fault"
    )
    parser.add_argument("--figure", type=Path, help="draw the two curves into this file")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (arguments, f"file://{folder}/meet"), WORLD)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
