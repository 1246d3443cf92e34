"""Callbacks for Lightning: ``Trainer(callbacks=[Protect("heraclius:b=1")], strategy="ddp")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from lightning.pytorch import Callback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options, watching
from phocas.integrations.guard_checkpoints import gathered_state
from phocas.rules import Rule


class Protect(Callback):  # type: ignore[misc]  # Lightning is not installed for type checks
    """A callback that protects the model from the first step; it sets the attribute ``guard``.

    Lightning's checkpoints contain the state of the guard. Its loggers get ``guard.metrics()``
    every ``log_every_n_steps`` steps.

    Use the rule ``heraclius:b=1`` for language models and mixtures of experts: other column rules
    drop the gradients of rare tokens of honest ranks (``docs/costs.md``).

    Args:
        rule: As for ``phocas.integrations.protect``.
        **options: As for ``phocas.integrations.protect``.
    """

    def __init__(self, rule: Rule | str, **options: Unpack[Options]) -> None:
        self.rule, self.options = rule, options
        self.guard: Guard | None = None
        self._restored: Mapping[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Protect the model that the strategy has wrapped."""
        del pl_module
        self.guard = parallel.protect(trainer.strategy.model, self.rule, **self.options)
        if self._restored:
            self.guard.load_state_dict(self._restored)
            self._restored = {}

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Log the metrics of the guard."""
        step = trainer.global_step
        if self.guard is not None and trainer.loggers and step % trainer.log_every_n_steps == 0:
            metrics = self.guard.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard on all ranks, for a checkpoint of Lightning."""
        return {} if self.guard is None else gathered_state(self.guard)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state of a checkpoint for the guard, which is made when training starts."""
        self._restored = state_dict


class Watch(Protect):
    """A callback that averages as before and detects faulty ranks; it sets ``guard``.

    Args:
        b: As for ``phocas.integrations.watch``.
        **options: As for ``phocas.integrations.watch``.
    """

    def __init__(self, b: int, **options: Unpack[Options]) -> None:
        super().__init__(watching(b), **options)
