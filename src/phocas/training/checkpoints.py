"""Checkpoints: the whole state of a run in one file, which is replaced atomically.

A checkpoint is a safetensors file with a digest in its metadata. The digest is that of the whole
file with zeros in the place of the digest, so that every damage is detected.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load, save

from phocas.files import write_atomically
from phocas.provenance import describe_code

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phocas.training.trainer import Trainer

FORMAT = 5
READABLE = (4, FORMAT)  # 4 is of version 0.2: it has neither ``first_loss`` nor ``lost``
Tensors = dict[str, torch.Tensor]

_NO_DIGEST = "0" * 64
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')


class DamagedCheckpointError(ValueError):
    """A checkpoint whose digest does not match its content."""


def save_checkpoint(
    path: Path,
    trainer: Trainer,
    identity: str = "",
    extra: Mapping[str, torch.Tensor] | None = None,
    *,
    keep: Path | None = None,
) -> None:
    """Write the state of a trainer into a file, atomically.

    Random numbers are functions of (seed, round, worker), so no state of a generator is saved.

    Args:
        path: the file.
        trainer: the trainer.
        identity: the identity of the run, which :func:`load_checkpoint` compares.
        extra: further tensors to save.
        keep: where to move the checkpoint that was there before.
    """
    header, tensors = _capture(trainer)
    tensors |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
    header |= {"format": FORMAT, "identity": identity, "round": trainer.rounds_done}
    header["code"] = trainer.code
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(path, _seal(save(whole, _metadata(header))), keep=keep)


def load_checkpoint(
    path: Path, trainer: Trainer, identity: str = "", *, other_code: bool = False
) -> Tensors:
    """Restore the state of a trainer, and return the further tensors of the checkpoint.

    Args:
        path: the file.
        trainer: the trainer.
        identity: the identity of the run, which must be that of the checkpoint.
        other_code: accept a checkpoint that was saved with other user-defined code.
    """
    header, tensors = _read(path)
    if header["identity"] != identity:
        raise ValueError(f"checkpoint {path} belongs to a run with another configuration")
    if not other_code:
        _check_code(path, header.get("code"), trainer.code)
    try:
        _restore(trainer, tensors, header)
    except KeyError as error:
        raise ValueError(
            f"checkpoint {path} has no {error}: it was saved by a trainer with other settings"
        ) from None
    trainer.rounds_done = int(header["round"])
    return _part(tensors, "extra")


def _check_code(path: Path, saved: Mapping[str, str] | None, code: Mapping[str, str]) -> None:
    """Raise ValueError if a checkpoint was saved with other code; warn if that is unknown."""
    if saved == code or (saved is None and not code):
        return
    now = describe_code(code) or "none of your own"
    if saved is None:
        warnings.warn(
            f"checkpoint {path} does not say with which code it was saved, because an older phocas"
            f" wrote it: make sure that it was the same as now ({now})",
            stacklevel=4,
        )
        return
    raise ValueError(
        f"checkpoint {path} was saved with other code ({describe_code(saved) or 'none of your own'}"
        f"; now {now}): restore that code to continue, or begin at round 0 (phocas train --restart,"
        " or a Trainer that loads nothing); Trainer.load(path, other_code=True) continues anyway"
    )


def read_model(path: Path) -> Tensors:
    """Return the state dict of the model in a checkpoint."""
    header, tensors = _read(path)
    found = {}
    for name, place in header["model"].items():
        if place is None:
            found[name] = tensors[f"model.{name}"]
        else:
            start, shape = place
            size = torch.Size(shape)
            found[name] = tensors["vector"][start : start + size.numel()].view(size)
    return found


def save_model(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the state dict of a model as a safetensors file."""
    write_atomically(path, save({name: value.clone() for name, value in tensors.items()}))


def discard_checkpoint(path: Path) -> None:
    """Remove a checkpoint, and temporary files of processes that were killed while writing."""
    path.unlink(missing_ok=True)
    for half in path.parent.glob(f"{path.name}.*.tmp"):
        half.unlink(missing_ok=True)


