"""Settings of asynchronous training, common to all engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phocas.attacks import ATTACKS, Attack
from phocas.engines.asynchronous.policies import parse_policy, read_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.rules import RULES, Rule
from phocas.settings import Conflict, Settings, at_least, setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phocas.settings import Spelling
    from phocas.training.task import TaskSettings


@dataclass(frozen=True, kw_only=True)
class AsynchronousSettings(Settings):
    """Base class of engine settings: whether training is asynchronous, and its update policy."""

    asynchronous: Policy | str | None = setting(
        None, "Asynchronous update policy: buffers=15, zeno, kardam, mean."
    )
    max_staleness: int = setting(
        1000, "Asynchronous: reject rows that are more steps old than this.", at_least(0)
    )

    def policy(self) -> Policy | None:
        """Return the asynchronous update policy, or None for synchronous rounds."""
        said = self.asynchronous
        return parse_policy(said) if isinstance(said, str) else said

    def conflicts(self, task: TaskSettings, say: Spelling = str) -> Iterator[Conflict]:
        """Yield the settings that are impossible together; no module of the user is imported."""
        if self.asynchronous is None:
            if self.max_staleness != AsynchronousSettings.max_staleness:
                text = f"{say('max_staleness')} has no effect without {say('asynchronous')}"
                yield Conflict("max_staleness", text)
            return
        for name in ("local_steps", "clients"):
            if getattr(task, name) is not None:
                yield Conflict(
                    name,
                    f"asynchronous training sends the gradients of all workers: leave {say(name)}"
                    f" or {say('asynchronous')} out",
                )
        attack = ATTACKS.read(task.attack) if isinstance(task.attack, str) else task.attack
        if isinstance(attack, Attack) and attack.needs_previous:
            yield Conflict(
                "attack",
                f"{attack.name} is what slow workers do in synchronous rounds: with"
                f" {say('asynchronous')} set {say('speeds')} instead",
            )
        if isinstance(attack, Attack) and attack.needs_memory:
            yield Conflict(
                "attack",
                f"{attack} keeps what it has seen in synchronous rounds: leave its warm-up or"
                f" {say('asynchronous')} out",
            )
        rule = RULES.read(task.rule) if isinstance(task.rule, str) else task.rule
        said = self.asynchronous
        policy = read_policy(said) if isinstance(said, str) else said
        if isinstance(rule, Rule) and rule.needs_reference is not None:
            yield Conflict(
                "rule",
                f"{rule} needs a reference vector, which synchronous rounds have: leave"
                f" {say('asynchronous')} out, or choose another {say('rule')}",
            )
        try:
            if isinstance(rule, Rule) and isinstance(policy, Policy):
                policy.check(task.num_workers, rule)
        except ValueError as error:
            yield Conflict("rule", str(error))
