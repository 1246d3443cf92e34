"""Rows that live on an accelerator: by kernels in Triton where they can be had, or by torch.

``PHOCAS_DEVICE_KERNELS`` chooses. Unset, tensors on cuda (which is what torch calls AMD's devices,
too) take Triton's kernels, and torch's operations if those cannot be had, which is said once.
``triton`` insists on the kernels: what they cannot do is an error. ``torch`` never tries them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels.triton import KernelError, calls
from phocas.kernels.triton.calls import Rows
from phocas.kernels.triton.loader import obstacle
from phocas.rules.accelerator import BLOCK_VALUES, DeviceMatrix
from phocas.rules.algebra import (
    Decision,
    Distances,
    Floats,
    Matrix,
    Plausible,
    Request,
    needs_double,
)

VARIABLE = "PHOCAS_DEVICE_KERNELS"
CHOICES = ("triton", "torch")
UNCLEANED = "Triton's kernels know nothing of cleaned rows"

Answer = TypeVar("Answer")
Piece: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A range of columns of all m rows: one (m, n) tensor, or m of n values."""
_said: set[str] = set()


def open_device(pieces: list[Piece], rebuild: Callable[[list[Any]], Any]) -> Matrix:
    """Return the matrix of rows on a device, by the kernels that were chosen."""
    cleaned: list[Piece] = [
        _plain(piece) if isinstance(piece, torch.Tensor) else [_plain(row) for row in piece]
        for piece in pieces
    ]
    choice, _ = path(cleaned[0][0].device)
    return KernelMatrix(cleaned, rebuild) if choice == "triton" else _by_torch(cleaned, rebuild)


def path(device: torch.device) -> tuple[str, str]:
    """Return which kernels tensors of a device take, and why."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        if chosen not in CHOICES:
            raise ValueError(f"{VARIABLE} must be {' or '.join(CHOICES)}: got {chosen!r}")
        return chosen, f"{VARIABLE} says so"
    if device.type != "cuda":
        return "torch", f"Triton's kernels are for cuda: this is {device}"
    reason = obstacle()
    return ("torch", reason) if reason else ("triton", "it is here, and the device is its own")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg()


def _by_torch(pieces: list[Piece], rebuild: Callable[[list[Any]], Any]) -> DeviceMatrix:
    stacked = [piece if isinstance(piece, torch.Tensor) else _dense(piece) for piece in pieces]
    return DeviceMatrix(stacked, rebuild)


@dataclass(frozen=True, slots=True, eq=False)
class KernelMatrix:
    """The m x d matrix on a device, measured and reduced by kernels in Triton."""

    pieces: list[Piece]
    rebuild: Callable[[list[Any]], Any]

    @property
    def m(self) -> int:
        """Return the number of rows."""
        return len(self.pieces[0])

    @property
    def d(self) -> int:
        """Return the number of columns."""
        return sum(map(_columns, self.pieces))

    def measure(self, request: Request | Plausible) -> Floats:
        """Answer a rule's question about whole rows."""
        return self._or_by_torch(
            lambda: _measured(self.pieces, self.m, request), lambda other: other.measure(request)
        )

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None) -> Any:
        """Mix and reduce; count what was dropped of each mixed row."""

        def work() -> Any:
            _check(decision)
            lost = None if counts is None else np.zeros_like(counts)
            answers = [_reduced(piece, decision, lost) for piece in self.pieces]
            if counts is not None and lost is not None:
                counts[:] += lost
            return self.rebuild(answers)

        return self._or_by_torch(work, lambda other: other.apply(decision, counts))

    def _or_by_torch(
        self, work: Callable[[], Answer], otherwise: Callable[[DeviceMatrix], Answer]
    ) -> Answer:
        try:
            return work()
        except KernelError as error:
            if os.environ.get(VARIABLE) == "triton":
                raise
            reason = str(error)
        if reason not in _said:
            _said.add(reason)
            message = f"{reason}; torch's operations are used, which sort and take much longer"
            warnings.warn(message, RuntimeWarning, stacklevel=5)
        return otherwise(_by_torch(self.pieces, self.rebuild))


def _columns(piece: Piece) -> int:
    return int(piece.shape[1]) if isinstance(piece, torch.Tensor) else piece[0].numel()


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    if isinstance(piece, torch.Tensor):
        return piece[:, start:stop]
    return [row[start:stop] for row in piece]


