"""Zeno++: Xie, Koyejo and Gupta, *Robust Fully Asynchronous SGD*, ICML 2020.

Its authors' program is github.com/xcgoner/iclr2020_zeno_async.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.settings import nonnegative
from phocas.specs import count, normalise


@dataclass(frozen=True)
class Zeno(Policy):
    """Zeno++: accept a row if it goes down by the server's own gradient, at that one's length.

    With v the gradient over ``validation`` samples that the server holds and g the row, the step is
    along h, taken if the second line holds:

        h = g |v| / |g|
        gamma <v, h> - rho |h|^2 >= -gamma epsilon

    with gamma the learning rate. With epsilon = 0 this asks for an angle: a cosine of at least
    rho / gamma. Survives any number of liars, since nobody else is asked.

    rho = 0.001, epsilon = 0 and a gradient that is renewed every 10 rows are those of the authors'
    program. It renews after rows that came, and each time over other samples, of a set that no
    worker has; here v is computed anew after ``every`` accepted rows, without which nothing has
    moved, over all of the server's samples, which are drawn once from the training samples.

    rho is weighed against gamma, so a smaller step asks for a better angle. The rows of stale
    parameters want a small one: see docs/asynchronous.md.

    Args:
        validation: how many samples the server holds.
        rho: how much is asked of the angle.
        epsilon: how far uphill a row may lead.
        every: after how many accepted rows the server's gradient is computed anew.

    >>> from phocas.engines.asynchronous import parse_policy
    >>> parse_policy("zeno++:validation=64")
    Zeno(validation=64, rho=0.001, epsilon=0.0, every=10)
    """

    name = "zeno"
    aliases = ("zeno++",)

    validation: int = 128
    rho: float = 0.001
    epsilon: float = 0.0
    every: int = 10

    def __post_init__(self) -> None:
        normalise(
            self,
            validation=count("zeno", "validation", self.validation, 1),
            rho=nonnegative("zeno", "rho", self.rho),
            epsilon=nonnegative("zeno", "epsilon", self.epsilon),
            every=count("zeno", "every", self.every, 1),
        )

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state without a validation gradient yet."""
        del m
        return ZenoState(self, rows.new_zeros(d), lr)


class ZenoState(State):
    """The server's own gradient, which an engine computes when it is :attr:`due`."""

    def __init__(self, policy: Zeno, own: torch.Tensor, lr: float) -> None:
        self.policy = policy
        self.own = own
        self.lr = lr
        # Of a shorter row so many squares may vanish that its length cannot be known: a liar would
        # be stretched to many times the length of the server's gradient.
        self.shortest = 1e3 * math.sqrt(len(own) * torch.finfo(own.dtype).tiny)
        self.accepted = torch.zeros((), dtype=torch.int64)
        self.computed = torch.full((), -1, dtype=torch.int64)

    @property
    def due(self) -> bool:
        """Whether ``own`` must be computed anew before the next row is judged."""
        stale = int(self.accepted - self.computed)
        return int(self.computed) < 0 or stale >= self.policy.every

    def renewed(self) -> None:
        """Say that ``own`` is that of the current parameters."""
        self.computed.copy_(self.accepted)

    def receive(self, arrival: Arrival) -> Verdict:
        """Judge a row by its angle to the server's own gradient."""
        who = (arrival.worker,)
        length = float(torch.linalg.vector_norm(arrival.row))
        own = float(torch.linalg.vector_norm(self.own))
        if not self.shortest < length < math.inf or not 0 < own < math.inf:
            return Verdict(None, who, accepted=False)
        scale = own / length
        score = self.lr * scale * float(self.own @ arrival.row) - self.policy.rho * own**2
        if not score >= -self.lr * self.policy.epsilon:
            return Verdict(None, who, accepted=False)
        self.accepted += 1
        return Verdict(arrival.row * scale, who)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the gradient and how old it is."""
        return {"own": self.own, "accepted": self.accepted, "computed": self.computed}
