"""The direction in which the model has moved in the last rounds.

Detection compares the rows of workers with this direction. Honest gradients mostly agree with it,
and rows with flipped signs point the other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phocas.detection.sampling import Sample

_SPAN = 16  # rounds: steps of fewer are mostly noise, and gradients of long ago point elsewhere


class RecentDirection:
    """The difference of the parameters 16 to 32 rounds ago and now.

    The difference is the sum of the steps of these rounds, with the sign of the gradients. The
    class keeps two snapshots of the parameters, one of which is replaced every 16 rounds.

    >>> from phocas.detection.sampling import Sample
    >>> vector = torch.zeros(4)
    >>> direction = RecentDirection(vector)
    >>> _ = vector.sub_(torch.tensor([1.0, 0.0, -1.0, 0.5]))
    >>> direction.sampled(Sample(start=0, runs=2, stride=2, width=2)).ravel()
    array([ 1. ,  0. , -1. ,  0.5])
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._older, self._newer = vector.clone(), vector.clone()

    def sampled(self, sample: Sample) -> npt.NDArray[np.float64]:
        """Return the direction in the columns of a sample, (runs, width)."""
        now, then = (sample.take(vector[None])[0] for vector in (self._vector, self._older))
        return np.asarray(then - now)

    def advance(self, rounds_done: int) -> None:
        """Take a snapshot of the parameters every 16 rounds."""
        if rounds_done % _SPAN == 0:
            self._older, self._newer = self._newer, self._older
            self._newer.copy_(self._vector)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint."""
        return {"older": self._older, "newer": self._newer}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self._older.copy_(state["older"])
        self._newer.copy_(state["newer"])
