"""How the rows of a unit come to those who aggregate them, and results to those who keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phocas.integrations.wire import Wire, all_gather
from phocas.sharding import shard_bounds


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """All m rows of some columns of a unit, in memory that the next unit uses again.

    ``own`` is which of the ``width`` columns of this rank's shard they are, and ``start`` where
    they lie among all columns of the unit.
    """

    rows: torch.Tensor
    width: int
    own: tuple[int, int]
    start: int


class Sharded:
    """One dimension of ranks: rank s keeps shard s, so it aggregates all of it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.shards = wire.m

    def scatter(self, flat: torch.Tensor, group: dist.ProcessGroup) -> Arrived:
        """Give shard s of every rank's gradient to rank s, on the group that torch would use."""
        m = self.wire.m
        arrived = self.wire.memory("rows", flat.numel(), flat.dtype)
        dist.all_to_all_single(arrived, flat, group=group)
        width = flat.numel() // m
        return Arrived(arrived.view(m, width), width, (0, width), self.wire.rank * width)

    def gather(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Keep the result."""
        out.copy_(value)


class Replicated:
    """Two dimensions (HSDP): the ranks that keep the same shard aggregate a part of it each.

    So every column is aggregated once, over the rows of all ranks, and then shared. What torch does
    next, an all-reduce over replicas, finds the same values everywhere.
    """

    def __init__(
        self, wire: Wire, replicas: dist.ProcessGroup, places: Sequence[tuple[int, int]]
    ) -> None:
        """Take the (replica, shard) of every rank of the wire, in its order."""
        self.wire, self.replicas, self.places = wire, replicas, places
        self.copies = 1 + max(replica for replica, _ in places)
        self.shards = len(places) // self.copies

    def scatter(self, flat: torch.Tensor, group: dist.ProcessGroup) -> Arrived:
        """Give part r of shard s of every rank's gradient to the rank at (r, s)."""
        del group  # it has the ranks of one replica only
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
        """Share the result with the ranks that keep the same shard."""
        bounds = shard_bounds(out.numel(), self.copies)
        longest = max(end - begin for begin, end in bounds)
        own = value.new_zeros(longest)
        own[: value.numel()] = value
        everyone = self.wire.memory("parts", self.copies * longest, out.dtype)
        all_gather(everyone, own, group=self.replicas)
        for part, (begin, end) in zip(everyone.view(self.copies, longest), bounds, strict=True):
            out[begin:end] = part[: end - begin]