def _dense(piece: Piece) -> torch.Tensor:
    return piece.contiguous() if isinstance(piece, torch.Tensor) else torch.stack(list(piece))


def _blocks(piece: Piece) -> Iterator[Piece]:
    """Yield the columns as rows whose values are adjacent: in place, or copied block by block."""
    columns = _columns(piece)
    rows = piece[:1] if isinstance(piece, torch.Tensor) else piece
    if columns > 1 and any(row.stride(0) != 1 for row in rows):
        step = max(1, BLOCK_VALUES // len(piece))
        for start in range(0, columns, step):
            yield _dense(_cut(piece, start, start + step))
    elif columns:
        yield piece


def _granules(pieces: list[Piece], granule: int) -> Iterator[Piece]:
    """Yield the columns in whole granules, counted from the first column of all.

    Those that lie in several pieces are put together. The last one may be shorter.
    """
    parts: list[torch.Tensor] = []
    width = 0
    for block in (block for piece in pieces for block in _blocks(piece)):
        columns = _columns(block)
        start = 0
        while start < columns:
            if not parts and columns - start >= granule:
                stop = columns - (columns - start) % granule
                yield _cut(block, start, stop)
            else:
                stop = min(columns, start + granule - width)
                parts.append(_dense(_cut(block, start, stop)))
                width += stop - start
                if width == granule:
                    yield torch.cat(parts, dim=1)
                    parts, width = [], 0
            start = stop
    if parts:
        yield torch.cat(parts, dim=1)


def _measured(pieces: list[Piece], m: int, request: Request | Plausible) -> Floats:
    if isinstance(request, Plausible) or request.clean is not None:
        raise KernelError(UNCLEANED)
    pairs = isinstance(request, Distances)
    wide = not isinstance(request, Distances) or request.wide or request.scale != 1
    weights = np.eye(m) if request.weights is None and request.scale != 1 else request.weights
    k = m if weights is None else len(weights)
    granule = kernels.granule_columns(k)
    sums = calls.Sums(k, granule, pairs=pairs, device=pieces[0][0].device)
    for piece in _granules(pieces, granule):
        rows = Rows.of(piece)
        if weights is None:
            sums.add(rows, wide=wide)
            continue
        step = max(1, BLOCK_VALUES // (k * granule)) * granule
        for start in range(0, rows.columns, step):
            part = rows.shifted(start, min(rows.columns, start + step))
            # Wide in weights as well: what scales 3e38 down to 1e-9 is too small for single.
            mixed = part.empty(k, part.columns, dtype=torch.float64 if wide else part.computed)
            calls.combine(part, weights, mixed, fused=False)
            sums.add(Rows.of(mixed * request.scale), wide=wide)
    return sums.result()


def _check(decision: Decision) -> None:
    """Refuse what a decision may hold beside a mix and a window: it must not be left out."""
    if decision.clean is not None:
        raise KernelError(UNCLEANED)
    calls.check(decision.window)
    known = ("mix", "window")
    for field in fields(decision):
        if field.name not in known and getattr(decision, field.name) is not None:
            raise KernelError(f"Triton's kernels know nothing of the {field.name} of a decision")


def _reduced(piece: Piece, decision: Decision, counts: NDArray[np.int64] | None) -> torch.Tensor:
    out = torch.empty(_columns(piece), dtype=piece[0].dtype, device=piece[0].device)
    done = 0
    for block in _blocks(piece):
        rows = Rows.of(block)
        _reduce(rows, decision, out[done : done + rows.columns], counts)
        done += rows.columns
    return out


def _reduce(
    rows: Rows, decision: Decision, out: torch.Tensor, counts: NDArray[np.int64] | None
) -> None:
    weights, chosen = decision.mix.weights, decision.mix.selected
    if weights is None or chosen is not None:
        rows = rows if chosen is None else rows.take(chosen)
        calls.reduce(rows, decision.window, out, counts)
        return
    k = len(weights)
    dtype = torch.float64 if needs_double(weights) else rows.computed
    step = max(1, BLOCK_VALUES // k)
    for start in range(0, rows.columns, step):
        part = rows.shifted(start, min(rows.columns, start + step))
        mixed = part.empty(k, part.columns, dtype=dtype)
        calls.combine(part, weights, mixed, fused=k > 1)
        answer = mixed[0]
        if k > 1:
            answer = part.empty(part.columns, dtype=dtype)
            calls.reduce(Rows.of(mixed), decision.window, answer, counts)
        out[start : start + part.columns] = answer
