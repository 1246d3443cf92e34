"""The units of a sharded model, and the meshes whose ranks reduce them.

A unit is a group of parameters that FSDP2 reduces together. A module that ``fully_shard`` was
called on has one unit, or one for each mesh that its ``shard_placement_fn`` returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from phocas.detection.observer import Segment
from phocas.integrations.fsdp.exchange import Replicated, Sharded, Unit
from phocas.integrations.fsdp.reduce_scatter import RobustReduceScatter
from phocas.integrations.joining import check_dtypes
from phocas.integrations.wire import Wire


@dataclass(eq=False, slots=True)
class Mesh:
    """The units that the same ranks reduce in the same way.

    Attributes:
        info: torch's description of the mesh.
        units: the name and torch's parameter group of each unit.
    """

    info: Any
    units: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Return (rank, replica, shard) of each rank that has gradients of these parameters."""
        info = self.info
        if info.replicate_mesh_dim is None:
            ranks = dist.get_process_group_ranks(info.shard_process_group)
            return [(rank, 0, shard) for shard, rank in enumerate(ranks)]
        return sorted(
            (rank, place[info.replicate_mesh_dim], place[info.shard_mesh_dim])
            for rank in info.mesh.mesh.flatten().tolist()
            for place in (info.mesh.mesh == rank).nonzero().tolist()
        )

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks with gradients of these parameters: row i is the i-th."""
        return [rank for rank, _, _ in self.places]

    @property
    def parameters(self) -> list[Any]:
        """Return torch's records of the parameters."""
        return [each for _, group in self.units for each in group.fsdp_params]

    @property
    def copies(self) -> list[list[int]]:
        """Return the rows that keep the same shard, for each shard; none without replicas."""
        found: dict[int, list[int]] = {}
        for row, (_, _, shard) in enumerate(self.places):
            found.setdefault(shard, []).append(row)
        return list(found.values()) if self.info.replicate_mesh_dim is not None else []

    def reduces(self) -> bool:
        """Return whether torch reduces the gradients of the next backward pass."""
        return all(group.reduce_grads for _, group in self.units)

    def mates(self) -> list[int]:
        """Return the ranks that share the samples of this rank, by tensor or expert parallelism.

        Wrong activations of one of them reach the gradients of all of them.
        """
        own, kept = dist.get_rank(), self.info.mesh.ndim
        found = {own}
        for each in self.parameters:
            mesh = each.sharded_param.device_mesh.mesh
            if mesh.ndim > kept and not getattr(self.info, "is_spmd_mesh", False):
                rows = mesh.flatten(kept).flatten(0, -2).tolist()
                found.update(*(row for row in rows if own in row))
        return sorted(found)

    def exchange(self, wire: Wire) -> Sharded | Replicated:
        """Return the exchange of gradients on this mesh."""
        if self.info.replicate_mesh_dim is None:
            return Sharded(wire)
        places = [(replica, shard) for _, replica, shard in self.places]
        return Replicated(wire, self.info.replicate_process_group, places)

    def describe(self) -> str:
        """Return the ranks and the first unit, for messages."""
        more = len(self.units) - 1
        others = f" and {more} more" if more else ""
        return f"{len(self.ranks)} ranks {self.ranks}, which reduce {self.units[0][0]}{others}"


def meshes_of(model: Any) -> list[Mesh]:
    """Return the meshes of a model, in the order of their first units.

    Raises:
        TypeError: if the model is not sharded.
        ValueError: if a part of the model cannot be protected.
    """
    meshes: dict[Any, Mesh] = {}
    for name, group in _sharded(model):
        info = group.mesh_info
        if info.shard_mesh_dim is None:
            raise ValueError(
                f"the mesh must have a dimension to shard on: got {info.mesh}; use DDP"
            )
        if info.replicate_mesh_dim is not None and info.mesh.ndim != 2:
            raise ValueError(
                f"replicas need a mesh of two dimensions, (replicate, shard): got {info.mesh}"
            )
        if info.replicate_mesh_dim is not None and info.shard_mesh_size == 1:
            raise ValueError(
                f"replicas need two shards or more: got {info.mesh} for {name}, on which torch"
                " reduces nothing that a rule could be applied to; shard on a mesh of one dimension"
                " with these ranks, or use DDP"
            )
        mesh = Mesh(info, [(name, group)])
        meshes.setdefault(tuple(mesh.places), Mesh(info)).units.append((name, group))
    if not meshes:
        raise ValueError("there is nothing to protect: no unit of the model has parameters")
    return list(meshes.values())


