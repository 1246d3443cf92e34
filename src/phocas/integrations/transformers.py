"""Callbacks for Hugging Face: ``trainer.add_callback(Protect(trainer, "heraclius:b=1"))``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import TrainerCallback

from phocas.integrations import parallel
from phocas.integrations.guard import Guard, Options, watching
from phocas.integrations.guard_checkpoints import gathered_state
from phocas.rules import Rule

FILE = "phocas_guard.pt"
"""The file of a checkpoint folder that has the state of the guard on all ranks."""


class Protect(TrainerCallback):  # type: ignore[misc]  # not installed for type checks
    """A callback that protects the model from the first step; it sets the attribute ``guard``.

    A checkpoint folder of the trainer contains the state of the guard (``phocas_guard.pt``), which
    is loaded when training resumes. ``guard.metrics()`` is logged whenever the trainer logs.

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

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Protect the model that the trainer has wrapped."""
        self.guard = parallel.protect(self.trainer.model_wrapped, self.rule, **self.options)
        if not state.global_step:
            return
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) else []
        for folder in (*folders, _folder(args, state)):
            file = folder / FILE
            if file.exists():
                self.guard.load_state_dict(torch.load(file, weights_only=True))
                return
        warnings.warn(
            f"there is no {FILE} in the checkpoint: the guard begins without evidence; pass"
            " resume_from_checkpoint to TrainingArguments if the checkpoint is elsewhere",
            RuntimeWarning,
            stacklevel=2,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the metrics of the guard in the steps in which the trainer logs."""
        del args, state
        if self.guard is not None and control.should_log:
            self.trainer.log(self.guard.metrics())
            control.should_log = True  # log() has reset it, and the trainer's own log comes next

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Write the state of the guard into the folder of the checkpoint."""
        if self.guard is None:
            return
        found = gathered_state(self.guard)
        folder = _folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(found, folder / FILE)


class Watch(Protect):
    """A callback that averages as before and detects faulty ranks; it sets ``guard``.

    Args:
        trainer: The trainer, which has the wrapped model.
        b: As for ``phocas.integrations.watch``.
        **options: As for ``phocas.integrations.watch``.
    """

    def __init__(self, trainer: Any, b: int, **options: Unpack[Options]) -> None:
        super().__init__(trainer, watching(b), **options)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
