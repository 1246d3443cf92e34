"""A device for machines that have none: tensors on torch's ``meta``, given memory by a mode.

Under :class:`FakeDevice`, whatever is computed with tensors on ``meta`` is computed on the CPU, in
memory that only the mode can reach; autograd, views and modules are torch's own. As on a real
device, no operation takes tensors of both places, nothing there can be had as an array, and what
goes from one place to the other goes through a copy, which is counted. (``torch.tensor(...,
device=)`` asks no mode, and makes a tensor without memory.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
THERE = torch.device("meta")
COPIES = (aten._to_copy.default, aten.copy_.default)
SCALARS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Give ``meta`` memory, and count the bytes that go there and come back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._places: dict[int, torch.UntypedStorage] = {}
        self.sent: list[int] = []
        self.fetched: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute on the CPU what is to be computed there."""
        del types
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = any(tensor.device == THERE for tensor in tensors)
        wanted = kwargs.get("device")
        result_there = there if wanted is None else torch.device(wanted) == THERE
        if not there and not result_there:
            return func(*args, **kwargs)
        if func in COPIES:
            target = args[0] if func is aten.copy_.default else None
            source = args[-1] if target is None else args[1]
            to = result_there if target is None else target.device == THERE
            size = source.numel() * source.element_size()
            if to != (source.device == THERE):
                (self.sent if to else self.fetched).append(size)
        elif any(tensor.device != THERE and tensor.dim() for tensor in tensors):
            raise RuntimeError(f"all tensors must be on one device: {func} got some of both")
        if func in SCALARS:
            self.fetched.append(8)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        real = func(
            *tree_map_only(torch.Tensor, self._real, args),
            **tree_map_only(torch.Tensor, self._real, kwargs),
        )
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, self._seen, real) if result_there else real

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's memory on the CPU."""
        if tensor.device != THERE:
            return tensor
        memory, _ = self._memory[_key(tensor)]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _seen(self, real: torch.Tensor) -> torch.Tensor:
        """Return the tensor there whose memory this is: a view, if there is one already."""
        memory = real.untyped_storage()
        place = self._places.get(memory._cdata)
        if place is None:
            place = torch.empty(memory.nbytes(), dtype=torch.uint8, device=THERE).untyped_storage()
            self._memory[place._cdata] = (memory, place)
            self._places[memory._cdata] = place
        empty = torch.empty(0, dtype=real.dtype, device=THERE)
        return empty.set_(place, real.storage_offset(), real.size(), real.stride())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
