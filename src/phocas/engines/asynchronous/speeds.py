"""How long workers take on a virtual clock, drawn by the seed, the worker and its row's number."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from phocas.seeds import Stream, generator
from phocas.settings import nonnegative
from phocas.specs import Spec, Table, count, normalise, number

_AHEAD = 16  # steps drawn at once: one by one among other work, each takes three times as long
LARGEST_SPREAD = 20.0


def _spread(owner: str, name: str, value: object) -> float:
    """Return the spread of a logarithm, if no worker can be so slow that it is not a number."""
    found = nonnegative(owner, name, value)
    if found > LARGEST_SPREAD:
        raise ValueError(
            f"{owner} needs {name} <= {LARGEST_SPREAD:g}, the spread of a logarithm: got"
            f" {name}={found:g}; for workers who never answer write slow:workers=1,factor=inf"
        )
    return found


@functools.lru_cache(1 << 16)
def _drawn(seed: int, worker: int, block: int) -> tuple[float, ...]:
    """Draw a worker's normal numbers for some steps, each of the stream of its own step."""
    steps = range(block * _AHEAD, (block + 1) * _AHEAD)
    streams = (generator(Stream.SPEED, seed, worker, step) for step in steps)
    return tuple(float(stream.standard_normal()) for stream in streams)


@functools.lru_cache(1 << 16)
def _own(seed: int, worker: int) -> float:
    """Draw a worker's normal number for all of its steps."""
    return float(generator(Stream.SPEED, seed, worker).standard_normal())


class Speeds(Spec):
    """The virtual seconds of each gradient; 1 is what an even worker takes in the middle."""

    noise: float

    @abstractmethod
    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return how many times longer than an even one this worker takes; inf is forever."""

    def seconds(self, worker: int, num_workers: int, seed: int, step: int) -> float:
        """Return how long a worker's gradient takes, its pace times exp(noise z)."""
        pace = self.pace(worker, num_workers, seed)
        if not self.noise or math.isinf(pace):
            return pace
        block, place = divmod(step, _AHEAD)
        return pace * math.exp(self.noise * _drawn(seed, worker, block)[place])

    def check(self, num_workers: int) -> None:
        """Raise if there cannot be so many workers."""


@dataclass(frozen=True)
class Even(Speeds):
    """All workers are equally fast.

    Args:
        noise: the spread of the logarithm from gradient to gradient.

    >>> Even(noise=0).seconds(3, 20, seed=0, step=0)
    1.0
    """

    name = "even"

    noise: float = 0.1

    def __post_init__(self) -> None:
        normalise(self, noise=_spread("even", "noise", self.noise))

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return 1."""
        del worker, num_workers, seed
        return 1.0


@dataclass(frozen=True)
class Lognormal(Speeds):
    """Each worker has a pace of its own, exp(sigma z).

    Args:
        sigma: the spread of the logarithm from worker to worker.
        noise: that from gradient to gradient.

    >>> paces = [Lognormal(sigma=1).pace(worker, 20, seed=0) for worker in range(20)]
    >>> max(paces) > 5 * min(paces)
    True
    """

    name = "lognormal"

    sigma: float
    noise: float = 0.1

    def __post_init__(self) -> None:
        normalise(
            self,
            sigma=_spread("lognormal", "sigma", self.sigma),
            noise=_spread("lognormal", "noise", self.noise),
        )

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return exp(sigma z), with the worker's own z."""
        del num_workers
        return math.exp(self.sigma * _own(seed, worker))


@dataclass(frozen=True)
class Slow(Speeds):
    """The last workers are so many times slower than the others; a factor of inf is for ever.

    Args:
        workers: how many are slow.
        factor: how many times slower.
        noise: the spread of the logarithm from gradient to gradient.

    >>> slow = Slow(workers=4, factor=10, noise=0)
    >>> [slow.seconds(worker, 20, seed=0, step=0) for worker in (0, 15, 16, 19)]
    [1.0, 1.0, 10.0, 10.0]
    """

    name = "slow"

    workers: int
    factor: float = 10.0
    noise: float = 0.1

    def __post_init__(self) -> None:
        factor = number("slow", "factor", self.factor)
        if not factor >= 1:
            raise ValueError(f"slow needs factor >= 1: got factor={factor}")
        normalise(
            self,
            workers=count("slow", "workers", self.workers),
            factor=factor,
            noise=_spread("slow", "noise", self.noise),
        )

    def pace(self, worker: int, num_workers: int, seed: int) -> float:
        """Return the factor for the last workers, and 1 for the others."""
        del seed
        return self.factor if worker >= num_workers - self.workers else 1.0

    def check(self, num_workers: int) -> None:
        """Ask that somebody answers."""
        if self.workers > num_workers or (self.workers == num_workers and math.isinf(self.factor)):
            raise ValueError(
                f"slow needs workers <= m, and somebody who answers: got workers={self.workers}"
                f" with m={num_workers}"
            )


SPEEDS: Table[Speeds] = Table("speed", [Even, Lognormal, Slow], base=Speeds)


class VirtualRounds:
    """The virtual clock of synchronous rounds: each takes as long as the slowest, or the deadline.

    Who is late is missing, and begins anew with the next round.
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
        """Let a round pass, and return who was late."""
        m = self.num_workers
        taken = np.array(
            [self.steps * self.speeds.seconds(i, m, self.seed, round) for i in range(m)]
        )
        self.now += min(float(taken.max()), self.deadline)
        return tuple(np.flatnonzero(taken > self.deadline).tolist())
