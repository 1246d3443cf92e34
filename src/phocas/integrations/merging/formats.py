"""Files of named tensors, read where they are: .safetensors, .npz, .npy and torch's .pt.

What a file is, its content says and not its name. Nothing in it is ever run: arrays of objects are
refused, and torch unpickles with ``weights_only=True``. Values stay in the file and are mapped into
memory; only those that are compressed or not in their usual order are copied, a tensor at a time.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.floats import FORMATS
from phocas.rules.inputs import element_of, on_host

ARRAY = "array"
"""The name of the one tensor of an .npy file."""
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
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
"""Formats by how their files are usually named."""
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
_DAMAGE = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    EOFError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What readers raise for bytes that nobody wrote on purpose."""
_LOCAL_HEADER = 30  # bytes before a zip member's name


class FileError(ValueError):
    """A file that cannot be read, or that must not be."""


@contextmanager
def _reading(owner: str) -> Iterator[None]:
    """Refuse what a reader stumbles over."""
    try:
        yield
    except FileError:
        raise
    except _DAMAGE as error:
        raise FileError(f"{owner} is cut short or damaged: {error}".splitlines()[0]) from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor of a file: ``open`` returns its values as they are stored, in a row."""

    name: str
    element: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """What is stored: 16-bit words for bfloat16, bytes for flags."""
    open: Callable[[], NDArray[Any]]

    @property
    def columns(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Tell counters, indices and flags from floating-point values."""
        return self.element in WHOLE


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file, what it is, its tensors by name in their order, and what is said about them.

    Attributes:
        path: the file.
        format: what it is.
        tensors: its tensors by name, in their order.
        metadata: what is said about them.
    """

    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def open_tensors(path: Path) -> TensorFile:
    """Find out what a file is, and which tensors it has; refuse what cannot be trusted or read.

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
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):  # opening a pipe waits for a writer, for ever if there is none
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise FileError(f"{path} must be a regular file: it is {kind}")
    with path.open("rb") as file:
        head = file.read(9)
        if head[:4] == b"PK\x03\x04":
            return _open_zip(path)
        if head[:6] == b"\x93NUMPY":
            file.seek(0)
            tensor = _described(path, ARRAY, file, file.tell, _size(file), _mapped(file))
            return TensorFile(path, "npy", {ARRAY: tensor}, {})
        if head[8:9] == b"{":
            return _open_safetensors(path, file)
    if head[:1] == b"\x80":
        return _open_torch(path, mapped=False)
    raise FileError(f"{path} must be .safetensors, .npz, .npy or .pt by its content: it is none")


def storage(element: str, owner: str) -> np.dtype[Any]:
    """Return the words that an element is stored as, or refuse it."""
    if element == "bool":
        return np.dtype(np.uint8)
    if element in FORMATS:
        return FORMATS[element].word if element == "bfloat16" else np.dtype(element)
    if element in WHOLE:
        return np.dtype(element)
    known = ", ".join((*FORMATS, *WHOLE))
    raise FileError(f"{owner} must be one of {known}: it is {element}")


def _size(file: BinaryIO) -> int:
    place = file.tell()
    size = file.seek(0, 2)
    file.seek(place)
    return size


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _part(mapping: mmap.mmap, dtype: np.dtype[Any], start: int, columns: int) -> NDArray[Any]:
    if not columns:
        return np.empty(0, dtype)
    return np.frombuffer(mapping, dtype, columns, start)


# -- safetensors -----------------------------------------------------------------------------------


