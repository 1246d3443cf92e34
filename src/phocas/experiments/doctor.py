"""Check which kernels a device uses, and whether they compute what the rules define.

The check is meant for untested hardware. The rows contain hostile values of every kind. The
expected results come from :mod:`phocas.rules.reference`, which shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phocas.floats import FORMATS
from phocas.rules import parse_rule
from phocas.rules.device import path
from phocas.rules.reference import reference

RULES = (
    "median",
    "trimmed-mean:b=3",
    "phocas:b=3",
    "meamed:b=3",
    "heraclius:b=3",
    "krum:b=3",
    "multi-krum:b=3",
    "bulyan:b=2",
    "geometric-median",
    "clipping:radius=8.0|phocas:b=3",
)
# The mean tolerates no Byzantine row, and all rows are equally near to one at infinite distance.
HONEST_RULES = ("mean", "nnm:b=3|phocas:b=3")
WORKERS, COLUMNS = 11, 300  # a few blocks of columns, of which the last is incomplete


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The comparison of a rule's result with its definition.

    Attributes:
        rule: spec of the rule.
        dtype: dtype of the rows.
        distance: largest distance of the result from the definition.
        allowed: largest distance that rounding explains.
        same_bits: whether the result has the same bits as on the CPU.
    """

    rule: str
    dtype: str
    distance: float
    allowed: float
    same_bits: bool

    @property
    def passed(self) -> bool:
        """Return whether the result equals the definition up to rounding."""
        return self.distance <= self.allowed


def devices() -> list[torch.device]:
    """Return the devices that torch can compute on: the CPU and accelerators."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        number = torch.accelerator.device_count()
        found += [torch.device(str(kind), index) for index in range(number)]
    return found


def route(device: torch.device) -> str:
    """Return which kernels a device uses, and why."""
    if device.type == "cpu":
        return "machine code by LLVM"
    choice, why = path(device)
    return f"{'kernels in Triton' if choice == 'triton' else 'operations of torch'}: {why}"


def checks(device: torch.device) -> Iterator[KernelCheck]:
    """Yield a comparison of every rule on a device, in every dtype, with its definition."""
    for dtype in FORMATS:
        rows = hostile_rows(dtype)
        for text in RULES:
            yield _check(text, dtype, rows, device)
        for text in HONEST_RULES:
            yield _check(text, dtype, rows[2:], device)


def hostile_rows(dtype: str) -> torch.Tensor:
    """Return rows of which two consist of NaN, infinities, extremes and signed zeros."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(WORKERS, COLUMNS))).to(getattr(torch, dtype))
    largest = torch.finfo(rows.dtype).max
    hostile = [np.nan, np.inf, -np.inf, largest, -largest, torch.finfo(rows.dtype).tiny, -0.0]
    rows[:2] = torch.from_numpy(rng.choice(hostile, size=(2, COLUMNS))).to(rows.dtype)
    return rows


def _check(text: str, dtype: str, rows: torch.Tensor, device: torch.device) -> KernelCheck:
    rule = parse_rule(text)
    wanted = reference(rule, rows.double().numpy())
    here, there = rule(rows), rule(rows.to(device)).cpu()
    distance = np.abs(there.double().numpy() - wanted).max()
    # One rounding to the stored dtype; sums, and Weiszfeld's last step, in the computing dtype.
    allowed = torch.finfo(rows.dtype).eps * 4 + (1e-12 if dtype == "float64" else 1e-5)
    allowed += 1e-6 if "geometric" in text else 0.0
    return KernelCheck(text, dtype, float(distance), allowed, _bits(here) == _bits(there))


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().tobytes()
