"""The sizes of the batches of all ranks, for jobs whose ranks have batches of different sizes."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from phocas.integrations.wire import Wire, as_bytes

_BAD = 0.0


class BatchSizes:
    """The size of the batch of each rank, exchanged at the beginning of observed steps.

    In the first observed step every rank sends its size, or NaN if none was given. If no rank has a
    size, later steps exchange nothing. A size that is invalid, or that only some ranks have, raises
    the same error on every rank.

    Args:
        trusted: whether ranks are trusted to send their true sizes.
    """

    def __init__(self, *, trusted: bool) -> None:
        self.trusted = trusted
        self.used: bool | None = None if trusted else False
        """Whether ranks have given their sizes; None before the first observed step."""
        self._own = math.nan  # not given

    def give(self, samples: float) -> None:
        """Set the size of this rank's batch; an invalid size raises in :meth:`exchange`."""
        if not self.trusted:
            raise ValueError(
                "samples are for threat='faults': an adversary would tell a size that hides it"
            )
        if self.used is False:
            raise ValueError(
                "samples must be given from the first step on: call guard.samples(n) on every rank"
                " before the first backward pass"
            )
        try:
            number = float(samples)
        except (TypeError, ValueError):
            number = _BAD
        self._own = number if 0 < number < math.inf else _BAD

    def exchange(self, wire: Wire) -> NDArray[np.float64] | None:
        """Return the sizes of all ranks, or None if they are equal or not given.

        Call this on all ranks of an observed step.
        """
        if self.used is False:
            return None
        own = as_bytes(torch.tensor([self._own], dtype=torch.float64))
        told = wire.gather([own], [8] * wire.m)
        sizes = torch.cat([each.view(torch.float64) for each in told]).cpu().numpy()
        missing, wrong = np.isnan(sizes), sizes <= 0
        if missing.all() and not self.used:
            self.used = False
            return None
        if wrong.any():
            raise ValueError(
                f"samples must be finite numbers > 0: {_ranks(wire, wrong)} gave another value to"
                " guard.samples"
            )
        if missing.any():
            raise ValueError(
                f"samples must be given on every rank or on none: {_ranks(wire, missing)} gave"
                " none; call guard.samples(n) on every rank before the first backward pass"
            )
        self.used = True
        return None if (sizes == sizes[0]).all() else np.array(sizes)


def _ranks(wire: Wire, chosen: NDArray[np.bool_]) -> str:
    found = [wire.ranks[row] for row in np.flatnonzero(chosen)]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
