"""Detection among federated clients by their own past, and the exclusion of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.detection import Detector
from phocas.detection.comparison import Sample
from phocas.detection.exclusion import AfterEvidence, Exclusions, Name, Never, listed
from phocas.detection.own_past import FIRST_VERDICT
from phocas.floats import from_bfloat16
from phocas.integrations.merging.tensors import Tensor
from phocas.seeds import Stream, generator
from phocas.specs import count

if TYPE_CHECKING:
    from phocas.integrations.client_replies import Client
    from phocas.rules import Rule

MOST_CLIENTS = 1000
"""The largest number of clients that are compared with their past: those that reply first."""

Sent = TypeVar("Sent")


class ClientHistory(Generic[Name]):
    """The past of each client, by its name, and the clients that no longer act as they used to.

    A client may join late and leave out rounds: only the rounds in which it takes part count. With
    at most 1000 clients the false alarm probability is that of :class:`phocas.detection.Detector`
    with ``data="differ"``. Further clients are not compared with their past.

    Args:
        seed: the seed of the columns in which updates are compared.
        exclude: when clients are excluded.
    """

    def __init__(self, seed: int = 0, exclude: Never | AfterEvidence | None = None) -> None:
        self.seed = seed
        self.exclusions: Exclusions[Name] = Exclusions(exclude)
        self.news: list[str] = []
        """Lines about clients that were excluded or readmitted, for the log."""
        self._restored = False
        self._begin({})

    def _begin(self, model: Mapping[str, Tensor]) -> None:
        self._numbers: dict[Name, int] = {}
        self.exclusions.since.clear()
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
        """Observe the replies of one round, and exclude clients from the next round on.

        Args:
            clients: the clients whose replies are aggregated.
            model: the tensors of the model that was sent to them.
            updates: whether clients send differences to the model.
        """
        if _trained(model) != self._shape:
            self._begin(model)
        if self._restored and clients and not any(c.name in self._numbers for c in clients):
            self.news.append(
                "no client of this round is in the state: do clients keep their names?"
            )
        self._restored = False
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
        e_values = self._detector.e_values[who].tolist()
        judged = zip((client.name for client in known), e_values, strict=True)
        self.news += self.exclusions.judge(judged, MOST_CLIENTS)

    def end_round(self) -> None:
        """Count a round, and readmit the clients whose exclusion ends with it."""
        self.news += self.exclusions.end_round(
            lambda name: self._detector.acquit(self._numbers[name])
        )

    def excluded(self) -> list[Name]:
        """Return the clients that are excluded from the next round, first excluded first."""
        return list(self.exclusions.since)

    def admitted(
        self, clients: Sequence[Client[Name, Sent]], rule: Rule
    ) -> list[Client[Name, Sent]]:
        """Return the clients of a round without those that are excluded.

        Clients are left out in the order of their exclusion. A client stays if otherwise the rule
        would not tolerate its b among the remaining clients, or half of the round would be left
        out: if so many clients seem to have changed, the cause is not the clients.
        """
        left_out: set[Name] = set()
        present = {client.name for client in clients}
        for name in self.exclusions.since:
            remaining = len(clients) - len(left_out) - 1
            if name in present and 2 * remaining > len(clients) and _holds(rule, remaining):
                left_out.add(name)
        return [client for client in clients if client.name not in left_out]

    def flagged(self) -> list[Name]:
        """Return the clients that no longer act as they used to, in the order of their joining."""
        found = set(self._detector.flagged())
        return [name for name, number in self._numbers.items() if number in found]

    def no_verdict(self, names: Sequence[Name]) -> list[Name]:
        """Return which of the named clients have no past, or one too short for a verdict."""
        early: set[int] = {-1, *self._detector.no_verdict()}
        return [name for name in names if self._numbers.get(name, -1) in early]

    def known(self) -> list[Name]:
        """Return the clients that have a past, in the order of their joining."""
        return list(self._numbers)

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what a restarted server needs: values for JSON, and arrays."""
        since = [[name, round] for name, round in self.exclusions.since.items()]
        told = {"round": self.exclusions.round, "clients": list(self._numbers), "excluded": since}
        return told, self._detector.state()

    def load_state(
        self,
        model: Mapping[str, Tensor],
        told: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        """Restore a state, or raise ValueError, KeyError or TypeError and change nothing."""
        fresh: ClientHistory[Name] = ClientHistory(self.seed, self.exclusions.policy)
        fresh._begin(model)
        names: list[Name] = told["clients"]
        if len(set(names)) != len(names) or len(names) > MOST_CLIENTS:
            twice = next((name for name in names if names.count(name) > 1), None)
            raise ValueError(f"client {twice} appears twice")
        fresh.exclusions.round = count("a state", "round", told["round"])
        fresh._numbers = {name: number for number, name in enumerate(names)}
        fresh.exclusions.since = {
            name: count("a state", "round", since) for name, since in told["excluded"]
        }
        if not fresh.exclusions.since.keys() <= fresh._numbers.keys():
            raise ValueError("a client is excluded that has no past")
        fresh._detector.load_state(arrays)
        fresh._restored = bool(names)
        vars(self).update(vars(fresh))

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
    return (
        f"clients that no longer act as in their own past ({FIRST_VERDICT} rounds):"
        f" {listed(flagged)}"
    )


def _holds(rule: Rule, m: int) -> bool:
    """Tell whether a rule can aggregate m rows."""
    try:
        rule.check(m)
    except ValueError:
        return False
    return True


def _trained(model: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of values of each tensor of floating-point numbers."""
    return {name: tensor.columns for name, tensor in model.items() if not tensor.is_integer}
