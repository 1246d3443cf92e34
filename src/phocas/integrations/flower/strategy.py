"""A Flower strategy that stands where FedAvg stood, and survives wrong clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from phocas.integrations.flower.optimisers import ServerOptimiser
from phocas.integrations.flower.replies import (
    examples,
    middle_metrics,
    open_reply,
    serialised,
    tensors_of,
)
from phocas.integrations.merging.formats import Tensor, TensorFile
from phocas.integrations.merging.merge import Merge, Shares
from phocas.rules import Relative, Rule
from phocas.rules.suspicion import stand_out
from phocas.rules.table import RULES

MOST = 0.5
"""Whoever lost less of its values than this is no suspect, however little others lost."""
POLICIES = ("skip", "stop")


@dataclass(frozen=True, slots=True)
class _Client:
    node: int
    tensors: TensorFile
    content: RecordDict
    weight: float


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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._own_metrics = options.get("train_metrics_aggr_fn")
        self._own_evaluation = options.get("evaluate_metrics_aggr_fn")
        self.rule = RULES.of(rule, "RobustStrategy")
        if on_too_few not in POLICIES:
            raise ValueError(f"on_too_few must be one of {', '.join(POLICIES)}: got {on_too_few!r}")
        if max_share is not None and not 0 < max_share <= 1:
            raise ValueError(f"max_share must be more than 0 and at most 1: got {max_share!r}")
        Relative(self.rule)  # refuses what cannot be applied to updates, now and not in a round
        self.on_too_few = on_too_few
        self.max_share = max_share
        self.optimiser = optimiser
        self.seed = seed
        self._model: TensorFile | None = None
        self._state: dict[str, dict[str, NDArray[Any]]] = {}
        self._turn = 0

    def summary(self) -> None:
        """Log the rule, and what FedAvg logs."""
        log(INFO, "\t├──> Robust aggregation: %s", self.rule)
        shares = "ignored" if self.max_share is None else f"at most {self.max_share:g} each"
        log(INFO, "\t│\t├── Claimed examples: %s", shares)
        log(INFO, "\t│\t└── Too few replies: %s", self.on_too_few)
        super().summary()

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
            arrays, dropped, expected = self._aggregate(clients, self._model, server_round)
        except ValueError as error:
            reason = f"round {server_round}: {len(clients)} usable replies, {failed} not: {error}"
            if self.on_too_few == "stop":
                raise AggregationError(reason) from None
            log(WARNING, "aggregate_train: skipped %s", reason)
            return None, MetricRecord({"phocas/replies": len(clients), "phocas/failed": failed})
        contents = [client.content for client in clients]
        if self._own_metrics is not None:
            metrics = dict(self._own_metrics(contents, self.weighted_by_key))
        else:
            metrics = dict(middle_metrics(contents, self.weighted_by_key))
        nodes = [client.node for client in clients]
        suspects = [nodes[i] for i in np.flatnonzero(stand_out(dropped) & (dropped > MOST))]
        metrics |= {
            "phocas/replies": len(clients),
            "phocas/failed": failed,
            "phocas/nodes": nodes,
            "phocas/dropped": dropped.tolist(),
            "phocas/expected": expected,
            "phocas/suspects": suspects,
        }
        if suspects:
            log(WARNING, "aggregate_train: thrown away far more than others: nodes %s", suspects)
        return arrays, MetricRecord(metrics)

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

    def _usable(self, replies: list[Message], model: TensorFile) -> tuple[list[_Client], int]:
        """Return the clients whose row can be used, in the order of their nodes."""
        clients = []
        for reply in replies:
            node = int(reply.metadata.src_node_id)
            try:
                tensors = open_reply(reply, model)
                weight = 1.0
                if self.max_share is not None:
                    weight = examples(reply.content, self.weighted_by_key)
            except (ValueError, TypeError, KeyError, SyntaxError) as error:
                log(WARNING, "aggregate_train: node %d is left out: %s", node, error)
                continue
            clients.append(_Client(node, tensors, reply.content, weight))
        failed = len(replies) - len(clients)
        log(INFO, "aggregate_train: Received %d usable results, %d not", len(clients), failed)
        return sorted(clients, key=lambda client: client.node), failed

    def _aggregate(
        self, clients: list[_Client], model: TensorFile, server_round: int
    ) -> tuple[ArrayRecord, NDArray[np.float64], float]:
        """Aggregate key by key: beside the messages, there is no more than the result."""
        rule, m = self.rule, len(clients)
        if m and self.max_share is not None:
            rule = rule.weighted([client.weight for client in clients], max(self.max_share, 1 / m))
        rule.check(m)
        files = [*(client.tensors for client in clients), model]
        # The keys are in the order of the model: blocks of columns are counted over them.
        files[0] = TensorFile(
            files[0].path, "npz", {name: files[0].tensors[name] for name in model.tensors}, {}
        )
        merge = Merge(files, m, Relative(rule), self.seed + server_round, None)
        merge.plan()
        shares = Shares(m)
        self._turn += 1
        found = {
            name: serialised(tensor, self._stepped(tensor, list(merge.parts(tensor, shares))))
            for name, tensor in model.tensors.items()
        }
        return ArrayRecord(found), shares.total(), rule.expected(m)

    def _stepped(self, tensor: Tensor, parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Let the server's optimiser take the step, if there is one and it is one of floats."""
        if self.optimiser is None or tensor.whole:
            return parts
        old = tensor.open()
        new = np.concatenate([np.empty(0, old.dtype), *parts])
        state = self._state.setdefault(tensor.name, {})
        stepped = self.optimiser.step(old, new - old, state, self._turn)
        return [stepped.astype(old.dtype, copy=False)]
