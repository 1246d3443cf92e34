"""Matrices on an accelerator, reduced by Triton kernels where possible, else by torch operations.

The environment variable ``PHOCAS_DEVICE_KERNELS`` chooses. If it is unset, tensors on cuda (torch's
name for AMD devices as well) use Triton kernels. If Triton is not available, they use torch
operations, with one warning. ``triton`` requires the kernels: an operation without a kernel raises
an error. ``torch`` always uses torch operations.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels.triton import KernelError, calls
from phocas.kernels.triton.calls import DeviceRows
from phocas.kernels.triton.loader import obstacle
from phocas.rules.accelerator import BLOCK_VALUES, CUT_BLOCKS, Beyond, DeviceMatrix, ranges
from phocas.rules.algebra import (
    Allowance,
    Distances,
    Floats,
    Function,
    Mix,
    OutlierShares,
    Radii,
    Request,
    Signs,
    needs_double,
    of_pairs,
    wants_double,
)
from phocas.rules.execution import ColumnRange, Counts, Matrix, Reduction
from phocas.rules.measures import Partial, of_columns

VARIABLE = "PHOCAS_DEVICE_KERNELS"
CHOICES = ("triton", "torch")

Answer = TypeVar("Answer")
Asked = ParamSpec("Asked")
Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A range of columns of all m rows: one (m, n) tensor, or m of n values."""
_said: set[str] = set()


def open_device(pieces: list[Tensors], rebuild: Callable[[list[Any]], Any]) -> Matrix:
    """Return the matrix of rows on a device, with the back end that was chosen."""
    detached: list[Tensors] = [
        _plain(piece) if isinstance(piece, torch.Tensor) else [_plain(row) for row in piece]
        for piece in pieces
    ]
    choice, _ = path(detached[0][0].device)
    return KernelMatrix(detached, rebuild) if choice == "triton" else _by_torch(detached, rebuild)


