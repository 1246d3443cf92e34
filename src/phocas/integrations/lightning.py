"""A callback for Lightning: ``Trainer(callbacks=[Protect("heraclius:b=1")], strategy="ddp")``."""

from __future__ import annotations

from typing import Any, Unpack

from lightning.pytorch import Callback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options
from phocas.rules import Rule


class Protect(Callback):  # type: ignore[misc]  # Lightning is not installed for type checks
    """A callback that protects the model from the first step; it sets the attribute ``guard``.

    Use the rule ``heraclius:b=1`` for language models and mixtures of experts: other column rules
    drop the gradients of rare tokens of honest ranks (``docs/costs.md``).

    Args:
        rule: As for ``phocas.integrations.protect``.
        **options: As for ``phocas.integrations.protect``.
    """

    def __init__(self, rule: Rule | str, **options: Unpack[Options]) -> None:
        self.rule, self.options = rule, options
        self.guard: Guard | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Protect the model that the strategy has wrapped."""
        del pl_module
        self.guard = parallel.protect(trainer.strategy.model, self.rule, **self.options)
