"""A callback for Hugging Face: ``trainer.add_callback(Protect(trainer, "heraclius:b=1"))``."""

from __future__ import annotations

from typing import Any, Unpack

from transformers import TrainerCallback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options
from phocas.rules import Rule


class Protect(TrainerCallback):  # type: ignore[misc]  # not installed for type checks
    """A callback that protects the model from the first step; it sets the attribute ``guard``.

    Use the rule ``heraclius:b=1`` for language models and mixtures of experts: other column rules
    drop the gradients of rare tokens of honest ranks (``docs/costs.md``).

    Args:
        trainer: The trainer, which has the wrapped model.
        rule: As for ``phocas.integrations.protect``.
        **options: As for ``phocas.integrations.protect``.
    """

    def __init__(self, trainer: Any, rule: Rule | str, **options: Unpack[Options]) -> None:
        self.trainer, self.rule, self.options = trainer, rule, options
        self.guard: Guard | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Protect the model that the trainer has wrapped."""
        self.guard = parallel.protect(self.trainer.model_wrapped, self.rule, **self.options)
