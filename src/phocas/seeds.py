"""Streams of random numbers: every purpose has its own, drawn from the one seed of a run.

What is random depends on the seed, the purpose and the place (the round, the worker), and on
nothing else, so that it comes out the same wherever a round runs and whenever a run is resumed.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What random numbers are drawn for; streams with one seed have nothing in common."""

    ATTACK = 0xA77AC
    RULE = 0x12E
    SPLIT = 0x5B117
    DROPOUT = 0xD0
    FAULT = 0xFA017
    SAMPLE = 0x5A3
    CLIENTS = 0xC11E
    SPEED = 0x59EED
    VALIDATION = 0x7A11D


def sequence(stream: Stream, *place: int) -> np.random.SeedSequence:
    """Return the seeds of a stream at a place: the seed of the run, the round, the worker, ..."""
    return np.random.SeedSequence((int(stream), *place))


def generator(stream: Stream, *place: int) -> np.random.Generator:
    """Return the generator of a stream at a place.

    >>> draws = [generator(Stream.RULE, 7, round).integers(100) for round in (3, 3, 4)]
    >>> bool(draws[0] == draws[1]), bool(draws[0] == draws[2])
    (True, False)
    """
    return np.random.default_rng(sequence(stream, *place))
