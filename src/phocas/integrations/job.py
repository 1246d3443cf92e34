"""The exchange between the data-parallel groups of one job, so that all ranks have the same flags.

Under tensor or pipeline parallelism the ranks with gradients of the same parameters are a group of
some ranks only. Each group detects faulty ranks among its own. A :class:`Job` sends the flags of
every group to all ranks.
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

_EARLY = 64  # number of first steps with an exchange after each step
_EVERY = 4  # number of steps between exchanges later on
_LONGEST = 1 << 16  # limit for the bytes of a message: a faulty rank may announce any length


class Job:
    """The exchange of flags between all ranks of a job, over a process group of its own.

    All ranks exchange after the same steps: each of the first 64, then every fourth, and every step
    while a message is pending. An exchange is one asynchronous all-gather, which completes at the
    next step. So no rank blocks inside a step on a group that is behind in a pipeline. An exchange
    without messages is 8 bytes per rank: the length of the message in the next exchange.
    """

    def __init__(self, wire: Wire, groups: Sequence[tuple[Sequence[int], int]]) -> None:
        """Store the global ranks of every group, and the largest number of faulty ranks in each."""
        self.wire, self.groups = wire, groups
        self.hosts: dict[int, str] = {}
        self.steps = 0
        self.sizes = [0] * wire.m
        self.outgoing = b""
        self._arrived: tuple[torch.Tensor, dist.Work] | None = None

    def due(self) -> bool:
        """Return whether there is an exchange at the end of this step."""
        return self.steps < _EARLY or self.steps % _EVERY == 0 or any(self.sizes)

    def send(self, news: Sequence[dict[str, Any]], *, due: bool) -> None:
        """End a step; if an exchange is due, send pending entries and the next message's length."""
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
        """Wait for the last exchange; return each global rank and the entries that it sent."""
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
        """Yield the entries about a rank that more than b ranks of the rank's group have sent."""
        for members, b in self.groups:
            said = Counter(
                text for rank, entries in told if rank in members for text in _texts(entries)
            )
            for text, times in said.items():
                entry = json.loads(text)
                if times > b and entry["rank"] in members:
                    yield entry


def join_job(wire: Wire, ranks: Sequence[int], b: int, timeout: timedelta | None) -> Job | None:
    """Join the groups of a job; return None if the wire's group is the only one."""
    check_job(wire.ranks, ranks)
    if set(wire.ranks) == set(ranks):
        return None
    # Messages are small, so they go through host memory (gloo).
    # With local synchronization, torch derives the name of a group from the number of groups of its
    # ranks, which may differ between the groups of a job. So it is off if all ranks take part.
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


def check_job(members: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise ValueError unless the ranks of a job contain the members of a group."""
    if not set(members) <= set(ranks):
        raise ValueError(
            f"job_group must have all ranks of the model's group, {list(members)}: got"
            f" {list(ranks)}"
        )


def ranks_of_job(mesh: Any, group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group or, without a group, of the root mesh of a mesh."""
    if group is not None:
        return dist.get_process_group_ranks(group)
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()  # noqa: SLF001 - torch has no other way
    else:  # before torch 2.9
        root = dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # noqa: SLF001
    ranks: list[int] = root.mesh.flatten().tolist()
    return sorted(ranks)


def _texts(entries: Sequence[Any]) -> set[str]:
    """Return each entry once, as JSON with sorted keys; other values are dropped."""
    return {
        json.dumps(entry, sort_keys=True)
        for entry in entries
        if isinstance(entry, dict) and {"event", "rank"} <= entry.keys()
    }


def _message(news: Sequence[dict[str, Any]]) -> bytes:
    """Return entries as JSON; if the text is too long, drop details, then entries."""
    whole = json.dumps(news).encode() if news else b""
    if len(whole) <= _LONGEST:
        return whole
    details: dict[str, Any] = {"places": {}, "layers": {}}
    bare = [{**entry, **details} if "places" in entry else entry for entry in news]
    while len(whole := json.dumps(bare).encode()) > _LONGEST:
        bare.pop()
    return whole


def _entries(message: bytes) -> list[Any]:
    """Return the entries of a message; none if a faulty rank sent invalid JSON."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []
