"""The table of policies, and plain asynchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phocas.engines.asynchronous.buffers import Buffered
from phocas.engines.asynchronous.kardam import Kardam
from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.engines.asynchronous.zeno import Zeno
from phocas.specs import Foreign, Table, loaded


@dataclass(frozen=True)
class AsynchronousMean(Policy):
    """Plain asynchronous SGD: step along every row. It tolerates no Byzantine worker.

    >>> parse_policy("mean")
    AsynchronousMean()
    """

    name = "mean"

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return the state of the policy before the first row."""
        del m, d, rows, lr
        return _Mean()


class _Mean(State):
    def receive(self, arrival: Arrival) -> Verdict:
        return Verdict(arrival.row, (arrival.worker,))


POLICIES: Table[Policy] = Table("policy", [Buffered, Zeno, Kardam, AsynchronousMean], base=Policy)


def parse_policy(text: str) -> Policy:
    """Parse a policy; ``buffers=10`` is short for ``buffered:buffers=10``.

    Args:
        text: the policy as on the command line.

    >>> parse_policy("buffers=10"), parse_policy("zeno:validation=64").validation
    (Buffered(buffers=10), 64)
    """
    policy: Policy = loaded(read_policy(text))
    return policy


def read_policy(text: str) -> Policy | Foreign:
    """Parse a policy without an import: a user-defined policy is returned as text."""
    short, told, _ = text.strip().partition("=")
    if short == "buffers":
        text = f"buffered:{text.strip()}" if told else "buffered"
    return POLICIES.read(text)