def path(device: torch.device) -> tuple[str, str]:
    """Return the back end for tensors on a device, ``triton`` or ``torch``, and the reason."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        if chosen not in CHOICES:
            raise ValueError(f"{VARIABLE} must be {' or '.join(CHOICES)}: got {chosen!r}")
        return chosen, f"{VARIABLE}={chosen} is set"
    if device.type != "cuda":
        return "torch", f"Triton's kernels are for cuda: this is {device}"
    reason = obstacle()
    return ("torch", reason) if reason else ("triton", "it is installed and supports the device")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg()


def _by_torch(pieces: list[Tensors], rebuild: Callable[[list[Any]], Any]) -> DeviceMatrix:
    stacked = [piece if isinstance(piece, torch.Tensor) else _dense(piece) for piece in pieces]
    return DeviceMatrix(stacked, rebuild)


def or_by_torch(
    method: Callable[Concatenate[KernelMatrix, Asked], Answer],
) -> Callable[Concatenate[KernelMatrix, Asked], Answer]:
    """Return a method that falls back on torch operations if there is no kernel."""

    @wraps(method)
    def either(self: KernelMatrix, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        try:
            return method(self, *args, **kwargs)
        except KernelError as error:
            if os.environ.get(VARIABLE) == "triton":
                raise
            reason = str(error)
        if reason not in _said:
            _said.add(reason)
            message = f"{reason}; torch's operations are used, which sort and take much longer"
            warnings.warn(message, RuntimeWarning, stacklevel=5)
        answer: Answer = getattr(self._by_torch(), method.__name__)(*args, **kwargs)
        return answer

    return either


class KernelMatrix(Matrix):
    """The m x d matrix on a device, measured and reduced by Triton kernels."""

    def __init__(self, tensors: list[Tensors], rebuild: Callable[[list[Any]], Any]) -> None:
        self.pieces = ranges(tensors)
        self.m = len(tensors[0])
        self.rebuild = rebuild

    def blocks(self, piece: ColumnRange) -> Iterator[tuple[int, int, Tensors]]:
        """Yield the blocks of a piece (range of columns): first column, last column + 1, rows.

        The values of a row are adjacent in memory; rows are copied if they are not.
        """
        tensors = piece.arrays
        rows = tensors[:1] if isinstance(tensors, torch.Tensor) else tensors
        if piece.columns > 1 and any(row.stride(0) != 1 for row in rows):
            step = max(1, BLOCK_VALUES // self.m)
            for begin in range(0, piece.columns, step):
                end = min(piece.columns, begin + step)
                yield begin, end, _dense(_cut(tensors, begin, end))
        elif piece.columns:
            yield 0, piece.columns, tensors

    @or_by_torch
    def measure(self, request: Request) -> Floats:
        """Measure squared distances or squared norms of the rows on the device.

        Squares are added up in granules, which are fixed numbers of columns. Signs are counted by
        torch operations.
        """
        if isinstance(request, Signs):
            return self._by_torch().measure(request)
        question = _Question(request, self.m)
        sums = question.sums(self._device)
        found = (block for piece in self.pieces for _, _, block in self.blocks(piece))
        for block in _granules(found, sums.granule):
            for rows in question.seen(block):
                sums.add(rows, wide=question.wide)
        return sums.result()

    @or_by_torch
    def partial(self, request: Request | Radii, start: int = 0) -> Partial:
        """Measure these columns, which begin at column ``start`` of the whole matrix."""
        if isinstance(request, Signs):
            return self._by_torch().partial(request, start)
        return super().partial(request, start)

    def _by_torch(self) -> DeviceMatrix:
        return _by_torch([piece.arrays for piece in self.pieces], self.rebuild)

    def measured(self, request: Request | Radii, start: int, rows: Tensors) -> Partial:
        """Measure a range of columns; each granule (group of columns) has a sum of its own."""
        if isinstance(request, Radii):
            raise TypeError(CUT_BLOCKS)
        question = _Question(request, self.m)
        room = question.sums(self._device)

        def sums(begin: int, end: int) -> Floats:
            seen = question.seen(_cut(rows, begin, end))
            found = [room.each(part, wide=question.wide) for part in seen]
            return kernels.packed_sums(np.concatenate(found))

        def values(begin: int, end: int) -> NDArray[np.floating]:
            parts = [_computed(part) for part in question.seen(_cut(rows, begin, end))]
            return np.asarray(torch.cat(parts, dim=1).cpu().numpy())

        return of_columns(room.m, start, _columns(rows), sums, values)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.pieces[0].arrays[0].device
        return device

    @or_by_torch
    def outliers(self, request: OutlierShares, start: int = 0) -> Beyond:
        """Raise KernelError, because there is no kernel that filters cells."""
        del request, start
        raise KernelError("Triton's kernels do not filter cells")

    def filtered(self, outliers: Beyond, excluded: NDArray[np.bool_]) -> Matrix:
        """Return the filtered rows as a matrix of torch operations."""
        return self._by_torch().filtered(outliers, excluded)

    def keep_tail(
        self, reduction: Reduction, spreads: Any, outs: list[Any], outside: Counts, start: int
    ) -> None:
        """Add the outliers of the window to the result, by torch operations."""
        self._by_torch().keep_tail(reduction, spreads, outs, outside, start)

    def tail_squares(self, outliers: Any, limit: float) -> Floats:
        """Raise KernelError: there is no kernel, and :meth:`keep_tail` does not call this."""
        del outliers, limit
        raise KernelError("Triton's kernels keep no tail")

    def add_tail(self, outs: list[Any] | None, outliers: Any, allowed: Allowance) -> Counts:
        """Raise KernelError: there is no kernel, and :meth:`keep_tail` does not call this."""
        del outs, outliers, allowed
        raise KernelError("Triton's kernels keep no tail")

    @or_by_torch
    def reduce(self, reduction: Reduction, counts: Counts | None = None, start: int = 0) -> Any:
        """Mix and reduce; leave ``counts`` unchanged if a kernel fails."""
        lost = None if counts is None else np.zeros_like(counts)
        answer = super().reduce(replace(reduction), lost, start)
        if counts is not None and lost is not None:
            counts += lost
        return answer

    @or_by_torch
    def apply(self, function: Function, mix: Mix) -> Any:
        """Reduce by a function; this falls back on torch operations."""
        return super().apply(function, mix)

    def block_spreads(self, reduction: Reduction) -> calls.Spreads:
        """Return the scale (root mean square of the radii) of every block of columns.

        A block may span several pieces (ranges of columns).
        """
        parts = []
        for piece in self.pieces:
            for _, _, block in self.blocks(piece):
                for rows in _seen(block, reduction):
                    parts.append(rows.empty(rows.columns, dtype=rows.computed))
                    calls.radii(rows, reduction.window, parts[-1])
        kind = parts[0].dtype if parts else torch.float32
        none = torch.empty(0, dtype=kind, device=self._device)
        return calls.Spreads.of(torch.cat([none, *parts]), reduction.window.cutoff)

    def empty(self, piece: ColumnRange, reduction: Reduction, rows: Tensors) -> torch.Tensor:
        """Return an empty tensor of the stored type, or of the computed type if rows are mixed."""
        like: torch.Tensor = piece.arrays[0]
        if reduction.sums is None:
            return like.new_empty(piece.columns)
        return like.new_empty(piece.columns, dtype=_mixed_type(DeviceRows.of(rows), reduction.sums))

    def reduce_block(
        self,
        reduction: Reduction,
        start: int,
        rows: Tensors,
        out: torch.Tensor,
        counts: Counts | None,
    ) -> None:
        """Mix and reduce a range of columns; mixed rows are reduced a few columns at a time."""
        one = reduction.sums is not None and len(reduction.sums) == 1
        done = 0
        for seen in _seen(rows, reduction):
            part, spread = out[done : done + seen.columns], reduction.spreads
            if one:  # the one mixed row is the result
                part.copy_(seen.owner[0])
            else:
                here = None if spread is None else replace(spread, first=start + done)
                calls.reduce(seen, reduction.window, part, counts, here, mean=reduction.mean)
            done += seen.columns

    def values(self, rows: Tensors, weights: Floats | None) -> NDArray[np.floating]:
        """Raise KernelError, because there is no kernel that copies rows for a function."""
        del rows, weights
        raise KernelError("Triton's kernels do not run a function of the rows")

    def stored(self, piece: ColumnRange, values: torch.Tensor | None) -> torch.Tensor:
        """Return values in the type of the rows."""
        like: torch.Tensor = piece.arrays[0]
        return like.new_empty(0) if values is None else values.to(like.dtype)


def _columns(tensors: Tensors) -> int:
    return int(tensors[0].numel())


def _cut(piece: Tensors, start: int, stop: int) -> Tensors:
    if isinstance(piece, torch.Tensor):
        return piece[:, start:stop]
    return [row[start:stop] for row in piece]


def _dense(piece: Tensors) -> torch.Tensor:
    return piece.contiguous() if isinstance(piece, torch.Tensor) else torch.stack(list(piece))


def _granules(blocks: Iterator[Tensors], granule: int) -> Iterator[Tensors]:
    """Yield columns in whole granules, counted from the first column of the matrix.

    A granule is a fixed number of columns. Parts of a granule that arrive separately are joined.
    The last granule may be shorter.
    """
    parts: list[torch.Tensor] = []
    width = 0
    for block in blocks:
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
    """A request about m rows, and the parameters of its measurement."""

    request: Request
    m: int

    @property
    def wide(self) -> bool:
        """Tell whether squares are added in double precision."""
        return wants_double(self.request)

    @property
    def weights(self) -> Floats | None:
        """Return the mix that is measured; None: the rows are measured where they are."""
        request = self.request
        if request.weights is None and (request.scale != 1 or self.origin is not None):
            return np.eye(self.m)
        return request.weights

    @property
    def origin(self) -> int | None:
        """Return the row from which distances are measured, as norms of differences."""
        return self.request.origin if isinstance(self.request, Distances) else None

    def sums(self, device: torch.device) -> calls.Sums:
        """Return sums that are zero, to which the squares of the rows are added."""
        k = self.m if self.weights is None else len(self.weights)
        pairs = of_pairs(self.request)
        return calls.Sums(k, kernels.granule_columns(k), pairs=pairs, device=device)

    def seen(self, piece: Tensors) -> Iterator[DeviceRows]:
        """Yield the rows to measure of some columns, whole granules at a time."""
        rows = DeviceRows.of(piece)
        if self.weights is None:
            yield rows
            return
        k = len(self.weights)
        granule = kernels.granule_columns(k)
        step = max(1, BLOCK_VALUES // (k * granule)) * granule
        for start in range(0, rows.columns, step):
            part = rows.shifted(start, min(rows.columns, start + step))
            # The weights are double too: a factor from 3e38 to 1e-9 is too small for single.
            kind = torch.float64 if self.wide else part.computed
            mixed = part.empty(k, part.columns, dtype=kind)
            calls.combine(part, self.weights, mixed, fused=False)
            mixed = mixed * self.request.scale
            yield DeviceRows.of(mixed if self.origin is None else mixed - mixed[self.origin])


def _computed(rows: DeviceRows) -> torch.Tensor:
    """Return the values of rows in the type of the computation."""
    out = rows.empty(len(rows), rows.columns, dtype=rows.computed)
    calls.combine(rows, np.eye(len(rows)), out, fused=False)
    return out


def _seen(block: Tensors, reduction: Reduction) -> Iterator[DeviceRows]:
    """Yield the mixed rows that a window reduces, a range of columns at a time."""
    rows, weights = DeviceRows.of(block), reduction.sums
    if weights is None:
        chosen = reduction.mix.selected
        yield rows if chosen is None else rows.take(chosen)
        return
    k = len(weights)
    step = max(1, BLOCK_VALUES // k)
    for start in range(0, rows.columns, step):
        part = rows.shifted(start, min(rows.columns, start + step))
        mixed = part.empty(k, part.columns, dtype=_mixed_type(rows, weights))
        calls.combine(part, weights, mixed, fused=k > 1)
        yield DeviceRows.of(mixed)


def _mixed_type(rows: DeviceRows, weights: Floats) -> torch.dtype:
    """Return the type of mixed values."""
    return torch.float64 if needs_double(weights) else rows.computed
