"""Replies of federated clients: which are usable, and what clients claim in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np

from phocas.integrations.merging.tensors import Tensor

UNUSABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RuntimeError)
"""Errors of reading a reply: the client loses its row, and no other client is affected."""

Name = TypeVar("Name", int, str)
Sent = TypeVar("Sent")


@dataclass(frozen=True, slots=True, eq=False)
class Client(Generic[Name, Sent]):
    """A client with a usable reply.

    Attributes:
        name: the name or number of the client.
        sent: the reply of the client, as the framework delivers it.
        tensors: the tensors of the reply, by name.
        weight: the weight of the client in the aggregate.
        steps: the number of local steps behind the reply.
    """

    name: Name
    sent: Sent
    tensors: Mapping[str, Tensor]
    weight: float
    steps: float = 1.0


def usable(
    replies: Iterable[tuple[Name, Sent]],
    opened: Callable[[Sent], tuple[Mapping[str, Tensor], float, float]],
    warn: Callable[[str], None],
) -> list[Client[Name, Sent]]:
    """Return the clients with a usable reply, in the order of their names.

    Args:
        replies: the name and the reply of each client.
        opened: returns the tensors, the weight and the local steps of a reply, or raises one of
            ``UNUSABLE``.
        warn: called with the reason for each client that is left out.
    """
    clients = []
    given = sorted(replies, key=lambda reply: reply[0])
    times = Counter(name for name, _ in given)
    for name, sent in given:
        try:
            if times[name] > 1:
                raise ValueError(f"it must reply once in a round: it replied {times[name]} times")
            clients.append(Client(name, sent, *opened(sent)))
        except UNUSABLE as error:
            warn(f"{name} is left out: {error}")
    return clients


def check_like(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError if keys, shapes or types differ from those of the model."""
    missing = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} too"
        raise ValueError(f"it must have the keys of the model: it {what}")
    for name, tensor in wanted.items():
        if got[name].shape != tensor.shape or got[name].element != tensor.element:
            raise ValueError(
                f"key {name!r} must be {tensor.element} of shape {tensor.shape}: it is"
                f" {got[name].element} of shape {got[name].shape}"
            )


def claimed(value: Any, what: str) -> float:
    """Return the number of examples that a client claims; raise ValueError if it is no number.

    >>> claimed(600, "examples")
    600.0
    """
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{what!r} must be a number, more than 0 and finite: it is {value!r}")
    return float(value)


def middle(said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median over the clients of every metric, without weights.

    A value that is NaN or not a single number is ignored. So is a metric that fewer than half of
    the clients send.

    >>> middle([{"loss": 0.25}, {"loss": 0.5}, {"loss": 1e30, "mine": 1}])
    {'loss': 0.5}
    """
    found: dict[str, list[float]] = {}
    for each in said:
        for key, value in each.items():
            if isinstance(value, Real) and not math.isnan(value):
                found.setdefault(key, []).append(float(value))
    return {
        key: float(np.sort(values)[(len(values) - 1) // 2])
        for key, values in found.items()
        if 2 * len(values) > len(said)
    }
