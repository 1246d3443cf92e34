"""The creation of process groups: all ranks must have the same settings, or an error is raised."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import phocas
from phocas.floats import FORMATS
from phocas.integrations.wire import Wire
from phocas.machine import available_cores
from phocas.rules import Rule

DTYPES = tuple(getattr(torch, name) for name in FORMATS)


def join(
    group: dist.ProcessGroup,
    device: torch.device,
    settings: dict[str, Any],
    timeout: timedelta | None = None,
    ranks: list[int] | None = None,
    failure: Exception | None = None,
) -> tuple[Wire, list[str]]:
    """Return a new wire (collectives) for the ranks of a group, and the names of their hosts.

    ``ranks`` are the members if the new wire has other ranks than the group. The settings of all
    ranks are compared, so that a difference raises an error instead of a hang. If any rank passes a
    ``failure``, all ranks raise an error.
    """
    _share_cores()
    members = ranks or dist.get_process_group_ranks(group)
    # With local synchronization, torch derives the name of a group from the number of groups that a
    # rank has, which may differ between ranks. So it is off if all ranks take part.
    group = dist.new_group(
        members,
        timeout=timeout or group_timeout(group, device),
        use_local_synchronization=len(members) < dist.get_world_size(),
    )
    wire = Wire(group, device)
    return wire, compare_settings(wire, settings, failure)


def compare_settings(
    wire: Wire, settings: dict[str, Any], failure: Exception | None = None
) -> list[str]:
    """Return the names of the ranks' hosts; raise ValueError on all ranks if settings differ.

    If any rank passes a ``failure``, all ranks raise an error.
    """
    settings = {"version of phocas": phocas.__version__, **settings}
    said = tell_all(
        wire,
        {**settings, "host": socket.gethostname(), "failure": failure and str(failure)},
    )
    if failure is not None:
        raise failure
    for rank, theirs in zip(wire.ranks, said, strict=True):
        if theirs["failure"] is not None:
            raise ValueError(f"rank {rank} cannot be protected: {theirs['failure']}")
        for key, value in settings.items():
            if theirs.get(key) != value:
                own = wire.ranks[wire.rank]
                raise ValueError(
                    f"all ranks must be protected alike: rank {own} has {key} {value!r},"
                    f" rank {rank} has {theirs.get(key)!r}"
                )
    return [str(theirs["host"]) for theirs in said]


def join_part(
    whole: Wire, groups: Iterable[Sequence[int]], timeout: timedelta | None = None
) -> Wire:
    """Return a new wire for the one of several groups that this rank is in.

    All ranks of ``whole`` must call this with the same groups, in the same order.
    """
    own, part = whole.ranks[whole.rank], whole.group
    timeout = timeout or group_timeout(whole.group, whole.device)
    local = whole.m < dist.get_world_size()
    for members in groups:
        if own in members or not local:
            made = dist.new_group(list(members), timeout=timeout, use_local_synchronization=local)
            part = made if own in members else part
    return Wire(part, whole.device)


def tell_all(wire: Wire, told: Any) -> list[Any]:
    """Send a value to all ranks as JSON; return the values of all ranks, in their order."""
    text = bytearray(json.dumps(told).encode())
    messages = wire.gather([torch.frombuffer(text, dtype=torch.uint8)])
    return [json.loads(message.cpu().numpy().tobytes()) for message in messages]


def uncompiled(model: Any) -> Any:
    """Return the model that ``torch.compile`` was called on, or the model itself."""
    return getattr(model, "_orig_mod", model)


def check_rule(rule: Rule, m: int) -> None:
    """Raise ValueError unless the guarantee of the rule holds for m data-parallel ranks."""
    if rule.needs_reference is not None:
        raise ValueError(
            f"{rule} needs a reference vector, which ranks do not keep between steps: choose a rule"
            " without one, or train with phocas.training, Flower or NVFlare"
        )
    try:
        rule.check(m)
    except ValueError as error:
        world = dist.get_world_size()
        if m == world:
            raise
        raise ValueError(
            f"{error}; workers are the {m} data-parallel ranks, of {world} ranks in all: ranks of"
            " one tensor-parallel group count as one"
        ) from None


def check_dtypes(dtypes: Iterable[torch.dtype]) -> None:
    """Raise TypeError for gradients of an unsupported type."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise TypeError(f"gradients must be of {known}: got {dtype}")


def _share_cores() -> None:
    """Divide the cores between the ranks of this host, as torchrun does with OpenMP threads."""
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if neighbours > 1 and "PHOCAS_NUM_THREADS" not in os.environ:
        cores = max(1, available_cores() // neighbours)
        phocas.set_num_threads(min(cores, phocas.get_num_threads()))


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of the collectives of a group."""
    # The default timeout of a new group is minutes. Torch has no public way to read a timeout.
    options = group._get_backend(device).options  # noqa: SLF001
    return getattr(options, "_timeout", None)
