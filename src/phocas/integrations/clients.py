"""Rounds of federated learning: select the usable replies, and aggregate them by a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from phocas.deprecation import former_attributes, former_names
from phocas.detection import Detector
from phocas.detection.exclusion import EXCLUSIONS, Never
from phocas.detection.own_past import check_worker_data
from phocas.floats import from_bfloat16, to_bfloat16
from phocas.integrations.client_history import ClientHistory
from phocas.integrations.client_replies import Client, Name, Sent
from phocas.integrations.merging.merge import Merge, Shares, rows_not_finite
from phocas.integrations.merging.tensors import Tensor
from phocas.integrations.server_state import UNREADABLE, damaged, read_state, write_state
from phocas.rules import Relative, Rule
from phocas.rules.weighting import check_cap
from phocas.specs import check_on_nonfinite

__getattr__ = former_names(__name__, {"Blame": "ClientDrops"})

MOST = 0.5
"""A client with a smaller dropped share than this is not unusual, however small the others'."""
ALL = 0.99
"""A client with a larger dropped share than this is unusual where most clients lost few values."""
POLICIES = ("skip", "stop")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of torch's buffers of batch and instance normalisation."""
Made = TypeVar("Made")
Update: TypeAlias = Mapping[str, Any]
"""The change of a model: for the name of each tensor, an array of the tensor's shape."""
Reference: TypeAlias = Update | Callable[[dict[str, NDArray[Any]], int], Update]
"""The server's own update, or a function that returns it for the model's arrays and a round."""


