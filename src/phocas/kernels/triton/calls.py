"""The Triton kernels as functions of tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.kernels.blocks import BLOCK_COLUMNS
from phocas.kernels.columns import PLAIN_MEAN, Window
from phocas.kernels.emit import ELEMENTS
from phocas.kernels.mixes import SparseMix
from phocas.kernels.mixing import PLAIN, UNIFORM
from phocas.kernels.triton import KernelError
from phocas.kernels.triton.loader import THREADS, Kernel, interpreted, load
from phocas.kernels.triton.sums import SIDE, mix_source, sums_source
from phocas.kernels.triton.windows import TOGETHER, spreads_source, window_source

BLOCK = THREADS  # columns per program, one per thread
MIXES = 16  # mixes per program
SUMS_BYTES = 1 << 26  # largest size of granule sums before they are added up
# A column's values are in the registers of one thread, which has 255 of them: more rows than these
# do not fit, or take a minute to compile.
LARGEST_ROWS = {torch.float32: 128, torch.float64: 64}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """The addresses of m rows of ``columns`` contiguous values, and the owner of their memory."""

    table: torch.Tensor
    columns: int
    dtype: torch.dtype
    owner: Any

    @staticmethod
    def of(tensors: torch.Tensor | Sequence[torch.Tensor]) -> DeviceRows:
        """Return the rows of a matrix, or of m vectors; each row must be contiguous."""
        if isinstance(tensors, torch.Tensor):
            step = tensors.stride(0) * tensors.element_size()
            table = torch.arange(len(tensors), device=tensors.device) * step + tensors.data_ptr()
            return DeviceRows(table, tensors.shape[1], tensors.dtype, tensors)
        first = tensors[0]
        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
        return DeviceRows(addresses.to(first.device), first.numel(), first.dtype, tensors)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def element(self) -> str:
        """Return the name of the stored dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def computed(self) -> torch.dtype:
        """Return the dtype that values are computed in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def shifted(self, start: int, stop: int) -> DeviceRows:
        """Return a range of columns of the same rows."""
        table = self.table + start * ELEMENTS[self.element].size
        return DeviceRows(table, stop - start, self.dtype, self.owner)

    def take(self, indices: NDArray[np.intp]) -> DeviceRows:
        """Return some of the rows."""
        chosen = torch.tensor(indices).to(self.table.device)
        return DeviceRows(self.table[chosen], self.columns, self.dtype, self.owner)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the device of the rows."""
        return torch.empty(shape, dtype=dtype, device=self.table.device)


