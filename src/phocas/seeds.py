"""Random streams: every purpose has its own stream, derived from the seed of a run.

Random numbers depend only on the seed, the purpose, and a position such as (round, worker). So they
are the same wherever a round runs, and when a run is resumed.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The purposes of random numbers; streams with the same seed are independent."""

    ATTACK = 0xA77AC
    RULE = 0x12E
    SPLIT = 0x5B117
    DROPOUT = 0xD0
    FAULT = 0xFA017
    SAMPLE = 0x5A3
    CLIENTS = 0xC11E
    SPEED = 0x59EED
    VALIDATION = 0x7A11D
    TRUSTED = 0x7205
    AUGMENTATION = 0xA46


def sequence(stream: Stream, *position: int) -> np.random.SeedSequence:
    """Return the seed sequence of a stream at a position: seed of the run, round, worker, ..."""
    return np.random.SeedSequence((int(stream), *position))


def generator(stream: Stream, *position: int) -> np.random.Generator:
    """Return the generator of a stream at a position.

    >>> draws = [generator(Stream.RULE, 7, round).integers(100) for round in (3, 3, 4)]
    >>> bool(draws[0] == draws[1]), bool(draws[0] == draws[2])
    (True, False)
    """
    return np.random.default_rng(sequence(stream, *position))
