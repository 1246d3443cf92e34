"""A Flower strategy that replaces FedAvg and tolerates Byzantine clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from logging import INFO, WARNING
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
from phocas.integrations.client_history import ClientHistory, describe
from phocas.integrations.clients import Client, Reference, Terms, usable
from phocas.integrations.flower.optimizers import UpdateOptimizer, check_optimizer
from phocas.integrations.flower.replies import (
    examples,
    middle_metrics,
    open_reply,
    serialised,
    tensors_of,
)
from phocas.integrations.merging.tensors import Tensor
from phocas.rules import Rule
from phocas.rules.table import RULES
from phocas.specs import OnNonfinite

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of torch's buffers of batch and instance normalisation."""


@former_parameters(optimiser="optimizer")
class RobustStrategy(FedAvg):  # type: ignore[misc]  # flwr may not be installed, or is untyped
    """A FedAvg strategy that aggregates the clients' updates by a robust rule.

    A client that fails, does not answer, or sends other keys, shapes or types than the model's
    loses its own row of the round and affects nothing else. The number of examples that a client
    claims is ignored, unless ``max_share`` is given: then it is the weight of the client, and no
    client has more than that share of the total weight. The metrics of a round are medians over the
    clients. Further metrics say whose values were dropped: ``phocas/nodes`` with the share
    ``phocas/dropped`` of each node, and ``phocas/suspects``, the nodes that lost most of their
    values and far more than the others. If data differ, such a node may be honest. So each node is
    compared with its own past: ``phocas/flagged`` has the nodes that no longer act as they used to,
    and ``phocas/no-verdict`` those that have taken part in too few rounds to say.

    Args:
        rule: the rule, or its name
        on_too_few: what to do in a round with fewer usable replies than the rule needs: ``skip``
            the round and keep the model, or ``stop`` the run
        max_share: weight clients by their examples, each with at most this share of the total
        optimizer: the server's optimizer: :class:`Momentum`, :class:`Adam`, or None
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
        options: arguments of FedAvg, such as ``fraction_train``
    """

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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if optimizer is not None:
            check_optimizer(optimizer)
        if isinstance(buffers, str):
            raise TypeError(f"buffers must be a list of names: got {buffers!r}")
        self._own_metrics = options.get("train_metrics_aggr_fn")
        self._own_evaluation = options.get("evaluate_metrics_aggr_fn")
        found = RULES.of(rule, "RobustStrategy")
        self.terms = Terms(found, on_too_few, max_share, seed, on_nonfinite, reference, data)
        self._history: ClientHistory[int] = ClientHistory(seed)
        self.optimizer = optimizer
        self.buffers = frozenset(buffers)
        self._model: Mapping[str, Tensor] | None = None
        self._state: dict[str, dict[str, NDArray[Any]]] = {}
        self._turn = 0

    def summary(self) -> None:
        """Log the rule and the settings, in the format of FedAvg."""
        terms, share = self.terms, self.terms.max_share
        claims = "ignored" if share is None else f"weights, at most {share:g} of all each"
        fractions = f"train ({self.fraction_train:.2f}) | evaluate ({self.fraction_evaluate:.2f})"
        least = f"train ({self.min_train_nodes}) | evaluate ({self.min_evaluate_nodes})"
        for line in (
            f"├──> Robust aggregation: {terms.rule}",
            f"│\t├── Claimed '{self.weighted_by_key}': {claims}",
            f"│\t├── Too few replies: {terms.on_too_few}",
            f"│\t└── Aggregate not finite: {terms.on_nonfinite}",
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
        self._model = tensors_of(arrays)
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable replies, and report the others and the shares that were dropped."""
        if self._model is None:
            raise AggregationError("configure_train must come before aggregate_train")
        clients, failed = self._usable(list(replies), self._model)
        try:
            arrays, blame = self.terms.aggregate(clients, self._model, server_round, self._stepped)
        except ValueError as error:
            reason = f"round {server_round}: {len(clients)} usable replies, {failed} not: {error}"
            if self.terms.on_too_few == "stop":
                raise AggregationError(reason) from None
            log(WARNING, "aggregate_train: skipped %s", reason)
            return None, MetricRecord({"phocas/replies": len(clients), "phocas/failed": failed})
        nodes = [client.name for client in clients]
        lost = f"round {server_round}: {blame.lost(self.terms.rule, nodes)}"
        if arrays is None and self.terms.on_nonfinite == "stop":
            raise AggregationError(lost)
        contents = [client.sent.content for client in clients]
        if self._own_metrics is not None:
            metrics = dict(self._own_metrics(contents, self.weighted_by_key))
        else:
            metrics = dict(middle_metrics(contents, self.weighted_by_key))
        unusual = blame.unusual(nodes)
        metrics |= {
            "phocas/replies": len(clients),
            "phocas/failed": failed,
            "phocas/nodes": nodes,
            "phocas/dropped": blame.dropped.tolist(),
            "phocas/expected": blame.expected,
            "phocas/suspects": unusual,
            "phocas/not-finite": blame.not_finite,
        }
        if self.terms.data == "differ":
            self._history.observe(clients, self._model)
            flagged = self._history.flagged()
            metrics["phocas/flagged"] = flagged
            metrics["phocas/no-verdict"] = self._history.no_verdict(nodes)
            if flagged:
                log(WARNING, "aggregate_train: %s", describe(flagged))
        if unusual:
            log(WARNING, "aggregate_train: far more values dropped than of others: %s", unusual)
        if blame.not_finite:
            metrics["phocas/not-finite-nodes"] = [nodes[index] for index in blame.sources]
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

        def opened(reply: Message) -> tuple[Mapping[str, Tensor], float]:
            tensors = open_reply(reply, model)
            if self.terms.max_share is None:
                return tensors, 1.0
            return tensors, examples(reply.content, self.weighted_by_key)

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
        buffer = tensor.is_integer or not self.buffers.isdisjoint(
            (tensor.name, tensor.name.rpartition(".")[2])
        )
        if self.optimizer is None or buffer:
            return serialised(tensor, parts)
        old = tensor.open()
        new = np.concatenate([np.empty(0, old.dtype), *parts])
        state = self._state.setdefault(tensor.name, {})
        stepped = self.optimizer.step(old, new - old, state, self._turn + 1)
        return serialised(tensor, [stepped.astype(old.dtype, copy=False)])
