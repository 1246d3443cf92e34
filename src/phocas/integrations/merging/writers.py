"""Files of tensors written as their values come: in the format, order and types of an example."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.integrations.merging.formats import SAFETENSORS, Tensor, TensorFile

Parts: TypeAlias = Callable[[Tensor], Iterable[NDArray[Any]]]
"""Makes the values of a tensor, one part after the other."""


def write(
    file: BinaryIO,
    example: TensorFile,
    metadata: Mapping[str, str],
    parts: Parts,
    folder: Path,
) -> None:
    """Write the tensors of an example, with the values that ``parts`` makes for each.

    What must be kept until all is known is kept in the folder.
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
        end = place + tensor.columns * tensor.dtype.itemsize
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
    """Collect the values in a mapped file, so that memory need not hold them, and save that."""
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
            place += tensor.columns * tensor.dtype.itemsize
        scratch.truncate(place)
        scratch.flush()
        mapping = np.memmap(scratch, np.uint8, "r+") if place else np.empty(0, np.uint8)
        for tensor in example.tensors.values():
            begin = places[tensor.name]
            size = tensor.columns * tensor.dtype.itemsize
            # A storage of its own for each: a view would be saved with all that it is a view of.
            storage = (
                torch.frombuffer(mapping[begin : begin + size], dtype=torch.uint8)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
            kind = getattr(torch, tensor.element)
            found[tensor.name] = storage.view(kind).reshape(tensor.shape)
        torch.save(found, file)
