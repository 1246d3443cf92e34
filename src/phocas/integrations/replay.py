"""The last micro-batch of a rank, which can be computed again there and on another rank.

A forward hook keeps references to the inputs of a pass, its random state, and the gradient of the
loss with respect to the model's output. Together with the weights, which do not change before the
end of the backward pass, they determine the gradient. Nothing is computed until a rank is flagged.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # torch has no public one

from phocas.integrations.reports import ConfirmationReport
from phocas.integrations.wire import Wire, as_bytes

_PASSES = 8  # forward passes of a step that are kept; more are those of a loop without backward


@dataclass(slots=True)
class Pass:
    """One forward pass of the model, and the gradient with respect to its output."""

    inputs: list[Any]
    structure: Any
    """How the inputs are nested in the arguments."""
    random: list[torch.Tensor]
    """The states of torch's generators before the pass: host, then device."""
    autocast: torch.dtype | None
    """The type of automatic mixed precision, or None."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the number of an output, the gradient of the loss with respect to it."""

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Store the gradient of an output; called in the backward pass."""
        known = self.gradients.get(number)
        self.gradients[number] = gradient if known is None else known + gradient


class Recorder:
    """The last micro-batch of this rank, and the means to compute it again.

    Args:
        wire: the collectives of the model's ranks.
        hosts: the host of each rank.
        module: the model.
        device: the device of its gradients.
        reduces: returns whether the gradients of the next backward pass are reduced.
    """

    def __init__(
        self,
        wire: Wire,
        hosts: Sequence[str],
        module: nn.Module,
        device: torch.device,
        reduces: Callable[[], bool],
    ) -> None:
        self.wire, self.hosts = wire, hosts
        self.module, self.device, self._reduces = module, device, reduces
        self._passes: deque[Pass] = deque(maxlen=_PASSES)
        self._begun: Pass | None = None
        self.accumulated = False
        """Whether the gradients of this step have other micro-batches, too."""
        self.replaying = False
        self._handles = [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self.module.register_forward_hook(self._after),
        ]

    def confirm(self, row: int, flagged: Sequence[int]) -> ConfirmationReport:
        """Replay the last micro-batch of a row; call it on all ranks, in the backward pass.

        Returns:
            The verdict, the same on every rank.
        """
        raise NotImplementedError

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = None
        if self.replaying or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():  # a trace has no values
            return
        if not self._reduces():
            self.accumulated = True
            return
        kind = self.device.type
        random = [torch.get_rng_state()]
        if kind == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._begun = Pass(*pytree.tree_flatten((args, kwargs)), random, autocast)

    def _after(self, _: nn.Module, __: Any, output: Any) -> Any:
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        self._passes.append(begun)
        leaves, structure = pytree.tree_flatten(output)
        found = [number for number, leaf in enumerate(leaves) if _has_gradient(leaf)]
        if len(found) == 1:
            leaves[found[0]].register_hook(partial(begun.take, found[0]))
            return None
        for number in found:
            # If one output is computed from another, only a view of it gets the gradient from
            # outside of the model alone.
            leaves[number] = leaves[number].view_as(leaves[number])
            leaves[number].register_hook(partial(begun.take, number))
        return pytree.tree_unflatten(leaves, structure) if found else None

    def end(self) -> None:
        """Release what was kept of a step."""
        self._passes.clear()
        self.accumulated = False

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self.end()

    def other(self, row: int, flagged: Sequence[int]) -> int | None:
        """Return the next row that is not flagged, on another host if there is one."""
        m = self.wire.m
        rows = [(row + step) % m for step in range(1, m)]
        rows = [each for each in rows if each not in flagged]
        elsewhere = [each for each in rows if self.hosts[each] != self.hosts[row]]
        return next(iter(elsewhere or rows), None)

    def usable(self) -> list[Pass]:
        """Return the forward passes of this step; raise ValueError if none is known."""
        found = [each for each in self._passes if each.gradients]
        if not found:
            raise ValueError(
                "no micro-batch is known: its outputs must be tensors in tuples, lists or"
                " dictionaries, and the model must be called through DistributedDataParallel or as"
                " fully_shard has returned it, which is not compiled itself"
            )
        return found

    def packed(self, parcel: Parcel) -> dict[str, Any]:
        """Return the micro-batch and the buffers as JSON, with their tensors in the parcel."""
        return {
            "passes": [_packed(each, parcel) for each in self.usable()],
            "buffers": [parcel.add(each) for each in self.module.buffers()],
        }

    @contextlib.contextmanager
    def playing(self, buffers: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """Compute passes again inside of this; random states and buffers are then as before.

        Args:
            buffers: the buffers to compute with, or None for those of the model.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        self.replaying = True
        try:
            with torch.random.fork_rng(devices), self._with(buffers), torch.enable_grad():
                yield
        finally:
            self.replaying = False

    def forward(self, each: Pass) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Compute a pass again; return its outputs, and the gradients with respect to them."""
        torch.set_rng_state(each.random[0].cpu())
        if len(each.random) > 1:
            torch.cuda.set_rng_state(each.random[1].cpu(), self.device)
        inputs = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in each.inputs]
        args, kwargs = pytree.tree_unflatten(inputs, each.structure)
        with torch.autocast(
            self.device.type, dtype=each.autocast, enabled=each.autocast is not None
        ):
            output = self.module(*args, **kwargs)
        leaves = pytree.tree_leaves(output)
        return [leaves[number] for number in each.gradients], list(each.gradients.values())

    @contextlib.contextmanager
    def _with(self, buffers: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """Give the model these buffers, if there are any; restore its own afterwards."""
        own = list(self.module.buffers())
        with torch.no_grad():
            before = [each.clone() for each in own]
            for each, value in zip(own, buffers or (), strict=buffers is not None):
                each.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, value in zip(own, before, strict=True):
                    each.copy_(value)


class Parcel:
    """Tensors to send with a header, as plain numbers and JSON: nothing is unpickled."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor; return its number."""
        if tensor.layout != torch.strided or isinstance(tensor, DTensor):
            raise TypeError(f"tensors must be dense to be sent: got {tensor.layout}")
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1

    def send(self, wire: Wire, row: int, header: Mapping[str, Any]) -> None:
        """Send all tensors and the header to a row."""
        shapes = [(list(each.shape), str(each.dtype)) for each in self.tensors]
        text = bytearray(json.dumps({**header, "tensors": shapes}).encode())
        parts = [torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)]
        for each in parts + self.tensors:
            if each.numel():
                values = as_bytes(each.contiguous()).to(wire.device)
                dist.send(values, wire.ranks[row], group=wire.group)


