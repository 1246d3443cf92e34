"""The state of a guard on all ranks, for frameworks in which one rank writes a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phocas.integrations.guard import Guard
from phocas.integrations.state_bytes import read_state, write_state
from phocas.integrations.wire import Wire


def gathered_state(guard: Guard) -> dict[str, Any]:
    """Return the states of all ranks' guards, on every rank; call it on all ranks.

    ``guard.load_state_dict`` takes from it what its rank needs.
    """
    group = dist.group.WORLD
    assert group is not None
    on_host = "gloo" in dist.get_backend(group)
    device = torch.device("cpu" if on_host else "cuda")
    own = torch.frombuffer(bytearray(write_state(guard.state_dict())), dtype=torch.uint8)
    found: dict[str, Any] = {}
    for part in Wire(group, device).gather([own]):
        found |= read_state(part.cpu().numpy().tobytes())
    return found
