"""The exchange of messages between the peers of a process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
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

        A rank with other bytes receives those of the majority from one rank that has them, and
        checks their digest.
        """
        wire = self.wire
        label = digest([torch.frombuffer(bytearray(own), dtype=torch.uint8)])
        labels = self(label + len(own).to_bytes(8, "little"))
        common, times = Counter(labels.values()).most_common(1)[0]
        if 2 * times <= wire.m:
            raise ValueError(
                "more than half of the peers must have the same parameters and outer steps:"
                f" {times} of {wire.m} have; load the same checkpoint, or set the same seed, on all"
            )
        wanted, size = common[:DIGEST], int.from_bytes(common[DIGEST:], "little")
        holders = [i for i, rank in enumerate(wire.ranks) if labels[rank] == common]
        mine, have = own, label == wanted
        for holder in holders:
            done = self(bytes([have]))
            if all(value == b"\x01" for value in done.values()):
                break
            sent = torch.zeros(size, dtype=torch.uint8)
            if have:
                sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            got = wire.broadcast(sent.to(wire.device), holder).cpu()
            if not have and digest([got]) == wanted:
                mine, have = np.asarray(got).tobytes(), True
        if not have:
            raise ValueError("no peer has sent the state that most peers have: leave the group")
        return mine
