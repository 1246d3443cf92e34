"""Matrices on an accelerator, reduced by torch operations.

The semantics are those of the CPU kernels; the rounding of sums may differ. Columns are processed
in ranges, so that memory is bounded. The scale of a block of columns is the root mean square of the
radii of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import BLOCK_COLUMNS, PLAIN_MEAN, Window
from phocas.rules.algebra import (
    Allowance,
    Distances,
    Floats,
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

BLOCK_VALUES = 1 << 24
CUT_BLOCKS = (
    "shards of a rule that goes by blocks of columns must be in host memory: move the tensor to the"
    " CPU first"
)


def ranges(tensors: list[Any]) -> list[ColumnRange]:
    """Return the ranges of columns of a matrix, each an (m, n) tensor or m tensors of n values."""
    widths = [int(each[0].numel()) for each in tensors]
    starts = [0, *accumulate(widths)]
    return [
        ColumnRange(start, width, each, str(each[0].dtype).removeprefix("torch."))
        for start, width, each in zip(starts, widths, tensors, strict=False)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Beyond:
    """The cells that a filter replaces, stored as the scales from which the cells are computed.

    Attributes:
        window: the window; cells farther than twice its cutoff are replaced.
        rows: the number of rows to consider, from the first.
        spreads: the scale of each column's block.
        found: the number of replaced cells of each row.
    """

    window: Window
    rows: int
    spreads: torch.Tensor
    found: Floats

    def counts(self) -> Floats:
        """Return how many cells of each row are replaced."""
        return self.found

    def partial(self) -> Partial:
        """Raise TypeError, because the scales of split blocks are exchanged in host memory only."""
        raise TypeError(CUT_BLOCKS)

    def squared_radii(self) -> Partial:
        """Return the mean of the squared radii of each block of columns.

        The mean of the last block, if it is shorter, is stored at the first of its columns.
        """
        with np.errstate(over="ignore"):
            means = (2 * self.spreads[::BLOCK_COLUMNS].double().cpu().numpy()) ** 2
        whole, rest = divmod(len(self.spreads), BLOCK_COLUMNS)
        edge = np.zeros((1, rest))
        edge[:, :1] = means[whole:]
        return Partial(
            len(self.found),
            ((0, means[:whole, None]),) if whole else (),
            ((whole * BLOCK_COLUMNS, edge),) if rest else (),
        )

    def of(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which cells of a range of columns are replaced, and the centres of the columns."""
        near, _, outside = self._beyond(rows, start)
        others = outside.new_zeros(len(rows) - self.rows, rows.shape[1])
        return torch.cat([outside, others]), near.centre

    def _beyond(self, rows: torch.Tensor, start: int) -> tuple[Nearest, torch.Tensor, torch.Tensor]:
        near = nearest(rows[: self.rows], self.window)
        known = self.spreads[start : start + rows.shape[1]]
        return near, *_beyond(near, self.window.cutoff, known)

    def tail(
        self, rows: torch.Tensor, start: int, largest: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return half the weighted distances of outliers from the centres, and which are lost.

        The weight rises from 0 at the limit of a column to 1 at twice the limit. An outlier farther
        than ``largest`` is lost.
        """
        near, full, outside = self._beyond(rows, start)
        limit = torch.maximum(near.radius, 2 * full)
        distances = rows / 2 - near.centre / 2
        bad = outside & ~(distances.abs() <= min(largest, torch.finfo(rows.dtype).max))
        weights = (distances.abs() / limit - 1).clamp(max=1)
        return torch.where(outside & ~bad, distances * weights, 0), bad


class DeviceMatrix(Matrix):
    """The m x d matrix as (m, n) tensors, one for each range of columns."""

    def __init__(self, tensors: list[torch.Tensor], rebuild: Callable[[list[Any]], Any]) -> None:
        self.pieces = ranges([tensor.detach() for tensor in tensors])
        self.m = len(tensors[0])
        self.rebuild = rebuild
        self._replaced: tuple[Beyond, torch.Tensor] | None = None

    def blocks(self, piece: ColumnRange) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the columns of a tensor in blocks that bound the memory."""
        step = max(1, BLOCK_VALUES // max(1, self.m))
        for begin in range(0, piece.columns, step):
            end = min(piece.columns, begin + step)
            block = piece.arrays[:, begin:end]
            if self._replaced is not None:
                beyond, excluded = self._replaced
                rows = _computed(block)
                outside, centre = beyond.of(rows, piece.start + begin)
                rows = torch.where(outside, centre, rows)
                block = rows.masked_fill(excluded[:, None], torch.nan).to(block.dtype)
            yield begin, end, block

    def _all(self) -> Iterator[torch.Tensor]:
        return (rows for piece in self.pieces for _, _, rows in self.blocks(piece))

    def measure(self, request: Request) -> Floats:
        """Measure squared distances, norms or signs of the rows on the device, by ranges."""
        if isinstance(request, Signs):
            return Matrix.measure(self, request)
        pairs = of_pairs(request)
        k = self.m if request.weights is None else len(request.weights)
        result = np.zeros((k, k) if pairs else k)
        for block in self._all():
            result += _squares(_asked(block, request), pairs=pairs)
        return result + result.T if pairs else result

    def measured(self, request: Request | Radii, start: int, rows: torch.Tensor) -> Partial:
        """Measure a range of columns; each granule (group of columns) has a sum of its own."""
        if isinstance(request, Radii):
            raise TypeError(CUT_BLOCKS)
        asked, pairs = _asked(rows, request), of_pairs(request)
        k = len(asked)

        def sums(begin: int, end: int) -> Floats:
            granules = asked[:, begin:end].reshape(k, -1, kernels.granule_columns(k))
            if isinstance(request, Signs):
                counts = [(each > 0).sum(dim=-1).cpu().numpy().T for each in (granules, -granules)]
                return np.concatenate([kernels.packed_sums(each) for each in counts], axis=1)
            return kernels.packed_sums(np.moveaxis(_squares(granules, pairs=pairs), -1, 0))

        def values(begin: int, end: int) -> NDArray[Any]:
            return np.asarray(asked[:, begin:end].cpu().numpy())

        return of_columns(k, start, rows.shape[1], sums, values)

    def block_spreads(self, reduction: Reduction) -> torch.Tensor:
        """Return, for each column, the scale of its block; a block may span several tensors."""
        weights, window = reduction.mix.weights, reduction.window
        none = _computed(self.pieces[0].arrays[0, :0])
        found = (nearest(_mixed(_computed(each), weights), window).radius for each in self._all())
        return _spreads(torch.cat([none, *found]))

    def outliers(self, request: OutlierShares, start: int = 0) -> Beyond:
        """Count the cells that a filter replaces."""
        del start
        rows = self.m if request.rows is None else request.rows
        firsts = [piece.arrays[:rows] for piece in self.pieces]
        spreads = DeviceMatrix(firsts, self.rebuild).block_spreads(Reduction(request.window))
        found = Beyond(request.window, rows, spreads, np.zeros(self.m))
        for piece in self.pieces:
            for begin, _, block in self.blocks(piece):
                outside, _ = found.of(_computed(block), piece.start + begin)
                found.found[:] += outside.sum(dim=1).cpu().numpy()
        return found

    def filtered(self, outliers: Beyond, excluded: NDArray[np.bool_]) -> DeviceMatrix:
        """Return the matrix with outliers replaced by column centres, and excluded rows as NaN."""
        result = DeviceMatrix([piece.arrays for piece in self.pieces], self.rebuild)
        there = torch.from_numpy(excluded).to(self.pieces[0].arrays.device)
        result._replaced = outliers, there
        return result

    def _tails(
        self, outliers: Beyond, limit: float
    ) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        """Yield the tails of a range of columns: piece, columns, distances, and which are lost."""
        for number, piece in enumerate(self.pieces):
            for begin, end, block in self.blocks(piece):
                found = outliers.tail(_computed(block), piece.start + begin, limit)
                yield number, slice(begin, end), *found

    def tail_squares(self, outliers: Beyond, limit: float) -> Floats:
        """Return the squared length of each row's tail, summed on the device."""
        result = np.zeros(self.m)
        for _, _, values, _ in self._tails(outliers, limit):
            wide = values.device.type != "mps"
            result += _squares(values.double() if wide else values, pairs=False)
        return result

    def add_tail(self, outs: list[Any] | None, outliers: Beyond, allowed: Allowance) -> Counts:
        """Add the scaled tails to the results; return the number of lost values of each row."""
        lost = np.zeros(self.m, np.int64)
        for number, columns, values, bad in self._tails(outliers, allowed.limit):
            lost += bad.sum(dim=1).cpu().numpy()
            if outs is not None:
                scales = torch.as_tensor(allowed.scales, dtype=values.dtype, device=values.device)
                count = (self.m - bad.sum(dim=0)).clamp(min=1)
                total = 2 * (values * scales[:, None] / count)[allowed.order].sum(dim=0)
                out = outs[number][columns]
                out.copy_(out + total)
        return lost

    def empty(self, piece: ColumnRange, reduction: Reduction, rows: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor of the stored type."""
        del reduction, rows
        found: torch.Tensor = piece.arrays.new_empty(piece.columns)
        return found

    def reduce_block(
        self,
        reduction: Reduction,
        start: int,
        rows: torch.Tensor,
        out: torch.Tensor,
        counts: Counts | None,
    ) -> None:
        """Mix and reduce a block; a window with a cutoff uses the scales of the columns' blocks."""
        weights, computed = reduction.mix.weights, _computed(rows)
        wide = weights is not None and needs_double(weights) and rows.device.type != "mps"
        mixed = _mixed(computed.double() if wide else computed, weights)
        if weights is not None and len(weights) == 1:
            out.copy_(mixed[0])
            return
        spreads = reduction.spreads
        known = None if spreads is None else spreads[start : start + rows.shape[1]]
        value, outside = window_mean(mixed, reduction.window, known)
        out.copy_(window_mean(computed, PLAIN_MEAN)[0] if reduction.mean else value)
        if counts is not None and outside is not None:
            counts += outside.sum(dim=1).cpu().numpy()

    def values(self, rows: torch.Tensor, weights: Floats | None) -> NDArray[np.floating]:
        """Return a copy of a block in host memory."""
        return np.array(_mixed(_computed(rows), weights).numpy(force=True))

    def stored(self, piece: ColumnRange, values: Any) -> torch.Tensor:
        """Return values in the type and on the device of the rows."""
        found = piece.arrays.new_empty(0) if values is None else torch.as_tensor(values)
        return found.to(piece.arrays)


def _spreads(radii: torch.Tensor) -> torch.Tensor:
    """Return, for each column, the scale of its block, from the radii of all columns.

    The scale is the root mean square of the radii of the block's columns.
    """
    d = len(radii)
    radii = torch.where(radii.isfinite(), radii, 0)
    blocks, sizes = (
        torch.nn.functional.pad(each, (0, -d % BLOCK_COLUMNS)).view(-1, BLOCK_COLUMNS)
        for each in (radii, torch.ones_like(radii))
    )
    # Divide by the largest radius, so that no square overflows.
    largest = blocks.amax(dim=1).clamp(min=torch.finfo(radii.dtype).tiny)
    squares = (blocks / largest[:, None]).square().sum(dim=1)
    spreads = (squares / sizes.sum(dim=1)).sqrt() * largest
    return spreads.repeat_interleave(BLOCK_COLUMNS)[:d]


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """The values of each column nearest to its centre; distances are halved to avoid overflow."""

    rows: torch.Tensor
    """All values, with +inf in place of NaN."""
    centre: torch.Tensor
    kept: torch.Tensor
    """The distances of the values nearest to the centre."""
    chosen: torch.Tensor
    """The values nearest to the centre."""

    @property
    def radius(self) -> torch.Tensor:
        """Return, for each column, half the distance from the centre to the farthest kept value."""
        return self.kept.abs().amax(dim=0)


def window_mean(
    rows: torch.Tensor, window: Window, spreads: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mean of each column's window, and which values are outside it.

    ``spreads`` are the halved scales of the columns' blocks, for a window with a cutoff.
    """
    m = len(rows)
    if window.plain:
        return (rows / m).sum(dim=0), None
    if not window.drop:
        rows, wires = _ordered(rows)
        centre = wires[window.trim : m - window.trim]
        value = _centre(centre).clamp(centre[0], centre[-1])
        return value, (rows < centre[0]) | (rows > centre[-1])
    found = nearest(rows, window)
    y, radius = found.centre, found.radius
    if spreads is not None:
        return _reaching(found, window.cutoff, spreads)
    value = y + 2 * (found.kept / len(found.kept)).sum(dim=0)
    value = value.clamp(found.chosen.amin(dim=0), found.chosen.amax(dim=0))
    return value, (found.rows / 2 - y / 2).abs() > radius


def _reaching(
    found: Nearest, cutoff: float, spreads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean of each column, and which cells have weight 0.

    Weights fall from 1 at the cutoff to 0 at twice the cutoff.
    """
    distances = found.rows / 2 - found.centre / 2
    lengths, radius = distances.abs(), found.radius
    full, outside = _beyond(found, cutoff, spreads)
    weights = ((2 * full - lengths) / full).clamp(0, 1)
    weights = torch.where(lengths <= radius, 1, weights).masked_fill(outside, 0)
    share = weights / weights.sum(dim=0)
    value = found.centre + 2 * (share * distances.masked_fill(outside, 0)).sum(dim=0)
    low = found.rows.masked_fill(outside, torch.inf).amin(dim=0)
    high = found.rows.masked_fill(outside, -torch.inf).amax(dim=0)
    return value.clamp(low, high), outside


def _beyond(
    found: Nearest, cutoff: float, spreads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance up to which values have weight 1, and the cells beyond twice as far."""
    lengths = (found.rows / 2 - found.centre / 2).abs()
    largest = torch.finfo(lengths.dtype).max
    full = (torch.maximum(found.radius, spreads) * cutoff).clamp(max=largest)
    return full, lengths > torch.maximum(found.radius, (2 * full).clamp(max=largest))


def _ordered(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with +inf in place of NaN, and a copy of these rows with sorted columns."""
    rows = torch.where(rows.isnan(), torch.inf, rows)
    return rows, rows.sort(dim=0).values


def _centre(values: torch.Tensor) -> torch.Tensor:
    """Average the differences from the first value, as in the kernels.

    The mean of equal values is then exact, and no sum overflows.
    """
    size = len(values)
    return values[0] + (values / size - values[:1] / size).sum(dim=0)


def nearest(rows: torch.Tensor, window: Window) -> Nearest:
    """Find the values of each column that are nearest to its trimmed mean."""
    m = len(rows)
    rows, wires = _ordered(rows)
    y = _centre(wires[window.trim : m - window.trim])
    b = window.drop or 0
    distances = wires / 2 - y / 2
    # Of the sorted values whose indices are equal modulo m - b, the window has the nearest.
    kept, chosen = distances[: m - b].clone(), wires[: m - b].clone()
    for start in range(m - b, m, m - b):
        others = distances[start : start + m - b]
        n = len(others)
        nearer = kept[:n].abs() <= others.abs()
        kept[:n] = torch.where(nearer, kept[:n], others)
        chosen[:n] = torch.where(nearer, chosen[:n], wires[start : start + n])
    return Nearest(rows, y, kept, chosen)


def _asked(block: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the rows that a request measures, in its precision, or their differences from one."""
    rows = _computed(block)
    rows = rows.double() if wants_double(request) and rows.device.type != "mps" else rows
    rows = _mixed(rows, request.weights) * request.scale
    if isinstance(request, Distances) and request.origin is not None:
        return rows - rows[request.origin]
    return rows


def _squares(rows: torch.Tensor, *, pairs: bool) -> NDArray[np.float64]:
    """Return sums along the last axis: of squared differences of pairs of rows, or of squares.

    Pairs are above the diagonal. A sum of NaN becomes +inf.
    """
    if not pairs:
        found = rows.square().sum(dim=-1)
    else:
        k = len(rows)
        found = rows.new_zeros(k, *rows.shape[:-1])
        for i in range(k - 1):
            found[i, i + 1 :] = (rows[i + 1 :] - rows[i]).square().sum(dim=-1)
    return np.asarray(found.nan_to_num(torch.inf, torch.inf).cpu().double().numpy())


def _computed(block: torch.Tensor) -> torch.Tensor:
    return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block


def _mixed(rows: torch.Tensor, weights: Floats | None) -> torch.Tensor:
    """Return ``weights @ rows``, where NaN and inf times the weight 0 are 0."""
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
