"""What clients send, and whether it can stand beside what the others send."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.integrations.clients import check_like, claimed, middle
from phocas.integrations.merging.formats import Tensor, TensorFile, storage

_HEADER = 10  # bytes before the text of an array's header


def tensors_of(arrays: ArrayRecord, owner: str) -> TensorFile:
    """Return the arrays of a record as they are in the message: nothing is copied."""
    found = {str(name): _tensor(str(name), array) for name, array in arrays.items()}
    return TensorFile(Path(owner), "npz", found, {})


def _tensor(name: str, array: Array) -> Tensor:
    if array.stype != "numpy.ndarray":
        raise ValueError(f"key {name!r} must be serialised as numpy.ndarray: it is {array.stype}")
    data = array.data
    try:
        layout = _layout(bytes(data[: _header_size(data)]))
    except ValueError as error:
        raise ValueError(f"key {name!r}: {error}") from None
    if len(data) != layout.end:
        raise ValueError(f"key {name!r} is cut short: it has {len(data)} bytes")
    return Tensor(name, layout.element, layout.shape, layout.kind, partial(layout.values, data))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the header of a serialised array says."""

    element: str
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    start: int
    end: int
    fortran: bool

    def values(self, data: bytes) -> NDArray[Any]:
        """Return the values where they are, in a row."""
        stored = np.frombuffer(data, self.kind, offset=self.start)
        return stored.reshape(self.shape, order="F").reshape(-1) if self.fortran else stored


def _header_size(data: bytes) -> int:
    return _HEADER + int.from_bytes(data[8:10], "little")


@lru_cache(maxsize=4096)  # the same for all clients, and reading it takes longer than the values
def _layout(header: bytes) -> _Layout:
    """Read the header of a serialised array."""
    file = io.BytesIO(header)
    if npy.read_magic(file) != (1, 0):
        raise ValueError("it must be serialised as numpy.save does")
    shape, fortran, dtype = npy.read_array_header_1_0(file)
    element, start = dtype.name, file.tell()
    kind = storage(element, "its values") if dtype.isnative else dtype
    end = start + math.prod(shape) * kind.itemsize
    return _Layout(element, shape, kind, start, end, fortran and len(shape) > 1)


def serialised(tensor: Tensor, parts: Sequence[NDArray[Any]]) -> Array:
    """Return a tensor's new values as Flower sends arrays."""
    dtype = np.dtype(bool) if tensor.element == "bool" else tensor.dtype.newbyteorder("=")
    buffer = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
    npy.write_array_header_1_0(buffer, described)
    for part in parts:
        buffer.write(np.ascontiguousarray(part).data)
    return Array(str(dtype), tensor.shape, "numpy.ndarray", buffer.getvalue())


def open_reply(message: Message, example: TensorFile) -> TensorFile:
    """Return the tensors of a reply; raise ValueError with the reason why it cannot be used."""
    if message.has_error():
        raise ValueError(f"it failed: {message.error.reason}")
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"it must send one ArrayRecord: got {len(records)}")
    found = tensors_of(records[0], f"node-{message.metadata.src_node_id}")
    check_like(found.tensors, example.tensors)
    return found


def examples(content: RecordDict, key: str) -> float:
    """Return how many examples a client says that it has; raise ValueError if that is no number."""
    values = [record[key] for record in content.metric_records.values() if key in record]
    if len(values) != 1:
        raise ValueError(f"it must send one number {key!r}: got {values}")
    return claimed(values[0], key)


def middle_metrics(contents: Sequence[RecordDict], weighted_by_key: str) -> dict[str, float]:
    """Return the median of every number that clients send but how many examples they have."""
    return middle(
        [
            {
                key: value
                for record in content.metric_records.values()
                for key, value in record.items()
                if key != weighted_by_key
            }
            for content in contents
        ]
    )
