"""Servers that receive wrong values from honest workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phocas.detection.sampling import Sample

Floats = npt.NDArray[np.float64]

_ABSURD = 1e6  # values so many times the usual size are no gradients


class AbsurdServers:
    """The servers in whose columns the values of workers are absurd.

    A group of neighbouring values is absurd if the values are not finite or a million times the
    usual size, and if the worker sent no such values to at least half of the servers. The usual
    size is the median of a round, and the largest of these medians so far: gradients of workers
    that have learned their own data vanish, which does not make another worker's gradient absurd.

    Args:
        num_workers: m.
        bounds: the column ranges of the servers.
    """

    def __init__(self, num_workers: int, bounds: Sequence[tuple[int, int]]) -> None:
        self.bounds = bounds
        self.found = np.zeros((len(bounds), num_workers))
        """1 where a server has received absurd values of a worker, (servers, m)."""
        self.size = np.zeros(1)

    def observe(self, sizes: Floats, sample: Sample) -> None:
        """Observe the lengths of rows in the groups of a sample of the columns, (m, runs)."""
        if not self.bounds:
            return
        usual = np.partition(sizes.ravel(), sizes.size // 2)[sizes.size // 2]
        if not usual < math.inf:
            return
        np.maximum(self.size, usual, out=self.size)
        absurd = ~(sizes <= _ABSURD * self.size)
        if not absurd.any() or not self.size:
            return
        owners = sample.owners(self.bounds)
        found = np.zeros(self.found.shape, bool)
        for server in set(owners.tolist()) - {-1}:
            found[server] = absurd[:, owners == server].any(axis=1)
        found &= found.sum(axis=0) <= len(found) / 2
        self.found[found] = 1
