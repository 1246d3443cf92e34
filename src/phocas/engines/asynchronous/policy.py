"""The base class of policies, which decide on single rows computed at older parameters.

The staleness of a row is the number of steps since the worker got its parameters. The server
computes the staleness itself and does not use claims of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from phocas.rules import Mean, Rule
from phocas.specs import Spec


@dataclass(frozen=True, eq=False)
class Arrival:
    """A row that arrived at the server."""

    worker: int
    """The worker that sent it."""
    row: torch.Tensor
    """Its values."""
    staleness: int
    """The number of steps since the server gave the worker its parameters."""
    given: torch.Tensor | None
    """The parameters that the worker was given, if the policy needs them."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """The decision of a policy: a step along a vector or the buffers' aggregate, or no step."""

    along: torch.Tensor | None
    """The vector; None if the rule aggregates the buffers, or if the row was rejected."""
    workers: tuple[int, ...]
    """The workers whose rows are decided on."""
    rows: tuple[int, ...] = ()
    """The buffer of each worker, if the rule aggregates buffers."""
    accepted: bool = True
    """Whether a step is taken."""
    factor: float = 1.0
    """A factor of the learning rate."""


class Policy(Spec):
    """A policy of asynchronous training."""

    uses_rule: ClassVar[bool] = False
    """Whether the policy uses the rule of the task."""
    needs_given: ClassVar[bool] = False
    """Whether the policy needs the parameters at which a row was computed."""

    def check(self, m: int, rule: Rule) -> None:
        """Raise ValueError if the policy cannot work with m workers and this rule."""
        if rule != Mean():
            raise ValueError(
                f"{self.name} decides by itself on every row of m={m} workers: rule must be mean,"
                f" got rule={rule}"
            )

    @abstractmethod
    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return the state before the first row.

        Args:
            m: the number of workers.
            d: the number of parameters.
            rows: the rows that the rule aggregates.
            lr: the learning rate.
        """

    def num_rows(self) -> int:
        """Return the number of rows that the rule aggregates."""
        return 1


class State(ABC):
    """The state of a policy between rows."""

    news: tuple[str, ...] = ()
    """Descriptions of what else happened with the last row."""

    @abstractmethod
    def receive(self, arrival: Arrival) -> Verdict | None:
        """Process a row; return None if the policy needs further rows to decide."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state, which are changed in place."""
        return {}

    def load(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for name, tensor in self.tensors().items():
            tensor.copy_(kept[name])
