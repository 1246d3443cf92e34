"""A Flower strategy that replaces FedAvg and tolerates Byzantine clients."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from phocas.deprecation import former_parameters
from phocas.detection.own_past import WorkerData
from phocas.integrations.client_history import describe
from phocas.integrations.client_replies import Client, usable
from phocas.integrations.clients import BUFFERS, Reference, Terms
from phocas.integrations.flower.optimizers import UpdateOptimizer, check_optimizer
from phocas.integrations.flower.replies import (
    claim,
    middle_metrics,
    open_reply,
    serialised,
    tensors_of,
)
from phocas.integrations.merging.tensors import Tensor
from phocas.rules import Rule
from phocas.rules.table import RULES
from phocas.specs import OnNonfinite, unknown


class _OtherNodes:
    """A grid without some of its nodes, from which nodes are sampled."""

    def __init__(self, grid: Grid, without: Collection[int]) -> None:
        self._grid, self._without = grid, frozenset(without)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        """Return the connected nodes that may be sampled."""
        return [node for node in self._grid.get_node_ids() if node not in self._without]


@former_parameters(optimiser="optimizer")
class RobustStrategy(FedAvg):  # type: ignore[misc]  # flwr may not be installed, or is untyped
    """A FedAvg strategy that aggregates the clients' updates by a robust rule.

    A client that fails, does not answer, or sends other keys, shapes or types than the model's
    loses its own row of the round and affects nothing else. The number of examples that a client
    claims is ignored, unless ``max_share`` is given: then it is the weight of the client, and no
    client has more than that share of the total weight. The metrics of a round are medians over the
    clients. Further metrics say whose values were dropped: ``phocas/nodes`` with the share
    ``phocas/dropped`` of each node, and ``phocas/unusual``, the nodes that lost most of their
    values and far more than the others. If data differ, such a node may be honest. So each node is
    compared with its own past: ``phocas/flagged`` has the nodes that no longer act as they used to,
    and ``phocas/no-verdict`` those that have taken part in too few rounds to say. With ``exclude``,
    ``phocas/excluded`` has the excluded nodes: they are not aggregated, and they are sampled only
    if too few others are connected.

    Args:
        rule: the rule, or its name
        on_too_few: what to do in a round with fewer usable replies than the rule needs: ``skip``
            the round and keep the model, or ``stop`` the run
        max_share: weight clients by their examples, each with at most this share of the total
        optimizer: the server's optimizer: :class:`Momentum`, :class:`Adam`, :class:`Yogi`, or None
        seed: a seed for rules that draw at random
        on_nonfinite: what to do with an aggregate that is not finite: ``skip`` the round and keep
            the model, ``stop`` the run, or ``apply`` it
        buffers: names of the arrays that are not trained and bypass the optimizer: whole names, or
            the part after the last dot. Arrays of integers always bypass it. For a torch model:
            ``[name for name, _ in model.named_buffers()]``
        reference: for a rule that needs a trusted update (``fl-trust``): a function of the model's
            arrays by name and of the round, which returns the update of the server's own training
            on trusted samples, the new values minus the old, by name
        data: the data of honest clients: if they ``differ``, each client is compared with its own
            past; if they are ``alike``, no client is
        exclude: when clients are excluded: ``never``; ``evidence``, for good once a client no
            longer acts as in its own past; ``evidence:rounds=20``, for so many rounds;
            ``evidence:false_alarm=1e-4`` states the probability that any honest client is excluded
        state: a file that keeps the past of the clients, the excluded ones, the previous update and
            the state of the optimizer, so that a restarted server continues with them
        normalized_by_key: the metric with which clients report their number of local steps. Each
            update is then divided by it, and multiplied by the median over the clients, so that
            clients with more local work are not dropped for the length of their updates
        options: arguments of FedAvg, such as ``fraction_train``
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a class that inherits from another strategy that aggregates."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            other = base.__module__.startswith("flwr.") and base not in FedAvg.__mro__
            if other and "aggregate_train" in vars(base):
                raise TypeError(
                    f"{cls.__name__} must not inherit from RobustStrategy and {base.__name__}:"
                    " both aggregate; pass optimizer=Momentum(...), Adam(...) or Yogi(...) to"
                    " RobustStrategy"
                )

    def __init__(
        self,
        rule: Rule | str,
        *,
        on_too_few: Literal["skip", "stop"] = "skip",
        max_share: float | None = None,
        optimizer: UpdateOptimizer | None = None,
        seed: int = 0,
        on_nonfinite: OnNonfinite = "skip",
        buffers: Collection[str] = BUFFERS,
        reference: Reference | None = None,
        data: WorkerData = "differ",
        exclude: str = "never",
        state: str | Path | None = None,
        normalized_by_key: str | None = None,
        **options: Any,
    ) -> None:
        others = inspect.signature(FedAvg).parameters
        for name in options:
            if name not in others:
                own = [
                    own for own in inspect.signature(RobustStrategy).parameters if own != "options"
                ]
                raise TypeError(unknown("option", name, [*own, *others]))
        super().__init__(**options)
        if optimizer is not None:
            check_optimizer(optimizer)
        if isinstance(buffers, str):
            raise TypeError(f"buffers must be a list of names: got {buffers!r}")
        self._own_metrics = options.get("train_metrics_aggr_fn")
        self._own_evaluation = options.get("evaluate_metrics_aggr_fn")
        found = RULES.of(rule, "RobustStrategy")
        self.terms = Terms(
            found,
            on_too_few,
            max_share,
            seed,
            on_nonfinite,
            reference,
            data,
            exclude,
            state,
            normalized_by_key is not None,
            frozenset(buffers),
        )
        self.normalized_by_key = normalized_by_key
        self.optimizer = optimizer
        self._model: Mapping[str, Tensor] | None = None
        self._state: dict[str, dict[str, NDArray[Any]]] = {}
        self._turn = 0

    def summary(self) -> None:
        """Log the rule and the settings, in the format of FedAvg."""
        terms, share = self.terms, self.terms.max_share
        claims = "ignored" if share is None else f"weights, at most {share:g} of all each"
        key = self.normalized_by_key
        work = "expected to be equal" if key is None else f"updates divided by '{key}'"
        fractions = f"train ({self.fraction_train:.2f}) | evaluate ({self.fraction_evaluate:.2f})"
        least = f"train ({self.min_train_nodes}) | evaluate ({self.min_evaluate_nodes})"
        for line in (
            f"├──> Robust aggregation: {terms.rule}",
            f"│\t├── Claimed '{self.weighted_by_key}': {claims}",
            f"│\t├── Local steps: {work}",
            f"│\t├── Too few replies: {terms.on_too_few}",
            f"│\t├── Aggregate not finite: {terms.on_nonfinite}",
            f"│\t└── Exclusion of clients: {terms.exclude}",
            "├──> Sampling:",
            f"│\t├── Fraction: {fractions}",
            f"│\t├── Minimum nodes: {least}",
            f"│\t└── Minimum available nodes: {self.min_available_nodes}",
            "└──> Keys in records:",
            f"\t├── ArrayRecord key: '{self.arrayrecord_key}'",
            f"\t└── ConfigRecord key: '{self.configrecord_key}'",
        ):
            log(INFO, "\t%s", line)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keep the model that is sent to the clients: their updates are relative to it."""
        self._begin(tensors_of(arrays))
        excluded = self.terms.history.excluded()
        if excluded:
            nodes = list(grid.get_node_ids())
            others = [node for node in nodes if node not in excluded]
            if len(others) >= max(self.min_available_nodes, self.min_train_nodes):
                grid = _OtherNodes(grid, excluded)
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def _begin(self, model: Mapping[str, Tensor]) -> None:
        """Keep the model of a round; before the first round restore the state of the server."""
        self._model = model
        try:
            kept = self.terms.begin(model)
        except RuntimeError as error:
            raise AggregationError(str(error)) from None
        for key, values in kept.items():
            slot, _, name = key.partition("/")
            if slot == "turn":
                self._turn = int(values)
            else:
                self._state.setdefault(name, {})[slot] = values

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable replies, and report the others and the shares that were dropped."""
        if self._model is None:
            raise AggregationError("configure_train must come before aggregate_train")
        self._begin(self._model)
        arrays, metrics = self._aggregated(server_round, list(replies), self._model)
        kept = {
            f"{slot}/{name}": values
            for name, slots in self._state.items()
            for slot, values in slots.items()
        }
        for line in self.terms.end_round({"turn": np.array(self._turn), **kept}):
            log(WARNING, "aggregate_train: %s", line)
        return arrays, metrics

    def _aggregated(
        self, server_round: int, replies: list[Message], model: Mapping[str, Tensor]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the new model, or None for a round that is skipped, and the metrics."""
        sent, failed = self._usable(replies, model)
        history = self.terms.history
        clients = self.terms.select(sent, model)
        try:
            arrays, drops = self.terms.aggregate(clients, model, server_round, self._stepped)
        except ValueError as error:
            reason = f"round {server_round}: {len(clients)} usable replies, {failed} not: {error}"
            if self.terms.on_too_few == "stop":
                raise AggregationError(reason) from None
            log(WARNING, "aggregate_train: skipped %s", reason)
            return None, MetricRecord({"phocas/replies": len(clients), "phocas/failed": failed})
        nodes = [client.name for client in clients]
        lost = f"round {server_round}: {drops.lost(self.terms.rule, nodes)}"
        if arrays is None and self.terms.on_nonfinite == "stop":
            raise AggregationError(lost)
        contents = [client.sent.content for client in clients]
        if self._own_metrics is not None:
            metrics = dict(self._own_metrics(contents, self.weighted_by_key))
        else:
            metrics = dict(middle_metrics(contents, self.weighted_by_key))
        unusual = drops.unusual(nodes)
        metrics |= {
            "phocas/replies": len(clients),
            "phocas/failed": failed,
            "phocas/nodes": nodes,
            "phocas/dropped": drops.dropped.tolist(),
            "phocas/expected": drops.expected,
            "phocas/unusual": unusual,
            "phocas/not-finite": drops.not_finite,
        }
        if self.terms.data == "differ":
            metrics["phocas/excluded"] = history.excluded()
            history.observe(clients, model)
            flagged = history.flagged()
            metrics["phocas/flagged"] = metrics["phocas/suspects"] = flagged
            metrics["phocas/no-verdict"] = history.no_verdict(nodes)
            if flagged:
                log(WARNING, "aggregate_train: %s", describe(flagged))
        if unusual:
            log(WARNING, "aggregate_train: far more values dropped than of others: %s", unusual)
        if drops.not_finite:
            metrics["phocas/not-finite-nodes"] = [nodes[index] for index in drops.sources]
            done = "skipped" if arrays is None else "applied"
            log(WARNING, "aggregate_train: %s %s", done, lost)
        if arrays is None:
            return None, MetricRecord(metrics)
        self._turn += 1
        return ArrayRecord(arrays), MetricRecord(metrics)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the median over the clients of every metric; ignore values that are no numbers."""
        del server_round
        contents = [reply.content for reply in replies if not reply.has_error()]
        if not contents:
            return None
        if self._own_evaluation is not None:
            found: MetricRecord = self._own_evaluation(contents, self.weighted_by_key)
            return found
        return MetricRecord(dict(middle_metrics(contents, self.weighted_by_key)))

    def _usable(
        self, replies: list[Message], model: Mapping[str, Tensor]
    ) -> tuple[list[Client[int, Message]], int]:
        """Return the clients with a usable reply, and the number of the others."""

        def opened(reply: Message) -> tuple[Mapping[str, Tensor], float, float]:
            tensors, content, steps = open_reply(reply, model), reply.content, 1.0
            if self.normalized_by_key is not None:
                steps = claim(content, self.normalized_by_key)
            if self.terms.max_share is None:
                return tensors, 1.0, steps
            return tensors, claim(content, self.weighted_by_key), steps

        clients = usable(
            [(int(reply.metadata.src_node_id), reply) for reply in replies],
            opened,
            lambda reason: log(WARNING, "aggregate_train: node %s", reason),
        )
        failed = len(replies) - len(clients)
        log(INFO, "aggregate_train: Received %d usable results, %d not", len(clients), failed)
        return clients, failed

    def _stepped(self, tensor: Tensor, parts: list[NDArray[Any]]) -> Array:
        """Return the new values of a tensor: a step of the optimizer if the tensor is trained."""
        if self.optimizer is None or self.terms.is_buffer(tensor):
            return serialised(tensor, parts)
        old = tensor.open()
        new = np.concatenate([np.empty(0, old.dtype), *parts])
        state = self._state.setdefault(tensor.name, {})
        stepped = self.optimizer.step(old, new - old, state, self._turn + 1)
        return serialised(tensor, [stepped.astype(old.dtype, copy=False)])
