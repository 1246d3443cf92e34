"""The reduce-scatter that FSDP2 calls for each unit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phocas.integrations.fsdp.exchange import Replicated, Sharded, Unit
from phocas.integrations.fsdp.step import FSDPAggregator


class RobustReduceScatter:
    """A ``ReduceScatter`` of torch that exchanges the rows and then applies a rule to them."""

    def __init__(
        self, unit: Unit, group: Any, aggregator: FSDPAggregator, exchange: Sharded | Replicated
    ) -> None:
        self.unit, self.group = unit, group
        self.aggregator, self.exchange = aggregator, exchange

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients of a unit to this rank's shard of the aggregate."""
        del async_op  # torch never sets it
        aggregator = self.aggregator
        if aggregator.replay is not None and aggregator.replay.take(
            self.unit, input_tensor.view(group.size(), -1)
        ):
            output_tensor.zero_()
            return
        self._say_if_partial()
        self._say_if_reduced_twice()
        try:
            value = aggregator.reduce(self.unit, self.exchange.scatter(input_tensor, group))
            self.exchange.gather(value, output_tensor)
            aggregator.together.leave()
        except RuntimeError as error:  # raised by every collective that fails
            aggregator.state.failure = aggregator.state.failure or error
            raise RuntimeError(
                f"step {aggregator.step + 1}, gradients of {self.unit.name}: waited for all"
                f" {aggregator.wire.m} ranks to exchange them: {error}"
            ) from error
        factor = _factor(op, group.size())
        if factor != 1:
            output_tensor.mul_(factor)

    def _say_if_partial(self) -> None:
        """Warn once, on one rank, if the model has units that no guard protects.

        Torch knows all units of a model only after the first forward pass.
        """
        step = self.aggregator.together
        if step.said_partial:
            return
        step.said_partial = True
        context = self.group.modules[0]._get_fsdp_state()._state_ctx  # noqa: SLF001
        groups = [group for state in context.all_states for group in state._fsdp_param_groups]  # noqa: SLF001
        bare = [
            group
            for group in groups
            if not isinstance(group._reduce_scatter_comm, RobustReduceScatter)  # noqa: SLF001
            and not any(group is known for known in step.averaged)
            and any(each.sharded_param.requires_grad for each in group.fsdp_params)
        ]
        if bare and step.speaks:
            warnings.warn(
                f"only {len(groups) - len(bare)} of {len(groups)} units of the model are protected:"
                " the gradients of the others are averaged by torch, and their faults are not seen;"
                " call protect on the model that fully_shard was called on last",
                RuntimeWarning,
                stacklevel=3,
            )

    def _say_if_reduced_twice(self) -> None:
        if self.aggregator.together.said_twice:
            return
        for parameter in self.group.fsdp_params:
            grad = parameter.sharded_param.grad
            again = self.group._partial_reduce_output is not None  # noqa: SLF001 - HSDP only
            if again or (grad is not None and bool(grad.to_local().any())):
                self.aggregator.together.said_twice = True
                warnings.warn(
                    f"{self.unit.name} is reduced again before its gradient is used: rules are not"
                    " linear, so that the sum of reduced micro-batches is not the reduced sum;"
                    " call model.set_requires_gradient_sync(False) for all but the last",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return


def _factor(op: Any, size: int) -> float:
    """Return the factor from the mean to the reduction that torch requests."""
    # Torch passes a plain kind, or an operation whose factor only its pickled state has.
    bare = isinstance(op, dist.ReduceOp.RedOpType)
    state: Any = (op, None) if bare else op.__getstate__()
    kind, premultiplied = state
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(size)
    if premultiplied is not None:
        return float(size * premultiplied)
    raise ValueError(f"gradients must be averaged or summed: got {op}")
