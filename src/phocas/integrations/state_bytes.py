"""States for checkpoints as bytes: plain numbers and JSON, never pickled objects."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch


def write_state(state: dict[str, Any]) -> bytes:
    """Return a state of numbers, text, lists, dicts and tensors as bytes, the same on all hosts.

    >>> found = read_state(write_state({"a": {0: torch.arange(3)}, "b": [1.5, None, (True,)]}))
    >>> found
    {'a': {0: tensor([0, 1, 2])}, 'b': [1.5, None, [True]]}
    """
    tensors: list[torch.Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if isinstance(value, dict):
            return {"items": [[key, described(each)] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            return [described(each) for each in value]
        return value

    text = json.dumps(described(state)).encode()
    return (
        struct.pack("<q", len(text)) + text + b"".join(tensor_bytes(tensor) for tensor in tensors)
    )


def read_state(content: bytes) -> dict[str, Any]:
    """Return the state that :func:`write_state` has written; raise ValueError for other bytes."""
    try:
        (length,) = struct.unpack_from("<q", content)
        place = 8 + length

        def restored(value: Any) -> Any:
            nonlocal place
            if isinstance(value, list):
                return [restored(each) for each in value]
            if not isinstance(value, dict):
                return value
            if "items" in value:
                return {key: restored(each) for key, each in value["items"]}
            dtype = getattr(torch, value["dtype"])
            size = math.prod(value["shape"]) * dtype.itemsize
            part, place = bytearray(content[place : place + size]), place + size
            flat = torch.frombuffer(part, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            return flat.reshape(value["shape"])

        found: dict[str, Any] = restored(json.loads(content[8:place]))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"a state must be whole: {error}") from None
    return found


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the values of a tensor."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()
