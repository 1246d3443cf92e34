"""Zeno++: Xie, Koyejo and Gupta, *Robust Fully Asynchronous SGD*, ICML 2020.

Its authors' program is github.com/xcgoner/iclr2020_zeno_async.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from phocas.engines.asynchronous.policy import Arrival, Policy, State, Verdict
from phocas.settings import at_least, nonnegative
from phocas.specs import checks


@dataclass(frozen=True)
class Zeno(Policy):
    """Zeno++: accept a row if it agrees with a gradient of the server.

    Let v be the gradient over ``validation`` samples of the server, g the row and gamma the
    learning rate. The row is scaled to the norm of v, and accepted if the second line holds:

        h = g |v| / |g|
        gamma <v, h> - rho |h|^2 >= -gamma epsilon

    With epsilon = 0, the cosine of the angle between g and v must be at least rho / gamma. Zeno++
    tolerates any number of Byzantine workers, because it compares no row with those of others.

    The defaults rho = 0.001, epsilon = 0 and ``every`` = 10 are those of the authors' program. That
    program computes v after 10 received rows, each time over other samples, from a set that no
    worker has. Here, v is computed after ``every`` accepted rows, because the parameters change
    only then. It is the gradient over all validation samples, which are drawn once from the
    training samples.

    The limit of the angle is rho / gamma: a smaller learning rate needs a better angle. Stale rows
    need a small learning rate: see docs/asynchronous.md.

    Args:
        validation: the number of samples of the server.
        rho: the weight of the norm; rho / gamma is the smallest accepted cosine.
        epsilon: the slack of the condition.
        every: the number of accepted rows after which v is computed again.

    >>> from phocas.engines.asynchronous import parse_policy
    >>> parse_policy("zeno++:validation=64")
    Zeno(validation=64, rho=0.001, epsilon=0.0, every=10)
    """

    name = "zeno"
    aliases = ("zeno++",)

    validation: int = field(default=128, metadata=checks(at_least(1)))
    rho: float = field(default=0.001, metadata=checks(nonnegative))
    epsilon: float = field(default=0.0, metadata=checks(nonnegative))
    every: int = field(default=10, metadata=checks(at_least(1)))

    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return a state without a validation gradient yet."""
        del m
        return ZenoState(self, rows.new_zeros(d), lr)


class ZenoState(State):
    """The server's validation gradient; an engine computes it again when :attr:`due` is True."""

    def __init__(self, policy: Zeno, own: torch.Tensor, lr: float) -> None:
        self.policy = policy
        self.own = own
        self.lr = lr
        # The squares of shorter rows underflow, so that their norm is wrong: a Byzantine row would
        # be scaled to many times the norm of the server's gradient.
        self.shortest = 1e3 * math.sqrt(len(own) * torch.finfo(own.dtype).tiny)
        self.accepted = torch.zeros((), dtype=torch.int64)
        self.computed = torch.full((), -1, dtype=torch.int64)

    @property
    def due(self) -> bool:
        """Whether ``own`` must be computed again before the next row."""
        stale = int(self.accepted - self.computed)
        return int(self.computed) < 0 or stale >= self.policy.every

    def renewed(self) -> None:
        """Record that ``own`` is the gradient at the current parameters."""
        self.computed.copy_(self.accepted)

    def receive(self, arrival: Arrival) -> Verdict:
        """Accept or reject a row by its angle to the server's gradient."""
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
        """Return the gradient and its age."""
        return {"own": self.own, "accepted": self.accepted, "computed": self.computed}
