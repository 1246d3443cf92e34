"""Training without waiting: policies that say what to do with a row that comes alone.

A policy is a frozen value, ``buffered:buffers=15``, and knows no clock and no process; the event
engine here gives it rows in the order of a virtual clock.
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
