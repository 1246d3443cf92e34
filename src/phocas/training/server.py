"""The parameter server: s servers, each with a range of the columns."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from phocas.rules import parse_rule
from phocas.rules.sharded import ShardedAggregation
from phocas.settings import nonnegative
from phocas.sharding import shard_bounds
from phocas.specs import OnNonfinite, check_on_nonfinite, count
from phocas.training.optimizers import is_plain, parse_optimizer
from phocas.training.parameters import FlatParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from phocas.rules import Rule
    from phocas.rules.explanation import Explanation
    from phocas.training.optimizers import Optimizers

Action = Literal["applied", "skipped", "stopped"]


class NonfiniteError(ArithmeticError):
    """The aggregate is not finite, and the policy is to stop."""


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The aggregate of the rows of one round."""

    value: torch.Tensor
    """The aggregated vector."""
    dropped: npt.NDArray[np.float64]
    """For each worker, the share of its values that the rule dropped."""
    expected: float
    """The share of its values that an honest worker loses by chance."""
    by_server: npt.NDArray[np.float64]
    """The dropped shares within each server's columns, (s, m)."""

    @functools.cached_property
    def norm(self) -> float:
        """The Euclidean norm of the value."""
        return float(torch.linalg.vector_norm(self.value))

    @functools.cached_property
    def finite(self) -> bool:
        """Whether every value is finite, even if their norm overflows."""
        return math.isfinite(self.norm) or bool(self.value.isfinite().all())


@dataclass(frozen=True, slots=True)
class ParticipationShare:
    """The participation of one client."""

    client: int
    """Its number."""
    rounds: int
    """The rounds in which it took part."""
    dropped: float
    """The mean share of its values that the rule dropped in these."""


class ParticipationShares:
    """The dropped share of each client, over the rounds in which it took part.

    >>> seen = ParticipationShares(5)
    >>> seen.update(np.array([1, 4]), np.array([0.75, 0.25]))
    >>> seen.update(np.array([1, 2]), np.array([0.25, 0.0]))
    >>> seen.shares()[0]
    ParticipationShare(client=1, rounds=2, dropped=0.5)
    """

    def __init__(self, clients: int) -> None:
        self.sums = np.zeros((2, clients))
        """The sum of the dropped shares, and the number of rounds."""

    def update(
        self, participants: npt.NDArray[np.int64] | None, dropped: npt.NDArray[np.float64]
    ) -> None:
        """Add one round; None stands for all clients."""
        who = slice(None) if participants is None else participants
        sums, rounds = self.sums  # of one dimension each, where NumPy looks up faster
        sums[who] += dropped
        rounds[who] += 1

    def clear(self) -> None:
        """Discard all rounds."""
        self.sums[:] = 0

    def means(self) -> npt.NDArray[np.float64]:
        """Return the mean share of each client, NaN for clients that took no part."""
        with np.errstate(invalid="ignore"):
            found: npt.NDArray[np.float64] = self.sums[0] / self.sums[1]
        return found

    def shares(self) -> list[ParticipationShare]:
        """Return the clients that took part, the largest dropped share first."""
        means = self.means()
        there = np.flatnonzero(self.sums[1])
        order = there[np.argsort(-means[there], kind="stable")]
        rounds = self.sums[1]
        return [ParticipationShare(int(i), int(rounds[i]), float(means[i])) for i in order]


