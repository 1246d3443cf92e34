"""Messages between ranks: shards of columns, and results of shards.

All messages are plain numbers, never pickled objects: a faulty rank can only send wrong values.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from phocas.rules.measures import Partial
from phocas.sharding import shard_bounds

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_LEAVING = timedelta(seconds=5)
_FLOATS: dict[int, type[np.floating]] = {4: np.float32, 8: np.float64}


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One bucket of a step on one rank.

    Attributes:
        flat: the bucket's values of this rank.
        start: the first column, counted from the first column of the gradient.
        bounds: the range of columns of each shard.
        columns: by shard, all m rows of the shards that this rank aggregates.
    """

    flat: torch.Tensor
    start: int
    bounds: list[tuple[int, int]]
    columns: dict[int, torch.Tensor]

    def width(self, shard: int) -> int:
        """Return the number of columns of a shard of the bucket."""
        begin, end = self.bounds[shard]
        return end - begin


@dataclass(frozen=True, slots=True, eq=False)
class GatherBuffers:
    """Memory for messages of known lengths: the message of this rank, and those of all ranks."""

    own: torch.Tensor
    everyone: torch.Tensor
    messages: list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRoute:
    """How the shards of all buckets of one size are sent to this rank, and where they arrive."""

    bounds: list[tuple[int, int]]
    shard: int
    order: list[tuple[int, int]]
    leaving: list[int]
    arriving: list[int]
    columns: torch.Tensor
    arrived: torch.Tensor


