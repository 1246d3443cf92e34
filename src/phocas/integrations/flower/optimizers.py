"""Optimizers of the server: momentum, Adam and Yogi, applied to the aggregated update."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phocas.specs import number, positive


class UpdateOptimizer(Protocol):
    """The protocol of a server optimizer."""

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the new values of a tensor.

        Args:
            old: the values of the tensor before the step.
            update: the aggregated update.
            state: the tensor's own state, empty in the first step.
            turn: the number of the step, from 1.
        """


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError unless an object has the method of :class:`UpdateOptimizer`."""
    try:
        inspect.signature(optimizer.step).bind("old", "update", "state", "turn")  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            "optimizer must be an object such as Momentum(lr=1.0) or Adam(lr=0.1), with"
            f" step(old, update, state, turn), or None: got {optimizer!r}"
        ) from None


def _check_share(owner: str, name: str, value: float) -> None:
    if not 0 <= number(owner, name, value) < 1:
        raise ValueError(f"{owner} needs 0 <= {name} < 1: got {value:g}")


@dataclass(frozen=True)
class Momentum:
    """SGD with momentum: v = momentum v + update, and x = x + lr v.

    Args:
        lr: the learning rate.
        momentum: the factor of past updates.

    >>> state = {}
    >>> step = Momentum(lr=1.0, momentum=0.5).step
    >>> step(np.zeros(1), np.ones(1), state, 1), step(np.zeros(1), np.ones(1), state, 2)
    (array([1.]), array([1.5]))
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        positive("Momentum", "lr", self.lr)
        _check_share("Momentum", "momentum", self.momentum)

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the new values of a tensor."""
        del turn
        before = state.get("moving")
        state["moving"] = update if before is None else self.momentum * before + update
        return np.asarray(old + self.lr * state["moving"])


@dataclass(frozen=True)
class Adam:
    """FedAdam, with the bias correction of Adam.

    Reference: Reddi et al., "Adaptive federated optimization" (2021).

    Args:
        lr: the learning rate.
        beta1: the decay of the mean of updates.
        beta2: the decay of the mean of their squares.
        tau: added to the root of the mean square.
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        owner = type(self).__name__
        _check_share(owner, "beta1", self.beta1)
        _check_share(owner, "beta2", self.beta2)
        positive(owner, "lr", self.lr)
        positive(owner, "tau", self.tau)

    def step(
        self, old: NDArray[Any], update: NDArray[Any], state: dict[str, NDArray[Any]], turn: int
    ) -> NDArray[Any]:
        """Return the new values of a tensor."""
        zeros = np.zeros_like(update)
        state["mean"] = self.beta1 * state.get("mean", zeros) + (1 - self.beta1) * update
        state["square"] = self._square(state.get("square", zeros), np.square(update))
        mean = state["mean"] / (1 - self.beta1**turn)
        square = state["square"] / (1 - self.beta2**turn)
        return np.asarray(old + self.lr * mean / (np.sqrt(square) + self.tau))

    def _square(self, before: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        """Return the mean square after a round."""
        return np.asarray(self.beta2 * before + (1 - self.beta2) * new)


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: Adam whose mean square changes by at most (1 - beta2) update^2 in a round.

    Reference: Reddi et al., "Adaptive federated optimization" (2021).

    Args:
        lr: the learning rate.
        beta1: the decay of the mean of updates.
        beta2: the decay of the mean of their squares.
        tau: added to the root of the mean square.

    >>> state = {"square": np.array([4.0, 0.0])}
    >>> _ = Yogi(beta2=0.9).step(np.zeros(2), np.ones(2), state, 1)
    >>> state["square"]
    array([3.9, 0.1])
    """

    def _square(self, before: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(before - (1 - self.beta2) * new * np.sign(before - new))
