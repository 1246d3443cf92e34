"""Decode the replies of Flower's clients, and reject those that do not fit the model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from phocas.integrations.client_replies import check_like, claimed, middle
from phocas.integrations.merging.tensors import Tensor, decode_array, in_memory


def tensors_of(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays of a record by name, as views of the received bytes."""
    return {str(name): _decode(str(name), array) for name, array in arrays.items()}


def _decode(name: str, array: Array) -> Tensor:
    """Decode one array; Flower's own ``Array.numpy`` would copy its values."""
    owner = f"key {name!r}"
    if array.stype != "numpy.ndarray":
        raise ValueError(f"{owner} must be serialised as numpy.ndarray: it is {array.stype}")
    try:
        values = decode_array(array.data)
    except ValueError as error:
        raise ValueError(f"{owner} is cut short or damaged: {error}") from None
    return in_memory(name, values, owner)


def serialised(tensor: Tensor, parts: Sequence[NDArray[Any]]) -> Array:
    """Return the new values of a tensor as Flower sends arrays."""
    dtype = np.dtype(bool) if tensor.element == "bool" else tensor.dtype.newbyteorder("=")
    buffer = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
    npy.write_array_header_1_0(buffer, described)
    for part in parts:
        buffer.write(np.ascontiguousarray(part).data)
    return Array(str(dtype), tensor.shape, "numpy.ndarray", buffer.getvalue())


def open_reply(message: Message, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a reply; raise ValueError if they cannot be aggregated."""
    if message.has_error():
        raise ValueError(f"it failed: {message.error.reason}")
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"it must send one ArrayRecord: got {len(records)}")
    found = tensors_of(records[0])
    check_like(found, model)
    return found


def claim(content: RecordDict, key: str) -> float:
    """Return a number that a client claims; raise ValueError if it is none."""
    values = [record[key] for record in content.metric_records.values() if key in record]
    if len(values) != 1:
        raise ValueError(f"it must send one number {key!r}: got {values}")
    return claimed(values[0], key)


def middle_metrics(contents: Sequence[RecordDict], weighted_by_key: str) -> dict[str, float]:
    """Return the median over the clients of every metric except the number of examples."""
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
