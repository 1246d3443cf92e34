"""What the server makes of an aggregated update: steps with momentum, or by Adam."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phocas.specs import number, positive


class ServerOptimiser(Protocol):
    """A step from the old values of a tensor, given the update that was aggregated."""

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the new values; the state is the tensor's own, empty in the first turn, 1."""


def check_optimiser(optimiser: object) -> None:
    """Raise TypeError unless an object can take the steps of a :class:`ServerOptimiser`."""
    try:
        inspect.signature(optimiser.step).bind("old", "update", "state", "turn")  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            "optimiser must be an object such as Momentum(lr=1.0) or Adam(lr=0.1), with"
            f" step(old, update, state, turn), or None: got {optimiser!r}"
        ) from None


def _check_share(owner: str, name: str, value: float) -> None:
    if not 0 <= number(owner, name, value) < 1:
        raise ValueError(f"{owner} needs 0 <= {name} < 1: got {value:g}")


@dataclass(frozen=True)
class Momentum:
    """Add ``lr`` times a sum of updates of which each counts ``momentum`` of the next.

    Args:
        lr: the step.
        momentum: how much of past updates is kept.

    >>> state = {}
    >>> step = Momentum(lr=1.0, momentum=0.5).step
    >>> step(np.zeros(1), np.ones(1), state, 1), step(np.zeros(1), np.ones(1), state, 2)
    (array([1.]), array([1.5]))
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Check the numbers."""
        positive("Momentum", "lr", self.lr)
        _check_share("Momentum", "momentum", self.momentum)

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the old values and the step."""
        del turn
        before = state.get("moving")
        state["moving"] = update if before is None else self.momentum * before + update
        return np.asarray(old + self.lr * state["moving"])


@dataclass(frozen=True)
class Adam:
    """Divide the mean of past updates by the root of the mean of their squares.

    Reference: Reddi et al., "Adaptive federated optimization" (2021), FedAdam, with Adam's
    corrections for the first turns.

    Args:
        lr: the step.
        beta1: how much of past updates is kept.
        beta2: how much of their squares is kept.
        tau: what is added to the root.
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_share("Adam", "beta1", self.beta1)
        _check_share("Adam", "beta2", self.beta2)
        positive("Adam", "lr", self.lr)
        positive("Adam", "tau", self.tau)

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the old values and the step."""
        for name, beta, value in (
            ("mean", self.beta1, update),
            ("square", self.beta2, np.square(update)),
        ):
            before = state.get(name, np.zeros_like(update))
            state[name] = beta * before + (1 - beta) * value
        mean = state["mean"] / (1 - self.beta1**turn)
        square = state["square"] / (1 - self.beta2**turn)
        return np.asarray(old + self.lr * mean / (np.sqrt(square) + self.tau))
