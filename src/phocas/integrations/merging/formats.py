"""Files of named tensors: .safetensors, .npz, .npy and .pt of torch, recognized by their content.

Nothing in a file is ever executed: arrays of objects are rejected, and torch unpickles with
``weights_only=True``. Files are mapped into memory, so that files larger than the memory can be
merged. The safetensors library and ``np.load`` would copy whole tensors: here they (and
``numpy.lib.format``) check the headers, and the values are views of the mapped file.
"""

from __future__ import annotations

import json
import mmap
import stat
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phocas.integrations.merging.tensors import (
    LONGEST_HEADER,
    Tensor,
    TensorError,
    decode_array,
    in_memory,
    read_header,
    storage,
)

ARRAY = "array"
"""The name of the one tensor of an .npy file."""
SAFETENSORS = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
ENDINGS = {
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".npy": "npy",
    ".pt": "pt",
    ".pth": "pt",
}
"""Formats by the usual endings of their files."""
_LOCAL_HEADER = 30  # bytes before the name of a zip member


@contextmanager
def reading(owner: str) -> Iterator[None]:
    """Raise TensorError, in one line, for whatever a reader raises for damaged bytes."""
    try:
        yield
    except TensorError:
        raise
    except Exception as error:
        text = f"{owner} cannot be read: it is cut short, damaged, or holds objects ({error})"
        raise TensorError(" ".join(text.split())) from error


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors.

    Attributes:
        path: the file.
        format: ``safetensors``, ``npz``, ``npy`` or ``pt``.
        tensors: the tensors by name, in the order of the file.
        metadata: the texts that a .safetensors file has besides its tensors.
        mapping: the mapped file, unless torch mapped it.
    """

    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    mapping: mmap.mmap | None = None

    def release(self) -> None:
        """Take the pages that were read out of this process; reading maps them again.

        Pages of a mapped file count as memory of the process until then.
        """
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


def open_tensors(path: Path) -> TensorFile:
    """Open a file of tensors; raise TensorError if it cannot be read or must not be.

    Args:
        path: the file.

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.save(Path(folder.name, "rows.npy"), np.ones((2, 3)))
    >>> found = open_tensors(Path(folder.name, "rows.npy"))
    >>> found.format, [tensor.shape for tensor in found.tensors.values()]
    ('npy', [(2, 3)])
    >>> folder.cleanup()
    """
    check_regular(path)
    with path.open("rb") as file:
        head = file.read(9)
    if head[:4] == b"PK\x03\x04":
        return _open_zip(path)
    if head[:6] == b"\x93NUMPY":
        owner = f"{path}, key {ARRAY!r}"
        with reading(owner):
            mapping = _map(path)
            tensor = in_memory(ARRAY, decode_array(mapping), owner)
        return TensorFile(path, "npy", {ARRAY: tensor}, {}, mapping)
    if head[8:9] == b"{":
        return _open_safetensors(path)
    if head[:1] == b"\x80":
        return _open_torch(path, mapped=False)
    raise TensorError(f"{path} must be .safetensors, .npz, .npy or .pt by its content: it is none")


def check_regular(path: Path) -> None:
    """Raise TensorError unless a path is a regular file; OSError if it does not exist."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):  # opening a pipe blocks until there is a writer
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise TensorError(f"{path} must be a regular file: it is {kind}")


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# -- safetensors -----------------------------------------------------------------------------------


def _open_safetensors(path: Path) -> TensorFile:
    """Let the library check the header against the file, and map the values.

    The library copies the values that it returns, has no bfloat16 for NumPy, and takes the last of
    two tensors of one name. So the header is read a second time, for the offsets and the names.
    """
    from safetensors import safe_open  # noqa: PLC0415 - for this format alone

    with reading(str(path)):
        with safe_open(path, framework="numpy") as checked:
            metadata = checked.metadata() or {}
        mapping = _map(path)
        begin = 8 + int.from_bytes(mapping[:8], "little")
        header = json.loads(mapping[8:begin], object_pairs_hook=unique)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            element = SAFETENSORS.get(entry["dtype"], entry["dtype"])
            dtype = storage(element, f"{path}, key {name!r}")
            values = np.ndarray(entry["shape"], dtype, mapping, begin + entry["data_offsets"][0])
            tensors[name] = Tensor(name, element, values.shape, dtype, partial(values.reshape, -1))
    return TensorFile(path, "safetensors", tensors, metadata, mapping)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object; raise ValueError if two of them have the same name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("two of its tensors have the same name")
    return found


