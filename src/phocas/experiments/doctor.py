"""Which kernels a device takes here, and whether they compute what the rules' definitions say.

Made to be run on hardware that nobody has tried: lies of every kind are among the rows, and the
twins of :mod:`phocas.rules.reference`, which share nothing with the kernels, say what must come
out.
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
# A mean survives no lie, and to a row infinitely far away all others are as near.
HONEST_RULES = ("mean", "nnm:b=3|phocas:b=3")
WORKERS, COLUMNS = 11, 300  # a few blocks of columns, the last not whole


@dataclass(frozen=True, slots=True)
class Check:
    """A rule's largest distance from its definition, and how large it may be."""

    rule: str
    dtype: str
    distance: float
    allowed: float
    same_bits: bool
    """As on the processor."""

    @property
    def passed(self) -> bool:
        """Tell whether the result is what the definition says, up to rounding."""
        return self.distance <= self.allowed


def devices() -> list[torch.device]:
    """Return what torch can compute on here: the processor, and accelerators."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        number = torch.accelerator.device_count()
        found += [torch.device(str(kind), index) for index in range(number)]
    return found


def route(device: torch.device) -> str:
    """Say which kernels a device takes, and why."""
    if device.type == "cpu":
        return "machine code by LLVM"
    choice, why = path(device)
    return f"{'kernels in Triton' if choice == 'triton' else 'operations of torch'}: {why}"


def checks(device: torch.device) -> Iterator[Check]:
    """Compare every rule on a device, in every type, with its definition."""
    for dtype in FORMATS:
        rows = hostile_rows(dtype)
        for text in RULES:
            yield _check(text, dtype, rows, device)
        for text in HONEST_RULES:
            yield _check(text, dtype, rows[2:], device)


def hostile_rows(dtype: str) -> torch.Tensor:
    """Return rows of which two lie, with everything that a number can be."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(WORKERS, COLUMNS))).to(getattr(torch, dtype))
    largest = torch.finfo(rows.dtype).max
    lies = [np.nan, np.inf, -np.inf, largest, -largest, torch.finfo(rows.dtype).tiny, -0.0]
    rows[:2] = torch.from_numpy(rng.choice(lies, size=(2, COLUMNS))).to(rows.dtype)
    return rows


def _check(text: str, dtype: str, rows: torch.Tensor, device: torch.device) -> Check:
    rule = parse_rule(text)
    wanted = reference(rule, rows.double().numpy())
    here, there = rule(rows), rule(rows.to(device)).cpu()
    distance = np.abs(there.double().numpy() - wanted).max()
    # One rounding to the stored type; sums, and Weiszfeld's last step, in the computing type.
    allowed = torch.finfo(rows.dtype).eps * 4 + (1e-12 if dtype == "float64" else 1e-5)
    allowed += 1e-6 if "geometric" in text else 0.0
    return Check(text, dtype, float(distance), allowed, _bits(here) == _bits(there))


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().tobytes()