class ParameterServer:
    """A parameter server: collects the rows of m workers, aggregates them by a rule, and steps.

    The rows are one (m, d) matrix, whose columns are divided among s servers. Write into ``rows``
    or call :meth:`push`. A worker that did not push before :meth:`step` counts as a row of NaN,
    which the rule tolerates like any other wrong row. The result does not depend on the number of
    servers: column-wise rules treat each column alone, and measurements over all columns are summed
    over the servers before a rule uses them. ``reference`` is the vector that some rules need: the
    server keeps the previous aggregate there; set a gradient on trusted samples before each
    :meth:`aggregate`.

    Args:
        model: the model to train.
        num_workers: m, the number of rows.
        rule: the rule, or its text.
        num_servers: the number of servers; results do not depend on it.
        optimizer: a name in torch.optim, or a callable that returns an optimizer for parameters.
        lr: the learning rate.
        optimizer_options: further arguments of the optimizer.
        on_nonfinite: what to do with an aggregate that is not finite: skip, stop or apply.

    >>> import phocas
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> server = ParameterServer(model, num_workers=5, rule=phocas.Median(), lr=0.5)
    >>> for worker, value in enumerate([2.0, 2.0, 2.0, 1e30]):
    ...     server.push(worker, torch.tensor([value]))
    >>> server.step().finite, server.vector.tolist()  # worker 3 is Byzantine, worker 4 is late
    (True, [-1.0])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_workers: int,
        rule: Rule | str,
        num_servers: int = 1,
        optimizer: Optimizers | str = torch.optim.SGD,
        lr: float = 0.1,
        optimizer_options: Mapping[str, Any] | None = None,
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        self.parameters = FlatParameters(model)
        self.num_workers = count("ParameterServer", "num_workers", num_workers, minimum=1)
        self.num_servers = count("ParameterServer", "num_servers", num_servers, minimum=1)
        d = self.parameters.size
        if self.num_servers > d:
            raise ValueError(
                f"each server needs a column: got {num_servers} servers for d={d} parameters"
            )
        check_on_nonfinite(on_nonfinite)
        self.rule = parse_rule(rule) if isinstance(rule, str) else rule
        self.rule.check(self.num_workers)
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.bounds = [slice(*bounds) for bounds in shard_bounds(d, self.num_servers)]
        self.rows = self.parameters.rows(self.num_workers)
        kind = parse_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        self.make_optimizer = functools.partial(kind, lr=lr, **(optimizer_options or {}))
        self._lr = nonnegative("ParameterServer", "lr", lr)
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer; None for plain SGD, which is faster as x - lr g over all columns."""
        # To make an optimizer, torch imports its compiler, which takes 2 s. With bfloat16 it is
        # needed: torch rounds the last few values of a tensor differently from the others.
        if not is_plain(kind, optimizer_options or {}) or self.vector.dtype == torch.bfloat16:
            self.optimizer = self.make_optimizer(self.parameters.tensors)
            self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            self._gradient = torch.zeros_like(self.vector)
        self.reference: torch.Tensor | None = None
        """The reference vector of the next aggregation, if the rule needs one."""
        if self.rule.needs_reference == "previous":
            self.reference = torch.zeros_like(self.vector)
        self._arrived: set[int] | None = None
        self._prepared: dict[int, Callable[[], list[Explanation]] | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which prepares the reductions of its own rows."""
        return {**self.__dict__, "_prepared": {}}

    @property
    def vector(self) -> torch.Tensor:
        """The d parameters as one vector; the model's tensors are views of it."""
        return self.parameters.vector

    def pull(self) -> torch.Tensor:
        """Return a copy of the parameters."""
        return self.vector.clone()

    def push(self, worker: int, gradient: torch.Tensor | npt.NDArray[np.floating]) -> None:
        """Store the gradient of one worker."""
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"workers are 0 to {self.num_workers - 1}: got worker {worker}")
        values = torch.as_tensor(gradient)
        if values.shape != self.rows.shape[1:]:
            raise ValueError(
                f"worker {worker} must push d={self.rows.shape[1]} values:"
                f" got shape {tuple(values.shape)}"
            )
        self.rows[worker].copy_(values)
        self._arrived = (self._arrived or set()) | {worker}

    def aggregate(
        self, *, rng: np.random.Generator | None = None, by_server: bool = True
    ) -> Aggregate:
        """Aggregate the rows, and measure the share of each worker's values that is dropped.

        Args:
            rng: the generator for rules that draw at random.
            by_server: whether to measure the shares of each server, which takes longer.
        """
        if self._arrived is not None:
            for worker in set(range(self.num_workers)) - self._arrived:
                self.rows[worker].fill_(float("nan"))
        bounds = self.bounds if by_server else [slice(0, self.parameters.size)]
        if len(bounds) not in self._prepared:
            self._prepared[len(bounds)] = self._prepare(bounds)
        prepared = self._prepared[len(bounds)]
        if prepared is None:
            whole = self._explain(rng)
            shares = np.broadcast_to(whole.dropped, (self.num_servers, self.num_workers))
            return Aggregate(whole.value, whole.dropped, float(whole.expected), shares)
        parts = prepared()
        value = torch.cat([part.value for part in parts])  # the next round overwrites the parts
        widths = np.array([part.stop - part.start for part in bounds])
        shares = np.stack([part.dropped for part in parts])
        dropped = widths @ shares / widths.sum() if len(parts) > 1 else shares[0]
        shares = np.broadcast_to(shares, (self.num_servers, self.num_workers))
        return Aggregate(value, dropped, float(parts[0].expected), shares)

    def _explain(self, rng: np.random.Generator | None) -> Explanation:
        """Aggregate whole rows, beside the reference if the rule needs one."""
        if self.rule.needs_reference is None:
            return self.rule.explain(self.rows, rng=rng)
        if self.reference is None or self.reference.shape != self.vector.shape:
            got = "none" if self.reference is None else f"shape {tuple(self.reference.shape)}"
            raise ValueError(
                f"{self.rule} needs a reference of d={self.vector.numel()} values: set"
                f" ParameterServer.reference before aggregating, got {got}"
            )
        found = self.rule.referenced().explain([*self.rows, self.reference], rng=rng)
        return replace(found, dropped=found.dropped[:-1])

    def remember(self, aggregate: Aggregate) -> None:
        """Keep an aggregate as the reference of the next round, if the rule needs it."""
        if self.rule.needs_reference == "previous" and aggregate.finite:
            self.reference = aggregate.value.clone()

    def _prepare(self, bounds: list[slice]) -> Callable[[], list[Explanation]] | None:
        """Prepare the reduction of ranges of columns; return None if the rule needs whole rows."""
        m, rows = self.num_workers, self.rows
        split, on_host = len(bounds) > 1, rows.device.type == "cpu"
        # Blocks of columns that are cut between servers are supported in host memory only.
        if not self.rule.columnwise or (split and not on_host and self.rule.window(m).cutoff):
            return None
        make = functools.partial(ShardedAggregation, self.rule, m, whole_blocks=split and on_host)
        parts = [(rows[:, part], part.start) for part in bounds]
        if make().request is None:
            calls = [make().prepare(*part) for part in parts]
            return lambda: [explain() for explain in calls]

        def measured() -> list[Explanation]:
            aggregation = make()
            while aggregation.request is not None:
                aggregation.answer([aggregation.partial(*part) for part in parts])
            return [aggregation.explain(*part) for part in parts]

        return measured

    def verdict(self, aggregate: Aggregate) -> Action:
        """Return what the policy for aggregates that are not finite decides."""
        if self.on_nonfinite == "apply" or aggregate.finite:
            return "applied"
        return "skipped" if self.on_nonfinite == "skip" else "stopped"

    def update(self, aggregate: Aggregate, factor: float = 1.0) -> Action:
        """Take an optimizer step along an aggregate, unless the policy forbids it."""
        self._arrived = None if self._arrived is None else set()
        action = self.verdict(aggregate)
        if action != "applied":
            return action
        self.remember(aggregate)
        if self.optimizer is None:
            self.vector.add_(aggregate.value, alpha=-self._lr * factor)
            return "applied"
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor
        self._gradient.copy_(aggregate.value)
        views = self.parameters.views(self._gradient)
        for tensor, view in zip(self.parameters.tensors, views, strict=True):
            tensor.grad = view
        self.optimizer.step()
        return "applied"

    def optimizer_state(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state of each parameter, by its number."""
        if self.optimizer is None:
            return {}
        kept: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        return kept

    def load_optimizer_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the state of the optimizer."""
        if self.optimizer is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": dict(state), "param_groups": groups})

    def step(self, *, rng: np.random.Generator | None = None, factor: float = 1.0) -> Aggregate:
        """Aggregate and update; raise NonfiniteError if the policy is to stop."""
        aggregate = self.aggregate(rng=rng)
        if self.update(aggregate, factor) == "stopped":
            bad = int((~torch.isfinite(aggregate.value)).sum())
            raise NonfiniteError(
                f"{self.rule} gave {bad} values that are not finite, of {aggregate.value.numel()}:"
                " more values of a column were wrong or missing than it tolerates"
            )
        return aggregate