@former_attributes(suspects="unusual")
@dataclass(frozen=True, slots=True, eq=False)
class ClientDrops:
    """The share of each client's values that was dropped in one round.

    >>> ClientDrops(np.array([0.3, 0.9, 0.3]), 0.3, 0).unusual(["a", "b", "c"])
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
        """Return the clients that lost most of their values, and far more than the others.

        A client that lost all of them, such as one that sends NaN, is included whenever the median
        client lost less than half. This is a warning without a false alarm probability, because
        each round has other clients, whose data differ.
        """
        detector = Detector(len(names), b=0)
        detector.update(self.dropped)
        found = np.isin(np.arange(len(names)), detector.unusual(at_least=MOST))
        if np.median(self.dropped) < MOST:
            found |= self.dropped > ALL
        return [names[client] for client in np.flatnonzero(found).tolist()]

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
    """The settings of robust aggregation over clients, and its memory between rounds.

    Args:
        rule: the rule.
        on_too_few: what to do in a round with fewer usable replies than the rule needs.
        max_share: weight clients by their examples, each with at most this share of the total.
        seed: a seed for rules that draw at random.
        on_nonfinite: what to do with an aggregate that is not finite.
        reference: the server's own update on trusted samples, for a rule that needs it.
        data: the data of honest clients. If they ``differ``, each client is compared with its own
            past; if they are ``alike``, no client is.
        exclude: when clients are excluded because of their past: a text such as
            ``evidence:rounds=20``, see :data:`phocas.detection.exclusion.EXCLUSIONS`.
        state: the file that keeps the memory of the server for a restart.
        normalize: whether updates are divided by the local steps of their client.
        buffers: names of the arrays that are not trained, see :meth:`is_buffer`.
    """

    rule: Rule
    on_too_few: str = "skip"
    max_share: float | None = None
    seed: int = 0
    on_nonfinite: str = "skip"
    reference: Reference | None = None
    data: str = "differ"
    exclude: str = "never"
    state: str | Path | None = None
    normalize: bool = False
    buffers: frozenset[str] = frozenset(BUFFERS)
    history: ClientHistory[Any] = field(init=False, repr=False, compare=False)
    """The past of each client, and the clients that are excluded."""
    _begun: list[dict[str, Any]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The identity of the federation; empty before the first round."""
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
        policy = EXCLUSIONS.of(self.exclude, "exclude")
        if self.data == "alike" and not isinstance(policy, Never):
            raise ValueError(
                f"exclude={policy} needs data='differ', where each client is compared with its own"
                " past: got data='alike', where no client is"
            )
        object.__setattr__(self, "history", ClientHistory(self.seed, policy))

    def begin(self, model: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Restore the memory of the server before the first round; do nothing in later ones.

        Returns:
            After a restart, the ``extra`` arrays of the last :meth:`end_round`; otherwise none.

        Raises:
            RuntimeError: if the state file is damaged or belongs to another federation.
        """
        if self._begun:
            return {}
        tensors = {name: [tensor.element, *tensor.shape] for name, tensor in model.items()}
        identity = {"seed": self.seed, "data": self.data, "model": tensors}
        extra: dict[str, NDArray[Any]] = {}
        if self.state is not None:
            path = Path(self.state)
            try:
                found = read_state(path, identity)
                if found is not None:
                    parts: dict[str, dict[str, NDArray[Any]]] = {}
                    for key, array in found[1].items():
                        part, _, name = key.partition("/")
                        parts.setdefault(part, {})[name] = array
                    try:
                        self.history.load_state(model, found[0], parts.get("history", {}))
                    except UNREADABLE as error:
                        raise damaged(path, error) from None
                    self._previous.update(parts.get("previous", {}))
                    extra = parts.get("extra", {})
            except ValueError as error:  # not of a client: no round must pass without the state
                raise RuntimeError(str(error)) from None
        self._begun.append(identity)
        return extra

    def end_round(self, extra: Mapping[str, NDArray[Any]] | None = None) -> list[str]:
        """Readmit clients whose exclusion ends, write the state, and return lines for the log.

        Args:
            extra: further arrays to keep for a restart.
        """
        self.history.end_round()
        if self.state is not None:
            told, arrays = self.history.state()
            parts = {"history": arrays, "previous": self._previous, "extra": extra or {}}
            flat = {
                f"{p}/{name}": array for p, part in parts.items() for name, array in part.items()
            }
            try:
                write_state(Path(self.state), self._begun[0], told, flat)
            except OSError as error:  # a full disk must not end a healthy job
                self.history.news.append(f"the state cannot be written: {error}")
        news, self.history.news = self.history.news, []
        return news

    def is_buffer(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is not trained: it has integers, or is one of ``buffers``.

        An entry of ``buffers`` is a whole name, or the part of a name after its last dot.
        """
        names = (tensor.name, tensor.name.rpartition(".")[2])
        return tensor.is_integer or not self.buffers.isdisjoint(names)

    def select(
        self,
        clients: Sequence[Client[Name, Sent]],
        model: Mapping[str, Tensor],
        *,
        updates: bool = False,
    ) -> list[Client[Name, Sent]]:
        """Return the clients that are aggregated: without excluded ones, with normalised updates.

        To normalise, the update of client i is multiplied by t / t_i, where t_i is its number of
        local steps and t is the median over the clients. Then a client with more steps has no
        longer update. FedNova takes the mean for t (Wang et al., "Tackling the objective
        inconsistency problem", 2020), but one client with a false t_i could move the mean
        anywhere. Buffers are not normalised.
        """
        kept = self.history.admitted(clients, self.rule)
        if not self.normalize or not kept:
            return kept
        usual = float(np.median([client.steps for client in kept]))
        found = []
        for client in kept:
            tensors = {
                name: tensor
                if self.is_buffer(tensor)
                else _stretched(tensor, None if updates else model[name], usual / client.steps)
                for name, tensor in client.tensors.items()
            }
            found.append(replace(client, tensors=tensors))
        return found

    def aggregate(
        self,
        clients: Sequence[Client[Name, Sent]],
        model: Mapping[str, Tensor],
        turn: int,
        make: Callable[[Tensor, list[NDArray[Any]]], Made],
        *,
        updates: bool = False,
    ) -> tuple[dict[str, Made] | None, ClientDrops]:
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
        drops = ClientDrops(shares.total(), expected, merge.not_finite, tuple(sources))
        if merge.not_finite and self.on_nonfinite != "apply":
            return None, drops
        if self.rule.needs_reference == "previous" and not merge.not_finite:
            for name in merge.starts:
                new = np.concatenate([_numbers(part, model[name]) for part in parts[name]])
                old = 0 if updates else _numbers(model[name].open(), model[name])
                self._previous[name] = new - old
        # Release parts as they are used: two copies of the result need not fit into memory.
        return {name: make(model[name], parts.pop(name)) for name in list(parts)}, drops

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
        """Return the reference: the update of the previous round, or the server's own."""
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


def _stretched(tensor: Tensor, base: Tensor | None, factor: float) -> Tensor:
    """Return a tensor whose difference to its base is multiplied when the values are read."""

    def read() -> NDArray[Any]:
        values = _numbers(tensor.open(), tensor)
        with np.errstate(all="ignore"):
            if base is None:
                values *= values.dtype.type(factor)
            else:
                start = _numbers(base.open(), base)
                values = start + values.dtype.type(factor) * (values - start)
        return to_bfloat16(values) if tensor.element == "bfloat16" else values

    return tensor if factor == 1 else replace(tensor, open=read)


def _numbers(values: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    """Return stored values as numbers to compute with; bfloat16 becomes float32."""
    if tensor.element != "bfloat16":
        return values.copy()
    return from_bfloat16(values)
