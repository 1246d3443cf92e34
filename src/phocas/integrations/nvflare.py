"""Robust federated learning with NVFlare: an aggregator for its FedAvg and ScatterAndGather."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from phocas.detection.own_past import WorkerData
from phocas.integrations.client_history import describe
from phocas.integrations.client_replies import (
    UNUSABLE,
    Client,
    check_like,
    claimed,
    middle,
    usable,
)
from phocas.integrations.clients import ClientDrops, Terms
from phocas.integrations.merging.tensors import Tensor, in_memory
from phocas.rules import Rule
from phocas.rules.inputs import is_tensor, like
from phocas.rules.table import RULES
from phocas.specs import OnNonfinite, imported_callable

__all__ = ["RobustAggregator"]

_NAME = "client_name"
"""The key of the client's name in the metadata of a result."""


class RobustAggregator(ModelAggregator):  # type: ignore[misc]  # nvflare may not be installed
    """An aggregator of NVFlare that aggregates the clients' updates by a robust rule.

    A client that sends other keys, shapes or types than the model's loses its own row of the round
    and affects nothing else; so does a client that fails, if the controller has
    ``ignore_result_error=True``. The number of steps that a client claims is ignored, unless
    ``max_share`` is given: then it is the weight of the client, and no client has more than that
    share of the total weight. For each round, the log lists the clients that were left out and why,
    the share of each client's values that was dropped, and the clients that lost most of their
    values and far more than the others. If data differ, such a client may be honest, so each client
    is compared with its own past, and the log lists those that no longer act as they used to. With
    ``exclude``, such a client is not aggregated. Metrics are medians over the clients.

    Args:
        rule: the rule, or its name
        on_too_few: what to do in a round with fewer usable results than the rule needs: ``skip``
            the round and keep the model, or ``stop`` the job
        max_share: weight clients by their steps, each with at most this share of the total
        seed: a seed for rules that draw at random
        on_nonfinite: what to do with an aggregate that is not finite: ``skip`` the round and keep
            the model, ``stop`` the job, or ``apply`` it
        reference: for a rule that needs a trusted update (``fl-trust``): ``module:function``, a
            function of the model's arrays by name and of the round, which returns the update of the
            server's own training on trusted samples, the new values minus the old, by name
        data: the data of honest clients: if they ``differ``, each client is compared with its own
            past; if they are ``alike``, no client is
        exclude: when clients are excluded: ``never``; ``evidence``, for good once a client no
            longer acts as in its own past; ``evidence:rounds=20``, for so many rounds;
            ``evidence:false_alarm=1e-4`` states the probability that any honest client is excluded
        state: a file of the server that keeps the past of the clients, the excluded ones and the
            previous update, so that a restarted server continues with them
        normalize: whether each update is divided by the number of steps that its client reports,
            and multiplied by the median over the clients, so that clients with more local work are
            not dropped for the length of their updates
    """

    def __init__(
        self,
        rule: Rule | str,
        on_too_few: Literal["skip", "stop"] = "skip",
        max_share: float | None = None,
        seed: int = 0,
        on_nonfinite: OnNonfinite = "skip",
        reference: str | None = None,
        data: WorkerData = "differ",
        exclude: str = "never",
        state: str | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        found = RULES.of(rule, "RobustAggregator")
        trusted = None if reference is None else imported_callable(reference)
        self._terms = Terms(
            found,
            on_too_few,
            max_share,
            seed,
            on_nonfinite,
            trusted,
            data,
            exclude,
            state,
            normalize,
        )
        # NVFlare writes these into the job, under the names of the arguments.
        self.rule = str(self._terms.rule)
        self.on_too_few = on_too_few
        self.max_share = max_share
        self.seed = seed
        self.on_nonfinite = on_nonfinite
        self.reference = reference
        self.data = data
        self.exclude = exclude
        self.state = state
        self.normalize = normalize
        self._model: FLModel | None = None
        self._results: list[tuple[str, FLModel]] = []

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the model that is sent to the clients: their updates are relative to it."""
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.BEFORE_TRAIN_TASK:
            sent = FLModelUtils.from_shareable(fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE))
            if sent.params is not None:
                self._model = sent

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Accept a result from ScatterAndGather, under the name that the server knows."""
        self.fl_ctx = fl_ctx
        name = fl_ctx.get_peer_context().get_identity_name()
        try:
            _check_round(shareable, fl_ctx)
            result = FLModelUtils.from_shareable(shareable, fl_ctx)
        except UNUSABLE as error:
            self.warning(f"{name} is left out: {error}")
            return False
        result.meta[_NAME] = name
        self.accept_model(result)
        return True

    def accept_model(self, model: FLModel) -> None:
        """Keep a client's result until the round is aggregated."""
        self._results.append((str(model.meta[_NAME]), model))

    def reset_stats(self) -> None:
        """Discard the results of the round."""
        self._results = []

    def aggregate_model(self) -> FLModel:
        """Aggregate the usable results, and report the others and the shares that were dropped."""
        results, model = self._results, self._model
        self.reset_stats()
        if model is None:
            raise ValueError("the model must be sent to clients before results are aggregated")
        arrays = _arrays(model.params)
        wanted = _tensors_of(arrays)
        self._terms.begin(wanted)
        found = self._aggregated(model, arrays, wanted, results)
        for line in self._terms.end_round():
            self.warning(line)
        return found

    def _aggregated(
        self,
        model: FLModel,
        arrays: Mapping[str, Any],
        wanted: Mapping[str, Tensor],
        results: list[tuple[str, FLModel]],
    ) -> FLModel:
        """Return the aggregate of a round, or the model itself if the round is skipped."""
        kinds = [result.params_type for _, result in results]
        kind = max(ParamsType, key=kinds.count)  # the majority
        sent = usable(results, partial(self._opened, wanted, kind), self.warning)
        clients = self._terms.select(sent, wanted, updates=kind is ParamsType.DIFF)
        turn = model.current_round or 0
        said = f"round {turn}: {len(sent)} of {len(results)} results are usable"
        if excluded := self._terms.history.excluded():
            self.info(f"{said}; excluded by {self.exclude}: {', '.join(excluded)}")
        try:
            params, drops = self._terms.aggregate(
                clients,
                wanted,
                turn,
                lambda tensor, parts: _made(arrays[tensor.name], tensor, parts),
                updates=kind is ParamsType.DIFF,
            )
        except ValueError as error:
            if self.on_too_few == "stop":
                raise ValueError(f"{said}: {error}") from None
            self.warning(f"skipped {said}: {error}")
            return FLModel(params_type=ParamsType.FULL, params=model.params)
        metrics = middle([client.sent.metrics or {} for client in clients]) or None
        lost = drops.lost(self._terms.rule, [client.name for client in clients])
        if params is None and self.on_nonfinite == "stop":
            raise ValueError(f"{said}: {lost}")
        self._log_shares(said, clients, drops)
        if self.data == "differ":
            self._terms.history.observe(clients, wanted, updates=kind is ParamsType.DIFF)
            self._log_history(said, [client.name for client in clients])
        if drops.not_finite:
            self.warning(f"{'skipped' if params is None else 'applied'} {said}: {lost}")
        if params is None:
            return FLModel(params_type=ParamsType.FULL, params=model.params, metrics=metrics)
        return FLModel(params_type=kind, params=params, metrics=metrics)

    def _opened(
        self, wanted: Mapping[str, Tensor], kind: ParamsType, result: FLModel
    ) -> tuple[Mapping[str, Tensor], float, float]:
        """Return the tensors of a result, its weight and its steps; raise if it is unusable."""
        if result.params_type is not kind:
            raise ValueError(f"it must send what most do, {kind.value}: it is {result.params_type}")
        tensors = _tensors_of(_arrays(result.params))
        check_like(tensors, wanted)
        if self.max_share is None and not self.normalize:
            return tensors, 1.0, 1.0
        key = FLMetaKey.NUM_STEPS_CURRENT_ROUND
        steps = claimed(result.meta.get(key), key)
        return tensors, 1.0 if self.max_share is None else steps, steps

    def _log_shares(
        self, said: str, clients: list[Client[str, FLModel]], drops: ClientDrops
    ) -> None:
        """Log the share that was dropped of each client, and the clients that stand out."""
        names = [client.name for client in clients]
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in zip(names, drops.dropped, strict=True)
        )
        self.info(f"{said}; dropped by {self.rule} ({drops.expected:.0%} by chance): {shares}")
        unusual = drops.unusual(names)
        if unusual:
            self.warning(f"{said}; far more values dropped than of others: {', '.join(unusual)}")

    def _log_history(self, said: str, names: list[str]) -> None:
        """Log the clients that no longer act as they used to, and those without a verdict."""
        if flagged := self._terms.history.flagged():
            self.warning(f"{said}; {describe(flagged)}")
        if early := self._terms.history.no_verdict(names):
            self.info(f"{said}; no verdict yet, too few rounds: {', '.join(early)}")


