"""The two verbs for a model that somebody else has wrapped: by DDP or by FSDP2, whichever it is."""

from __future__ import annotations

from typing import Any, Unpack

from torch.nn.parallel import DistributedDataParallel

from phocas.integrations import ddp, fsdp
from phocas.integrations.guard import Guard, Options
from phocas.integrations.joining import uncompiled
from phocas.rules import Rule


def protect(model: Any, rule: Rule | str, **options: Unpack[Options]) -> Guard:
    """Aggregate a wrapped model's gradients by a rule; see ``ddp.protect`` and ``fsdp.protect``.

    Args:
        model: what DDP has wrapped, or ``fully_shard`` has sharded.
        rule: the rule, or its text.
        **options: as for ``ddp.protect`` and ``fsdp.protect``.
    """
    if isinstance(uncompiled(model), DistributedDataParallel):
        return ddp.protect(model, rule, **options)
    return fsdp.protect(model, rule, **options)


def watch(model: Any, b: int, **options: Unpack[Options]) -> Guard:
    """Average as before, and know who is wrong; see ``ddp.watch`` and ``fsdp.watch``.

    Args:
        model: what DDP has wrapped, or ``fully_shard`` has sharded.
        b: how many ranks may be wrong for what is said about them to hold.
        **options: as for ``ddp.watch`` and ``fsdp.watch``.
    """
    if isinstance(uncompiled(model), DistributedDataParallel):
        return ddp.watch(model, b, **options)
    return fsdp.watch(model, b, **options)
