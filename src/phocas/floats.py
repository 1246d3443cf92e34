"""The floating-point formats of gradients, and their names in NumPy and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format: one sign bit, then the exponent, then the mantissa.

    Attributes:
        name: name of the dtype.
        bits: total number of bits.
        mantissa: number of stored bits of the mantissa.
    """

    name: str
    bits: int
    mantissa: int

    @property
    def word(self) -> np.dtype[Any]:
        """Return the dtype of unsigned integers of the same size."""
        return np.dtype(f"uint{self.bits}")

    @property
    def work(self) -> np.dtype[Any]:
        """Return the dtype to compute in: float64 for float64, float32 for the others."""
        return np.dtype(np.float64 if self.bits == 64 else np.float32)

    @property
    def large(self) -> float:
        """Return a number whose square is also finite in this format."""
        exponent_bits = self.bits - 1 - self.mantissa
        return float(2.0 ** (2 ** (exponent_bits - 2) - 1))

    def paper_bits(self) -> tuple[int, ...]:
        """Return the bits that correspond to 22, 30, 31 and 32 in a float32.

        They are the mantissa's second bit, the exponent's first two, and the sign.

        >>> FORMATS["float64"].paper_bits()
        (51, 62, 63, 64)
        """
        return (self.mantissa - 1, self.bits - 2, self.bits - 1, self.bits)


FORMATS = {
    each.name: each
    for each in (
        Format("float16", 16, 10),
        Format("bfloat16", 16, 7),
        Format("float32", 32, 23),
        Format("float64", 64, 52),
    )
}


def format_name(dtype: Any) -> str:
    """Return the name of a dtype, given as a NumPy dtype, a torch dtype or a name.

    Dtypes of non-native byte order have a different name.
    """
    text = str(dtype)
    if text.startswith("torch.") or text == "bfloat16":  # NumPy has no bfloat16 of its own
        return text.removeprefix("torch.")
    exact = np.dtype(dtype)
    return str(exact.name if exact.isnative else exact.str)


def format_of(dtype: Any, owner: str) -> Format:
    """Return the format of a dtype; raise TypeError in the name of ``owner`` if unsupported."""
    name = format_name(dtype)
    if name not in FORMATS:
        raise TypeError(f"{owner} needs one of the dtypes {', '.join(FORMATS)}: got {name}")
    return FORMATS[name]


def from_bfloat16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 words."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return bfloat16 words, rounded to nearest, ties to even, as torch does; NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)
