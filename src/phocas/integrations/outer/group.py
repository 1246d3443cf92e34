"""The exchange of messages between the peers of a process group."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from phocas.integrations.joining import compare_settings
from phocas.integrations.outer.messages import DIGEST, digest
from phocas.integrations.wire import Wire


class GroupExchange:
    """All-gather of the messages of the ranks of a group; peers are numbered by global rank.

    Args:
        group: the process group.
        device: the device of the parameters.
        settings: what must be the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, settings: dict[str, Any]
    ) -> None:
        on_host = "gloo" in dist.get_backend(group)
        self.wire = Wire(group, torch.device("cpu") if on_host else device)
        compare_settings(self.wire, settings)

    def __call__(self, message: bytes) -> dict[int, bytes]:
        """Return the messages of all ranks; each is as long as that of this rank.

        Each pair of ranks exchanges its messages directly. So every rank sees which one has ended,
        and no rank forwards the message of another.
        """
        wire, group = self.wire, self.wire.group
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(wire.device)
        found = [own if i == wire.rank else torch.empty_like(own) for i in range(wire.m)]
        others = [i for i in range(wire.m) if i != wire.rank]
        pending: list[tuple[int, dist.Work | None]] = []
        failed: dict[int, RuntimeError] = {}
        for i in others:
            try:
                pending.append((i, dist.irecv(found[i], group=group, group_src=i)))
                pending.append((i, dist.isend(own, group=group, group_dst=i)))
            except RuntimeError as error:
                failed[wire.ranks[i]] = error
        for i, work in pending:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                failed.setdefault(wire.ranks[i], error)
        if failed:
            ranks = ", ".join(map(str, sorted(failed)))
            first = next(iter(failed.values()))
            raise RuntimeError(f"rank {ranks} has ended or does not answer: {first}")
        parts = zip(wire.ranks, found, strict=True)
        return {rank: part.cpu().numpy().tobytes() for rank, part in parts}

    def majority(self, own: bytes) -> bytes:
        """Return the bytes that more than half of the ranks have; else raise ValueError.

        A rank with other bytes asks the ranks that claim to have them, one after another, until
        the digest of an answer is right. Each pair of ranks does that on its own. So a rank that
        answers some ranks otherwise than others makes no pair wait that it is not in.
        """
        wire = self.wire
        label = _digest(own)
        labels = self(label + len(own).to_bytes(8, "little"))
        common, times = Counter(labels.values()).most_common(1)[0]
        if 2 * times <= wire.m:
            raise ValueError(
                "more than half of the peers must have the same parameters and outer steps:"
                f" {times} of {wire.m} have; load the same checkpoint, or set the same seed, on all"
            )
        wanted, size = common[:DIGEST], int.from_bytes(common[DIGEST:], "little")
        found = own if label == wanted else None
        # All ranks take the pairs in the same order, so that none waits for a later pair.
        for other in (i for i in range(wire.m) if i != wire.rank):
            for asking in sorted((wire.rank, other)):
                if asking == other:
                    if self._receive(1, other) != b"\x00":
                        self._send(own, other)
                    continue
                asks = found is None and labels[wire.ranks[other]] == common
                self._send(bytes([asks]), other)
                if asks and _digest(got := self._receive(size, other)) == wanted:
                    found = got
        if found is None:
            raise ValueError("no peer has sent the state that most peers have: leave the group")
        return found

    def _send(self, message: bytes, to: int) -> None:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.wire.device)
        with self._naming(to):
            dist.send(own, group=self.wire.group, group_dst=to)

    def _receive(self, size: int, sender: int) -> bytes:
        found = torch.empty(size, dtype=torch.uint8, device=self.wire.device)
        with self._naming(sender):
            dist.recv(found, group=self.wire.group, group_src=sender)
        return found.cpu().numpy().tobytes()

    @contextlib.contextmanager
    def _naming(self, other: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank = self.wire.ranks[other]
            raise RuntimeError(f"rank {rank} has ended or does not answer: {error}") from error


def _digest(message: bytes) -> bytes:
    return digest([torch.frombuffer(bytearray(message), dtype=torch.uint8)])
