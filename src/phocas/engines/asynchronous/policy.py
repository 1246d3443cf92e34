"""What a policy is: it takes rows that come alone, computed at parameters of a while ago.

How stale a row is the server knows by itself: it remembers which parameters it gave to whom. What a
worker says about it is not asked.
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
    """A row that came."""

    worker: int
    row: torch.Tensor
    staleness: int
    """How many steps the server has taken since it gave the worker its parameters."""
    given: torch.Tensor | None
    """These parameters, where the policy asks for them."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is done now: a step along a vector, or along the rows of the buffers, or none."""

    along: torch.Tensor | None
    """The vector; None where the rule is to reduce the buffers, or where a row was turned down."""
    workers: tuple[int, ...]
    """Whose rows were decided on."""
    rows: tuple[int, ...] = ()
    """The buffer of each, where the rule decides."""
    accepted: bool = True
    factor: float = 1.0
    """Of the learning rate."""


class Policy(Spec):
    """One way to train without waiting."""

    uses_rule: ClassVar[bool] = False
    """Whether the rule of the task reduces rows here; otherwise there is none."""
    needs_given: ClassVar[bool] = False
    """Whether arrivals must tell at which parameters they were computed."""

    def check(self, m: int, rule: Rule) -> None:
        """Raise if this is impossible with m workers and this rule."""
        if rule != Mean():
            raise ValueError(
                f"{self.name} decides by itself on every row of m={m} workers: rule must be mean,"
                f" got rule={rule}"
            )

    @abstractmethod
    def begin(self, m: int, d: int, rows: torch.Tensor, lr: float) -> State:
        """Return the state before the first row; ``rows`` are those that the rule reduces."""

    def num_rows(self) -> int:
        """Return how many rows the rule reduces."""
        return 1


class State(ABC):
    """What a policy remembers from row to row."""

    news: tuple[str, ...] = ()
    """What happened besides, in words, with the last arrival."""

    @abstractmethod
    def receive(self, arrival: Arrival) -> Verdict | None:
        """Take a row; None says that more must come before anything is decided."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint must keep: tensors that are changed in place."""
        return {}

    def load(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        for name, tensor in self.tensors().items():
            tensor.copy_(kept[name])