def reduce(
    rows: DeviceRows,
    window: Window,
    out: torch.Tensor,
    counts: NDArray[np.int64] | None = None,
    spread: Spreads | None = None,
    *,
    mean: bool = False,
) -> None:
    """Average a window of every column into ``out``; add dropped values to ``counts``.

    A window with a cutoff needs ``spreads``, the root mean squares of the radii of each block of
    columns. With ``mean``, ``out`` gets the plain mean of all rows, and the window is only used for
    the counts.
    """
    if mean and counts is None:
        window = PLAIN_MEAN
    if window.plain:
        counts, mean = None, False
    m = len(rows)
    programs = -(-rows.columns // BLOCK)
    tallies = rows.empty(1 if counts is None else programs, m, dtype=torch.int32)
    arguments: list[Any] = [rows.table, _words(out), tallies]
    if window.cutoff:
        if spread is None:
            raise ValueError(f"a window with a cutoff needs the spreads of blocks: got {window}")
        arguments += [spread.values, spread.cutoff, spread.first]
    kernel = _window_kernel(rows, window, blame=counts is not None, mean=mean)
    kernel((programs,), *arguments, rows.columns, BLOCK=BLOCK)
    if counts is not None:
        counts += tallies.sum(dim=0, dtype=torch.int64).cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class Spreads:
    """The spreads of all blocks of columns, the cutoff, and the index of the first column."""

    values: torch.Tensor
    cutoff: torch.Tensor
    first: int = 0

    @staticmethod
    def of(radii: torch.Tensor, cutoff: float) -> Spreads:
        """Compute the spreads, with the same bits as :func:`phocas.kernels.spread`."""
        d = len(radii)
        blocks = -(-d // BLOCK_COLUMNS)
        values = torch.empty(blocks, dtype=radii.dtype, device=radii.device)
        if d:
            kernel = _compiled("spreads", str(radii.dtype).removeprefix("torch."), wide=False)
            kernel((-(-blocks // TOGETHER),), radii, values, d)
        return Spreads(values, torch.full_like(radii[:1], cutoff) if d else radii)


def radii(rows: DeviceRows, window: Window, out: torch.Tensor) -> None:
    """Write the radius of every column as computed values, scaled as in :func:`reduce`."""
    kernel = _window_kernel(rows, window, radii=True)
    programs = -(-rows.columns // BLOCK)
    tallies = rows.empty(1, dtype=torch.int32)
    kernel((programs,), rows.table, out, tallies, rows.columns, BLOCK=BLOCK)


def combine(
    rows: DeviceRows, weights: NDArray[np.float64], out: torch.Tensor, *, fused: bool
) -> None:
    """Write the mixed rows to ``out``, (k, columns) of computed values or of doubles.

    ``fused`` scales equal weights as the fused CPU kernel does.
    """
    m, k = len(rows), len(weights)
    mix = SparseMix.of(weights)
    around = mix.mode != PLAIN
    scales = mix.scales() if fused else (0.5, 2.0) if around else (1.0, 1.0)
    centres = rows.take(mix.centres[mix.groups[m:]]).table
    grid = (-(-rows.columns // BLOCK), -(-k // MIXES))
    _compiled("mix", rows.element, out.dtype == torch.float64)(
        grid,
        rows.table,
        torch.tensor(weights, dtype=out.dtype).to(rows.table.device),
        centres,
        torch.tensor(scales, dtype=out.dtype).to(rows.table.device),
        out,
        m,
        k,
        rows.columns,
        AROUND=around,
        SAME=fused and mix.mode == UNIFORM,
        MIXES=min(MIXES, 1 << (k - 1).bit_length()),
        BLOCK=BLOCK,
    )


class Sums:
    """Sums of squares over granules (fixed numbers of columns), added in the order of the calls."""

    def __init__(self, m: int, granule: int, *, pairs: bool, device: torch.device) -> None:
        self.m = m
        self.granule = granule
        self.blocks = -(-m // SIDE)
        self.grid = (self.blocks, self.blocks) if pairs else (self.blocks,)
        self.name = "pairs" if pairs else "squares"
        width = (self.blocks * SIDE) ** len(self.grid)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)

    def add(self, rows: DeviceRows, *, wide: bool) -> None:
        """Add whole granules; columns missing from the last one count as zeros."""
        width = len(self.total)
        for sums in self._granules(rows, wide=wide):
            add_up = _compiled("add_up", rows.element, wide)
            programs = -(-width // BLOCK)
            add_up((programs,), sums, self.total, len(sums), width, BLOCK=BLOCK)

    def each(self, rows: DeviceRows, *, wide: bool) -> NDArray[np.float64]:
        """Return the sums of each granule separately: squared distances, or squared norms."""
        return np.concatenate(
            [self._squares(sums.cpu().numpy()) for sums in self._granules(rows, wide=wide)]
        )

    def _granules(self, rows: DeviceRows, *, wide: bool) -> Iterator[torch.Tensor]:
        """Yield the sums of several granules at a time."""
        width = len(self.total)
        together = max(1, SUMS_BYTES // (8 * width))
        for start in range(0, rows.columns, together * self.granule):
            part = rows.shifted(start, min(rows.columns, start + together * self.granule))
            granules = -(-part.columns // self.granule)
            sums = torch.zeros((granules, width), dtype=torch.float64, device=self.total.device)
            measure = _compiled(self.name, rows.element, wide)
            measure(
                (granules, *self.grid),
                part.table,
                sums,
                self.m,
                part.columns,
                self.granule,
            )
            yield sums

    def result(self) -> NDArray[np.float64]:
        """Return the squared distances between the m rows, or their squared norms."""
        (found,) = self._squares(self.total[None].cpu().numpy())
        return np.asarray(found + found.T if found.ndim > 1 else found)

    def _squares(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (granules, m, m) squares above the diagonal, or (granules, m)."""
        if self.name == "squares":
            return sums[:, : self.m]
        cells = sums.reshape(-1, self.blocks, self.blocks, SIDE, SIDE).swapaxes(2, 3)
        side = self.blocks * SIDE
        return np.triu(cells.reshape(-1, side, side)[:, : self.m, : self.m], 1)


def _words(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.uint16) if out.dtype == torch.bfloat16 else out


def _window_kernel(
    rows: DeviceRows,
    window: Window,
    *,
    blame: bool = False,
    radii: bool = False,
    mean: bool = False,
) -> Kernel:
    largest = LARGEST_ROWS[rows.computed]
    if len(rows) > largest:
        raise KernelError(
            f"Triton's kernels reduce at most {largest} rows of {rows.element}: got {len(rows)}"
        )
    code = replace(window, cutoff=float(bool(window.cutoff)))  # the cutoff is a number, not code
    return _written(rows.element, len(rows), code, blame, radii, mean)


@lru_cache(maxsize=1024)
def _written(element: str, m: int, window: Window, blame: bool, radii: bool, mean: bool) -> Kernel:
    gives = {"blame": blame, "radii": radii, "mean": mean}
    text = window_source(ELEMENTS[element], m, window, **gives, interpreted=interpreted())
    return load(text)["kernel"]


@lru_cache(maxsize=64)
def _compiled(name: str, element: str, wide: bool) -> Kernel:
    kind = ELEMENTS[element].wide() if wide else ELEMENTS[element]
    source: Any = {"mix": mix_source, "spreads": spreads_source}.get(name, sums_source)
    return load(source(kind))[name]
