"""Where a model has been moving lately, by which one can tell who pulls the other way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phocas.rules.sampling import Sample

_SPAN = 16  # rounds: steps of fewer are mostly noise, and gradients of long ago point elsewhere


class Course:
    """The way of the parameters since they were where they were 16 to 32 rounds ago.

    It is made of the gradients of these rounds, and points as they do: against the step. With two
    marks of the vector that change places every 16 rounds it costs next to nothing.

    >>> from phocas.rules.sampling import Sample
    >>> vector = torch.zeros(4)
    >>> course = Course(vector)
    >>> _ = vector.sub_(torch.tensor([1.0, 0.0, -1.0, 0.5]))
    >>> course.sampled(Sample(start=0, runs=2, stride=2, width=2)).ravel()
    array([ 1. ,  0. , -1. ,  0.5])
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._older, self._newer = vector.clone(), vector.clone()

    def sampled(self, sample: Sample) -> npt.NDArray[np.float64]:
        """Return the way in the columns of a sample, (runs, width)."""
        now, then = (sample.take(vector[None])[0] for vector in (self._vector, self._older))
        return np.asarray(then - now)

    def advance(self, rounds_done: int) -> None:
        """Set a new mark if it is time."""
        if rounds_done % _SPAN == 0:
            self._older, self._newer = self._newer, self._older
            self._newer.copy_(self._vector)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep."""
        return {"older": self._older, "newer": self._newer}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._older.copy_(state["older"])
        self._newer.copy_(state["newer"])
