"""The search behind minimum-diameter averaging."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def smallest_diameter(squared: NDArray[np.float64], size: int) -> list[int]:
    """Return the ``size`` points with the smallest largest distance, the first such set.

    The diameter is one of the distances, so it is found by bisection over them: a set of that
    diameter is a clique among the pairs that are near enough, or, put the other way, what is left
    after removing m - size points that touch every pair that is too far apart.

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
    """Return, for each point, the set of points that are too far from it, as bits."""
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
            # It or all its partners must go, and the partners are too many.
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
    """Return the number of pairs left, when no point is in two."""
    return sum((far[i] & alive) != 0 for i in range(len(far)) if alive >> i & 1) // 2


def _first_set(far: list[int], m: int, size: int) -> list[int]:
    """Return the lexicographically first clique: take each point that still allows one."""
    chosen: list[int] = []
    alive = (1 << m) - 1
    for point in range(m):
        if not alive >> point & 1:
            continue
        # With this point in, all that is too far from it is out.
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
