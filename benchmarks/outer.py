# ruff: noqa: INP001 - a script, not a package
"""Train by local SGD with 8 peers, 2 of them malicious, and print test accuracies by rule.

    python benchmarks/outer.py                      # the table of docs/outer.md
    python benchmarks/outer.py --data synthetic --outer-steps 5 --rules mean --attacks none

Each peer is a thread with a model, a share of the data and an AdamW of its own. Every 20 inner
steps all peers take an outer step of DiLoCo (SGD, learning rate 0.7, Nesterov momentum 0.9).
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import phocas
from phocas import data
from phocas.integrations.outer import OuterStep

PEERS, MALICIOUS = 8, (6, 7)
TABLE = {
    "float32": (
        "mean",
        "adaptive-clipping:b=2|mean",
        "trimmed-mean:b=2",
        "nnm:b=2|trimmed-mean:b=2",
        "heraclius:b=2",
    ),
    "int8": ("mean", "nnm:b=2|trimmed-mean:b=2"),
    "top-k:share=0.02": ("mean", "geometric-median", "nnm:b=2|mean", "heraclius:b=2"),
}
"""The rules that are tried with each compression."""


class Hub:
    """The exchange between threads: everybody waits until all messages are there."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(PEERS)
        self.messages: dict[int, bytes] = {}

    def exchange(self, peer: int, message: bytes) -> dict[int, bytes]:
        """Send the message of a peer; return those of all."""
        self.messages[peer] = message
        self.barrier.wait()
        found = dict(self.messages)
        self.barrier.wait()
        return found


def flipped(base: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Send ten times the own update, in the opposite direction."""
    return base - 10 * (now - base)


def noise(base: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Send Gaussian noise with the standard deviation of a weight."""
    return base + torch.randn(now.shape, generator=torch.Generator().manual_seed(0)) * base.std()


Attack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ATTACKS: dict[str, Attack | None] = {"none": None, "flip x10": flipped, "noise": noise}


def train(dataset: Any, rule: str, compress: str, attack: Attack | None, outer_steps: int) -> float:
    """Train all peers; return the test accuracy of the first, which is honest."""
    hub = Hub()
    models: list[nn.Sequential] = []
    for _ in range(PEERS):
        torch.manual_seed(0)
        width = dataset.train_images[0].size
        models.append(nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)))

    def run(peer: int) -> None:
        model = models[peer]
        outer = OuterStep(
            model,
            rule,
            every=20,
            exchange=lambda message: hub.exchange(peer, message),
            compress=compress,
        )
        inner = torch.optim.AdamW(model.parameters(), 1e-3)
        rng = np.random.default_rng(peer)
        own = np.arange(peer, len(dataset.train_labels), PEERS)
        for step in range(20 * outer_steps):
            batch = rng.choice(own, 32)
            images = torch.from_numpy(dataset.floats(dataset.train_images[batch])).flatten(1)
            labels = torch.from_numpy(dataset.train_labels[batch]).long()
            inner.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            inner.step()
            if attack is not None and peer in MALICIOUS and step % 20 == 19:
                with torch.no_grad():
                    for base, parameter in zip(outer.base, outer.parameters, strict=True):
                        parameter.copy_(attack(base, parameter))
            outer.step()

    threads = [threading.Thread(target=run, args=(peer,)) for peer in range(PEERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        images = torch.from_numpy(dataset.floats(dataset.test_images)).flatten(1)
        right = models[0](images).argmax(dim=1) == torch.tensor(dataset.test_labels)
    return float(right.float().mean())


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--outer-steps", type=int, default=10)
    parser.add_argument("--rules", nargs="*", help="rules; the table's if not given")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--compress", nargs="*", default=list(TABLE))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    phocas.set_num_threads(1)
    dataset = data.load(arguments.data)
    print("| updates | rule |", " | ".join(arguments.attacks), "|")
    print("|---|---|" + "---|" * len(arguments.attacks))
    for compress in arguments.compress:
        for rule in arguments.rules or TABLE[compress]:
            cells = [
                f"{train(dataset, rule, compress, ATTACKS[name], arguments.outer_steps):.3f}"
                for name in arguments.attacks
            ]
            name = rule.replace("|", r"\|")
            print(f"| {compress} | `{name}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
