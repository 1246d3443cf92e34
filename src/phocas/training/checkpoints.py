"""Checkpoints: the whole state of a run in one file, which is there entirely or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from phocas.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phocas.training.trainer import Trainer

FORMAT = 1
Tensors = dict[str, torch.Tensor]


def save_checkpoint(
    path: Path,
    trainer: Trainer,
    identity: str = "",
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the state of a trainer; whoever reads the path sees the old file or the new one.

    Everything random is a function of (seed, round, worker), so there is no generator to keep.
    """
    tensors, numbers = _capture(trainer)
    tensors |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    header = {
        "format": FORMAT,
        "identity": identity,
        "round": trainer.rounds_done,
        "optimizer": numbers,
    }
    write_atomically(path, save(tensors, metadata={"phocas": json.dumps(header)}))


def load_checkpoint(path: Path, trainer: Trainer, identity: str = "") -> Tensors:
    """Give a trainer the state of a checkpoint, and return what was saved besides."""
    header, tensors = _read(path)
    if header.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {header.get('format')}, this version reads {FORMAT}"
        )
    if header["identity"] != identity:
        raise ValueError(f"checkpoint {path} belongs to a run with another configuration")
    _restore(trainer, tensors, header["optimizer"])
    trainer.rounds_done = int(header["round"])
    return {
        name.removeprefix("extra."): tensor
        for name, tensor in tensors.items()
        if name.startswith("extra.")
    }


def discard_checkpoint(path: Path) -> None:
    """Remove a checkpoint, and what was left of one by a process that was killed while writing."""
    path.unlink(missing_ok=True)
    for half in path.parent.glob(f"{path.name}.*.tmp"):
        half.unlink(missing_ok=True)


def save_model(path: Path, trainer: Trainer) -> None:
    """Write the model alone, by the names of its state dict, as safetensors."""
    tensors = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    write_atomically(path, save(tensors))


def _capture(trainer: Trainer) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    tensors: Tensors = {"vector": trainer.server.vector}
    for name, buffer in trainer.model.named_buffers():
        tensors[f"buffer.{name}"] = buffer
    for name, tensor in trainer.cluster.state().items():
        tensors[f"cluster.{name}"] = tensor
    for name, array in trainer.suspicion.state().items():
        tensors[f"suspicion.{name}"] = torch.from_numpy(array)
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in trainer.server.optimizer.state_dict()["state"].items():
        numbers[str(index)] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[str(index)][key] = value
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers


def _restore(trainer: Trainer, tensors: Tensors, numbers: dict[str, dict[str, Any]]) -> None:
    if tensors["vector"].shape != trainer.server.vector.shape:
        raise ValueError(
            f"the checkpoint has d={tensors['vector'].numel()} parameters,"
            f" the model {trainer.server.vector.numel()}"
        )
    trainer.server.vector.copy_(tensors["vector"])
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(tensors[f"buffer.{name}"])
    parts: dict[str, Tensors] = {"cluster": {}, "suspicion": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = tensor
    trainer.cluster.load_state(parts["cluster"])
    trainer.suspicion.load_state({key: value.numpy() for key, value in parts["suspicion"].items()})
    state: dict[int, dict[str, Any]] = {int(index): dict(rest) for index, rest in numbers.items()}
    for name, tensor in parts["optimizer"].items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = trainer.server.optimizer.state_dict()["param_groups"]
    trainer.server.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read(path: Path) -> tuple[dict[str, Any], Tensors]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("phocas", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint {path} cannot be read ({error}); delete it to start over"
        ) from None
