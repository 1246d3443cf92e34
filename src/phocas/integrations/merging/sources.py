"""The inputs of a merge: a file, a sharded checkpoint with its index, a LoRA adapter, a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phocas.integrations.merging.adapters import CONFIG, Adapter, has_factors
from phocas.integrations.merging.formats import (
    ENDINGS,
    TensorFile,
    check_regular,
    open_tensors,
    reading,
    unique,
)
from phocas.integrations.merging.tensors import Tensor, TensorError

INDEX = ".safetensors.index.json"
"""The ending of the index of a sharded checkpoint."""
ADAPTER = "adapter_model.safetensors"
"""The file in which PEFT keeps an adapter."""


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One input of a merge.

    Attributes:
        path: the file or folder, as it was given.
        files: the opened files of tensors: one, or the shards in the order of their names.
        tensors: the tensors to aggregate, by name.
        index: the index of a sharded checkpoint.
        adapter: the configuration of a LoRA adapter, whose tensors are products of its matrices.
    """

    path: Path
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, Tensor]
    index: Path | None = None
    adapter: Adapter | None = None

    @property
    def paths(self) -> list[Path]:
        """Return the files on which the values depend."""
        beside = [self.index, None if self.adapter is None else self.adapter.path]
        return [*(file.path for file in self.files), *(path for path in beside if path)]

    @property
    def is_folder(self) -> bool:
        """Return True if a merge like this source is a folder with several files."""
        return self.index is not None or self.adapter is not None

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata that all files have in common."""
        return common([file.metadata for file in self.files])

    def release(self) -> None:
        """Take the pages that were read out of this process; reading maps them again."""
        for file in self.files:
            file.release()


def common(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that all mappings have.

    >>> common([{"format": "pt", "step": "1"}, {"format": "pt", "step": "2"}])
    {'format': 'pt'}
    """
    first, *others = found
    return {k: v for k, v in first.items() if all(each.get(k) == v for each in others)}


def open_source(path: Path) -> MergeInput:
    """Open one input of a merge; raise TensorError or OSError if it cannot be read.

    Args:
        path: a file of tensors, the index of a sharded checkpoint, or a folder with one of them.
    """
    inside = _in_folder(path) if path.is_dir() else path
    if inside.name.endswith(INDEX):
        found = _open_shards(path, inside)
    else:
        file = open_tensors(inside)
        found = MergeInput(path, (file,), file.tensors)
    if not has_factors(found.tensors):
        return found
    if inside.name == ADAPTER or (inside.parent / CONFIG).exists():
        adapter = Adapter.read(inside.parent / CONFIG, inside)
    else:
        raise TensorError(
            f"{inside} has LoRA matrices: {CONFIG} must be beside it, with r and lora_alpha"
        )
    return replace(found, adapter=adapter, tensors=adapter.products(found.tensors, inside))


def _in_folder(folder: Path) -> Path:
    """Return the index, the adapter or the only file of tensors in a folder."""
    names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    indices = [path for path in names if path.name.endswith(INDEX)]
    files = [path for path in names if path.suffix.lower() in ENDINGS]
    for found in (indices, [path for path in files if path.name == ADAPTER], files):
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(path.name for path in found[:3])
            raise TensorError(
                f"{folder} must have one file of tensors, or one index (*{INDEX}) of its shards:"
                f" it has {len(found)}, {listed}"
            )
    raise TensorError(f"{folder} must have a file of tensors: it has none")


def _open_shards(path: Path, index: Path) -> MergeInput:
    """Open the shards of a checkpoint, and check them against their index."""
    check_regular(index)
    with reading(str(index)):
        content = json.loads(index.read_bytes(), object_pairs_hook=unique)
    places: Any = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise TensorError(f"{index} must have a weight_map from tensors to shards: it has none")
    files = []
    for name in sorted(set(places.values())):
        shard = index.parent / name
        if Path(name).name != name or shard.suffix != ".safetensors":
            # An index of others must not lead out of its folder, nor name other kinds of files.
            raise TensorError(
                f"{index}: shards must be .safetensors in the folder of the index: got {name!r}"
            )
        if not shard.exists():
            raise TensorError(f"{index} names the shard {name}, which is missing")
        files.append(open_tensors(shard))
        if files[-1].format != "safetensors":
            raise TensorError(f"{shard} must be .safetensors by its content: it is not")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in file.tensors:
            if places.get(tensor) != file.path.name:
                known = f"places it in {places[tensor]}" if tensor in places else "does not list it"
                raise TensorError(f"{file.path} has {tensor!r}, and {index.name} {known}")
        tensors |= file.tensors
    for tensor, name in places.items():
        if tensor not in tensors:
            raise TensorError(f"{index} places {tensor!r} in {name}, which lacks it")
    told = content.get("metadata")
    size = told.get("total_size") if isinstance(told, dict) else None
    actual = sum(tensor.nbytes for tensor in tensors.values())
    if size is not None and size != actual:
        raise TensorError(f"{index} says total_size {size}: the tensors have {actual} bytes")
    return MergeInput(path, tuple(files), tensors, index=index)
