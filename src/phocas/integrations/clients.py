"""A round of federated learning: whose rows can be used, and what a rule makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.integrations.merging.formats import Tensor, TensorFile
from phocas.integrations.merging.merge import Merge, Shares, rows_not_finite
from phocas.rules import Relative, Rule
from phocas.rules.suspicion import stand_out
from phocas.rules.weighting import check_cap
from phocas.specs import check_on_nonfinite

MOST = 0.5
"""Whoever lost less of its values than this is no suspect, however little others lost."""
POLICIES = ("skip", "stop")
UNUSABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RuntimeError)
"""What reading a reply may raise: it costs the client its row, and nobody else anything."""

Name = TypeVar("Name", int, str)
Sent = TypeVar("Sent")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class Client(Generic[Name, Sent]):
    """A client whose row can be used: what it sent, the tensors in it, and its weight."""

    name: Name
    sent: Sent
    tensors: TensorFile
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class Blame:
    """Who was thrown away: the share of each client's values that was dropped.

    >>> Blame(np.array([0.3, 0.9, 0.3]), 0.3, 0).suspects(["a", "b", "c"])
    ['b']
    """

    dropped: NDArray[np.float64]
    expected: float
    not_finite: int
    """How many values of the aggregate are NaN or infinite."""
    sources: tuple[int, ...] = ()
    """Indices of the clients that sent NaN or inf; empty if the aggregate is finite."""

    def suspects(self, names: Sequence[Name]) -> list[Name]:
        """Return who lost most of its values, and far more than others."""
        out = stand_out(self.dropped) & (self.dropped > MOST)
        return [name for name, one in zip(names, out, strict=True) if one]

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
    """By which rule clients are aggregated, with which weights, and what becomes of too few.

    Args:
        rule: the rule.
        on_too_few: what to do in a round with fewer usable replies than the rule needs.
        max_share: weigh clients by their examples, with nobody above this share of all.
        seed: a seed for rules that draw at random.
        on_nonfinite: what to do with an aggregate that is not finite.
    """

    rule: Rule
    on_too_few: str = "skip"
    max_share: float | None = None
    seed: int = 0
    on_nonfinite: str = "skip"

    def __post_init__(self) -> None:
        """Refuse now and not in a round what cannot be kept in one."""
        if self.on_too_few not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"on_too_few must be one of {known}: got {self.on_too_few!r}")
        check_on_nonfinite(self.on_nonfinite)
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise ValueError(f"max_share must be more than 0 and at most 1: got {self.max_share!r}")
        if self.max_share is not None:
            check_cap(self.rule, self.max_share)

    def aggregate(
        self,
        clients: Sequence[Client[Name, Sent]],
        model: TensorFile,
        turn: int,
        make: Callable[[Tensor, list[NDArray[Any]]], Made],
        *,
        updates: bool = False,
    ) -> tuple[dict[str, Made] | None, Blame]:
        """Aggregate key by key: beside what was sent, there is no more than the result.

        ``make`` turns the new values of a tensor of the model into what is returned for it. It is
        called only if the aggregate may be applied; the result is None otherwise. With ``updates``,
        clients sent differences to the model and not models, and so is the result.
        """
        rule, m = self.rule, len(clients)
        if m and self.max_share is not None:
            rule = rule.weighted([client.weight for client in clients], max(self.max_share, 1 / m))
        rule.check(m)
        files = [client.tensors for client in clients]
        # The keys are in the order of the model: blocks of columns are counted over them.
        ordered = {name: files[0].tensors[name] for name in model.tensors}
        files[0] = TensorFile(files[0].path, files[0].format, ordered, {})
        whole = [] if updates else [model]
        merge = Merge(files + whole, m, rule if updates else Relative(rule), self.seed + turn, None)
        merge.plan()
        shares = Shares(m)
        parts = {name: list(merge.parts(tensor, shares)) for name, tensor in model.tensors.items()}
        sources = rows_not_finite(files[:m]) if merge.not_finite else []
        blame = Blame(shares.total(), rule.expected(m), merge.not_finite, tuple(sources))
        if merge.not_finite and self.on_nonfinite != "apply":
            return None, blame
        # Parts are released as they are used: twice the model need not fit.
        return {name: make(model.tensors[name], parts.pop(name)) for name in list(parts)}, blame


def usable(
    replies: Iterable[tuple[Name, Sent]],
    opened: Callable[[Sent], tuple[TensorFile, float]],
    warn: Callable[[str], None],
) -> list[Client[Name, Sent]]:
    """Return the clients whose row can be used, in the order of their names.

    ``opened`` gives the tensors and the weight of a reply, or raises with the reason why there are
    none, which costs the client its row.
    """
    clients = []
    for name, sent in sorted(replies, key=lambda reply: reply[0]):
        try:
            clients.append(Client(name, sent, *opened(sent)))
        except UNUSABLE as error:
            warn(f"{name} is left out: {error}")
    return clients


def check_like(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot stand beside those of the model."""
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
    """Return how many examples a client says that it has; raise ValueError if that is no number.

    >>> claimed(600, "examples")
    600.0
    """
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{what!r} must be a number, more than 0 and finite: it is {value!r}")
    return float(value)


def middle(said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of every number that clients say, whoever claims how many examples.

    What is said by fewer than half, is no single number or is NaN does not count.

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
