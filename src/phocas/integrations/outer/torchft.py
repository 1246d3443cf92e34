"""Robust all-reduce for torchft: ``DiLoCo(RobustManager(manager, "trimmed-mean:b=1"), ...)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]
from torchft.work import _DummyWork

from phocas.rules import Rule, parse_rule


class RobustManager:
    """A wrapper of torchft's manager that aggregates replica groups by a rule, not the mean.

    Give it to torchft's ``DiLoCo`` or ``LocalSGD`` instead of the manager itself. The quorum,
    healing and commits are torchft's. b is checked against the replica groups of each step. If they
    are too few for the rule, or if the aggregate is not finite, no replica group commits the step;
    ``manager.errored()`` says why.

    A rule that measures whole rows needs ``DiLoCo(..., use_bucketization=True)``. Otherwise it
    chooses rows anew for each parameter.

    Args:
        manager: the manager of torchft.
        rule: the rule, or its text; row i is replica group i of the quorum.
    """

    def __init__(self, manager: Any, rule: Rule | str) -> None:
        self._manager = manager
        self.rule = parse_rule(rule) if isinstance(rule, str) else rule
        if self.rule.needs_reference is not None:
            raise ValueError(
                f"{self.rule} needs a reference vector, which torchft does not keep: choose a rule"
                " without one, or use phocas.integrations.outer.OuterStep"
            )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torchft's manager."""
        return getattr(self._manager, name)

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: Any = dist.ReduceOp.AVG,
    ) -> Any:
        """Replace a tensor by the aggregate of the tensors of all replica groups.

        Args:
            tensor: the tensor of this replica group; it is overwritten.
            should_quantize: must be False: rows are sent as they are.
            reduce_op: must be the average.
        """
        if should_quantize or reduce_op != dist.ReduceOp.AVG:
            raise ValueError(
                "RobustManager needs should_quantize=False and reduce_op=AVG: got"
                f" should_quantize={should_quantize}, reduce_op={reduce_op}"
            )
        manager = self._manager
        if not manager.errored():
            manager.wait_quorum()
            try:
                tensor.copy_(self._aggregate(tensor.detach()))
            except Exception as error:  # noqa: BLE001 - torchft does not commit the step
                manager.report_error(error)
        return _DummyWork(tensor)

    def _aggregate(self, tensor: torch.Tensor) -> torch.Tensor:
        manager, group = self._manager, self._manager._pg  # noqa: SLF001 - torchft has no other way
        # Replica groups that heal or are spare take part without a row.
        own = torch.cat([tensor.new_tensor([float(manager.is_participating())]), tensor.flatten()])
        rows = [torch.empty_like(own) for _ in range(group.size())]
        group.allgather([rows], [own], AllgatherOptions()).wait()
        used = [row[1:] for row in rows if row[0] == 1]
        value = self.rule(torch.stack(used) if used else own.new_empty(0, tensor.numel()))
        if not bool(value.isfinite().all()):
            raise ValueError(f"{self.rule} of {len(used)} rows must be finite: it is not")
        return value.reshape(tensor.shape)  # type: ignore[no-any-return]
