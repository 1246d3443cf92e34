"""The search of minimum-diameter averaging (MDA)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def smallest_diameter(squared: NDArray[np.float64], size: int) -> list[int]:
    """Return the set of ``size`` points with the smallest diameter, the first of several.

    The diameter is the largest distance within a set. It is one of all distances, so it is found by
    bisection over them. For a given diameter, a set is found by removing at most m - size points
    so that no pair of the remaining points is too far apart (a vertex cover).

    >>> points = np.array([0.0, 5.0, 1.0, 9.0, 2.0])
    >>> smallest_diameter((points[:, None] - points) ** 2, 3)
    [0, 2, 4]
    """
    m = len(squared)
    if size <= 1:
        return list(range(size))
    levels = np.unique(squared[np.triu_indices(m, 1)])
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _coverable(_far_pairs(squared, levels[middle]), (1 << m) - 1, m - size):
            high = middle
        else:
            low = middle + 1
    far = _far_pairs(squared, levels[low])
    return _first_set(far, m, size)


def _far_pairs(squared: NDArray[np.float64], limit: float) -> list[int]:
    """Return for each point the set of points that are too far away, as the bits of an integer."""
    far = squared > limit
    np.fill_diagonal(far, val=False)
    return [int("".join("1" if bit else "0" for bit in row[::-1]), 2) for row in far]


def _coverable(far: list[int], alive: int, budget: int) -> bool:
    """Tell whether removing at most ``budget`` points leaves no pair that is too far apart."""
    while True:
        worst, degree = -1, 0
        rest = alive
        while rest:
            point = (rest & -rest).bit_length() - 1
            rest &= rest - 1
            far_here = (far[point] & alive).bit_count()
            if far_here > degree:
                worst, degree = point, far_here
        if degree == 0:
            return True
        if budget <= 0:
            return False
        if degree > budget:
            # Either this point or all its partners must be removed, and the partners are too many.
            alive &= ~(1 << worst)
            budget -= 1
            continue
        if degree == 1:
            return _edges(far, alive) <= budget
        if _coverable(far, alive & ~(1 << worst), budget - 1):
            return True
        partners = far[worst] & alive
        alive &= ~partners
        budget -= degree


def _edges(far: list[int], alive: int) -> int:
    """Return the number of remaining pairs, if each point is in at most one."""
    return sum((far[i] & alive) != 0 for i in range(len(far)) if alive >> i & 1) // 2


def _first_set(far: list[int], m: int, size: int) -> list[int]:
    """Return the first set in lexicographic order: take each point that allows a solution."""
    chosen: list[int] = []
    alive = (1 << m) - 1
    for point in range(m):
        if not alive >> point & 1:
            continue
        # Taking this point removes all points that are too far from it.
        candidate = alive & ~far[point]
        removed = m - candidate.bit_count()
        if removed <= m - size and _coverable(far, candidate, m - size - removed):
            chosen.append(point)
            alive = candidate
            if len(chosen) == size:
                break
        else:
            alive &= ~(1 << point)
    return chosen
