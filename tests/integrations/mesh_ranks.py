"""What the ranks of test_meshes do: ``python mesh_ranks.py RANK FOLDER``, on a mesh of 4 x 2.

The ranks of one column of the mesh are a data-parallel group, as under tensor parallelism. Results
are as scenes.py says. The last scene ends every process with an exit code.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.scenes import Play, act, refusal
from tests.integrations.scenes import scene as add_to
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phocas.integrations import ddp, fsdp
from phocas.integrations.guard import Guard

RANKS = 8
FAULTY = 5
GROUP = [1, 3, 5, 7]
EXIT_CODE = 77
STEPS = 8
SCENES: dict[str, Play] = {}
scene = add_to(SCENES)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 61), nn.Tanh(), nn.Linear(61, 5))


def train(model: nn.Module, rank: int, steps: int = STEPS, faulty: int = FAULTY) -> None:
    """Take steps; from the third on, all gradients of one rank are NaN."""
    torch.manual_seed(100 + rank)
    for step in range(steps):
        model.zero_grad()
        poison = float("nan") if rank == faulty and step >= 2 else 1.0
        (model(torch.randn(8, 30)).square().mean() * poison).backward()


def answer(guard: Guard, told: list[Any]) -> dict[str, Any]:
    report = guard.report()
    return {
        "told": [one.rank for one in told],
        "suspects": report["suspects"],
        "nonfinite": report["nonfinite"],
        "named": [one.rank for one in guard.flagged()],
        "text": guard.report_text(),
        "members": report["members"],
        "unusual": report["unusual"],
        "state": guard.state_dict(),
    }


@scene
def fsdp_on_a_part_of_a_mesh(rank: int) -> Any:
    mesh = mesh_of((4, 2), ("dp", "tp"))
    log = Path(sys.argv[2]) / "fsdp.jsonl"
    told: list[Any] = []
    model: Any = fully_shard(network(), mesh=mesh["dp"])
    guard = fsdp.protect(model, "phocas:b=1", on_flagged=told.append, log=log)
    train(model, rank)
    if rank == 0:
        guard.flagged()  # one rank may ask alone
    train(model, rank, 1)
    dist.barrier()
    return {**answer(guard, told), "log": log.read_text()}


@scene
def ddp_in_a_subgroup(rank: int) -> Any:
    """Give DDP a bare group, and the world as the job. Go on from a checkpoint, too."""
    mesh = mesh_of((4, 2), ("dp", "tp"))
    told: list[Any] = []
    model = DistributedDataParallel(network(), process_group=mesh.get_group("dp"))
    world = dist.group.WORLD
    guard = ddp.protect(model, "phocas:b=1", on_flagged=told.append, job_group=world)
    train(model, rank)
    found = answer(guard, told)
    fresh = DistributedDataParallel(network(), process_group=mesh.get_group("dp"))
    again = ddp.protect(fresh, "phocas:b=1", on_flagged=told.append, job_group=world)
    again.load_state_dict(guard.state_dict())
    train(fresh, rank, 2)
    return {**found, "again": answer(again, told)}


@scene
def hybrid_on_a_part_of_a_mesh(rank: int) -> Any:
    """Have one replica group of 2 x 2 ranks for each of two parts of a model."""
    mesh = mesh_of((2, 2, 2), ("replicate", "shard", "tp"))
    told: list[Any] = []
    model: Any = fully_shard(network(), mesh=mesh["replicate", "shard"])
    guard = fsdp.protect(model, "phocas:b=1", on_flagged=told.append)
    train(model, rank, STEPS + 1)
    return answer(guard, told)


@scene
def apart(rank: int) -> Any:
    """Protect on the ranks of one group only, which without a mesh are all of the job."""
    mesh = mesh_of((4, 2), ("dp", "tp"))
    if rank not in GROUP:
        dist.barrier()
        return None
    group = mesh.get_group("dp")
    model = DistributedDataParallel(network(), process_group=group)
    pair = dist.new_group([rank], use_local_synchronization=True)
    said = refusal(lambda: ddp.protect(model, "phocas:b=1", job_group=pair))
    guard = ddp.protect(model, "phocas:b=1")  # the others of the world protect nothing
    train(model, rank)
    found = {"said": said, "named": [one.rank for one in guard.flagged()]}
    dist.barrier()
    return found


@scene
def leaving(rank: int) -> Any:
    """End all ranks with one code, though the groups take their steps at different times."""
    mesh = mesh_of((4, 2), ("dp", "tp"))
    model = DistributedDataParallel(network(), process_group=mesh.get_group("dp"))
    ddp.protect(model, "phocas:b=1", exit_code=EXIT_CODE, job_group=dist.group.WORLD)
    train(model, rank, 20)
    return "nobody has left"


if __name__ == "__main__":
    act(SCENES, int(sys.argv[1]), Path(sys.argv[2]), RANKS)