def _capture(trainer: Trainer) -> tuple[dict[str, Any], Tensors]:
    vector = trainer.server.vector
    tensors: Tensors = {"vector": vector}
    named = trainer.model.state_dict()
    places = {name: _place(tensor, vector) for name, tensor in named.items()}
    for name, tensor in {**dict(trainer.model.named_buffers()), **named}.items():
        if places.get(name) is None:
            tensors[f"model.{name}"] = (
                tensor.clone()
            )  # safetensors rejects tensors that share memory
    if trainer.server.reference is not None:
        tensors["reference"] = trainer.server.reference
    for name, tensor in trainer.cluster.state().items():
        tensors[f"cluster.{name}"] = tensor
    tensors["attendance"] = torch.from_numpy(trainer.participation.sums)
    for name, array in trainer.detector.state().items():
        tensors[f"suspicion.{name}"] = torch.from_numpy(array)
    tensors |= {
        f"course.{name}": tensor for name, tensor in trainer.recent_direction.state().items()
    }
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in trainer.server.optimizer_state().items():
        numbers[str(index)] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[str(index)][key] = value
    known: dict[str, object] = {"first_loss": trainer.first_loss, "lost": trainer.lost}
    if trainer.exclusions.since:
        known["excluded"] = list(trainer.exclusions.since.items())
    return {"optimizer": numbers, "model": places, **known}, tensors


def _place(tensor: torch.Tensor, vector: torch.Tensor) -> tuple[int, list[int]] | None:
    """Return the start and the shape of a tensor that is a view of the vector of parameters."""
    same = tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    if not same or tensor.dtype != vector.dtype or not tensor.is_contiguous():
        return None
    return int(tensor.storage_offset() - vector.storage_offset()), list(tensor.shape)


def _restore(trainer: Trainer, tensors: Tensors, header: Mapping[str, Any]) -> None:
    if tensors["vector"].shape != trainer.server.vector.shape:
        raise ValueError(
            f"the checkpoint has d={tensors['vector'].numel()} parameters,"
            f" the model {trainer.server.vector.numel()}"
        )
    trainer.server.vector.copy_(tensors["vector"])
    named = {**dict(trainer.model.named_buffers()), **trainer.model.state_dict()}
    for name, tensor in named.items():
        if header["model"].get(name) is None:
            tensor.copy_(tensors[f"model.{name}"])
    if "reference" in tensors:
        trainer.server.reference = tensors["reference"].to(trainer.server.vector.device)
    trainer.cluster.load_state(_part(tensors, "cluster"))
    detection = _part(tensors, "suspicion")
    trainer.detector.load_state({key: value.numpy() for key, value in detection.items()})
    trainer.recent_direction.load_state(_part(tensors, "course"))
    trainer.first_loss, trainer.lost = header.get("first_loss"), header.get("lost")
    trainer.exclusions.since = dict(header.get("excluded", ()))
    trainer.exclusions.round = int(header["round"])
    np.copyto(trainer.participation.sums, tensors["attendance"].numpy())
    state = {int(index): dict(rest) for index, rest in header["optimizer"].items()}
    for name, tensor in _part(tensors, "optimizer").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    trainer.server.load_optimizer_state(state)


def _part(tensors: Tensors, part: str) -> Tensors:
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    return {"phocas": json.dumps(header), "digest": _NO_DIGEST}


def _seal(content: bytes) -> bytes:
    """Write the digest of a file into the place of its zeros."""
    found = _DIGEST.search(content)
    assert found is not None
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[: found.start(1)] + digest + content[found.end(1) :]


def _read(path: Path) -> tuple[dict[str, Any], Tensors]:
    content = path.read_bytes()
    found = _DIGEST.search(content)
    if found is None:
        raise DamagedCheckpointError(
            f"checkpoint {path} has no digest: it is damaged, or was written by phocas 0.1.0"
        )
    digest = hashlib.sha256(content[: found.start(1)])
    digest.update(_NO_DIGEST.encode())
    digest.update(memoryview(content)[found.end(1) :])
    if digest.hexdigest().encode() != found[1]:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: its digest is not that of its content"
        )
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["phocas"])
    if header["format"] not in READABLE:
        known = ", ".join(map(str, READABLE))
        raise ValueError(
            f"checkpoint {path} has format {header['format']}, this version reads {known}"
        )
    return header, load(content)
