"""The parameters of a model as one vector of d columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_LINE = 64  # bytes of a cache line


class FlatParameters:
    """One vector of all trainable parameters; the model's own tensors become views of it.

    Column j of the gradient matrix belongs to ``vector[j]``, in the order of
    ``model.parameters()``.

    >>> model = torch.nn.Linear(3, 2)
    >>> flat = FlatParameters(model)
    >>> _ = flat.vector.fill_(7)
    >>> model.bias
    Parameter containing:
    tensor([7., 7.], requires_grad=True)
    """

    def __init__(self, model: nn.Module) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.tensors = list(trained.values())
        self.layers = [(name, tensor.numel()) for name, tensor in trained.items()]
        """Names and sizes of the parameters, in the order of the columns."""
        if not self.tensors:
            raise ValueError(
                "a model needs at least one parameter that requires a gradient: got none"
            )
        dtypes = {tensor.dtype for tensor in self.tensors}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64, torch.bfloat16}:
            raise TypeError(
                "a model's parameters must all be float32, all float64 or all bfloat16:"
                f" got {', '.join(sorted(map(str, dtypes)))}"
            )
        devices = {str(tensor.device) for tensor in self.tensors}
        if len(devices) != 1:
            raise ValueError(
                f"a model's parameters must be on one device: got {', '.join(sorted(devices))}"
            )
        self.shapes = [tensor.shape for tensor in self.tensors]
        self.size = sum(tensor.numel() for tensor in self.tensors)
        first = self.tensors[0]
        self.vector = torch.empty(self.size, dtype=first.dtype, device=first.device)
        for tensor, view in zip(self.tensors, self.views(self.vector), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view

    def rows(self, m: int) -> torch.Tensor:
        """Return uninitialised memory for m vectors of d values, each aligned to a cache line.

        The last bits of a matrix product depend on the alignment of its output. So a worker's row
        must have the same alignment whichever other rows are present.

        >>> rows = FlatParameters(torch.nn.Linear(3, 2)).rows(4)
        >>> rows.shape, rows.stride()
        (torch.Size([4, 8]), (16, 1))
        """
        return apart(self.vector, m, self.size)

    def views(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield views of a vector of d values, with the parameters' shapes."""
        offset = 0
        for shape in self.shapes:
            yield vector[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()


def apart(like: torch.Tensor, k: int, *shape: int) -> torch.Tensor:
    """Return uninitialised memory for k tensors of a shape, each aligned to a cache line."""
    size, line = math.prod(shape), _LINE // like.element_size()
    return like.new_empty(k, -(-size // line) * line)[:, :size].view(k, *shape)


def set_apart(stack: torch.Tensor) -> torch.Tensor:
    """Return k tensors aligned as by :func:`apart`; the stack itself if it is already aligned.

    Memory that torch allocates starts at a cache line.
    """
    aligned = stack.stride(0) * stack.element_size() % _LINE == 0
    return stack if aligned else apart(stack, *stack.shape).copy_(stack)
