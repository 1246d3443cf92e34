"""Conversions between tensors and the NumPy arrays that travel between processes.

NumPy has no bfloat16. Such values travel as arrays of unsigned 16-bit words, which have no other
meaning here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phocas.floats import from_bfloat16, to_bfloat16

Values = npt.NDArray[Any]

_WORDS = np.dtype(np.uint16)


def array_of(tensor: torch.Tensor) -> Values:
    """Return an array that shares the memory of a tensor.

    >>> array_of(torch.ones(2, dtype=torch.bfloat16))
    array([16256, 16256], dtype=uint16)
    """
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy()


def tensor_of(array: Values) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, which must be writable."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == _WORDS else tensor


def readable(rows: list[Values] | Values) -> Any:
    """Return rows as rules and attacks accept them: bfloat16 words become one tensor."""
    if rows[0].dtype != _WORDS:
        return rows
    return tensor_of(np.stack(rows) if isinstance(rows, list) else rows)


def sent(answer: Any) -> Values:
    """Return the result of a rule as an array to send."""
    return array_of(answer) if isinstance(answer, torch.Tensor) else np.asarray(answer)


def numbers(array: Values) -> npt.NDArray[np.floating]:
    """Return the values as floating-point numbers."""
    return from_bfloat16(array) if array.dtype == _WORDS else array


def stored(values: npt.NDArray[np.floating], like: Values) -> Values:
    """Return computed values as an array to send, in the type of another array."""
    return to_bfloat16(values) if like.dtype == _WORDS else values.astype(like.dtype, copy=False)


def absent(like: Values) -> Values:
    """Return a row of NaN."""
    return stored(np.full(like.shape, np.nan, np.float32), like)


def holds(array: Values, content: memoryview) -> bool:
    """Return whether bytes are in the memory of an array; no bytes always are.

    >>> array = np.zeros(4)
    >>> holds(array, array[1:3].data), holds(array, np.zeros(2).data)
    (True, False)
    """
    return not content or np.may_share_memory(array, np.asarray(content))


def kind(array: Values) -> str:
    """Return the name of the type of the values."""
    return "bfloat16" if array.dtype == _WORDS else str(array.dtype)
