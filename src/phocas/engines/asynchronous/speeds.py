"""Speeds of workers on a virtual clock, drawn from the seed, the worker and the row's number."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from phocas.seeds import Stream, generator
from phocas.settings import nonnegative
from phocas.specs import Spec, Table, checks, count, number

_AHEAD = 16  # steps drawn at once: drawing them one by one takes three times as long
LARGEST_DEVIATION = 20.0


def _deviation(owner: str, name: str, value: object) -> float:
    """Return the standard deviation of a logarithm; raise ValueError if times could overflow."""
    found = nonnegative(owner, name, value)
    if found > LARGEST_DEVIATION:
        raise ValueError(
            f"{owner} needs {name} <= {LARGEST_DEVIATION:g}, the standard deviation of a logarithm:"
            f" got {name}={found:g}; for workers that never answer write slow:workers=1,factor=inf"
        )
    return found


def _factor(owner: str, name: str, value: object) -> float:
    found = number(owner, name, value)
    if not found >= 1:
        raise ValueError(f"{owner} needs {name} >= 1: got {name}={found}")
    return found


@functools.lru_cache(1 << 16)
def _drawn(seed: int, worker: int, block: int) -> tuple[float, ...]:
    """Draw normal numbers for 16 steps of a worker, each from the random stream of the step."""
    steps = range(block * _AHEAD, (block + 1) * _AHEAD)
    streams = (generator(Stream.SPEED, seed, worker, step) for step in steps)
    return tuple(float(stream.standard_normal()) for stream in streams)


@functools.lru_cache(1 << 16)
def _own(seed: int, worker: int) -> float:
    """Draw the standard normal number z that determines the pace of a worker in all steps."""
    return float(generator(Stream.SPEED, seed, worker).standard_normal())


class Speeds(Spec):
    """The time of each gradient, in virtual seconds.

    The unit is the median time of a worker with :class:`Even` speed.
    """

    noise: float

    @abstractmethod
    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return the median time of a worker's gradients in virtual seconds.

        The pace is 1 for a worker with :class:`Even` speed, inf for a worker that never answers.
        """

    def seconds(self, worker: int, num_workers: int, seed: int, step: int) -> float:
        """Return the time of a gradient: the pace of the worker times exp(noise z)."""
        pace = self.pace(worker, num_workers, seed)
        if not self.noise or math.isinf(pace):
            return pace
        block, place = divmod(step, _AHEAD)
        return pace * math.exp(self.noise * _drawn(seed, worker, block)[place])

    def check(self, num_workers: int) -> None:
        """Raise ValueError if the speeds do not fit the number of workers."""


@dataclass(frozen=True)
class Even(Speeds):
    """All workers are equally fast.

    Args:
        noise: the standard deviation, over the gradients of a worker, of the logarithm of the time.

    >>> Even(noise=0).seconds(3, 20, seed=0, step=0)
    1.0
    """

    name = "even"

    noise: float = field(default=0.1, metadata=checks(_deviation))

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return 1, the pace of every worker."""
        del worker, num_workers, seed
        return 1.0


@dataclass(frozen=True)
class Lognormal(Speeds):
    """Each worker has its own pace, exp(sigma z).

    Args:
        sigma: the standard deviation, over workers, of the logarithm of the pace.
        noise: the standard deviation, over the gradients of a worker, of the logarithm of the time.

    >>> paces = [Lognormal(sigma=1).pace(worker, 20, seed=0) for worker in range(20)]
    >>> max(paces) > 5 * min(paces)
    True
    """

    name = "lognormal"

    sigma: float = field(metadata=checks(_deviation))
    noise: float = field(default=0.1, metadata=checks(_deviation))

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return exp(sigma z), with a standard normal z that is fixed for each worker."""
        del num_workers
        return math.exp(self.sigma * _own(seed, worker))


@dataclass(frozen=True)
class Slow(Speeds):
    """The last workers are slower than the others by a factor; with inf they never answer.

    Args:
        workers: the number of slow workers.
        factor: the time of a slow worker relative to the others.
        noise: the standard deviation, over the gradients of a worker, of the logarithm of the time.

    >>> slow = Slow(workers=4, factor=10, noise=0)
    >>> [slow.seconds(worker, 20, seed=0, step=0) for worker in (0, 15, 16, 19)]
    [1.0, 1.0, 10.0, 10.0]
    """

    name = "slow"

    workers: int = field(metadata=checks(count))
    factor: float = field(default=10.0, metadata=checks(_factor))
    noise: float = field(default=0.1, metadata=checks(_deviation))

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return the factor for the last workers, and 1 for the others."""
        del seed
        return self.factor if worker >= num_workers - self.workers else 1.0

    def check(self, num_workers: int) -> None:
        """Raise ValueError unless some worker answers."""
        if self.workers > num_workers or (self.workers == num_workers and math.isinf(self.factor)):
            raise ValueError(
                f"slow needs workers <= m, and a worker that answers: got workers={self.workers}"
                f" with m={num_workers}"
            )


SPEEDS: Table[Speeds] = Table("speed", [Even, Lognormal, Slow], base=Speeds)


class VirtualRounds:
    """The virtual clock of synchronous rounds.

    A round takes as long as its slowest worker, but not longer than the deadline. A late worker is
    missing from the round, and starts again with the next one.
    """

    def __init__(
        self, speeds: Speeds, num_workers: int, seed: int, steps: int, deadline: float | None
    ) -> None:
        speeds.check(num_workers)
        self.speeds = speeds
        self.num_workers = num_workers
        self.seed = seed
        self.steps = steps
        self.deadline = math.inf if deadline is None else deadline
        self.now = 0.0
        slowest = max(speeds.pace(worker, num_workers, seed) for worker in range(num_workers))
        if math.isinf(slowest) and deadline is None:
            raise ValueError(
                f"a round waits for all, and {speeds} has workers that never answer: set"
                " virtual_deadline, or asynchronous"
            )

    def play(self, round: int) -> tuple[int, ...]:
        """Advance the clock by a round, and return the late workers."""
        m = self.num_workers
        taken = np.array(
            [self.steps * self.speeds.seconds(i, m, self.seed, round) for i in range(m)]
        )
        self.now += min(float(taken.max()), self.deadline)
        return tuple(np.flatnonzero(taken > self.deadline).tolist())