# -- NumPy -----------------------------------------------------------------------------------------


def _open_zip(path: Path) -> TensorFile:
    """Open an archive of arrays of NumPy, or else one of torch."""
    with reading(str(path)):
        archive = zipfile.ZipFile(path)
    members = archive.infolist()
    names = [member.filename for member in members]
    if any(name.endswith("/data.pkl") for name in names):
        archive.close()
        return _open_torch(path, mapped=True)
    if not names or not all(name.endswith(".npy") for name in names):
        raise TensorError(f"{path} must be .npz or .pt by its content: it is another zip file")
    mapping = _map(path)
    tensors = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        owner = f"{path}, key {name!r}"
        if name in tensors:
            raise TensorError(f"{path}: two of its arrays have the name {name!r}")
        with reading(owner):
            if member.compress_type == zipfile.ZIP_STORED:
                begin = _data_offset(member, mapping)
                array = decode_array(mapping, begin, begin + member.file_size)
                tensors[name] = in_memory(name, array, owner)
            else:
                tensors[name] = _compressed(name, archive, member, owner)
    return TensorFile(path, "npz", tensors, {}, mapping)


def _data_offset(member: zipfile.ZipInfo, mapping: mmap.mmap) -> int:
    """Return where the data of a member begin, which zipfile does not expose."""
    head = mapping[member.header_offset : member.header_offset + _LOCAL_HEADER]
    if len(head) < _LOCAL_HEADER or head[:4] != b"PK\x03\x04" or member.flag_bits & 1:
        raise ValueError("it is encrypted, or does not begin where it should")
    lengths: tuple[int, int] = struct.unpack("<HH", head[26:])  # of the name and of further fields
    return member.header_offset + _LOCAL_HEADER + sum(lengths)


def _compressed(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, owner: str) -> Tensor:
    """Return a compressed array, which is decompressed each time that its values are read."""
    with archive.open(member) as file:
        header = read_header(file.read(LONGEST_HEADER))
    if header.end != member.file_size:
        raise ValueError(f"it must have {header.end} bytes: it has {member.file_size}")

    def read() -> NDArray[Any]:
        with reading(owner):
            return in_memory(name, decode_array(archive.read(member)), owner).open()

    example = in_memory(name, np.empty(0, header.dtype), owner)
    return replace(example, shape=header.shape, open=read)


# -- torch -----------------------------------------------------------------------------------------


def _open_torch(path: Path, *, mapped: bool) -> TensorFile:
    """Load a state dict; with ``mapped``, its values stay in the file."""
    import torch  # noqa: PLC0415 - an extra, needed for this format alone

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that others wrote
            options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
            if path.name.endswith(".safetensors"):  # torch would choose the reader by this name
                with path.open("rb") as file:
                    found = torch.load(file, **options)
            else:
                found = torch.load(path, mmap=mapped, **options)
    except Exception as error:
        raise TensorError(
            f"{path} cannot be read as tensors alone (weights_only=True): it is cut short,"
            " damaged, or holds objects, which are never unpickled"
        ) from error
    if not isinstance(found, Mapping):
        raise TensorError(
            f"{path} must be a mapping of names to tensors: got {type(found).__name__}"
        )
    tensors = {}
    for name, tensor in found.items():
        owner = f"{path}, key {name!r}"
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise TensorError(f"{owner} must be a dense tensor: got {type(tensor).__name__}")
        tensors[str(name)] = in_memory(str(name), tensor, owner)
    return TensorFile(path, "pt", tensors, {})
