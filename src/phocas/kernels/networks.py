"""Sorting networks, and their parts that are needed for some of the outputs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Comparator:
    """A comparator that puts the smaller of two wires on ``low`` and the larger on ``high``.

    If ``keep_low`` or ``keep_high`` is false, that output is not computed.
    """

    low: int
    high: int
    keep_low: bool = True
    keep_high: bool = True


# The smallest known networks for 10 and 16 wires (Knuth, The Art of Computer Programming, 5.3.4).
# Up to 8 wires, merging gives the smallest networks anyway.
_TEN = """
    4-9 3-8 2-7 1-6 0-5 1-4 6-9 0-3 5-8 0-2 3-6 7-9 0-1 2-4 5-7 8-9 1-2 4-6 7-8 3-5 2-5 6-8 1-3 4-7
    2-3 6-7 3-4 5-6 4-5
"""
_SIXTEEN = """
    0-13 1-12 2-15 3-14 4-8 5-6 7-11 9-10 0-5 1-7 2-9 3-4 6-13 8-14 10-15 11-12 0-1 2-3 4-5 6-8 7-9
    10-11 12-13 14-15 0-2 1-3 4-10 5-11 6-7 8-9 12-14 13-15 1-2 3-12 4-6 5-7 8-10 9-11 13-14 1-4 2-6
    5-8 7-10 9-13 11-14 2-4 3-6 9-12 11-13 3-5 6-8 7-9 10-12 3-4 5-6 7-8 9-10 11-12 6-7 8-9
"""
_SMALL = {
    size: tuple((int(low), int(high)) for low, high in (pair.split("-") for pair in text.split()))
    for size, text in ((10, _TEN), (16, _SIXTEEN))
}

Pairs: TypeAlias = list[tuple[int, int]]


@lru_cache(maxsize=64)
def sorting_network(size: int) -> tuple[tuple[int, int], ...]:
    """Return a network that sorts any number of wires, as (low, high) pairs.

    Halves are sorted, down to the small networks above, and merged by Batcher's odd-even merge. The
    order is depth first: one half is sorted before the other is touched, and the merge of even
    wires ends before that of odd wires begins. So blocks of 32 wires stay in 32 registers, which
    measured 2-3 times faster than layer by layer for 64 and 128 wires.

    >>> sorting_network(3)
    ((0, 1), (0, 2), (1, 2))
    >>> len(sorting_network(20))
    93
    """
    pairs, order = _sort(list(range(size)))
    # Merges of odd numbers of wires permute them, so wires are renamed to the order of the values.
    rank = {wire: position for position, wire in enumerate(order)}
    return tuple((rank[low], rank[high]) for low, high in pairs)


def _sort(wires: list[int]) -> tuple[Pairs, list[int]]:
    """Return a network, and the wires in the order of their values after it."""
    if len(wires) < 2:
        return [], wires
    if len(wires) in _SMALL:
        return [(wires[low], wires[high]) for low, high in _SMALL[len(wires)]], wires
    half = (len(wires) + 1) // 2
    left, lower = _sort(wires[:half])
    right, upper = _sort(wires[half:])
    merge, order = _merge(lower, upper)
    return left + right + merge, order


def _merge(a: list[int], b: list[int]) -> tuple[Pairs, list[int]]:
    if not a or not b:
        return [], a + b
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], a + b
    first, evens = _merge(a[::2], b[::2])
    second, odds = _merge(a[1::2], b[1::2])
    last = list(zip(odds, evens[1:], strict=False))
    paired = [evens[0], *itertools.chain.from_iterable(last)]
    return first + second + last, paired + odds[len(last) :] + evens[len(last) + 1 :]


def valley_network(size: int) -> tuple[tuple[int, int], ...]:
    """Return a network that sorts values that fall and then rise (the end of a bitonic sort).

    >>> valley_network(3)
    ((0, 2), (0, 1))
    """
    pairs = []
    step = 1 << (size - 1).bit_length()
    while step := step // 2:
        pairs += [(low, low + step) for low in range(size - step) if not low & step]
    return tuple(pairs)


def prune(
    pairs: tuple[tuple[int, int], ...], groups: Mapping[int, Hashable]
) -> tuple[Comparator, ...]:
    """Remove comparators, or halves of them, that the wanted outputs do not depend on.

    ``groups`` gives the group of each wanted wire. Wires of one group are wanted as a set, in any
    order, so a last comparator between two of them can be removed. A wire that is alone in its
    group is wanted exactly. A wire without a group is not wanted.

    >>> prune(sorting_network(3), {1: "median"})[-1]
    Comparator(low=1, high=2, keep_low=True, keep_high=False)
    >>> prune(sorting_network(4), {wire: "sum of all" for wire in range(4)})
    ()
    """
    wanted: dict[int, Hashable] = dict(groups)
    kept = []
    for low, high in reversed(pairs):
        group_low, group_high = wanted.get(low), wanted.get(high)
        if group_low is None and group_high is None:
            continue
        if group_low == group_high:
            continue
        kept.append(Comparator(low, high, group_low is not None, group_high is not None))
        # Each input now determines an output exactly, so it no longer belongs to a group.
        wanted[low] = ("wire", low)
        wanted[high] = ("wire", high)
    return tuple(reversed(kept))
