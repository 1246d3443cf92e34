"""Results that two ranks have worked out, and who is wrong when they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from phocas.integrations.wire import Bucket, Wire, as_bytes

DIGEST_BYTES = 16

Compute: TypeAlias = Callable[[int, Sequence[torch.Tensor]], list[torch.Tensor]]
"""Works out the bytes of a shard from its columns, one tensor of m rows for each bucket."""


class AggregatorError(RuntimeError):
    """Two ranks made different results of one shard; ``ranks`` are those that may be to blame.

    Args:
        message: what happened.
        ranks: those that may be to blame.

    >>> AggregatorError("shard 2 differs", (2, 3)).ranks
    (2, 3)
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def checker(shard: int, m: int) -> int:
    """Return the rank that works a shard out again: the one after its own."""
    return (shard + 1) % m


def agree(
    wire: Wire,
    buckets: Sequence[Bucket],
    compute: Compute,
    sizes: Sequence[int] | None = None,
    aside: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Work out the bytes of the own shard, and return those of all shards.

    ``aside`` comes before them, and is not checked: it is for what cannot be worked out again.

    A rank that holds the shard before its own works that out as well and adds the digest. Everyone
    compares what came of each shard with the digest from the rank that checks it, and so sees the
    same verdict.
    """
    body = compute(wire.rank, [bucket.columns[wire.rank] for bucket in buckets])
    if len(buckets[0].columns) == 1:
        return wire.gather([*aside, *body], sizes)
    before = (wire.rank - 1) % wire.m
    again = compute(before, [bucket.columns[before] for bucket in buckets])
    longer = None if sizes is None else [size + DIGEST_BYTES for size in sizes]
    messages = wire.gather([*aside, *body, digest(again)], longer)
    bodies = [message[:-DIGEST_BYTES] for message in messages]
    beside = sum(part.numel() for part in aside)
    for shard, got in enumerate(bodies):
        claims = {
            shard: digest([got[beside:]]),
            checker(shard, wire.m): messages[checker(shard, wire.m)][-DIGEST_BYTES:].cpu(),
        }
        if not torch.equal(*claims.values()):
            raise _settled(wire, buckets, compute, shard, claims)
    return bodies


def _settled(
    wire: Wire,
    buckets: Sequence[Bucket],
    compute: Compute,
    shard: int,
    claims: dict[int, torch.Tensor],
) -> AggregatorError:
    """Find who is wrong about a shard: both holders show its columns, and everyone computes."""
    shown: list[list[torch.Tensor]] = []
    for holder in claims:
        columns = [
            bucket.columns[shard]
            if wire.rank == holder
            else bucket.flat.new_empty(wire.m, bucket.width(shard))
            for bucket in buckets
        ]
        shown.append([wire.broadcast(tensor, holder) for tensor in columns])
    one, other = (wire.ranks[holder] for holder in claims)
    for first, second in zip(*shown, strict=True):
        for row in range(wire.m):
            if not torch.equal(as_bytes(first[row]), as_bytes(second[row])):
                sender = wire.ranks[row]
                return AggregatorError(
                    f"ranks {one} and {other} aggregated shard {shard} from different values of"
                    f" rank {sender}: rank {sender} sent two versions, or one of ranks {one} and"
                    f" {other} changed what it was sent",
                    (sender, *(rank for rank in (one, other) if rank != sender)),
                )
    truth = digest(compute(shard, shown[0]))
    made = {wire.ranks[holder]: claim for holder, claim in claims.items()}
    wrong = tuple(rank for rank, claim in made.items() if not torch.equal(claim, truth))
    names = " and ".join(f"rank {rank}" for rank in wrong)
    said = ", ".join(f"rank {rank} has {_hex(claim)}" for rank, claim in made.items())
    return AggregatorError(
        f"{names} aggregated shard {shard} wrongly: both holders have the same values, of which"
        f" the rule makes {_hex(truth)}, but {said}",
        wrong,
    )


def digest(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a digest of bytes that lie one after the other, as bytes."""
    value = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        value.update(part.cpu().numpy().data)
    return torch.frombuffer(bytearray(value.digest()), dtype=torch.uint8)


def _hex(value: torch.Tensor) -> str:
    return value.numpy().tobytes().hex()
