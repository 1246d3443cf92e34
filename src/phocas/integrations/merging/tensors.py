"""Named tensors, in memory or in a mapped file, and arrays as ``numpy.save`` writes them."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.floats import FORMATS
from phocas.rules.inputs import element_of, on_host

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
LONGEST_HEADER = 1 << 16  # bytes of an array's header; NumPy itself accepts 10,000


class TensorError(ValueError):
    """A tensor, or a file of tensors, that cannot be read or must not be."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor whose values are read when they are needed.

    Attributes:
        name: the key in its file or record.
        element: the type of its values: ``float32``, ``bfloat16``, ``int64``, ``bool``.
        shape: its shape.
        dtype: the NumPy type that stores the values: 16-bit words for bfloat16, bytes for bool.
        open: return the values as they are stored, in one dimension.
    """

    name: str
    element: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    open: Callable[[], NDArray[Any]]

    @property
    def columns(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the stored values in bytes."""
        return self.columns * self.dtype.itemsize

    @property
    def is_integer(self) -> bool:
        """Return True for counters, indices and flags, and False for floating-point values."""
        return self.element in INTEGERS

    def reader(self) -> Callable[[int, int], NDArray[Any]]:
        """Open the values, and return a function that returns a range of them."""
        values = self.open()
        return lambda begin, end: values[begin:end]


def storage(element: str, owner: str) -> np.dtype[Any]:
    """Return the NumPy type that stores an element; raise TensorError if it is not supported."""
    if element == "bool":
        return np.dtype(np.uint8)
    if element in FORMATS:
        return FORMATS[element].word if element == "bfloat16" else np.dtype(element)
    if element in INTEGERS:
        return np.dtype(element)
    known = ", ".join((*FORMATS, *INTEGERS))
    raise TensorError(f"{owner} must be one of {known}: it is {element}")


def in_memory(name: str, value: Any, owner: str) -> Tensor:
    """Return an array, or a torch tensor on the CPU, as a named tensor, without a copy.

    Args:
        name: the name of the tensor.
        value: the array or tensor.
        owner: the name of the tensor in error messages.

    >>> tensor = in_memory("bias", np.ones((2, 3), np.float32), "key 'bias'")
    >>> tensor.element, tensor.shape, tensor.open()
    ('float32', (2, 3), array([1., 1., 1., 1., 1., 1.], dtype=float32))
    """
    element = element_of(value.dtype)
    words = storage(element, owner)
    array = on_host(value, owner)
    kind = words if array.dtype.isnative else array.dtype
    return Tensor(name, element, array.shape, kind, lambda: array.reshape(-1).view(kind))


class ArrayHeader(NamedTuple):
    """The header of an array that ``numpy.save`` wrote."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    length: int
    """Bytes before the first value."""

    @property
    def end(self) -> int:
        """Return the number of bytes of the header and the values together."""
        return self.length + math.prod(self.shape) * self.dtype.itemsize


def read_header(data: Any, start: int = 0) -> ArrayHeader:
    """Read the header of the array that begins at a byte of a buffer; raise ValueError if it fails.

    Args:
        data: bytes, or a mapped file.
        start: the first byte of the array.
    """
    prefix = 10 if data[start + 6 : start + 7] == b"\x01" else 12  # before the header's text
    length = prefix + int.from_bytes(data[start + 8 : start + prefix], "little")
    return _parse_header(bytes(data[start : start + min(length, LONGEST_HEADER)]))


@lru_cache(maxsize=4096)  # all clients send the same headers; parsing costs more than small values
def _parse_header(text: bytes) -> ArrayHeader:
    file = io.BytesIO(text)
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except (SyntaxError, tokenize.TokenError, MemoryError, RecursionError) as error:
        # NumPy evaluates the text as a Python literal, and lets these errors through.
        raise ValueError("the header of the array cannot be parsed") from error
    if dtype.hasobject:
        raise ValueError("objects are never unpickled")
    return ArrayHeader(shape, fortran, dtype, file.tell())


def decode_array(data: Any, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Return the array that ``numpy.save`` wrote into a buffer, without a copy of its values.

    ``np.load`` would copy the values. Nothing is unpickled.

    Args:
        data: bytes, or a mapped file.
        start: the first byte of the array.
        end: the byte after the array; by default the end of the data.

    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(3))
    >>> decode_array(file.getvalue())
    array([0, 1, 2])
    """
    header = read_header(data, start)
    end = len(data) if end is None else end
    if start + header.end != end:
        raise ValueError(f"the array must end at byte {start + header.end}: it ends at byte {end}")
    values = np.frombuffer(data, header.dtype, math.prod(header.shape), start + header.length)
    return values.reshape(header.shape, order="F" if header.fortran else "C")
