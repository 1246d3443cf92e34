"""What the ranks of test_meshes do: ``python mesh_ranks.py FOLDER``, on a mesh of 4 x 2.

The ranks of one column of the mesh are a data-parallel group, as under tensor parallelism. Results
are as scenes.py says. The last scene ends every process with an exit code.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.mesh_models import (
    WIDTH,
    Model,
    experts_on,
    sharded,
    trial,
    weights,
)
from tests.integrations.mesh_models import train as train_model
from tests.integrations.scenes import Play, act, rejection, start_ranks
from tests.integrations.scenes import scene as add_to
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
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
    log = Path(sys.argv[1]) / "fsdp.jsonl"
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
def drifting(rank: int) -> Any:
    """Flip bits of a weight and of the state of an optimizer, on two ranks of four replicas."""
    mesh = mesh_of((4, 2), ("replicate", "shard"))
    told: list[Any] = []
    model: Any = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    guard = fsdp.watch(model, b=1, digest_every=4, optimizer=optimizer, on_flagged=told.append)
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        moments = optimizer.state[model[2].bias]["exp_avg_sq"]
        broken = {FAULTY: model[0].weight, 2: moments}.get(rank) if step == 6 else None
        if broken is not None:
            broken.to_local().detach().view(-1)[1:2].view(torch.int32).bitwise_xor_(8)
    return answer(guard, told)


def with_experts(rank: int) -> Any:
    """Return what builds a model of dense parameters on 8 ranks and experts on 4 x 2."""
    dense = mesh_of((8,), ("dp",))
    sparse = mesh_of((4, 2), ("efsdp", "ep"))
    place = experts_on(sparse["efsdp"])
    return lambda: sharded(
        Model(experts=True, mesh=sparse["ep"]), mesh=dense, shard_placement_fn=place
    )


@scene
def experts_by_placement(rank: int) -> Any:
    return trial(rank, FAULTY, with_experts(rank))


@scene
def experts_as_units(rank: int) -> Any:
    sparse = mesh_of((4, 2), ("efsdp", "ep"))

    def build() -> Any:
        model = Model(experts=True, mesh=sparse["ep"])
        block: Any
        for block in model.blocks:
            fully_shard(block.experts, mesh=sparse["efsdp"])
        return sharded(model)

    return trial(rank, FAULTY, build)


@scene
def experts_with_wrong_samples(rank: int) -> Any:
    """Poison the loss of a rank: through its tokens, the experts of its neighbour are wrong too."""
    build = with_experts(rank)
    log = Path(sys.argv[1]) / "experts.jsonl"
    told: list[Any] = []
    model = build()
    guard = fsdp.protect(model, "heraclius:b=1", on_flagged=told.append, log=log)
    train_model(model, rank, 7, poisoned=FAULTY)
    kept = guard.state_dict()
    again = fsdp.protect(build(), "heraclius:b=1")
    again.load_state_dict(kept)
    dist.barrier()
    return {
        **answer(guard, told),
        "layers": list(guard.flagged()[0].layers),
        "log": log.read_text(),
        "dropped": guard.dropped(),
        "finite": all(bool(each.isfinite().all()) for each in weights(model).values()),
        "again": again.report()["suspects"],
    }


def in_parallel(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


@scene
def tensor_parallel(rank: int) -> Any:
    mesh = mesh_of((4, 2), ("dp", "tp"))
    return trial(rank, FAULTY, lambda: sharded(in_parallel(Model(), mesh["tp"]), mesh=mesh["dp"]))


@scene
def replicas_and_tensor_parallel(rank: int) -> Any:
    mesh = mesh_of((2, 2, 2), ("replicate", "shard", "tp"))
    replicas = mesh["replicate", "shard"]
    return trial(rank, FAULTY, lambda: sharded(in_parallel(Model(), mesh["tp"]), mesh=replicas))


@scene
def pipeline(rank: int) -> Any:
    """Guard each of two stages by its own guard; the schedule reduces after its backward passes."""
    mesh = mesh_of((2, 4), ("pp", "dp"))

    def build() -> Any:
        torch.manual_seed(1)
        stage = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "ab"])
        for block in stage:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(stage, mesh=mesh["dp"])

    def run(model: Any, rank: int, steps: int) -> None:
        group, number = mesh.get_group("pp"), mesh.get_local_rank("pp")
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(
            stage, 4, loss_fn=lambda got, wanted: (got - wanted).square().mean()
        )
        torch.manual_seed(100 + rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(steps):
            optimizer.zero_grad()
            values = torch.randn(8, WIDTH)
            schedule.step(values) if stage.is_first else schedule.step(target=values)
            optimizer.step()

    return trial(rank, FAULTY, build, run)


@scene
def unlike(rank: int) -> Any:
    """Give one rank another rule, and one group a rule that cannot hold: no other rank may hang."""
    mesh = mesh_of((4, 2), ("dp", "tp"))
    model: Any = fully_shard(network(), mesh=mesh["dp"])
    return [
        rejection(partial(fsdp.protect, model, rule))
        for rule in (
            "median" if rank == FAULTY else "mean",
            "phocas:b=2" if rank == FAULTY else "phocas:b=1",
        )
    ]


@scene
def apart(rank: int) -> Any:
    """Protect on the ranks of one group only, which without a mesh are all of the job.

    Ranks have different numbers of groups afterwards, so that torch cannot form any of all sorts.
    """
    mesh = mesh_of((4, 2), ("dp", "tp"))
    if rank not in GROUP:
        dist.barrier()
        return None
    group = mesh.get_group("dp")
    model = DistributedDataParallel(network(), process_group=group)
    pair = dist.new_group([rank], use_local_synchronization=True)
    said = rejection(lambda: ddp.protect(model, "phocas:b=1", job_group=pair))
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
    act(SCENES, start_ranks(RANKS), Path(sys.argv[1]), RANKS)
