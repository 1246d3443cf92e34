"""Verification: two ranks compute each result, and a difference identifies the faulty rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from phocas.integrations.wire import Bucket, Wire, as_bytes

DIGEST_BYTES = 16

Compute: TypeAlias = Callable[[int, Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function that computes the bytes of a shard from its columns, one (m, n) tensor per bucket."""


class AggregatorError(RuntimeError):
    """Two ranks computed different results of one shard; ``ranks`` are the possibly faulty ones.

    Args:
        message: the description of the difference.
        ranks: the ranks that may be faulty.

    >>> AggregatorError("shard 2 differs", (2, 3)).ranks
    (2, 3)
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def checker(shard: int, m: int) -> int:
    """Return the rank that computes a shard a second time: the next rank."""
    return (shard + 1) % m


def agree(
    wire: Wire,
    buckets: Sequence[Bucket],
    compute: Compute,
    sizes: Sequence[int] | None = None,
    aside: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Compute the bytes of this rank's shard, and return the bytes of the shards of all ranks.

    The bytes of ``aside`` are sent before those of the shard. ``aside`` is not checked, because no
    other rank can compute it.

    With verification, each rank also holds the previous shard, computes it as well, and sends the
    digest. Every rank compares the bytes of each shard with the digest of the rank that checks the
    shard, so all ranks reach the same decision.
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
    """Return the error that names the faulty rank of a shard with two different results.

    The two ranks that hold the shard broadcast its columns, and all ranks compute the result.
    """
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
    """Return the digest of the concatenation of tensors of bytes."""
    value = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        value.update(part.cpu().numpy().data)
    return torch.frombuffer(bytearray(value.digest()), dtype=torch.uint8)


def _hex(value: torch.Tensor) -> str:
    return value.numpy().tobytes().hex()
