"""Digests of the weights of all ranks, which show a replica that has drifted apart.

Every rank applies the same gradient to its own copy of the weights, with its own optimizer. A bit
that flips in a weight or in the state of an optimizer stays on that rank, and gradients of slightly
different weights are not implausible.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from phocas.integrations.reports import SplitReport
from phocas.integrations.wire import Wire, local_values

EVERY = 100
"""The default number of steps from one comparison to the next."""


class Replicas:
    """The comparison of the weights of replicas, and of their optimizers' states.

    A comparison is one asynchronous all-gather of two numbers for each parameter: the digest of the
    parameter and the digest of its optimizer's state. It starts at the beginning of a backward
    pass, after the optimizer's last step, and is read at the beginning of the next one.

    Args:
        wire: the collectives of the group.
        names: the names of the parameters, in the same order on every rank.
        weights: returns the parameters, in the order of their names.
        every: the number of steps from one comparison to the next; 0 compares nothing.
        optimizer: the optimizer whose states are compared, or None.
        copies: the rows that hold the same weights, for each shard; all rows if not given.
    """

    def __init__(
        self,
        wire: Wire,
        names: Sequence[str],
        weights: Callable[[], Sequence[torch.Tensor]],
        every: int,
        optimizer: torch.optim.Optimizer | None = None,
        copies: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.wire, self.weights, self.every, self.optimizer = wire, weights, every, optimizer
        self.steps = 0
        """The steps so far; the caller counts them."""
        self.due: float = every or math.inf
        """The next step in which to call :meth:`step`."""
        self.drift = Drift(tuple(names), wire.ranks, copies or [range(wire.m)])
        self._arrived: tuple[torch.Tensor, dist.Work, int] | None = None

    def step(self) -> bool:
        """Read the last comparison, and start one if it is due; return whether there is news.

        All ranks must call this at the same point of the same step, in the steps that are ``due``.
        """
        news = self.receive()
        self.due = self.every * (self.steps // self.every + 1)
        if self.steps % self.every == 0:
            self.due = self.steps + 1  # to read the comparison
            own = torch.stack(self._digests()).to(self.wire.device)
            arrived = own.new_empty(self.wire.m * len(own))
            self._arrived = arrived, self.wire.gather_later(arrived, own), self.steps
        return news

    def receive(self) -> bool:
        """Wait for the comparison that is under way; return whether it shows anything new."""
        if self._arrived is None:
            return False
        (arrived, work, step), self._arrived = self._arrived, None
        work.wait()
        return self.drift.compare(arrived.view(self.wire.m, -1).cpu().numpy(), step)

    @torch.no_grad()
    def _digests(self) -> list[torch.Tensor]:
        parameters = self.weights()
        weights = [digest(parameter) for parameter in parameters]
        none = torch.zeros_like(weights[0])
        states: Any = {} if self.optimizer is None else self.optimizer.state
        kept = []
        for parameter in parameters:
            state = states.get(parameter, {})
            tensors = [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
            kept.append(sum((digest(each).to(none.device) for each in tensors), none))
        return weights + kept


@dataclass
class Drift:
    """The rows of a group whose weights or optimizer's states differ from those of the majority.

    >>> drift = Drift(("weight",), members=[4, 5, 6], copies=[[0, 1, 2]])
    >>> drift.compare(np.array([[7, 0], [8, 0], [7, 0]]), step=100), drift.rows
    (True, {1: (100, ('weight',))})
    """

    names: tuple[str, ...]
    """The names of the parameters."""
    members: Sequence[int]
    """The global rank of each row."""
    copies: Sequence[Sequence[int]]
    """The rows that must be equal, for each shard of the weights."""
    rows: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """For each such row, the step in which the difference was first found, and its tensors."""
    split: SplitReport | None = None
    """The first difference without a majority."""

    def compare(self, digests: NDArray[np.int64], step: int) -> bool:
        """Find the rows whose digests differ from the majority; return whether any is new."""
        found: dict[int, list[str]] = {}
        undecided: list[str] = []
        groups: list[list[int]] = []
        for rows in self.copies:
            these = digests[list(rows)]
            for column in np.flatnonzero((these != these[0]).any(axis=0)):
                values, owner, times = np.unique(
                    these[:, column], return_inverse=True, return_counts=True
                )
                name = self._tensor(int(column))
                if 2 * times.max() > len(rows):
                    for place in np.flatnonzero(owner != times.argmax()).tolist():
                        found.setdefault(rows[place], []).append(name)
                else:
                    undecided += [name] if name not in undecided else []
                    groups = groups or self._sides(rows, owner, len(values))
        new = {row: names for row, names in found.items() if row not in self.rows}
        self.rows.update({row: (step, tuple(names)) for row, names in new.items()})
        split = bool(undecided) and self.split is None
        if split:
            self.split = SplitReport(step=step, tensors=undecided, ranks=groups)
        return bool(new) or split

    def _sides(self, rows: Sequence[int], owner: NDArray[np.intp], number: int) -> list[list[int]]:
        sides = [np.flatnonzero(owner == value).tolist() for value in range(number)]
        return sorted([self.members[rows[place]] for place in side] for side in sides)

    def _tensor(self, column: int) -> str:
        state, number = divmod(column, len(self.names))
        return f"{self.names[number]} (optimizer)" if state else self.names[number]


def check_optimizer(optimizer: object) -> None:
    """Raise an error unless the optimizer's states can be compared between ranks."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer: got {type(optimizer).__name__}")
    # By name: the import of the class warns of deprecated parts of torch.
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise ValueError(
            "optimizer must have its whole state on every rank: got a ZeroRedundancyOptimizer,"
            " which has a part on each; leave it out to compare the weights alone"
        )


def warn_of_split(split: SplitReport) -> None:
    """Warn of weights that differ between ranks without a majority."""
    sides = " and on ranks ".join(", ".join(map(str, ranks)) for ranks in split["ranks"])
    warnings.warn(
        f"the weights of ranks differ since step {split['step']}, and no value has a majority:"
        f" {split['tensors'][0]} is the same on ranks {sides}. The wrong ranks are unknown:"
        " load a checkpoint from before that step",
        RuntimeWarning,
        stacklevel=3,
    )


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor modulo 2**64, which any single flipped bit changes.

    The sum is of words of 8 bytes, which torch adds several times as fast as narrower ones. Of a
    sharded tensor, it is the sum over the values of this rank.
    """
    flat = local_values(tensor).contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # words must be aligned
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
