"""Protect a DDP or FSDP job.

In this tutorial you add one line to a DDP script, so that a broken device does not destroy training
and the faulty rank is flagged. Four ranks train together. Rank 1 has a broken device: its gradients
are noise of size 1e20. The script starts real processes on the CPU. Your own script runs under
`torchrun` as before.
"""

# Four ranks share this machine, so each rank uses one thread. Under `torchrun` phocas divides the
# cores by itself.
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


# This is an ordinary training script: wrap the model, loop over batches. The additional line is
# `ddp.protect`. Call it on every rank, before the first backward pass.
def train(rank, rule):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 1))
    guard = None if rule is None else ddp.protect(model, rule)

    if rank == BROKEN:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1e20 * torch.randn_like(gradient))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        inputs = torch.randn(32, 20)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs @ TARGET)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module.weight[0].detach(), guard


# Every rank ends with the same weights and the same flagged ranks. Rank 0 prints them. Plain DDP
# averages, so one broken device destroys the model. `heraclius:b=1` tolerates one wrong value in
# every column of four, and keeps values that few ranks have, such as rare tokens
# ([limits](../choosing.md#limits)).
def run(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    for rule in (None, "heraclius:b=1"):
        weights, guard = train(rank, rule)
        error = ((weights - TARGET).norm() / TARGET.norm()).item()
        if rank == 0:
            print(f"{rule or 'plain DDP'} has learned: {'yes' if error < 0.1 else 'no'}")
        if rank == 0 and guard is not None:
            for flagged in guard.flagged():
                print(f"rank {flagged.rank} is flagged, in {', '.join(flagged.layers)}")
    dist.destroy_process_group()


# The ranks connect through a file, so this script needs no launcher and no port.
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (Path(folder) / "meeting",), nprocs=RANKS)

# For FSDP2 the line is `fsdp.protect(model, "heraclius:b=1")`, after `fully_shard`.
# `phocas.integrations.protect` accepts either kind of model. To flag faulty ranks and leave
# training as it is, use `watch(model, b=1)`. More: [DDP](../ddp.md), [FSDP2](../fsdp.md).
