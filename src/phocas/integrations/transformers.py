"""A callback for Hugging Face: ``trainer.add_callback(Protect(trainer, "heraclius:b=1"))``."""

from __future__ import annotations

from typing import Any, Unpack

from transformers import TrainerCallback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options
from phocas.rules import Rule


class Protect(TrainerCallback):  # type: ignore[misc]  # it is not there where types are checked
    """Protect the model of a run from its first step on; ``guard`` is what is known then.

    Use the rule ``watch:rule=heraclius:b=1`` for language models and mixtures of experts: rules
    that go by coordinates drop rare tokens of honest ranks (``docs/ddp.md``).

    Args:
        trainer: The trainer, which alone knows the wrapped model.
        rule: As for ``phocas.integrations.protect``.
        **options: The same.
    """

    def __init__(self, trainer: Any, rule: Rule | str, **options: Unpack[Options]) -> None:
        self.trainer, self.rule, self.options = trainer, rule, options
        self.guard: Guard | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Protect what the trainer has wrapped."""
        self.guard = parallel.protect(self.trainer.model_wrapped, self.rule, **self.options)