def _check_round(shareable: Shareable, fl_ctx: FLContext) -> None:
    """Raise ValueError for a result of another round: it is an update of another model."""
    now = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
    begun = shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND)
    if begun != now:
        raise ValueError(f"it must answer round {now}: it answers round {begun}")


def _tensors_of(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arrays or tensors of a model as named tensors, without a copy."""
    return {name: in_memory(name, value, f"key {name!r}") for name, value in params.items()}


def _arrays(params: Any) -> dict[str, Any]:
    """Return the arrays and tensors of a result by name; raise TypeError for anything else."""
    if not isinstance(params, Mapping):
        raise TypeError(f"arrays must be sent by name: got {type(params).__name__}")
    found = {}
    for name, value in params.items():
        array = np.asarray(value) if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not (isinstance(array, np.ndarray) or is_tensor(array)):
            kind = type(value).__name__
            raise TypeError(f"key {name!r} must be a NumPy array or a torch tensor: got {kind}")
        found[name] = array
    return found


def _made(example: Any, tensor: Tensor, parts: list[NDArray[Any]]) -> Any:
    """Return the new values of a tensor as an array or a torch tensor, as the model has it."""
    values = np.concatenate([np.empty(0, tensor.dtype.newbyteorder("=")), *parts])
    return like(example, values.view(bool) if tensor.element == "bool" else values).reshape(
        tensor.shape
    )
