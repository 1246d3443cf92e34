# ruff: noqa: INP001 - a script, not a package
"""Train on MNIST with DistributedDataParallel while one rank is faulty.

    torchrun --nproc-per-node 4 examples/ddp_mnist.py
    torchrun --nproc-per-node 4 examples/ddp_mnist.py --rule none   # plain DDP: learns nothing

The faulty rank sends noise of size 1e20. At the end rank 0 prints the flagged ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phocas import data
from phocas.integrations import ddp


def main() -> None:
    """Train, and print test accuracy and flagged ranks on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", default="phocas:b=1", help="a rule, or none for plain DDP")
    parser.add_argument("--verify", action="store_true", help="aggregate every shard twice")
    parser.add_argument("--faulty", type=int, default=1, help="the faulty rank, -1 for none")
    parser.add_argument("--data", default="mnist", help="mnist, fashion-mnist, synthetic, ...")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--rendezvous", default="env://", help="init_method of torch.distributed")
    arguments = parser.parse_args()

    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node 4 examples/ddp_mnist.py")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", arguments.rendezvous, rank=rank, world_size=world_size)

    dataset = data.load(arguments.data)
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(dataset.train_images[0].size, 128),
        nn.ReLU(),
        nn.Linear(128, dataset.num_classes),
    )
    if rank == arguments.faulty:
        for parameter in network.parameters():
            parameter.register_hook(lambda value: 1e20 * torch.randn_like(value))  # type: ignore[no-untyped-call]

    model = DistributedDataParallel(network)
    guard = None
    if arguments.rule != "none":
        guard = ddp.protect(model, arguments.rule, verify=arguments.verify)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(1, arguments.rounds + 1):
        batch = torch.randint(len(dataset.train_labels), (32,)).numpy()
        images = torch.from_numpy(dataset.floats(dataset.train_images[batch]))
        labels = torch.from_numpy(dataset.train_labels[batch]).long()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and (step % 100 == 0 or step == arguments.rounds):
            print(f"round {step}: test accuracy {accuracy(network, dataset):.3f}", flush=True)

    if rank == 0 and guard is not None:
        for flagged in guard.flagged():
            print(
                f"rank {flagged.rank} is flagged: {flagged.dropped:.0%} of its values were"
                f" dropped, where {flagged.expected:.0%} is chance"
            )
    dist.destroy_process_group()


def accuracy(model: nn.Module, dataset: data.Dataset) -> float:
    """Return the share of test images that are classified correctly."""
    with torch.no_grad():
        guesses = model(torch.from_numpy(dataset.floats(dataset.test_images))).argmax(dim=1)
    return float((guesses.numpy() == dataset.test_labels).mean())


if __name__ == "__main__":
    main()
