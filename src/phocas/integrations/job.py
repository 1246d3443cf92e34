"""What the data-parallel groups of one job tell one another, so that all ranks answer alike.

Under tensor or pipeline parallelism the ranks with gradients of the same parameters are a group of
some ranks only. Each group detects faulty ranks among its own. A :class:`Job` carries the verdicts
of every group to all ranks.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phocas.integrations.joining import group_timeout
from phocas.integrations.wire import Wire

_EARLY = 64  # steps at the beginning, after each of which there is an exchange
_EVERY = 4  # later on, there is one after so many steps
_LONGEST = 1 << 16  # bytes of a message: a faulty rank may announce any length


class Job:
    """The exchange of verdicts between all ranks of a job, over a process group of its own.

    There is an exchange after the same steps on every rank: the first 64, then one in four, and all
    while a message is under way. Each is one asynchronous all-gather. It is awaited at the next
    step, so that no rank waits inside of a step for a group that is behind it in a pipeline. A
    quiet exchange is 8 bytes a rank: the length of the message that the next one carries.
    """

    def __init__(self, wire: Wire, groups: Sequence[tuple[Sequence[int], int]]) -> None:
        """Take the global ranks of every group, and how many of these may lie."""
        self.wire, self.groups = wire, groups
        self.hosts: dict[int, str] = {}
        self.steps = 0
        self.sizes = [0] * wire.m
        self.outgoing = b""
        self._arrived: tuple[torch.Tensor, dist.Work] | None = None

    def due(self) -> bool:
        """Say whether there is an exchange at the end of this step."""
        return self.steps < _EARLY or self.steps % _EVERY == 0 or any(self.sizes)

    def send(self, news: Sequence[dict[str, Any]], *, due: bool) -> None:
        """End a step: announce news if an exchange is due."""
        self.steps += 1
        if not due:
            return
        body, self.outgoing = self.outgoing, _message(news)
        own = torch.zeros(8 + max(self.sizes), dtype=torch.uint8)
        own[:8].view(torch.int64)[0] = len(self.outgoing)
        if body:
            own[8 : 8 + len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        arrived = own.new_empty(self.wire.m * len(own))
        self._arrived = arrived, self.wire.gather_later(arrived, own)

    def receive(self) -> list[tuple[int, list[Any]]]:
        """Wait for the last exchange; return what each rank (global) told in it."""
        if self._arrived is None:
            return []
        (arrived, work), self._arrived = self._arrived, None
        work.wait()
        rows = arrived.view(self.wire.m, -1)
        told = [
            (self.wire.ranks[place], _entries(rows[place, 8 : 8 + size].numpy().tobytes()))
            for place, size in enumerate(self.sizes)
            if size
        ]
        lengths = rows[:, :8].contiguous().view(torch.int64).flatten()
        self.sizes = lengths.clamp(0, _LONGEST).tolist()
        return told

    def agreed(self, told: Sequence[tuple[int, list[Any]]]) -> Iterator[dict[str, Any]]:
        """Yield the entries about a member of a group that more than b of its members have told."""
        for members, b in self.groups:
            said = Counter(
                text for rank, entries in told if rank in members for text in _texts(entries)
            )
            for text, times in said.items():
                entry = json.loads(text)
                if times > b and entry["rank"] in members:
                    yield entry


def join_job(wire: Wire, ranks: Sequence[int], b: int, timeout: timedelta | None) -> Job | None:
    """Join the groups of a job, if there are others than that of the wire."""
    if not set(wire.ranks) <= set(ranks):
        raise ValueError(
            f"job_group must have all ranks of the model's group, {wire.ranks}: got {list(ranks)}"
        )
    if set(wire.ranks) == set(ranks):
        return None
    # Small messages through host memory: a device has no part in them.
    # Torch names a group that only its ranks know of by how many groups each of these is in, which
    # may differ between the groups of a job. So all of the world is asked if all take part.
    own = {"members": wire.ranks, "b": b, "host": socket.gethostname()}
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    try:
        group = dist.new_group(
            list(ranks),
            timeout=timeout or group_timeout(wire.group, wire.device),
            backend="gloo",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        whole = Wire(group, torch.device("cpu"))
        said = [json.loads(message.numpy().tobytes()) for message in whole.gather([text])]
    except RuntimeError as error:
        raise RuntimeError(
            f"all ranks of the job must protect their model: waited for ranks {list(ranks)};"
            f" pass job_group=... if only some of them do: {error}"
        ) from error
    groups = {tuple(theirs["members"]): int(theirs["b"]) for theirs in said}
    job = Job(whole, list(groups.items()))
    hosts = zip(whole.ranks, said, strict=True)
    job.hosts = {rank: str(theirs["host"]) for rank, theirs in hosts}
    return job


def ranks_of_job(mesh: Any, group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group, or else of the whole mesh that a mesh is a part of."""
    if group is not None:
        return dist.get_process_group_ranks(group)
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()  # noqa: SLF001 - torch has no other way
    else:  # before torch 2.9
        root = dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # noqa: SLF001
    ranks: list[int] = root.mesh.flatten().tolist()
    return sorted(ranks)


def _texts(entries: Sequence[Any]) -> set[str]:
    """Return each entry once, in one spelling; what is none is left out."""
    return {
        json.dumps(entry, sort_keys=True)
        for entry in entries
        if isinstance(entry, dict) and {"event", "rank"} <= entry.keys()
    }


def _message(news: Sequence[dict[str, Any]]) -> bytes:
    """Write entries as JSON that is short enough, without details if need be, or fewer of them."""
    whole = json.dumps(news).encode() if news else b""
    if len(whole) <= _LONGEST:
        return whole
    details: dict[str, Any] = {"places": {}, "layers": {}}
    bare = [{**entry, **details} if "places" in entry else entry for entry in news]
    while len(whole := json.dumps(bare).encode()) > _LONGEST:
        bare.pop()
    return whole


def _entries(message: bytes) -> list[Any]:
    """Read entries; a message that is none, as a faulty rank may send, has none."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []
