"""A Flower strategy that stands where FedAvg stood, and survives wrong clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from phocas.integrations.clients import Client, Terms, usable
from phocas.integrations.flower.optimisers import ServerOptimiser, check_optimiser
from phocas.integrations.flower.replies import (
    examples,
    middle_metrics,
    open_reply,
    serialised,
    tensors_of,
)
from phocas.integrations.merging.formats import Tensor, TensorFile
from phocas.rules import Rule
from phocas.rules.table import RULES
from phocas.specs import OnNonfinite

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of torch's buffers of batch and instance normalisation."""


class RobustStrategy(FedAvg):  # type: ignore[misc]  # flwr may not be installed, or is untyped
    """Aggregate the clients' updates by a rule; sample and evaluate as FedAvg does.

    A client that fails, does not answer, or sends other keys, shapes or types than the model's
    costs its own row and nothing else. What it claims about its examples is ignored, unless
    ``max_share`` is given: then clients are weighted by it, and nobody has more than that share.
    Metrics of a round are medians over the clients, and who was thrown away: ``phocas/nodes`` with
    the share ``phocas/dropped`` of each, and ``phocas/suspects``, who lost most of their values and
    far more than others.

    Args:
        rule: the rule, or its name
        on_too_few: what to do in a round with fewer usable replies than the rule needs: ``skip`` it
            and keep the model, or ``stop`` the run
        max_share: weigh clients by their examples, with nobody above this share of all
        optimiser: what the server makes of the update: :class:`Momentum`, :class:`Adam`, or None
        seed: a seed for rules that draw at random
        on_nonfinite: what to do with an aggregate that is not finite: ``skip`` the round and keep
            the model, ``stop`` the run, or ``apply`` it
        buffers: names of the arrays that are not trained, which the optimiser does not touch: whole
            names, or the part after the last dot. Arrays of whole numbers always count as such. For
            a model of torch's: ``[name for name, _ in model.named_buffers()]``
        options: all that FedAvg takes, such as ``fraction_train``
    """

    def __init__(
        self,
        rule: Rule | str,
        *,
        on_too_few: Literal["skip", "stop"] = "skip",
        max_share: float | None = None,
        optimiser: ServerOptimiser | None = None,
        seed: int = 0,
        on_nonfinite: OnNonfinite = "skip",
        buffers: Collection[str] = BUFFERS,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if optimiser is not None:
            check_optimiser(optimiser)
        if isinstance(buffers, str):
            raise TypeError(f"buffers must be a list of names: got {buffers!r}")
        self._own_metrics = options.get("train_metrics_aggr_fn")
        self._own_evaluation = options.get("evaluate_metrics_aggr_fn")
        found = RULES.of(rule, "RobustStrategy")
        self.terms = Terms(found, on_too_few, max_share, seed, on_nonfinite)
        self.optimiser = optimiser
        self.buffers = frozenset(buffers)
        self._model: TensorFile | None = None
        self._state: dict[str, dict[str, NDArray[Any]]] = {}
        self._turn = 0

    def summary(self) -> None:
        """Log the rule, and what FedAvg logs but that it weighs clients by their claims."""
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
        """Remember the model that clients are sent, from which their updates are."""
        self._model = tensors_of(arrays, "the model")
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable replies; say which are not, and who was thrown away."""
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
        suspects = blame.suspects(nodes)
        metrics |= {
            "phocas/replies": len(clients),
            "phocas/failed": failed,
            "phocas/nodes": nodes,
            "phocas/dropped": blame.dropped.tolist(),
            "phocas/expected": blame.expected,
            "phocas/suspects": suspects,
            "phocas/not-finite": blame.not_finite,
        }
        if suspects:
            log(WARNING, "aggregate_train: thrown away far more than others: nodes %s", suspects)
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
        """Return the median of what clients measure; one that sends something else is left out."""
        del server_round
        contents = [reply.content for reply in replies if not reply.has_error()]
        if not contents:
            return None
        if self._own_evaluation is not None:
            found: MetricRecord = self._own_evaluation(contents, self.weighted_by_key)
            return found
        return MetricRecord(dict(middle_metrics(contents, self.weighted_by_key)))

    def _usable(
        self, replies: list[Message], model: TensorFile
    ) -> tuple[list[Client[int, Message]], int]:
        """Return the clients whose row can be used, and how many others there are."""

        def opened(reply: Message) -> tuple[TensorFile, float]:
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
        """Let the optimiser take the step of a trained tensor; return others as they are."""
        buffer = tensor.whole or not self.buffers.isdisjoint(
            (tensor.name, tensor.name.rpartition(".")[2])
        )
        if self.optimiser is None or buffer:
            return serialised(tensor, parts)
        old = tensor.open()
        new = np.concatenate([np.empty(0, old.dtype), *parts])
        state = self._state.setdefault(tensor.name, {})
        stepped = self.optimiser.step(old, new - old, state, self._turn + 1)
        return serialised(tensor, [stepped.astype(old.dtype, copy=False)])
