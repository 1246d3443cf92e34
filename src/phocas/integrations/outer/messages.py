"""The messages of an outer step: the update of a peer.

An invalid message raises ValueError, and only its sender loses its row.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phocas.integrations.outer.compression import Compression, Row
from phocas.integrations.state_bytes import tensor_bytes

DIGEST = 16  # bytes

_HEADER = struct.Struct(f"<8s8sqqd{DIGEST}s")
_MAGIC = b"phocas-1"


def message_size(compression: Compression, d: int) -> int:
    """Return the number of bytes of a message with an update of d values."""
    return _HEADER.size + compression.size(d)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The update of a peer.

    Attributes:
        step: the outer step (from 0) that the update is for.
        weight: the weight that the peer claims.
        base: the digest of the parameters that the peer started from.
        row: parameters at the last outer step minus parameters now, decoded.
    """

    step: int
    weight: float
    base: bytes
    row: Row


def write_update(compression: Compression, update: Update) -> bytes:
    """Return an update as a message."""
    head = _HEADER.pack(
        _MAGIC, _form(compression), update.step, len(update.row), update.weight, update.base
    )
    return head + compression.encode(update.row)


def read_update(message: bytes, compression: Compression, d: int, step: int) -> Update:
    """Return the update that a peer has sent for an outer step; raise ValueError if unusable.

    Args:
        message: the bytes, of which nothing is known.
        compression: the compression that all peers use.
        d: the number of values of the model.
        step: the outer step.
    """
    if len(message) < _HEADER.size or message[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"it must be an update: got {len(message)} other bytes")
    _, form, its_step, its_d, weight, base = _HEADER.unpack_from(message)
    if its_d != d:
        raise ValueError(f"it must have the {d} values of the model: it has {its_d}")
    if form != _form(compression):
        raise ValueError(f"it must be compressed by {compression}: it is compressed otherwise")
    if its_step != step:
        raise ValueError(f"it must be for outer step {step + 1}: it is for {its_step + 1}")
    if not 0 < weight < math.inf:
        raise ValueError(f"its weight must be more than 0 and finite: it is {weight}")
    if len(message) != message_size(compression, d):
        raise ValueError(
            f"it must have {message_size(compression, d)} bytes: it has {len(message)}"
        )
    row = compression.decode(message[_HEADER.size :], d)
    if not np.isfinite(row).all():
        raise ValueError("its values must be finite: some are not")
    return Update(its_step, weight, base, row)


def digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the digest of the values of tensors."""
    value = hashlib.blake2b(digest_size=DIGEST)
    for tensor in tensors:
        value.update(tensor_bytes(tensor))
    return value.digest()


def _form(compression: Compression) -> bytes:
    return hashlib.blake2b(str(compression).encode(), digest_size=8).digest()
