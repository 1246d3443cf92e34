"""The same rules by torch operations, for rows that live on an accelerator.

Semantics are those of the kernels; the bits of sums may differ. Columns are worked on in blocks, so
that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.kernels import Window
from phocas.rules.algebra import (
    Decision,
    Distances,
    Floats,
    Function,
    Request,
    by_function,
    needs_double,
)

BLOCK_VALUES = 1 << 24


class DeviceMatrix:
    """The m x d matrix as (m, n) tensors, one for each range of columns."""

    def __init__(self, tensors: list[torch.Tensor], rebuild: Callable[[list[Any]], Any]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.m = len(tensors[0])
        self.d = sum(tensor.shape[1] for tensor in tensors)
        self.rebuild = rebuild

    def measure(self, request: Request) -> Floats:
        """Answer a rule's question about whole rows."""
        wide = not isinstance(request, Distances) or request.wide or request.scale != 1
        k = self.m if request.weights is None else len(request.weights)
        result = np.zeros((k, k) if isinstance(request, Distances) else k)
        for tensor in self.tensors:
            for block in _blocks(tensor):
                rows = _computed(block)
                rows = rows.double() if wide and rows.device.type != "mps" else rows
                rows = _mixed(rows, request.weights) * request.scale
                if isinstance(request, Distances):
                    for i in range(k - 1):
                        sums = (rows[i + 1 :] - rows[i]).square().sum(dim=1)
                        result[i, i + 1 :] += sums.double().cpu().numpy()
                else:
                    result += rows.square().sum(dim=1).double().cpu().numpy()
        result = np.where(np.isnan(result), np.inf, result)
        return result + result.T if isinstance(request, Distances) else result

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None) -> Any:
        """Mix and reduce; count what was dropped of each mixed row."""
        if decision.function is not None:
            return self._by_function(decision.function, decision.mix.weights)
        answers = []
        for tensor in self.tensors:
            parts = [self._reduce(block, decision, counts) for block in _blocks(tensor)]
            answers.append(torch.cat(parts) if parts else tensor.new_empty(0))
        return self.rebuild(answers)

    def _by_function(self, function: Function, weights: Floats | None) -> Any:
        """Give all mixed rows to a function at once, as an array in host memory."""
        rows = torch.cat([_mixed(_computed(tensor), weights) for tensor in self.tensors], dim=1)
        values = torch.from_numpy(by_function(function, rows.numpy(force=True)))
        parts = torch.split(values, [tensor.shape[1] for tensor in self.tensors])
        return self.rebuild([part.to(like) for part, like in zip(parts, self.tensors, strict=True)])

    def _reduce(
        self, block: torch.Tensor, decision: Decision, counts: NDArray[np.int64] | None
    ) -> torch.Tensor:
        weights = decision.mix.weights
        rows = _computed(block)
        if weights is not None and needs_double(weights) and rows.device.type != "mps":
            rows = rows.double()
        rows = _mixed(rows, weights)
        if weights is not None and len(weights) == 1:
            return rows[0].to(block.dtype)
        value, outside = window_mean(rows, decision.window)
        if counts is not None and outside is not None:
            counts += outside.sum(dim=1).cpu().numpy()
        return value.to(block.dtype)


def window_mean(rows: torch.Tensor, window: Window) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mean of each column's window, and which values are outside it."""
    m = len(rows)
    if window.plain:
        return (rows / m).sum(dim=0), None
    rows = torch.where(rows.isnan(), torch.inf, rows)
    wires = rows.sort(dim=0).values
    centre = wires[window.trim : m - window.trim]
    # Around a member, as in the kernels: equal values give that value, and nothing overflows.
    y = centre[0] + ((centre / len(centre)) - (centre[:1] / len(centre))).sum(dim=0)
    if not window.drop:
        return y.clamp(centre[0], centre[-1]), (rows < centre[0]) | (rows > centre[-1])
    b = window.drop
    half_y = y / 2
    distances = wires / 2 - half_y
    # The window has one value of each place modulo m - b, the nearest.
    kept, chosen = distances[: m - b].clone(), wires[: m - b].clone()
    for start in range(m - b, m, m - b):
        others = distances[start : start + m - b]
        n = len(others)
        nearer = kept[:n].abs() <= others.abs()
        kept[:n] = torch.where(nearer, kept[:n], others)
        chosen[:n] = torch.where(nearer, chosen[:n], wires[start : start + n])
    value = (y + 2 * (kept / (m - b)).sum(dim=0)).clamp(chosen.amin(dim=0), chosen.amax(dim=0))
    return value, (rows / 2 - half_y).abs() > kept.abs().amax(dim=0)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, BLOCK_VALUES // max(1, len(tensor)))
    for start in range(0, tensor.shape[1], step):
        yield tensor[:, start : start + step]


def _computed(block: torch.Tensor) -> torch.Tensor:
    return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block


def _mixed(rows: torch.Tensor, weights: Floats | None) -> torch.Tensor:
    """Return ``weights @ rows``, where a row without weight is not touched, NaN or not."""
    if weights is None:
        return rows
    matrix = torch.as_tensor(weights, dtype=rows.dtype, device=rows.device)
    bad = ~rows.isfinite()
    mixed = matrix @ rows.masked_fill(bad, 0)
    if bool(bad.any()):
        touched = (matrix != 0).to(rows.dtype)
        up, down, lost = (
            touched @ kind.to(rows.dtype) > 0
            for kind in (rows == torch.inf, rows == -torch.inf, rows.isnan())
        )
        mixed = mixed.masked_fill(up, torch.inf).masked_fill(down, -torch.inf)
        mixed = mixed.masked_fill(lost | (up & down), torch.nan)
    return mixed
