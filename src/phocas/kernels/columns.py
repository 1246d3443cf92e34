"""Generators of kernels that reduce each column of m values to the average of a window of them.

Median, trimmed mean, Phocas and MeaMed differ only in their :class:`Window`. One vector register
holds one row of as many columns as fit, and a sorting network runs across the registers. The
average follows in closed form, without a branch or an index:

    with u_1 <= ... <= u_m and y the centre, the m - b values nearest to y are u_{b+1..m-b} and, for
    k = 1..b, the nearer to y of u_k and u_{m-b+k}.

(y - u_k falls and u_{m-b+k} - y rises with k, so the choice changes at most once.) If b is more
than half of m, as in Bulyan, more than two values share an index modulo m - b. The window then has
one value of each index modulo m - b, the nearest to y.

A mean is computed as one value plus the mean of the scaled distances to it. So equal values give
exactly that value, no sum of finite values overflows, and rounding cannot move a mean of up to 4096
values beyond the smallest or largest of them. Scaled subnormal numbers have few digits, so a mean
near zero is clamped to those two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from phocas.kernels.emit import ColumnArguments, Element, Function, Vectors, module_text
from phocas.kernels.networks import prune, sorting_network
from phocas.kernels.target import Target


@dataclass(frozen=True, slots=True)
class Window:
    """Which of a column's m sorted values are averaged.

    The centre is the mean of the values that remain when ``trim`` values are cut from each end.
    With ``drop``, the centre is only the point that distances are measured from: all but the
    ``drop`` values farthest from it are averaged.

    With a ``cutoff``, dropped values that are plausible are included again. Their weight is 1 up to
    ``cutoff`` deviations from the centre and falls to 0 at twice that distance. The radius of a
    column is the distance from the centre to the farthest value that is not dropped. The deviation
    of a column is the larger of two numbers: its radius, and the root mean square of the radii of
    its block of columns.

    Args:
        trim: number of values cut from each end to find the centre.
        drop: number of values farthest from the centre that are dropped; None averages the trimmed
            values themselves.
        plain: whether everything is averaged, NaN included.
        cutoff: number of deviations up to which a dropped value counts in full; 0 for none.

    >>> Window(trim=2).kept(9), Window(trim=2, drop=2).kept(9)
    (5, 7)
    """

    trim: int = 0
    drop: int | None = None
    plain: bool = False
    cutoff: float = 0.0

    def kept(self, m: int) -> int:
        """Return how many of m values are averaged."""
        return m - 2 * self.trim if self.drop is None else m - self.drop


PLAIN_MEAN = Window(plain=True)


def wanted_wires(window: Window, m: int) -> dict[int, Hashable]:
    """Return the sorted positions that the window needs, with labels for :func:`prune`."""
    centre: dict[int, Hashable] = dict.fromkeys(range(window.trim, m - window.trim), "centre")
    if window.plain or window.drop is None:
        return centre
    wanted: dict[int, Hashable] = dict.fromkeys(range(window.drop, m - window.drop), "middle")
    wanted.update(centre)
    for k in range(window.drop):
        wanted[k] = ("below", k)
        wanted[m - window.drop + k] = ("above", k)
    return wanted


def scale_for(values: int) -> float:
    """Return a power of two by which ``values`` distances are scaled, so that no sum overflows."""
    return 0.5 ** math.ceil(math.log2(2 * values))


def plain_scale(values: int) -> float:
    """Return a power of two by which ``values`` values are scaled, so that no sum overflows."""
    return 0.5 ** math.ceil(math.log2(values))


def prefetch_bytes(m: int) -> int:
    """Return the prefetch distance in bytes; with more rows one iteration takes longer.

    Measured on AVX-512 with two threads and d = 1M: for 64 rows the time falls from 1.9 to 1.3
    times the mean, for 128 rows from 3.0 to 1.8. Hardware follows only about 32 streams by itself.
    """
    return 512 if m <= 64 else 128


def straight_module(target: Target, element: Element, m: int, window: Window) -> str:
    """Generate the LLVM IR of a kernel whose sorting network is straight-line code."""
    f = Function(target, element)
    args = f.named(ColumnArguments._fields)
    rows_table, out = args.pointer("rows"), args.pointer("out")
    with f.loop("%start", "%stop", f.lanes) as loop:
        addresses = [f.at(f.pointer(rows_table, i), loop.index) for i in range(m)]
        rows = [f.load(address) for address in addresses]
        if not window.plain:
            rows = [f.nan_to_inf(value) for value in rows]
        wires = run_network(f, rows, addresses, window)
        f.store(average(f, wires, window).value, f.at(out, loop.index))
    return module_text(f)


def run_network(f: Vectors, rows: list[str], addresses: list[str], window: Window) -> list[str]:
    """Emit code that sorts across the registers with a network.

    Between the steps of the network, the code prefetches the rows of the next iteration.
    """
    wires = list(rows)
    m = len(rows)
    network = () if window.plain else prune(sorting_network(m), wanted_wires(window, m))
    ahead = prefetch_bytes(m)
    every = max(1, len(network) // m)
    waiting = iter(addresses)
    for number, step in enumerate(network):
        if number % every == 0 and (address := next(waiting, None)):
            f.prefetch(address, ahead)
        a, b = wires[step.low], wires[step.high]
        if step.keep_low:
            wires[step.low] = f.low(a, b)
        if step.keep_high:
            wires[step.high] = f.high(a, b)
    return wires


@dataclass(frozen=True, slots=True)
class Averaged:
    """A window's mean, and the bounds that separate kept from dropped values.

    The fields are names of vectors in the generated code. A kept value is within [``low``,
    ``high``]. With a scale, the scaled distance of a kept value from ``-low`` is at most ``high``.
    Unused vectors are dead code, which the compiler removes.
    """

    value: str
    low: str = ""
    high: str = ""
    centre: str = ""
    total: str = ""
    """The sum of the scaled distances of the kept values from the centre."""
    beyond: tuple[str, ...] = ()
    """The scaled distances of the dropped values; empty if they are not known one by one."""


def outside(f: Vectors, value: str, low: str, high: str, scale: str | None) -> str:
    """Emit code for the mask of dropped values, by the bounds of :class:`Averaged`.

    NaN is dropped.
    """
    if scale is None:
        return f.either(f.compare("ult", value, low), f.compare("ugt", value, high))
    return f.compare("ugt", f.absolute(f.multiply_add(value, scale, low)), high)


def average(f: Vectors, wires: list[str], window: Window) -> Averaged:
    """Emit code that averages a window of sorted values."""
    m = len(wires)
    if window.plain:
        return Averaged(plain_mean(f, wires))
    centre = wires[window.trim : m - window.trim]
    y = _mean_from(f, centre[0], centre[1:])
    if not window.drop:
        result = held(f, y, lambda: _bounds(f, centre)) if len(centre) > 1 else y
        return Averaged(result, *_bounds(f, centre))
    b = window.drop
    scale = scale_for(m - b)
    scaled_y = f.mul(y, f.splat(scale))
    minus_y = f.negate(scaled_y)
    total = radius = ""
    choices, beyond = [], []
    for k in range(min(b, m - b)):
        # Scaled, so that a finite distance does not overflow to infinity.
        if 2 * b <= m:
            down = f.scaled_add(wires[k], -scale, scaled_y)
            up = f.scaled_add(wires[m - b + k], scale, minus_y)
            below = f.compare("ole", down, up)
            down = f.negate(down)
            nearer = f.select(below, down, up)
            beyond.append(f.select(below, up, down))
            choices.append((below, wires[k], wires[m - b + k]))
        else:
            nearer, value = _nearest_of(f, wires[k :: m - b], scale, minus_y)
            choices.append((f.everywhere, value, value))
        total = f.add(total, nearer) if total else nearer
        distance = f.absolute(nearer)
        radius = f.high(radius, distance) if radius else distance
    # The distances of the centre's values from their own mean add up to zero.
    for wire in wires[b : window.trim] + wires[m - window.trim : m - b]:
        distance = f.scaled_add(wire, scale, minus_y)
        total = f.add(total, distance)
        radius = f.high(radius, f.absolute(distance))
    for wire in centre:
        radius = f.high(radius, f.absolute(f.scaled_add(wire, scale, minus_y)))
    if window.cutoff:
        return Averaged("", minus_y, radius, y, total, tuple(beyond))
    result = f.fma(total, f.splat(1 / (scale * (m - b))), y)
    result = held(
        f, result, lambda: _bounds(f, wires[b : m - b] + [f.select(*each) for each in choices])
    )
    return Averaged(result, minus_y, radius)


def _nearest_of(f: Vectors, values: list[str], scale: float, minus_y: str) -> tuple[str, str]:
    """Emit code that finds the value nearest to y; return its scaled distance and the value."""
    chosen, nearest = values[0], f.scaled_add(values[0], scale, minus_y)
    for value in values[1:]:
        other = f.scaled_add(value, scale, minus_y)
        nearer = f.compare("ole", f.absolute(nearest), f.absolute(other))
        nearest, chosen = f.select(nearer, nearest, other), f.select(nearer, chosen, value)
    return nearest, chosen


def _bounds(f: Vectors, values: list[str]) -> tuple[str, str]:
    """Emit code for the smallest and the largest of some values."""
    low = high = values[0]
    for value in values[1:]:
        low, high = f.low(low, value), f.high(high, value)
    return low, high


def held(f: Vectors, mean: str, bounds: Callable[[], tuple[str, str]]) -> str:
    """Emit code that clamps a mean near zero to the smallest and largest averaged value.

    Away from zero the mean is between these two anyway. Clamping every mean took 10% more time at
    d = 118,282. Half precision has no number that scaling makes subnormal.
    """
    if f.element.name == "float16":
        return mean
    small = f.splat(2.0**-100 if f.scalar == "float" else 2.0**-900)
    near_zero = f.compare("olt", f.absolute(mean), small)
    return f.where_any(near_zero, lambda: within(f, mean, *bounds()), mean)


def within(f: Vectors, value: str, low: str, high: str) -> str:
    """Emit code that clamps a value to bounds; NaN stays NaN."""
    value = f.select(f.compare("ogt", low, value), low, value)
    return f.select(f.compare("olt", high, value), high, value)


def _mean_from(f: Vectors, pivot: str, others: list[str]) -> str:
    """Emit code for the mean of a pivot and other values, from their distances to the pivot."""
    if not others:
        return pivot
    size = 1 + len(others)
    scale = scale_for(size)
    minus = f.mul(pivot, f.splat(-scale))
    total = f.scaled_add(others[0], scale, minus)
    for value in others[1:]:
        total = f.add(total, f.scaled_add(value, scale, minus))
    return f.fma(total, f.splat(1 / (scale * size)), pivot)


def plain_mean(f: Vectors, values: list[str]) -> str:
    """Emit code for the mean of all values, NaN if one is NaN."""
    scale = plain_scale(len(values))
    total = f.mul(values[0], f.splat(scale))
    for value in values[1:]:
        total = f.scaled_add(value, scale, total)
    return f.mul(total, f.splat(1 / (scale * len(values))))
