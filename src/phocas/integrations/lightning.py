"""A callback for Lightning: ``Trainer(callbacks=[Protect("heraclius:b=1")], strategy="ddp")``."""

from __future__ import annotations

from typing import Any, Unpack

from lightning.pytorch import Callback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options
from phocas.rules import Rule


class Protect(Callback):  # type: ignore[misc]  # Lightning is not there where types are checked
    """Protect the model of a run from its first step on; ``guard`` is what is known then.

    Use the rule ``watch:rule=heraclius:b=1`` for language models and mixtures of experts: rules
    that go by coordinates drop rare tokens of honest ranks (``docs/ddp.md``).

    Args:
        rule: As for ``phocas.integrations.protect``.
        **options: The same.
    """

    def __init__(self, rule: Rule | str, **options: Unpack[Options]) -> None:
        self.rule, self.options = rule, options
        self.guard: Guard | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Protect what the strategy has wrapped."""
        del pl_module
        self.guard = parallel.protect(trainer.strategy.model, self.rule, **self.options)
