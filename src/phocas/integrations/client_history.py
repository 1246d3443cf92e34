"""Detection among federated clients: each client is compared with its own past rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.detection import Detector
from phocas.detection.own_past import FIRST_VERDICT
from phocas.detection.sampling import Sample
from phocas.floats import from_bfloat16
from phocas.integrations.merging.tensors import Tensor
from phocas.seeds import Stream, generator

if TYPE_CHECKING:
    from phocas.integrations.clients import Client

MOST_CLIENTS = 1000
"""The number of clients that are compared with their past, in the order of their first reply."""

Name = TypeVar("Name", int, str)


class ClientHistory(Generic[Name]):
    """The past of each client, by its name, and the clients that no longer act as they used to.

    A client may join late and leave out rounds: only the rounds in which it takes part count. With
    at most 1000 clients the false alarm probability is that of :class:`phocas.detection.Detector`
    with ``data="differ"``. Further clients are not compared with their past. The history is in the
    memory of the server, and begins anew when the server restarts.

    Args:
        seed: the seed of the columns in which updates are compared.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._begin({})

    def _begin(self, model: Mapping[str, Tensor]) -> None:
        self._numbers: dict[Name, int] = {}
        self._shape = _trained(model)
        self._detector = Detector(MOST_CLIENTS, data="differ")
        d = sum(self._shape.values())
        self._sample = Sample.draw(d, generator(Stream.SAMPLE, self.seed)) if d else None

    def observe(
        self,
        clients: Sequence[Client[Name, object]],
        model: Mapping[str, Tensor],
        *,
        updates: bool = False,
    ) -> None:
        """Observe the replies of one round.

        Args:
            clients: the clients with a usable reply.
            model: the tensors of the model that was sent to them.
            updates: whether clients send differences to the model.
        """
        if _trained(model) != self._shape:
            self._begin(model)
        for client in clients:
            if len(self._numbers) < MOST_CLIENTS:
                self._numbers.setdefault(client.name, len(self._numbers))
        known = [client for client in clients if client.name in self._numbers]
        if self._sample is None or not known:
            return
        base = 0.0 if updates else self._values(model)
        with np.errstate(all="ignore"):
            rows = np.stack([self._values(client.tensors) - base for client in known])
        who = np.array([self._numbers[client.name] for client in known])
        self._detector.observe(rows, participants=who)

    def flagged(self) -> list[Name]:
        """Return the clients that no longer act as they used to, in the order of their joining."""
        found = set(self._detector.flagged())
        return [name for name, number in self._numbers.items() if number in found]

    def no_verdict(self, names: Sequence[Name]) -> list[Name]:
        """Return those of some clients whose past is missing or too short for a verdict."""
        early: set[int] = {-1, *self._detector.no_verdict()}
        return [name for name in names if self._numbers.get(name, -1) in early]

    def _values(self, tensors: Mapping[str, Tensor]) -> NDArray[np.float64]:
        """Return the values of the sampled columns."""
        assert self._sample is not None
        found, first = [], 0
        for name, size in self._shape.items():
            values = tensors[name].open()[self._sample.columns(first, first + size)]
            if tensors[name].element == "bfloat16":
                values = from_bfloat16(values)
            found.append(values.astype(np.float64))
            first += size
        return np.concatenate(found)


def describe(flagged: Sequence[int | str]) -> str:
    """Return a line about flagged clients."""
    names = ", ".join(str(name) for name in flagged)
    return f"clients that no longer act as in their own past ({FIRST_VERDICT} rounds): {names}"


def _trained(model: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of values of each tensor of floating-point numbers."""
    return {name: tensor.columns for name, tensor in model.items() if not tensor.is_integer}
