"""One round of federated learning: select the usable replies, and aggregate them by a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.deprecation import former_attributes
from phocas.detection import Detector
from phocas.detection.own_past import check_worker_data
from phocas.floats import from_bfloat16, to_bfloat16
from phocas.integrations.merging.merge import Merge, Shares, rows_not_finite
from phocas.integrations.merging.tensors import Tensor
from phocas.rules import Relative, Rule
from phocas.rules.weighting import check_cap
from phocas.specs import check_on_nonfinite

MOST = 0.5
"""A client with a smaller dropped share than this is not unusual, however small the others'."""
POLICIES = ("skip", "stop")
UNUSABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RuntimeError)
"""Errors of reading a reply: the client loses its row, and no other client is affected."""

Name = TypeVar("Name", int, str)
Sent = TypeVar("Sent")
Made = TypeVar("Made")
Update: TypeAlias = Mapping[str, Any]
"""The change of a model by name of its tensors: arrays of their shapes."""
Reference: TypeAlias = Update | Callable[[dict[str, NDArray[Any]], int], Update]
"""The server's own update, or a function of the model's arrays and the round that returns it."""


@dataclass(frozen=True, slots=True, eq=False)
class Client(Generic[Name, Sent]):
    """A client with a usable reply.

    Attributes:
        name: the name or number of the client.
        sent: the reply of the client, as the framework delivers it.
        tensors: the tensors of the reply, by name.
        weight: the weight of the client in the aggregate.
    """

    name: Name
    sent: Sent
    tensors: Mapping[str, Tensor]
    weight: float


@former_attributes(suspects="unusual")
@dataclass(frozen=True, slots=True, eq=False)
class Blame:
    """The share of each client's values that was dropped in one round.

    >>> Blame(np.array([0.3, 0.9, 0.3]), 0.3, 0).unusual(["a", "b", "c"])
    ['b']
    """

    dropped: NDArray[np.float64]
    """By client, the share of its values that was dropped."""
    expected: float
    """The expected share of an honest client."""
    not_finite: int
    """How many values of the aggregate are NaN or infinite."""
    sources: tuple[int, ...] = ()
    """Indices of the clients that sent NaN or inf; empty if the aggregate is finite."""

    def unusual(self, names: Sequence[Name]) -> list[Name]:
        """Return the clients of which most values were dropped, and far more than of others.

        This is a warning without a false alarm probability, because each round has other clients,
        whose data differ.
        """
        detector = Detector(len(names), b=0)
        detector.update(self.dropped)
        return [names[client] for client in detector.unusual(at_least=MOST)]

    def lost(self, rule: Rule, names: Sequence[Name]) -> str:
        """Describe in one line an aggregate that is not finite, and the clients that caused it."""
        if not self.sources:
            why = "no client sent NaN or inf; values overflow, or the model was not finite before"
        else:
            who = ", ".join(str(names[index]) for index in self.sources)
            why = f"more clients are Byzantine than {rule} tolerates; NaN or inf came from {who}"
        return f"{self.not_finite} values of the aggregate are not finite: {why}"


