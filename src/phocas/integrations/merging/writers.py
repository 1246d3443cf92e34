"""Write files of tensors part by part, in the format, order and types of an example.

The libraries of the formats write only what is in memory as a whole.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.files import written_atomically
from phocas.integrations.merging.adapters import CONFIG, AdapterOutput
from phocas.integrations.merging.formats import SAFETENSORS, TensorFile
from phocas.integrations.merging.sources import ADAPTER, MergeInput, common
from phocas.integrations.merging.tensors import Tensor

Parts: TypeAlias = Callable[[Tensor], Iterable[NDArray[Any]]]
"""Return the values of a tensor, part by part."""


def write_like(
    sources: Sequence[MergeInput],
    output: Path,
    split: AdapterOutput | None,
    taken: Parts,
    written: ExitStack,
) -> list[Path]:
    """Write the files of a merge like its first source, and return their paths.

    The files appear when ``written`` is closed, and not at all if it is closed by an error.
    What is entered first appears last: the index and the configuration.
    """
    first = sources[0]
    metadata = common([source.metadata for source in sources])
    text: dict[str, Any] = {}
    if split is not None:
        parts: Parts = partial(split.parts, taken)
        text = {CONFIG: split.config}
        examples = {output / ADAPTER: split.example}
    elif first.index is not None:
        parts = taken
        size = sum(tensor.nbytes for tensor in first.tensors.values())
        places = {name: file.path.name for file in first.files for name in file.tensors}
        text = {first.index.name: {"metadata": {"total_size": size}, "weight_map": places}}
        examples = {output / file.path.name: file for file in first.files}
    else:
        parts = taken
        examples = {output: first.files[0]}
    if first.is_folder and not output.exists():
        written.push(partial(_removed_after_error, output))
    for name, content in text.items():
        place = written.enter_context(written_atomically(output / name))
        place.write((json.dumps(content, indent=2) + "\n").encode())
    for path, example in examples.items():
        place = written.enter_context(written_atomically(path))
        write(place, example, metadata, parts, path.parent)
    return [*examples, *(output / name for name in text)]


def _removed_after_error(folder: Path, kind: object, *_: object) -> None:
    """Remove a folder that stayed empty because of an error."""
    if kind is not None:
        with suppress(OSError):
            folder.rmdir()


def write(
    file: BinaryIO,
    example: TensorFile,
    metadata: Mapping[str, str],
    parts: Parts,
    folder: Path,
) -> None:
    """Write the tensors of an example, with the values that ``parts`` returns for each.

    A temporary file for the format of torch goes into the folder.
    """
    tensors = list(example.tensors.values())
    if example.format == "safetensors":
        _write_safetensors(file, tensors, metadata, parts)
    elif example.format == "npy":
        file.write(_npy_header(tensors[0]))
        _write_parts(file, tensors[0], parts)
    elif example.format == "npz":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for tensor in tensors:
                member = zipfile.ZipInfo(f"{tensor.name}.npy")  # dated 1980: the same bytes always
                with archive.open(member, "w", force_zip64=True) as place:
                    place.write(_npy_header(tensor))
                    _write_parts(place, tensor, parts)
    else:
        _write_torch(file, example, parts, folder)


def _write_parts(file: Any, tensor: Tensor, parts: Parts) -> None:
    for part in parts(tensor):
        file.write(part.astype(tensor.dtype, copy=False).data)


def _write_safetensors(
    file: BinaryIO, tensors: list[Tensor], metadata: Mapping[str, str], parts: Parts
) -> None:
    codes = {element: code for code, element in SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for tensor in tensors:
        if tensor.name in header:
            raise ValueError(f"no tensor of .safetensors may be called {tensor.name!r}")
        end = place + tensor.nbytes
        code = codes[tensor.element]
        header[tensor.name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        _write_parts(file, tensor, parts)


def _npy_header(tensor: Tensor) -> bytes:
    dtype = np.dtype(bool) if tensor.element == "bool" else tensor.dtype
    described = {
        "descr": npy.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tensor.shape,
    }
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def _write_torch(file: BinaryIO, example: TensorFile, parts: Parts, folder: Path) -> None:
    """Collect the values in a temporary file, map it, and let torch save it."""
    import torch  # noqa: PLC0415 - an extra, needed for this format alone

    found = {}
    with tempfile.TemporaryFile(dir=folder) as scratch:
        place = 0
        places = {}
        for tensor in example.tensors.values():
            place += -place % 64
            scratch.seek(place)
            places[tensor.name] = place
            _write_parts(scratch, tensor, parts)
            place += tensor.nbytes
        scratch.truncate(place)
        scratch.flush()
        mapping = np.memmap(scratch, np.uint8, "r+") if place else np.empty(0, np.uint8)
        for tensor in example.tensors.values():
            begin = places[tensor.name]
            # Each has its own storage: torch saves a view together with all that it is a view of.
            storage = (
                torch.frombuffer(mapping[begin : begin + tensor.nbytes], dtype=torch.uint8)
                if tensor.nbytes
                else torch.empty(0, dtype=torch.uint8)
            )
            kind = getattr(torch, tensor.element)
            found[tensor.name] = storage.view(kind).reshape(tensor.shape)
        torch.save(found, file)