def receive(wire: Wire, row: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the header and the tensors that a row has sent."""

    def take(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(list(shape), dtype=dtype, device=wire.device)
        if tensor.numel():
            dist.recv(as_bytes(tensor), wire.ranks[row], group=wire.group)
        return tensor

    length = int(take([1], torch.int64).item())
    header = json.loads(take([length], torch.uint8).cpu().numpy().tobytes())
    known = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    return header, [take(shape, known[dtype]) for shape, dtype in header["tensors"]]


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _packed(each: Pass, parcel: Parcel) -> dict[str, Any]:
    """Return a pass as JSON, with its tensors in the parcel."""
    leaves: list[Any] = []
    for leaf in each.inputs:
        if torch.is_tensor(leaf):
            leaves.append({"tensor": parcel.add(leaf)})
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            leaves.append(leaf)
        else:
            raise TypeError(
                "inputs of the model must be tensors, numbers, text or None to be sent: got a"
                f" {type(leaf).__name__}"
            )
    return {
        "leaves": leaves,
        "structure": pytree.treespec_dumps(each.structure),
        "random": [parcel.add(state) for state in each.random],
        "autocast": None if each.autocast is None else str(each.autocast),
        "gradients": [(number, parcel.add(one)) for number, one in each.gradients.items()],
    }


def unpacked(
    header: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[list[Pass], list[torch.Tensor]]:
    """Return the passes and the buffers of a parcel, see :meth:`Recorder.packed`."""
    buffers = [tensors[number] for number in header["buffers"]]
    return [_unpacked(each, tensors) for each in header["passes"]], buffers


def _unpacked(packed: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Pass:
    leaves = [
        tensors[leaf["tensor"]] if isinstance(leaf, dict) else leaf for leaf in packed["leaves"]
    ]
    autocast = packed["autocast"]
    return Pass(
        inputs=leaves,
        structure=pytree.treespec_loads(packed["structure"]),
        random=[tensors[number] for number in packed["random"]],
        autocast=None if autocast is None else getattr(torch, autocast.removeprefix("torch.")),
        gradients={number: tensors[place] for number, place in packed["gradients"]},
    )