@dataclass(frozen=True)
class Terms:
    """The settings of robust aggregation over clients.

    Args:
        rule: the rule.
        on_too_few: what to do in a round with fewer usable replies than the rule needs.
        max_share: weight clients by their examples, each with at most this share of the total.
        seed: a seed for rules that draw at random.
        on_nonfinite: what to do with an aggregate that is not finite.
        reference: the server's own update on trusted samples, for a rule that needs it.
        data: the data of honest clients. If they ``differ``, each client is compared with its own
            past; if they are ``alike``, no client is.
    """

    rule: Rule
    on_too_few: str = "skip"
    max_share: float | None = None
    seed: int = 0
    on_nonfinite: str = "skip"
    reference: Reference | None = None
    data: str = "differ"
    _previous: dict[str, NDArray[Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The update of the previous round, for a rule that needs it; empty before the first."""

    def __post_init__(self) -> None:
        """Raise ValueError now, not in a round, for settings that cannot work."""
        if self.on_too_few not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"on_too_few must be one of {known}: got {self.on_too_few!r}")
        check_on_nonfinite(self.on_nonfinite)
        check_worker_data(self.data)
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise ValueError(f"max_share must be more than 0 and at most 1: got {self.max_share!r}")
        if self.max_share is not None:
            check_cap(self.rule, self.max_share)
        needs = self.rule.needs_reference == "trusted"
        if needs and self.reference is None:
            raise ValueError(
                f"{self.rule} needs the server's own update on trusted samples: give reference=, a"
                " function of the model's arrays and the round that returns the update"
            )
        if self.reference is not None and not needs:
            raise ValueError(f"{self.rule} needs no update of the server: leave reference= out")

    def aggregate(
        self,
        clients: Sequence[Client[Name, Sent]],
        model: Mapping[str, Tensor],
        turn: int,
        make: Callable[[Tensor, list[NDArray[Any]]], Made],
        *,
        updates: bool = False,
    ) -> tuple[dict[str, Made] | None, Blame]:
        """Aggregate the clients key by key, and return the new values and the dropped shares.

        Besides the replies, only the result is in memory.

        Args:
            clients: the clients.
            model: the tensors of the model that was sent to them.
            turn: the number of the round, added to the seed.
            make: turns the new values of a tensor into an array of the framework. It is called only
                if the aggregate may be applied; otherwise the result is None.
            updates: whether clients send differences to the model; then the result is a difference.
        """
        rule, m = self.rule, len(clients)
        if m and self.max_share is not None:
            rule = rule.weighted([client.weight for client in clients], max(self.max_share, 1 / m))
        rule.check(m)
        rows: list[Mapping[str, Tensor]] = [client.tensors for client in clients]
        # Columns are counted over the keys in the order of the model.
        rows[0] = {name: rows[0][name] for name in model}
        expected = rule.expected(m)
        last: list[Mapping[str, Tensor]] = [] if updates else [model]
        if rule.needs_reference is not None:
            try:
                last.insert(0, self._reference_row(model, turn, updates=updates))
            except ValueError as error:  # not of a client: a round without it must not pass
                raise RuntimeError(str(error)) from error
            rule = rule.referenced()
        merge = Merge(rows + last, m, rule if updates else Relative(rule), self.seed + turn, None)
        merge.plan()
        shares = Shares(m)
        parts = {name: list(merge.parts(tensor, shares)) for name, tensor in model.items()}
        sources = rows_not_finite(rows) if merge.not_finite else []
        blame = Blame(shares.total(), expected, merge.not_finite, tuple(sources))
        if merge.not_finite and self.on_nonfinite != "apply":
            return None, blame
        if self.rule.needs_reference == "previous" and not merge.not_finite:
            for name in merge.starts:
                new = np.concatenate([_numbers(part, model[name]) for part in parts[name]])
                old = 0 if updates else _numbers(model[name].open(), model[name])
                self._previous[name] = new - old
        # Release parts as they are used: two copies of the result need not fit into memory.
        return {name: make(model[name], parts.pop(name)) for name in list(parts)}, blame

    def _reference_row(
        self, model: Mapping[str, Tensor], turn: int, *, updates: bool
    ) -> dict[str, Tensor]:
        """Return the reference as a client would send it: an update, or the updated model."""
        update = self._update(model, turn)
        row = {}
        for name, tensor in model.items():
            if tensor.is_integer:
                row[name] = tensor
                continue
            change = np.asarray(update[name]) if name in update else np.zeros(tensor.shape)
            if change.shape != tensor.shape or not np.isfinite(change).all():
                raise ValueError(
                    f"the reference must be finite, and of the shape {tensor.shape} for key"
                    f" {name!r}: got shape {change.shape}"
                )
            if not updates:
                change = _numbers(tensor.open(), tensor).reshape(tensor.shape) + change
            kind = np.dtype(np.float32) if tensor.element == "bfloat16" else tensor.dtype
            values = change.astype(kind.newbyteorder("="))
            stored = to_bfloat16(values) if tensor.element == "bfloat16" else values
            row[name] = replace(tensor, dtype=stored.dtype, open=partial(stored.reshape, -1))
        return row

    def _update(self, model: Mapping[str, Tensor], turn: int) -> Update:
        """Return the previous update, or the server's own."""
        if self.rule.needs_reference == "previous":
            return {
                name: values.reshape(model[name].shape) for name, values in self._previous.items()
            }
        if not callable(self.reference):
            found: Update = self.reference or {}
        else:
            arrays = {
                name: _numbers(tensor.open(), tensor).reshape(tensor.shape)
                for name, tensor in model.items()
            }
            found = self.reference(arrays, turn)
        for name, tensor in model.items():
            if name not in found and not tensor.is_integer:
                raise ValueError(
                    f"the reference must have the keys of the model: it lacks {name!r}"
                )
        return found


def _numbers(values: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return stored values as numbers to compute with; bfloat16 becomes float32."""
    if tensor.element != "bfloat16":
        return values.copy()
    return from_bfloat16(values)


def usable(
    replies: Iterable[tuple[Name, Sent]],
    opened: Callable[[Sent], tuple[Mapping[str, Tensor], float]],
    warn: Callable[[str], None],
) -> list[Client[Name, Sent]]:
    """Return the clients with a usable reply, in the order of their names.

    Args:
        replies: the name and the reply of each client.
        opened: returns the tensors and the weight of a reply, or raises one of ``UNUSABLE``.
        warn: called with the reason for each client that is left out.
    """
    clients = []
    for name, sent in sorted(replies, key=lambda reply: reply[0]):
        try:
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
    """Return the median over the clients of every metric, whatever examples they claim.

    Values that are NaN or no single number are ignored, and so are metrics that fewer than half of
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