def _open_safetensors(path: Path, file: BinaryIO) -> TensorFile:
    """Read the header of a safetensors file as strictly as its library, and map the rest."""
    size = _size(file)
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_LONGEST_HEADER, size - 8):
        raise FileError(f"{path} is cut short: its header would be {length} bytes of {size}")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", {})
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is no whole .safetensors file: its header is damaged") from error
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(f"{path}: __metadata__ must be texts by name")
    mapping = _mapped(file)
    begin = 8 + length
    place = 0
    tensors = {}
    for name, entry in entries:
        owner = f"{path}, key {name!r}"
        code, shape = entry.get("dtype"), entry.get("shape")
        element = SAFETENSORS.get(code, code) if isinstance(code, str) else str(code)
        kind = storage(element, owner)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise FileError(f"{owner} must have a shape of counts: it has {shape}")
        end = place + math.prod(shape) * kind.itemsize
        if entry["data_offsets"] != [place, end]:
            raise FileError(f"{owner} must lie at {[place, end]}: it says {entry['data_offsets']}")
        if begin + end > size:
            raise FileError(f"{owner} is cut short: it ends at byte {begin + end} of {size}")
        columns = math.prod(shape)
        read = partial(_part, mapping, kind, begin + place, columns)
        tensors[name] = Tensor(name, element, tuple(shape), kind, read)
        place = end
    if begin + place != size:
        raise FileError(f"{path} must end with its last tensor: {size - begin - place} bytes more")
    return TensorFile(path, "safetensors", tensors, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FileError("a name stands twice")
    return found


# -- NumPy -----------------------------------------------------------------------------------------


def _open_zip(path: Path) -> TensorFile:
    """Open NumPy's archive of arrays, or else torch's of a pickle and its storages."""
    with _reading(str(path)):
        archive = zipfile.ZipFile(path)
    members = archive.infolist()
    names = [member.filename for member in members]
    if any(name.endswith("/data.pkl") for name in names):
        archive.close()
        return _open_torch(path, mapped=True)
    if not names or not all(name.endswith(".npy") for name in names):
        raise FileError(f"{path} must be .npz or .pt by its content: it is another zip file")
    tensors = {}
    with path.open("rb") as file:
        mapping = _mapped(file)
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise FileError(f"{path}: the name {name!r} stands twice")
            with _reading(f"{path}, key {name!r}"):
                tensors[name] = _member(path, name, archive, member, mapping)
    return TensorFile(path, "npz", tensors, {})


def _member(
    path: Path, name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, mapping: mmap.mmap
) -> Tensor:
    owner = f"{path}, key {name!r}"
    if member.flag_bits & 1:
        raise FileError(f"{owner} must not be encrypted")
    if member.compress_type == zipfile.ZIP_STORED:
        head = mapping[member.header_offset : member.header_offset + _LOCAL_HEADER]
        if len(head) < _LOCAL_HEADER or head[:4] != b"PK\x03\x04":
            raise FileError(f"{owner} is damaged: it does not begin where it should")
        begin = member.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", head[26:]))
        with archive.open(member) as file:
            return _described(
                path, name, file, lambda: begin + file.tell(), begin + member.file_size, mapping
            )
    with archive.open(member) as file:
        described = _described(path, name, file, file.tell, member.file_size, None)

    def read() -> NDArray[Any]:
        with _reading(owner), archive.open(member) as again:
            values = npy.read_array(again, allow_pickle=False)
        return np.ascontiguousarray(values).reshape(-1).view(described.dtype)

    return Tensor(name, described.element, described.shape, described.dtype, read)


def _described(
    path: Path,
    name: str,
    file: Any,
    where: Callable[[], int],
    size: int,
    mapping: mmap.mmap | None,
) -> Tensor:
    """Read the header of an array, which ends at ``where()``; with a mapping, it ends by size."""
    owner = f"{path}, key {name!r}"
    with _reading(owner):
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    words = storage(dtype.name, owner)
    kind = words if dtype.isnative else dtype
    columns = math.prod(shape)
    start = where()
    if start + columns * kind.itemsize != size and (
        mapping is not None or columns * kind.itemsize > size
    ):
        raise FileError(
            f"{owner} is cut short or damaged: it must end at byte"
            f" {start + columns * kind.itemsize} and does at {size}"
        )

    def values() -> NDArray[Any]:
        if mapping is None:
            raise FileError(f"{owner} cannot be mapped: it is compressed")
        stored = _part(mapping, kind, start, columns)
        return stored.reshape(shape, order="F").reshape(-1) if fortran else stored

    return Tensor(name, dtype.name, shape, kind, values)


# -- torch -----------------------------------------------------------------------------------------


def _open_torch(path: Path, *, mapped: bool) -> TensorFile:
    """Load a state dict, its values still in the file if they can be mapped."""
    import torch  # noqa: PLC0415 - an extra, needed for this format alone

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that others wrote
            options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
            if path.name.endswith(".safetensors"):  # by this name torch takes it for such a file
                with path.open("rb") as file:
                    found = torch.load(file, **options)
            else:
                found = torch.load(path, mmap=mapped, **options)
    except _DAMAGE as error:
        raise FileError(
            f"{path} cannot be read as tensors alone (weights_only=True): it is cut short,"
            " damaged, or holds objects, which are never unpickled"
        ) from error
    if not isinstance(found, Mapping):
        raise FileError(f"{path} must be a mapping of names to tensors: got {type(found).__name__}")
    tensors = {}
    for name, tensor in found.items():
        owner = f"{path}, key {name!r}"
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise FileError(f"{owner} must be a dense tensor: got {type(tensor).__name__}")
        tensors[str(name)] = in_memory(str(name), tensor, owner)
    return TensorFile(path, "pt", tensors, {})


# -- memory ----------------------------------------------------------------------------------------


def in_memory(name: str, value: Any, owner: str) -> Tensor:
    """Return an array, or a tensor of torch's on the CPU, as one of a file: nothing is copied.

    Args:
        name: its name.
        value: the array or tensor.
        owner: what an error calls it.

    >>> tensor = in_memory("bias", np.ones((2, 3), np.float32), "key 'bias'")
    >>> tensor.element, tensor.shape, tensor.open()
    ('float32', (2, 3), array([1., 1., 1., 1., 1., 1.], dtype=float32))
    """
    element = element_of(value.dtype)
    words = storage(element, owner)
    array = on_host(value, owner)
    kind = words if array.dtype.isnative else array.dtype
    return Tensor(name, element, array.shape, kind, lambda: array.reshape(-1).view(kind))
