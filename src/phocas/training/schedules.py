"""Learning rate schedules: a factor of the initial rate that depends only on the round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from phocas.settings import at_least
from phocas.specs import Spec, Table, checks, positive


class Schedule(Spec):
    """A function from the round (from 0) to a factor of the learning rate.

    It has no state, so a resumed run needs only its round.
    """

    def __call__(self, round: int) -> float:
        """Return the factor of a round."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate, as in the paper."""

    name: ClassVar[str] = "constant"

    def __call__(self, round: int) -> float:  # noqa: ARG002
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Step(Schedule):
    """A learning rate that is multiplied by ``factor`` every ``every`` rounds.

    Args:
        every: number of rounds between two changes.
        factor: the factor of each change.

    >>> [Step(every=2, factor=0.5)(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int = field(metadata=checks(at_least(1)))
    factor: float = field(default=0.1, metadata=checks(positive))

    name: ClassVar[str] = "step"

    def __call__(self, round: int) -> float:
        """Return factor ** (round // every)."""
        return float(self.factor ** (round // self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """A learning rate that falls to zero along half a cosine over ``rounds`` rounds.

    Args:
        rounds: the round from which on the rate is zero.

    >>> [round(Cosine(rounds=4)(t), 3) for t in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    rounds: int = field(metadata=checks(at_least(1)))

    name: ClassVar[str] = "cosine"

    def __call__(self, round: int) -> float:
        """Return (1 + cos(pi * round / rounds)) / 2."""
        return (1 + math.cos(math.pi * min(round / self.rounds, 1.0))) / 2


@dataclass(frozen=True)
class Inverse(Schedule):
    """A learning rate that is divided by (1 + round / scale) ** power.

    Args:
        scale: the round at which the base of the power is 2.
        power: the exponent.

    >>> [round(Inverse(scale=10)(t), 3) for t in (0, 10, 30)]
    [1.0, 0.5, 0.25]
    """

    scale: float = field(default=100.0, metadata=checks(positive))
    power: float = field(default=1.0, metadata=checks(positive))

    name: ClassVar[str] = "inverse"

    def __call__(self, round: int) -> float:
        """Return (1 + round / scale) ** -power."""
        return float((1 + round / self.scale) ** -self.power)


SCHEDULES: Table[Schedule] = Table("schedule", [Constant, Step, Cosine, Inverse], base=Schedule)
