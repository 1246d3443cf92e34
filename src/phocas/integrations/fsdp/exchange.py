"""The exchange of a unit's rows before the aggregation, and of the results afterwards.

A unit is a module whose parameters FSDP2 reduces together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phocas.detection.observer import Segment
from phocas.integrations.wire import Wire, all_gather
from phocas.sharding import shard_bounds


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP2 reduces together, with their columns in the shard of this rank."""

    name: str
    number: int
    segments: tuple[Segment, ...]
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """All m rows of some columns of a unit.

    Attributes:
        rows: the rows, in memory that the next unit reuses.
        width: the number of columns of this rank's shard.
        own: the range of the columns within the shard.
        start: the first column, counted from the first column of the unit.
    """

    rows: torch.Tensor
    width: int
    own: tuple[int, int]
    start: int


class Sharded:
    """The exchange on a mesh of one dimension: rank s stores and aggregates shard s."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.shards = wire.m

    def scatter(self, flat: torch.Tensor, group: dist.ProcessGroup) -> Arrived:
        """Send shard s of every rank's gradient to rank s, on the process group of torch."""
        m = self.wire.m
        arrived = self.wire.memory("rows", flat.numel(), flat.dtype)
        dist.all_to_all_single(arrived, flat, group=group)
        width = flat.numel() // m
        return Arrived(arrived.view(m, width), width, (0, width), self.wire.rank * width)

    def gather(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the result to the output."""
        out.copy_(value)


class Replicated:
    """The exchange on a mesh of two dimensions (HSDP).

    The ranks that store the same shard aggregate a part of it each, over the rows of all ranks, and
    then share the results. So every column is aggregated once. The all-reduce over replicas that
    torch does next averages equal values.
    """

    def __init__(
        self, wire: Wire, replicas: dist.ProcessGroup, places: Sequence[tuple[int, int]]
    ) -> None:
        """Store the (replica, shard) of every rank of the process group, in the group's order."""
        self.wire, self.replicas, self.places = wire, replicas, places
        self.copies = 1 + max(replica for replica, _ in places)
        self.shards = len(places) // self.copies

    def scatter(self, flat: torch.Tensor, group: dist.ProcessGroup) -> Arrived:
        """Send part r of shard s of every rank's gradient to the rank at (r, s)."""
        del group  # this process group has the ranks of one replica only
        m, width = self.wire.m, flat.numel() // self.shards
        bounds = shard_bounds(width, self.copies)
        shards = flat.view(self.shards, width)
        sent = torch.cat([shards[shard, slice(*bounds[copy])] for copy, shard in self.places])
        leaving = [bounds[copy][1] - bounds[copy][0] for copy, _ in self.places]
        copy, shard = self.places[self.wire.rank]
        begin, end = bounds[copy]
        arrived = self.wire.memory("rows", m * (end - begin), flat.dtype)
        dist.all_to_all_single(arrived, sent, [end - begin] * m, leaving, group=self.wire.group)
        rows = arrived.view(m, end - begin)
        return Arrived(rows, width, (begin, end), shard * width + begin)

    def gather(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Share the result with the ranks that store the same shard."""
        bounds = shard_bounds(out.numel(), self.copies)
        longest = max(end - begin for begin, end in bounds)
        own = value.new_zeros(longest)
        own[: value.numel()] = value
        everyone = self.wire.memory("parts", self.copies * longest, out.dtype)
        all_gather(everyone, own, group=self.replicas)
        for part, (begin, end) in zip(everyone.view(self.copies, longest), bounds, strict=True):
            out[begin:end] = part[: end - begin]