class Wire:
    """The collectives of one process group, for use by one thread.

    Messages arrive in memory that the next call of the same kind reuses. (Freeing and allocating
    the memory in every step made glibc's heaps grow to five times the size.)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.m = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._rooms: dict[tuple[str, int, torch.device], torch.Tensor] = {}
        self._buffers: dict[tuple[int, ...], GatherBuffers] = {}
        self._routes: dict[tuple[int, torch.dtype, torch.device, int, int], ShardRoute] = {}

    def _room(self, name: str, number: int, size: int, device: torch.device) -> torch.Tensor:
        """Return a buffer of ``size`` bytes on a device.

        Calls with the same name, number and device return the same memory, enlarged if needed.
        """
        key = (name, number, device)
        if key not in self._rooms or self._rooms[key].numel() < size:
            self._rooms[key] = torch.empty(size, dtype=torch.uint8, device=device)
            self._buffers.clear()
            self._routes.clear()
        return self._rooms[key][:size]

    def _new_buffers(self, sizes: Sequence[int]) -> GatherBuffers:
        # Messages start at multiples of 8 bytes, so that numbers can be read in place.
        longest = -(-max(sizes) // 8) * 8
        own = self._room("padded", 0, longest, self.device)
        everyone = self._room("arrived", 0, self.m * longest, self.device)
        rows = zip(everyone.view(self.m, -1), sizes, strict=True)
        return GatherBuffers(own, everyone, [row[:size] for row, size in rows])

    def _known(self, sizes: Sequence[int]) -> GatherBuffers:
        key = tuple(sizes)
        if key not in self._buffers:
            self._buffers[key] = self._new_buffers(sizes)
        return self._buffers[key]

    def scatter(
        self, flat: torch.Tensor, start: int, shifts: Sequence[int], place: int = 0
    ) -> Bucket:
        """Send shard s of every rank's values to rank s + shift, for each shift.

        ``place`` is the number of the receive buffer. Buckets that are in use at the same time must
        have different places.
        """
        columns = {}
        for shift in shifts:
            route = self._route(flat, shift, place)
            sent = flat
            if shift:
                size = flat.numel() * flat.element_size()
                sent = self._room("sent", 0, size, flat.device).view(flat.dtype)
                torch.cat([flat[begin:end] for begin, end in route.order], out=sent)
            dist.all_to_all_single(
                route.arrived, sent, route.arriving, route.leaving, group=self.group
            )
            columns[route.shard] = route.columns
        return Bucket(flat, start, route.bounds, columns)

    def _route(self, flat: torch.Tensor, shift: int, place: int) -> ShardRoute:
        key = (flat.numel(), flat.dtype, flat.device, shift, place)
        if key not in self._routes:
            m, bounds = self.m, shard_bounds(flat.numel(), self.m)
            shard = (self.rank - shift) % m
            order = [bounds[(rank - shift) % m] for rank in range(m)]
            leaving = [end - begin for begin, end in order]
            width = leaving[self.rank]
            room = self._room(
                "columns", place * m + shift, m * width * flat.element_size(), flat.device
            )
            arrived = room.view(flat.dtype)
            columns = arrived.view(m, width)
            route = ShardRoute(bounds, shard, order, leaving, [width] * m, columns, arrived)
            self._routes[key] = route
        return self._routes[key]

    def gather(
        self, parts: Sequence[torch.Tensor], sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Return every rank's bytes, in the order of ranks; unknown sizes are exchanged first.

        If sizes are known, messages of the same sizes arrive in the same tensors again.
        """
        length = sum(part.numel() for part in parts)
        if sizes is None:
            own = torch.tensor([length]).to(self.device)
            everyone = own.new_empty(self.m)
            all_gather(everyone, own, group=self.group)
            buffers = self._new_buffers(everyone.tolist())
        else:
            buffers = self._known(sizes)
        torch.cat([part.to(self.device) for part in parts], out=buffers.own[:length])
        all_gather(buffers.everyone, buffers.own, group=self.group)
        return buffers.messages

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of those of all ranks, with the same bits on every rank."""
        dist.all_reduce(tensor, group=self.group)

    def gather_later(self, arrived: torch.Tensor, own: torch.Tensor) -> dist.Work:
        """Start to gather messages of the same length into memory of the caller."""
        work: dist.Work = all_gather(arrived, own, group=self.group, async_op=True)
        return work

    def leave(self) -> None:
        """Wait until all ranks are about to exit, so that no rank loses its peer while it reads."""
        with contextlib.suppress(RuntimeError):  # a rank has exited, or does not respond
            dist.barrier(self.group, async_op=True).wait(_LEAVING)

    def memory(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for ``size`` values; the next call with the same name reuses the memory."""
        return self._room(name, 0, size * dtype.itemsize, self.device).view(dtype)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the tensor of one rank; the other ranks pass a tensor of the same shape."""
        tensor = tensor.clone()
        dist.broadcast(tensor, dist.get_global_rank(self.group, rank), group=self.group)
        return tensor


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that this rank holds, all of them unless it is sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, without a copy."""
    # A tensor of at most one value may have any stride, but view requires 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pack(partials: Sequence[Partial]) -> torch.Tensor:
    """Return measurements as bytes: the number of pieces, five numbers for each, and the values."""
    m = partials[0].m
    whole = [(True, first, sums) for part in partials for first, sums in part.sums]
    edges = [(False, start, values) for part in partials for start, values in part.edges]
    index = [m, len(whole) + len(edges)]
    for is_sum, place, values in whole + edges:
        index += [int(is_sum), place, *values.shape, values.itemsize]
    header = np.array(index, np.uint64).tobytes()
    content = [values.tobytes() for _, _, values in whole + edges]
    return torch.frombuffer(bytearray(b"".join([header, *content])), dtype=torch.uint8)


def unpack(message: torch.Tensor) -> Partial:
    """Decode measurements; raise ValueError for invalid bytes."""
    content = message.cpu().numpy().tobytes()
    sums: list[tuple[int, NDArray[np.float64]]] = []
    edges: list[tuple[int, NDArray[np.floating]]] = []
    try:
        m, pieces = struct.unpack_from("=2Q", content)
        place = 16 + 40 * pieces
        for i in range(pieces):
            is_sum, number, *shape, itemsize = struct.unpack_from("=5Q", content, 16 + 40 * i)
            values = np.frombuffer(content, _FLOATS[itemsize], math.prod(shape), place)
            place += values.nbytes
            if is_sum:
                sums.append((number, values.reshape(shape).astype(np.float64)))
            else:
                edges.append((number, values.reshape(shape)))
        whole = place == len(content)
    except (struct.error, KeyError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"measurements must be whole: got {len(content)} bytes that are not")
    return Partial(m, tuple(sums), tuple(edges))


def read(rank: int, message: torch.Tensor) -> Partial:
    """Decode the measurements of a rank; the error for invalid bytes names the rank."""
    try:
        return unpack(message)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
