"""The outer step of DiLoCo and local SGD, by any rule."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phocas.detection.own_past import WorkerData
from phocas.detection.rare_features import by_coordinates
from phocas.integrations.clients import POLICIES
from phocas.integrations.joining import check_dtypes
from phocas.integrations.outer.compression import COMPRESSIONS, Compression, Row, TopK
from phocas.integrations.outer.group import GroupExchange
from phocas.integrations.outer.history import PeerHistory
from phocas.integrations.outer.messages import Update, digest, read_update, write_update
from phocas.integrations.state_bytes import read_state, write_state
from phocas.integrations.wire import local_values
from phocas.rules import Rule, parse_rule
from phocas.rules.weighting import check_cap
from phocas.seeds import Stream, generator
from phocas.specs import count, one_of, positive

Exchange: TypeAlias = Callable[[bytes], Mapping[int, bytes]]
"""A function that sends this peer's message and returns the messages of all peers, by number."""
MakeOptimizer: TypeAlias = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
"""A function of the parameters that returns the outer optimizer."""

DILOCO: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper on DiLoCo."""


@dataclass(frozen=True, slots=True, eq=False)
class OuterResult:
    """The result of one outer step.

    Attributes:
        step: the number of the outer step, from 1.
        peers: the peers that took part.
        rejected: for each peer without a usable update, the reason.
        shares: for each peer with a row, the share of its values that the rule dropped.
        apart: the peers that started from other parameters than most.
        applied: whether the outer optimizer took the step.
        reason: why it did not; empty if it did.
        length: the norm of the aggregate.

    >>> result = OuterResult(step=3, peers=(0, 1, 2), rejected={1: "its values must be finite"})
    >>> result.metrics()["outer/rejected"]
    1.0
    """

    step: int
    peers: tuple[int, ...]
    rejected: dict[int, str] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)
    apart: tuple[int, ...] = ()
    applied: bool = False
    reason: str = ""
    length: float = math.nan

    def metrics(self) -> dict[str, float]:
        """Return numbers for a tracker, by name."""
        return {
            "outer/step": float(self.step),
            "outer/peers": float(len(self.peers)),
            "outer/rejected": float(len(self.rejected)),
            "outer/apart": float(len(self.apart)),
            "outer/applied": float(self.applied),
            "outer/length": self.length,
            **{f"outer/dropped/{peer}": share for peer, share in self.shares.items()},
        }


class OuterStep:
    """A robust outer step: peers train alone, and every so many steps a rule joins their updates.

    Call :meth:`step` after each step of the inner optimizer, which keeps its state. In every
    ``every``-th call each peer sends its pseudo-gradient, the parameters at the last outer step
    minus the parameters now. Each peer receives all of them, applies the rule and takes a step of
    the outer optimizer. So no peer depends on what another one computes. Each peer needs memory for
    one row of every peer.

    A row is rejected, and its sender is in :attr:`OuterResult.rejected`, if it does not decode to
    the values of the model, is not finite, or is for another outer step. If too few other rows are
    left for the rule, rejected rows count as Byzantine ones.

    Args:
        model: the model, with the same parameters on all peers. Frozen parameters and buffers are
            not exchanged. Of a sharded model (DTensor) the peers are the ranks that hold the same
            shard in each replica, and the rule must reduce each column on its own.
        rule: the rule, or its text; row i is the i-th peer that takes part.
        every: the number of inner steps between outer steps.
        group: the process group of the peers, one rank for each; that of all ranks by default.
        exchange: a function that sends and receives messages, instead of a process group: the
            peers that it returns may be others in each step.
        optimizer: makes the outer optimizer of parameters; SGD with learning rate 0.7 and Nesterov
            momentum 0.9 by default. Plain averaging of models is ``partial(SGD, lr=1.0)``.
        compress: ``float32``, ``int8`` or ``top-k:share=0.02``. What compression leaves out is
            added to the next update of this peer (error feedback).
        weight: the weight of this peer, such as its number of samples; others cannot check it.
        max_share: the largest share of all weight that one peer may have; None ignores weights.
        on_too_few: what to do if too few peers take part for the rule: ``stop`` raises
            RuntimeError, ``skip`` lets all peers train until the next outer step.
        data: whether the data of honest peers ``differ`` or are ``alike``, for detection: see
            :class:`phocas.detection.Detector`.
        seed: the seed of rules that draw at random; the same on all peers.

    >>> model = torch.nn.Linear(2, 1)
    >>> alike = lambda message: {peer: message for peer in range(3)}  # three peers that agree
    >>> outer = OuterStep(model, "median", every=2, exchange=alike)
    >>> outer.step() is None, outer.step().applied
    (True, True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rule: Rule | str,
        *,
        every: int,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
        optimizer: MakeOptimizer = DILOCO,
        compress: Compression | str = "float32",
        weight: float = 1.0,
        max_share: float | None = None,
        on_too_few: str = "stop",
        data: WorkerData = "differ",
        seed: int = 0,
    ) -> None:
        self.rule = parse_rule(rule) if isinstance(rule, str) else rule
        self.every = count("OuterStep", "every", every, minimum=1)
        self.compression = COMPRESSIONS.of(compress, "OuterStep")
        self.weight = positive("OuterStep", "weight", weight)
        self.max_share = max_share
        self.on_too_few = one_of("OuterStep", "on_too_few", on_too_few, POLICIES)
        self.seed = count("OuterStep", "seed", seed)
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self._check()
        self.base = [_master(parameter) for parameter in self.parameters]
        """The parameters at the last outer step, the same on all peers."""
        self.d = sum(tensor.numel() for tensor in self.base)
        self.compression.size(self.d)
        self.optimizer = optimizer(self.base)
        self.steps = 0
        """How many outer steps all peers have taken."""
        self.inner_steps = 0
        """How many inner steps this peer has taken since the last outer step."""
        self.previous = torch.zeros(self.d if self.rule.needs_reference else 0)
        """The last aggregate, for a rule that needs it."""
        self.residual = torch.zeros(self.d if str(self.compression) != "float32" else 0)
        """The part of the last updates that compression has left out."""
        self.history = PeerHistory(self.rule, self.d, data, self.seed)
        self.exchange = exchange
        if exchange is None:
            self.regroup(group)
        elif group is not None:
            raise TypeError("give group or exchange: got both")

    def _check(self) -> None:
        """Raise an error for a rule or a model that cannot work."""
        if not self.parameters:
            raise ValueError("the model must have parameters to train: it has none")
        check_dtypes(parameter.dtype for parameter in self.parameters)
        if self.rule.needs_reference == "trusted":
            raise ValueError(
                f"{self.rule} needs an update on trusted samples, and no peer is trusted: choose a"
                " rule without one"
            )
        if not self.rule.columnwise and any(isinstance(p, DTensor) for p in self.parameters):
            raise ValueError(
                f"{self.rule} measures whole updates, and peers hold shards: choose a rule that"
                " reduces each column on its own (heraclius, trimmed-mean)"
            )
        if self.max_share is not None:
            check_cap(self.rule, self.max_share)

    def _check_peers(self, m: int) -> None:
        """Raise ValueError if m peers are too few for the rule, TypeError if no number would do."""
        self.rule.check(m)
        if isinstance(self.compression, TopK) and by_coordinates(self.rule, m):
            raise TypeError(
                f"{self.rule} drops values that few peers send, which are most values of"
                f" {self.compression}: choose a rule that weighs whole rows (geometric-median,"
                " nnm|mean, multi-krum) or heraclius alone"
            )

    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Continue with the peers of another process group; call it on all peers of that group.

        Peers with another state than most, such as a new one, receive the state of most peers: the
        parameters, the outer optimizer's state and the number of outer steps. The state is checked
        against the digest that most peers have sent, so the peer that sends it need not be
        trusted. Raises ValueError if no state is that of more than half of the peers, or if the
        rule needs more peers.
        """
        wanted = group or dist.group.WORLD
        if wanted is None:
            raise ValueError("torch.distributed must be initialised, or give exchange=")
        self._check_peers(dist.get_world_size(wanted))
        settings = {
            "rule": str(self.rule),
            "every": self.every,
            "compress": str(self.compression),
            "max_share": self.max_share,
            "seed": self.seed,
            "parameters": self.d,
        }
        members = GroupExchange(wanted, self.parameters[0].device, settings)
        own = write_state(self._shared())
        adopted = members.majority(own)
        if adopted != own:
            self._load_shared(read_state(adopted))
            self._to_model()
            self.residual.zero_()
        self.exchange, self.inner_steps = members, 0

    def step(self) -> OuterResult | None:
        """Count an inner step; if an outer step is due, take it and return its result."""
        self.inner_steps += 1
        return self.sync() if self.inner_steps >= self.every else None

    @torch.no_grad()
    def sync(self) -> OuterResult:
        """Take an outer step now; call it on all peers."""
        assert self.exchange is not None
        started = digest(self.base)
        row = self._pseudo_gradient()
        message = write_update(
            self.compression, Update(self.steps, self.weight, started, row.numpy())
        )
        try:
            messages = self.exchange(message)
        except RuntimeError as error:
            raise RuntimeError(
                f"outer step {self.steps + 1}: {error}; parameters are as before: make a group of"
                " the peers that are left, and call regroup(group) on them"
            ) from error
        result, value = self._aggregate(messages, started)
        if value is None:
            if self.on_too_few == "stop":
                raise RuntimeError(f"outer step {result.step}: {result.reason}")
            self.inner_steps = 0
            return result
        if result.applied:
            self._apply(value)
            self._keep_residual(row, message)
        self.steps += 1
        self.inner_steps = 0
        self._to_model()
        return result

    def _pseudo_gradient(self) -> torch.Tensor:
        """Return the update of this peer as one row in host memory."""
        parts = [
            (base - local_values(parameter).to(base.dtype)).float().flatten().cpu()
            for base, parameter in zip(self.base, self.parameters, strict=True)
        ]
        row = torch.cat(parts)
        return row + self.residual if len(self.residual) else row

    def _aggregate(
        self, messages: Mapping[int, bytes], started: bytes
    ) -> tuple[OuterResult, torch.Tensor | None]:
        """Return the aggregate of all messages; None if too few peers take part."""
        peers = tuple(sorted(messages))
        updates: dict[int, Update] = {}
        rejected: dict[int, str] = {}
        for peer in peers:
            try:
                updates[peer] = read_update(messages[peer], self.compression, self.d, self.steps)
            except ValueError as error:
                rejected[peer] = str(error)
        apart = _apart(updates, started)
        fails = partial(OuterResult, self.steps + 1, peers, rejected, apart=apart)
        rule, used = None, peers
        for used in (tuple(updates), peers):  # rejected rows count as Byzantine ones if need be
            try:
                rule = self._rule_of(used, updates)
            except ValueError as error:
                reason = f"{len(updates)} of {len(peers)} peers have a usable update: {error}"
            else:
                break
        if rule is None or not updates:
            return fails(reason=reason), None
        missing = np.full(self.d, np.nan, np.float32)
        rows = {peer: updates[peer].row if peer in updates else missing for peer in peers}
        self.history.observe(rows)
        found = rule.explain(
            [torch.from_numpy(rows[peer]) for peer in used],
            rng=generator(Stream.RULE, self.seed, self.steps),
            reference=self.previous if self.rule.needs_reference else None,
        )
        shares = dict(zip(used, found.dropped.tolist(), strict=True))
        length = float(torch.linalg.vector_norm(found.value, dtype=torch.float64))
        finite = math.isfinite(length)
        reason = "" if finite else f"{self.rule} gave values that are not finite"
        result = fails(shares=shares, applied=finite, reason=reason, length=length)
        return result, found.value

    def _rule_of(self, peers: Sequence[int], updates: Mapping[int, Update]) -> Rule:
        """Return the rule for the peers that take part; raise ValueError if they are too few."""
        m = len(peers)
        self._check_peers(m)
        if self.max_share is None:
            return self.rule
        weights = [updates[peer].weight if peer in updates else 0.0 for peer in peers]
        weighted = self.rule.weighted(weights, max(self.max_share, 1 / m))
        weighted.check(m)
        return weighted

    def _apply(self, value: torch.Tensor) -> None:
        begin = 0
        for tensor in self.base:
            part = value[begin : begin + tensor.numel()].reshape(tensor.shape)
            tensor.grad = part.to(tensor.device, tensor.dtype)
            begin += tensor.numel()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if len(self.previous):
            self.previous = value.clone()

    def _keep_residual(self, row: torch.Tensor, message: bytes) -> None:
        """Store what compression has left out; nothing if the row cannot be sent."""
        if not len(self.residual):
            return
        body = message[len(message) - self.compression.size(self.d) :]
        sent: Row = self.compression.decode(body, self.d)
        left = row - torch.from_numpy(sent)
        self.residual = left if bool(left.isfinite().all()) else torch.zeros_like(left)

    @torch.no_grad()
    def _to_model(self) -> None:
        for parameter, base in zip(self.parameters, self.base, strict=True):
            local_values(parameter).copy_(base)

    def flagged(self) -> tuple[int, ...]:
        """Return the peers that detection has flagged; see :class:`phocas.detection.Detector`.

        With ``data="differ"`` these are peers that no longer act as in their own past, of at least
        32 outer steps. With ``data="alike"`` they are peers that differ from the others beyond
        chance.
        """
        return self.history.flagged()

    def _shared(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "base": [tensor.detach() for tensor in self.base],
            "optimizer": self.optimizer.state_dict(),
            "previous": self.previous,
        }

    @torch.no_grad()
    def _load_shared(self, state: Mapping[str, Any]) -> None:
        shapes = [tensor.shape for tensor in self.base]
        got = [tensor.shape for tensor in state["base"]]
        if got != shapes:
            raise ValueError(
                f"the state must be of this model, with {len(shapes)} parameters: got {len(got)}"
                " of other shapes"
            )
        for tensor, value in zip(self.base, state["base"], strict=True):
            tensor.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.previous = int(state["steps"]), state["previous"].clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this peer for a checkpoint, beside that of model and optimizer."""
        return {
            "shared": self._shared(),
            "inner_steps": self.inner_steps,
            "residual": self.residual,
            "history": self.history.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; the model loads its own."""
        wanted = {"shared", "inner_steps", "residual", "history"}
        if not wanted <= state_dict.keys():
            lacks = ", ".join(sorted(wanted - state_dict.keys()))
            raise ValueError(f"the state of an OuterStep must have {lacks}: it does not")
        self._load_shared(state_dict["shared"])
        self.inner_steps = int(state_dict["inner_steps"])
        self.residual = state_dict["residual"].clone()
        self.history.load_state(state_dict["history"])


def _master(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter in at least single precision, for small outer steps."""
    local = local_values(parameter)
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    return local.to(wide, copy=True).requires_grad_()


def _apart(updates: Mapping[int, Update], own: bytes) -> tuple[int, ...]:
    """Return the peers that started from other parameters than most; warn if this peer did."""
    counts = Counter(update.base for update in updates.values())
    common, times = counts.most_common(1)[0] if counts else (own, 1)
    if 2 * times <= len(updates):
        common = own
    if common != own:
        warnings.warn(
            "the parameters of this peer at the last outer step are not those of most peers: one"
            " of its messages was lost or changed; call regroup(group) on all peers to mend it",
            RuntimeWarning,
            stacklevel=4,
        )
    return tuple(peer for peer, update in updates.items() if update.base != common)
