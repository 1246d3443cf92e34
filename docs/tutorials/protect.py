"""Protect a DDP or FSDP job.

Four ranks train together, and rank 1 has a broken device: its gradients are noise of size 1e20.
This is a whole script with real processes, on the CPU. Under `torchrun` yours stays as it is, with
one line more.
"""

# Four ranks share this machine, so each takes one thread. Under `torchrun` they share by
# themselves.
import os
import tempfile
from pathlib import Path

os.environ["PHOCAS_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phocas.integrations import ddp

RANKS, BROKEN, STEPS = 4, 1, 40
TARGET = torch.linspace(-1, 1, 20)


# A training script as it is everywhere: wrap the model, loop over batches. The one line is
# `ddp.protect`, on every rank, before the first backward pass.
def train(rank, rule):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 1))
    guard = None if rule is None else ddp.protect(model, rule)

    if rank == BROKEN:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1e20 * torch.randn_like(gradient))

    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        inputs = torch.randn(32, 20)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs @ TARGET)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.module.weight[0].detach(), guard


# Every rank ends with the same weights and knows who was wrong; rank 0 prints it. Plain DDP
# averages, and one broken device is enough to lose everything. `heraclius:b=1` survives one
# wrong value in every column of four. On dense gradients like these it costs no accuracy; for
# language models see docs/choosing.md, which recommends `watch`.
def run(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    for rule in (None, "heraclius:b=1"):
        weights, guard = train(rank, rule)
        error = ((weights - TARGET).norm() / TARGET.norm()).item()
        if rank == 0:
            print(f"{rule or 'plain DDP'} has learned: {'yes' if error < 0.1 else 'no'}")
        if rank == 0 and guard is not None:
            for suspect in guard.suspects():
                print(f"rank {suspect.rank} is suspect, in {', '.join(suspect.layers)}")
    dist.destroy_process_group()


# The ranks meet through a file, so that this script needs no launcher and no port.
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (Path(folder) / "meeting",), nprocs=RANKS)

# For FSDP2 the line is `fsdp.protect(model, "heraclius:b=1")`, after `fully_shard`, and
# `phocas.integrations.protect` takes either. To leave training as it is and only be told who is
# wrong, take `watch(model, b=1)`. What else there is: [DDP](../ddp.md), [FSDP2](../fsdp.md).
