"""The same rules by torch operations, for rows that live on an accelerator.

Semantics are those of the kernels; the bits of sums may differ. Columns are worked on in blocks, so
that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phocas import kernels
from phocas.kernels import BLOCK_COLUMNS, PLAIN_MEAN, Window
from phocas.rules import measures
from phocas.rules.algebra import (
    UNMIXED,
    Clean,
    Decision,
    Distances,
    Floats,
    Function,
    Plausible,
    Radii,
    Request,
    by_function,
    needs_double,
    wants_double,
)

BLOCK_VALUES = 1 << 24


class DeviceMatrix:
    """The m x d matrix as (m, n) tensors, one for each range of columns."""

    def __init__(self, tensors: list[torch.Tensor], rebuild: Callable[[list[Any]], Any]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.m = len(tensors[0])
        self.d = sum(tensor.shape[1] for tensor in tensors)
        self.rebuild = rebuild
        self._known: dict[Window, torch.Tensor] = {}

    def measure(self, request: Request | Plausible) -> Floats:
        """Answer a rule's question about whole rows."""
        if isinstance(request, Plausible):
            return self._implausible(request.window)
        pairs = isinstance(request, Distances)
        k = self.m if request.weights is None else len(request.weights)
        result = np.zeros((k, k) if pairs else k)
        for number in range(len(self.tensors)):
            for block in self._blocks(number, request.clean):
                result += _squares(_asked(block, request), pairs=pairs)
        return result + result.T if pairs else result

    def partial(self, request: Request | Radii | Plausible, start: int = 0) -> measures.Partial:
        """Return what these columns contribute, if they begin at column ``start`` of more."""
        asked = without_blocks(request)
        k = self.m if asked.weights is None else len(asked.weights)
        result = measures.Partial(k)
        for block in (block for tensor in self.tensors for block in _blocks(tensor)):

            def sums(begin: int, end: int, block: torch.Tensor = block) -> Floats:
                rows = _asked(block[:, begin:end], asked)
                granules = rows.reshape(k, -1, kernels.granule_columns(k))
                found = _squares(granules, pairs=isinstance(asked, Distances))
                return kernels.packed_sums(np.moveaxis(found, -1, 0))

            def values(begin: int, end: int, block: torch.Tensor = block) -> NDArray[Any]:
                return np.asarray(_asked(block[:, begin:end], asked).cpu().numpy())

            result += measures.of_columns(k, start, block.shape[1], sums, values)
            start += block.shape[1]
        return result

    def apply(self, decision: Decision, counts: NDArray[np.int64] | None, start: int = 0) -> Any:
        """Clean, mix and reduce; count what was dropped of each mixed row, wherever they begin."""
        del start
        if decision.function is not None:
            return self._by_function(decision, decision.function)
        if decision.clean is not None and decision.window.watched:
            if counts is not None:
                window = replace(decision.window, watched=False)
                self.apply(replace(decision, window=window), counts)
            return self.apply(Decision(decision.plain or UNMIXED, PLAIN_MEAN), None)
        answers = []
        spreads = self._spreads(decision) if decision.window.reach else None
        done = 0
        for number, tensor in enumerate(self.tensors):
            parts = []
            for block in self._blocks(number, decision.clean):
                end = done + block.shape[1]
                known = None if spreads is None else spreads[done:end]
                parts.append(self._reduce(block, decision, counts, known))
                done = end
            answers.append(torch.cat(parts) if parts else tensor.new_empty(0))
        return self.rebuild(answers)

    def _blocks(self, number: int, clean: Clean | None) -> Iterator[torch.Tensor]:
        """Yield the columns of a tensor, cleaned."""
        if clean is None:
            yield from _blocks(self.tensors[number])
            return
        window = clean.plausible.window
        spreads = self._own_spreads(window)
        done = sum(tensor.shape[1] for tensor in self.tensors[:number])
        out = torch.from_numpy(clean.out).to(self.tensors[number].device)
        for block in _blocks(self.tensors[number]):
            rows, known = _computed(block), spreads[done : done + block.shape[1]]
            found = nearest(rows, window)
            _, outside = _beyond(found, window.reach, known)
            cleaned = torch.where(outside, found.centre, rows)
            yield cleaned.masked_fill(out[:, None], torch.nan).to(block.dtype)
            done += block.shape[1]

    def _implausible(self, window: Window) -> Floats:
        """Return the share of each row that is beyond twice the reach of a window."""
        spreads = self._own_spreads(window)
        counts, done = np.zeros(self.m), 0
        for tensor in self.tensors:
            for block in _blocks(tensor):
                known = spreads[done : done + block.shape[1]]
                _, outside = _beyond(nearest(_computed(block), window), window.reach, known)
                counts += outside.sum(dim=1).cpu().numpy()
                done += block.shape[1]
        return counts / max(1, self.d)

    def _own_spreads(self, window: Window) -> torch.Tensor:
        """Return the spreads of the rows as they are, which are asked for again and again."""
        if window not in self._known:
            self._known[window] = self._spreads(Decision(UNMIXED, window))
        return self._known[window]

    def _by_function(self, decision: Decision, function: Function) -> Any:
        """Give all mixed rows to a function at once, as an array in host memory."""
        blocks = [
            _mixed(_computed(block), decision.mix.weights)
            for number in range(len(self.tensors))
            for block in self._blocks(number, decision.clean)
        ]
        rows = torch.cat(blocks, dim=1)
        values = torch.from_numpy(by_function(function, rows.numpy(force=True)))
        parts = torch.split(values, [tensor.shape[1] for tensor in self.tensors])
        return self.rebuild([part.to(like) for part, like in zip(parts, self.tensors, strict=True)])

    def _spreads(self, decision: Decision) -> torch.Tensor:
        """Return the spread of each column's block, which may lie in several tensors."""
        none = _computed(self.tensors[0][0, :0])
        radii = torch.cat(
            [
                none,
                *(
                    nearest(_mixed(_computed(block), decision.mix.weights), decision.window).radius
                    for number in range(len(self.tensors))
                    for block in self._blocks(number, decision.clean)
                ),
            ]
        )
        radii = torch.where(radii.isfinite(), radii, 0)
        sizes = torch.ones_like(radii)
        blocks, sizes = (
            torch.nn.functional.pad(each, (0, -self.d % BLOCK_COLUMNS)).view(-1, BLOCK_COLUMNS)
            for each in (radii, sizes)
        )
        # Around the largest, so that no square overflows.
        largest = blocks.amax(dim=1).clamp(min=torch.finfo(radii.dtype).tiny)
        squares = (blocks / largest[:, None]).square().sum(dim=1)
        spreads = (squares / sizes.sum(dim=1)).sqrt() * largest
        return spreads.repeat_interleave(BLOCK_COLUMNS)[: self.d]

    def _reduce(
        self,
        block: torch.Tensor,
        decision: Decision,
        counts: NDArray[np.int64] | None,
        spreads: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, window = decision.mix.weights, decision.window
        rows = _computed(block)
        if weights is not None and needs_double(weights) and rows.device.type != "mps":
            rows = rows.double()
        rows = _mixed(rows, weights)
        if weights is not None and len(weights) == 1:
            value, outside = rows[0], None
        else:
            value, outside = window_mean(rows, window, spreads)
        if window.watched:
            plain = None if decision.plain is None else decision.plain.weights
            value = window_mean(_mixed(_computed(block), plain), PLAIN_MEAN)[0]
        if counts is not None and outside is not None:
            counts += outside.sum(dim=1).cpu().numpy()
        return value.to(block.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """The values of a column nearest to its centre; distances are halved, so as not to overflow."""

    rows: torch.Tensor
    """All values; NaN is +inf."""
    centre: torch.Tensor
    kept: torch.Tensor
    """The distances of the values nearest to the centre."""
    chosen: torch.Tensor
    """These values."""

    @property
    def radius(self) -> torch.Tensor:
        """Return the distance to the farthest of them."""
        return self.kept.abs().amax(dim=0)


def window_mean(
    rows: torch.Tensor, window: Window, spreads: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mean of each column's window, and which values are outside it.

    ``spreads`` are those of the columns' blocks, halved, for a window with a reach.
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
        return _reaching(found, window.reach, spreads)
    value = y + 2 * (found.kept / len(found.kept)).sum(dim=0)
    value = value.clamp(found.chosen.amin(dim=0), found.chosen.amax(dim=0))
    return value, (found.rows / 2 - y / 2).abs() > radius


def _reaching(
    found: Nearest, reach: float, spreads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average with weights that fall beyond the reach."""
    distances = found.rows / 2 - found.centre / 2
    lengths, radius = distances.abs(), found.radius
    full, outside = _beyond(found, reach, spreads)
    weights = ((2 * full - lengths) / full).clamp(0, 1)
    weights = torch.where(lengths <= radius, 1, weights).masked_fill(outside, 0)
    share = weights / weights.sum(dim=0)
    value = found.centre + 2 * (share * distances.masked_fill(outside, 0)).sum(dim=0)
    low = found.rows.masked_fill(outside, torch.inf).amin(dim=0)
    high = found.rows.masked_fill(outside, -torch.inf).amax(dim=0)
    return value.clamp(low, high), outside


def _beyond(
    found: Nearest, reach: float, spreads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return up to where values count in full, and which are beyond twice as far."""
    lengths = (found.rows / 2 - found.centre / 2).abs()
    largest = torch.finfo(lengths.dtype).max
    full = (torch.maximum(found.radius, spreads) * reach).clamp(max=largest)
    return full, lengths > torch.maximum(found.radius, (2 * full).clamp(max=largest))


def _ordered(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with +inf for NaN, and their columns sorted."""
    rows = torch.where(rows.isnan(), torch.inf, rows)
    return rows, rows.sort(dim=0).values


def _centre(values: torch.Tensor) -> torch.Tensor:
    """Average around a member, as in the kernels: equal values are exact, nothing overflows."""
    size = len(values)
    return values[0] + (values / size - values[:1] / size).sum(dim=0)


def nearest(rows: torch.Tensor, window: Window) -> Nearest:
    """Find the values of each column that are nearest to the mean of its middle."""
    m = len(rows)
    rows, wires = _ordered(rows)
    wires = rows.sort(dim=0).values
    y = _centre(wires[window.trim : m - window.trim])
    b = window.drop or 0
    distances = wires / 2 - y / 2
    # The window has one value of each place modulo m - b, the nearest.
    kept, chosen = distances[: m - b].clone(), wires[: m - b].clone()
    for start in range(m - b, m, m - b):
        others = distances[start : start + m - b]
        n = len(others)
        nearer = kept[:n].abs() <= others.abs()
        kept[:n] = torch.where(nearer, kept[:n], others)
        chosen[:n] = torch.where(nearer, chosen[:n], wires[start : start + n])
    return Nearest(rows, y, kept, chosen)


def without_blocks(request: Request | Radii | Plausible) -> Request:
    """Refuse what goes by blocks that are cut: their spreads are exchanged in host memory only."""
    if isinstance(request, Radii | Plausible) or request.clean is not None:
        raise TypeError(
            "shards of a rule that goes by blocks of columns must be in host memory: move the"
            " tensor to the CPU first"
        )
    return request


def _asked(block: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the rows that a request is about, in the precision that it wants."""
    rows = _computed(block)
    rows = rows.double() if wants_double(request) and rows.device.type != "mps" else rows
    return _mixed(rows, request.weights) * request.scale


def _squares(rows: torch.Tensor, *, pairs: bool) -> NDArray[np.float64]:
    """Return the sums along the last axis of squared differences above the diagonal, or of squares.

    What is not a number is far away.
    """
    if not pairs:
        found = rows.square().sum(dim=-1)
    else:
        k = len(rows)
        found = rows.new_zeros(k, *rows.shape[:-1])
        for i in range(k - 1):
            found[i, i + 1 :] = (rows[i + 1 :] - rows[i]).square().sum(dim=-1)
    return np.asarray(found.nan_to_num(torch.inf, torch.inf).cpu().double().numpy())


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