def check_gradients(mesh: Mesh) -> None:
    """Raise TypeError if gradients are of an unsupported type."""
    for _, group in mesh.units:
        check_dtypes(
            group.mp_policy.reduce_dtype or each.sharded_param.dtype for each in group.fsdp_params
        )


def _sharded(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the parameter group of each unit."""
    if isinstance(model, DistributedDataParallel):
        raise TypeError("model is a DistributedDataParallel: use phocas.integrations.ddp")
    if not isinstance(model, torch.nn.Module) or not any(
        isinstance(module, FSDPModule) for module in model.modules()
    ):
        raise TypeError(
            f"model must be sharded: got {type(model).__name__}; call fully_shard on its blocks"
            " and on itself first"
        )
    known: list[Any] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001 - torch has no other way
            if not any(group is other for other in known):  # modules may be sharded as one unit
                known.append(group)
                if isinstance(group._reduce_scatter_comm, RobustReduceScatter):  # noqa: SLF001
                    raise ValueError(
                        f"{name or 'the model'} is protected already: close its guard first"
                    )
                yield name or "the model", group
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is in no sharded unit, so that its gradient is not reduced at all: call"
                " fully_shard on the whole model, too, or freeze it"
            )
    own = {id(parameter) for parameter in model.parameters()}
    for group in known:
        if not all(id(each.sharded_param) in own for each in group.fsdp_params):
            raise ValueError(
                "a unit must be in the model as a whole: fully_shard was called on a list with"
                " modules that are not in it; pass the model that has all of them"
            )


def units_of(mesh: Mesh, parameters: Iterable[Any], first: int) -> Iterator[tuple[Unit, Any]]:
    """Yield the units of a mesh, numbered from ``first`` on, with torch's parameter groups.

    ``parameters`` are those of the mesh, in the order of their numbers.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for number, (name, group) in enumerate(mesh.units, first):
        yield _unit(name, number, group, numbers), group


def _unit(name: str, number: int, group: Any, numbers: dict[int, int]) -> Unit:
    """Return a unit with the ranges of its parameters in the shard of this rank."""
    segments = []
    begin = 0
    rank, size = group.mesh_info.shard_mesh_rank, group.mesh_info.shard_mesh_size
    for each in group.fsdp_params:
        if not each.sharded_param.requires_grad:
            continue
        padded = each.padded_sharded_param_size.numel()
        shape, cut = each._orig_size, each.fsdp_placement.dim  # noqa: SLF001 - not public
        tail = math.prod(shape[cut:])
        segments.append(
            Segment(
                numbers[id(each.sharded_param)],
                begin,
                begin + each.sharded_size.numel(),
                first=rank * (tail // size if cut else padded),
                run=tail // size if cut else 0,
                jump=tail if cut else 0,
            )
        )
        begin += padded
    return Unit(name, number, tuple(segments), begin)


def records_of(mesh: Mesh, parameters: Iterable[Any]) -> list[Any]:
    """Return torch's records of parameters of a mesh."""
    known = {id(each.sharded_param): each for each in mesh.parameters}
    return [known[id(parameter)] for parameter in parameters]


def names_of(model: torch.nn.Module, meshes: Sequence[Mesh]) -> list[dict[str, Any]]:
    """Return the parameters of each mesh by name, in the order of the model."""
    named = list(model.named_parameters())
    found = []
    for mesh in meshes:
        own = {id(each.sharded_param) for each in mesh.parameters}
        found.append({name: parameter for name, parameter in named if id(parameter) in own})
    return found
