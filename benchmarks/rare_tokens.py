# ruff: noqa: INP001 - a script, not a package
"""Train a model of Zipf-distributed tokens on four real DDP ranks, protected, with a faulty rank.

Prints the loss of each case over that of plain DDP without a fault, for all tokens and for the
rarer half, and the flagged rank.

python benchmarks/rare_tokens.py [--steps 1500] [--rule heraclius:b=1] [--cases plain nan ...]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from phocas.integrations.ddp import protect

RANKS, FAULTY = 4, 3
VOCABULARY, WIDTH, BATCH = 2048, 32, 256
RATE = 0.03  # chosen by the loss of plain DDP without a fault (docs/reproduction.md)

FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda grad: torch.full_like(grad, torch.nan),
    "1e20": lambda grad: torch.full_like(grad, 1e20),
    "sign-flip": lambda grad: -10 * grad,
    "gaussian": torch.randn_like,
}
CASES = ["plain", "protected", *FAULTS]


class Tokens(nn.Module):
    """An embedding and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def train(rank: int, folder: str, case: str, rule: str, steps: int) -> None:
    """Train one rank; rank 0 writes the losses and the flagged ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    module = Tokens()
    if case in FAULTS and rank == FAULTY:
        for parameter in module.parameters():
            parameter.register_hook(FAULTS[case])
    model = DistributedDataParallel(module)
    guard = None if case == "plain" else protect(model, rule)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    generator = torch.Generator().manual_seed(1)
    following = torch.randperm(VOCABULARY, generator=generator)
    frequency = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    generator.manual_seed(1000 + rank)
    for _ in range(steps):
        tokens = torch.multinomial(frequency, BATCH, replacement=True, generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens), following[tokens]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if rank == 0:
        with torch.no_grad():
            every = torch.arange(VOCABULARY)
            losses = functional.cross_entropy(module(every), following, reduction="none").double()
        half = VOCABULARY // 2
        total = (frequency * losses).sum() / frequency.sum()
        rare = (frequency * losses)[half:].sum() / frequency[half:].sum()
        flagged = "" if guard is None else "; ".join(map(str, guard.flagged()))
        Path(folder, "result").write_text(f"{float(total)}\n{float(rare)}\n{flagged}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Train each case, and print its losses over those of plain DDP."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rule", default="heraclius:b=1")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    given = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    plain: tuple[float, float] | None = None
    for case in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            spawn(train, (folder, case, given.rule, given.steps), RANKS)  # type: ignore[no-untyped-call]
            total, rare, *flagged = Path(folder, "result").read_text().split("\n")
        loss = float(total), float(rare)
        plain = plain or loss
        ratios = "  ".join(
            f"{own:.5f} ({own / of:.2f})" for own, of in zip(loss, plain, strict=True)
        )
        print(f"{case:10} {ratios}  {' '.join(flagged)}", flush=True)


if __name__ == "__main__":
    main()
