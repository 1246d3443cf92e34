"""``protect`` and ``watch`` for a model wrapped by DDP or by FSDP2."""

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
        model: a model wrapped by DDP, or sharded by ``fully_shard``.
        rule: the rule, or its text.
        **options: as for ``ddp.protect`` or ``fsdp.protect``.
    """
    if isinstance(uncompiled(model), DistributedDataParallel):
        return ddp.protect(model, rule, **options)
    return fsdp.protect(model, rule, **options)


def watch(model: Any, b: int, **options: Unpack[Options]) -> Guard:
    """Average as before, and detect faulty ranks; see ``ddp.watch`` and ``fsdp.watch``.

    Args:
        model: a model wrapped by DDP, or sharded by ``fully_shard``.
        b: the largest number of faulty ranks for which the detection is valid.
        **options: as for ``ddp.watch`` and ``fsdp.watch``.
    """
    if isinstance(uncompiled(model), DistributedDataParallel):
        return ddp.watch(model, b, **options)
    return fsdp.watch(model, b, **options)
