"""Asynchronous training: policies that decide what to do with a single row.

A policy is a frozen value such as ``buffered:buffers=15``. It does not depend on clocks or
processes: the local engine delivers rows in the order of a virtual clock, the Ray engine in the
order of arrival.
"""

from phocas.engines.asynchronous.buffers import Buffered
from phocas.engines.asynchronous.kardam import Kardam
from phocas.engines.asynchronous.policies import POLICIES, AsynchronousMean, parse_policy
from phocas.engines.asynchronous.speeds import SPEEDS, Even, Lognormal, Slow
from phocas.engines.asynchronous.zeno import Zeno

__all__ = [
    "POLICIES",
    "SPEEDS",
    "AsynchronousMean",
    "Buffered",
    "Even",
    "Kardam",
    "Lognormal",
    "Slow",
    "Zeno",
    "parse_policy",
]
