"""Rows that live on an accelerator: by kernels in Triton where they can be had, or by torch.

``PHOCAS_DEVICE_KERNELS`` chooses. Unset, tensors on cuda (which is what torch calls AMD's devices,
too) take Triton's kernels, and torch's operations if those cannot be had, which is said once.
``triton`` insists on the kernels: what they cannot do is an error. ``torch`` never tries them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels.triton import KernelError, calls
from phocas.kernels.triton.calls import Rows
from phocas.kernels.triton.loader import obstacle
from phocas.rules import measures
from phocas.rules.accelerator import BLOCK_VALUES, DeviceMatrix, without_blocks
from phocas.rules.algebra import (
    UNMIXED,
    Columns,
    Decision,
    Distances,
    Floats,
    Mix,
    Plausible,
    Radii,
    Request,
    needs_double,
    wants_double,
)

VARIABLE = "PHOCAS_DEVICE_KERNELS"
CHOICES = ("triton", "torch")
UNCLEANED = "Triton's kernels know nothing of cleaned rows"

Answer = TypeVar("Answer")
Piece: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A range of columns of all m rows: one (m, n) tensor, or m of n values."""
_said: set[str] = set()


def open_device(pieces: list[Piece], rebuild: Callable[[list[Any]], Any]) -> Columns:
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

    def partial(self, request: Request | Radii | Plausible, start: int = 0) -> measures.Partial:
        """Return what these columns contribute, if they begin at column ``start`` of more."""
        asked = without_blocks(request)
        return self._or_by_torch(
            lambda: _partial(self.pieces, self.m, asked, start),
            lambda other: other.partial(asked, start),
        )

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None, start: int = 0) -> Any:
        """Mix and reduce; count what was dropped of each mixed row, wherever columns begin."""
        del start

        def work() -> Any:
            _check(decision)
            lost = None if counts is None else np.zeros_like(counts)
            answers = _reduced(self.pieces, decision, lost)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A request about m rows, and how it is measured."""

    request: Request
    m: int

    @property
    def wide(self) -> bool:
        """Tell whether squares are added in double precision."""
        return wants_double(self.request)

    @property
    def weights(self) -> Floats | None:
        """Return the mix that is measured."""
        scaled = self.request.weights is None and self.request.scale != 1
        return np.eye(self.m) if scaled else self.request.weights

    def sums(self, device: torch.device) -> calls.Sums:
        """Return room for the answer."""
        k = self.m if self.weights is None else len(self.weights)
        pairs = isinstance(self.request, Distances)
        return calls.Sums(k, kernels.granule_columns(k), pairs=pairs, device=device)

    def seen(self, piece: Piece) -> Iterator[Rows]:
        """Yield what is measured of some columns, whole granules at a time."""
        rows = Rows.of(piece)
        if self.weights is None:
            yield rows
            return
        k = len(self.weights)
        granule = kernels.granule_columns(k)
        step = max(1, BLOCK_VALUES // (k * granule)) * granule
        for start in range(0, rows.columns, step):
            part = rows.shifted(start, min(rows.columns, start + step))
            # Wide in weights as well: what scales 3e38 down to 1e-9 is too small for single.
            kind = torch.float64 if self.wide else part.computed
            mixed = part.empty(k, part.columns, dtype=kind)
            calls.combine(part, self.weights, mixed, fused=False)
            yield Rows.of(mixed * self.request.scale)


def _measured(pieces: list[Piece], m: int, request: Request | Plausible) -> Floats:
    if isinstance(request, Plausible) or request.clean is not None:
        raise KernelError(UNCLEANED)
    question = _Question(request, m)
    sums = question.sums(pieces[0][0].device)
    for piece in _granules(pieces, sums.granule):
        for rows in question.seen(piece):
            sums.add(rows, wide=question.wide)
    return sums.result()


def _partial(pieces: list[Piece], m: int, request: Request, start: int) -> measures.Partial:
    question = _Question(request, m)
    room = question.sums(pieces[0][0].device)
    result = measures.Partial(room.m)
    for piece in (block for whole in pieces for block in _blocks(whole)):

        def sums(begin: int, end: int, piece: Piece = piece) -> Floats:
            seen = question.seen(_cut(piece, begin, end))
            found = [room.each(rows, wide=question.wide) for rows in seen]
            return kernels.packed_sums(np.concatenate(found))

        def values(begin: int, end: int, piece: Piece = piece) -> NDArray[np.floating]:
            parts = [_computed(rows) for rows in question.seen(_cut(piece, begin, end))]
            return np.asarray(torch.cat(parts, dim=1).cpu().numpy())

        result += measures.of_columns(room.m, start, _columns(piece), sums, values)
        start += _columns(piece)
    return result


def _computed(rows: Rows) -> torch.Tensor:
    """Return the values of rows as they are computed with."""
    out = rows.empty(len(rows), rows.columns, dtype=rows.computed)
    calls.combine(rows, np.eye(len(rows)), out, fused=False)
    return out


def _check(decision: Decision) -> None:
    """Refuse what a decision may hold beside a mix and a window: it must not be left out."""
    if decision.clean is not None:
        raise KernelError(UNCLEANED)
    known = ("mix", "window")
    for field in fields(decision):
        if field.name not in known and getattr(decision, field.name) is not None:
            raise KernelError(f"Triton's kernels know nothing of the {field.name} of a decision")


def _reduced(
    pieces: list[Piece], decision: Decision, counts: NDArray[np.int64] | None
) -> list[torch.Tensor]:
    """Mix and reduce all pieces; with a reach, the radii of all columns come first."""
    mix, window = decision.mix, decision.window
    if window.watched and (counts is None or mix.weights is not None):
        means = _reduced(pieces, Decision(UNMIXED, kernels.PLAIN_MEAN), None)
        if counts is not None:
            _reduced(pieces, Decision(mix, replace(window, watched=False)), counts)
        return means
    weights = None if mix.selected is not None else mix.weights
    if weights is not None and len(weights) == 1:
        return [_joined(piece, [mixed[0] for mixed in _mixed(piece, weights)]) for piece in pieces]
    spread = _spreads(pieces, decision) if window.reach else None
    answers = []
    first = 0
    for piece in pieces:
        parts = []
        for rows in _seen(piece, mix):
            part = rows.empty(rows.columns, dtype=rows.dtype)
            here = None if spread is None else replace(spread, first=first)
            calls.reduce(rows, window, part, counts, here)
            parts.append(part)
            first += rows.columns
        answers.append(_joined(piece, parts))
    return answers


def _spreads(pieces: list[Piece], decision: Decision) -> calls.Spreads:
    """Return the spreads of all blocks of columns, which may lie in several pieces."""
    parts = []
    for piece in pieces:
        for rows in _seen(piece, decision.mix):
            parts.append(rows.empty(rows.columns, dtype=rows.computed))
            calls.radii(rows, decision.window, parts[-1])
    kind = parts[0].dtype if parts else torch.float32
    none = torch.empty(0, dtype=kind, device=pieces[0][0].device)
    return calls.Spreads.of(torch.cat([none, *parts]), decision.window.reach)


def _seen(piece: Piece, mix: Mix) -> Iterator[Rows]:
    """Yield the rows that a window sees, a range of columns at a time."""
    if mix.weights is not None and mix.selected is None:
        yield from map(Rows.of, _mixed(piece, mix.weights))
        return
    for block in _blocks(piece):
        rows = Rows.of(block)
        yield rows if mix.selected is None else rows.take(mix.selected)


def _mixed(piece: Piece, weights: Floats) -> Iterator[torch.Tensor]:
    """Yield the mixed rows, a range of columns at a time."""
    k = len(weights)
    step = max(1, BLOCK_VALUES // k)
    for block in _blocks(piece):
        rows = Rows.of(block)
        dtype = torch.float64 if needs_double(weights) else rows.computed
        for start in range(0, rows.columns, step):
            part = rows.shifted(start, min(rows.columns, start + step))
            mixed = part.empty(k, part.columns, dtype=dtype)
            calls.combine(part, weights, mixed, fused=k > 1)
            yield mixed


def _joined(piece: Piece, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the answers of a piece in one tensor of its type."""
    like = piece[0]
    out = parts[0] if len(parts) == 1 else torch.cat([like.new_empty(0), *parts])
    return out.to(like.dtype)
