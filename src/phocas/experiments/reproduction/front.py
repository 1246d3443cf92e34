"""The largest error that an attacker who knows the rule causes, on gradients of a real run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phocas.attacks import parse_attack
from phocas.attacks.base import attack_rng
from phocas.experiments.reproduction.outcomes import MissingError
from phocas.experiments.reproduction.tasks import label_of
from phocas.experiments.runner import build_trainer
from phocas.files import write_atomically
from phocas.rules import parse_rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from phocas.experiments.config import RunConfig
    from phocas.experiments.reproduction.tasks import Reproduction

BYZANTINE = 6
# For a window on each column the first attack finds the optimum, except where a cutoff admits more
# values: there the second goes farther. For other rules the first is a search that includes the
# second.
ATTACKS = (
    "worst-case:rule=({rule}),q={q},budget=100",
    "a-little-is-enough:q={q},against=({rule})",
)


@dataclass(frozen=True)
class Errors:
    """The errors of one rule, without and with Byzantine workers.

    The error is the distance of the rule's result from the honest mean, divided by the norm of the
    honest mean.

    Attributes:
        rule: spec of the rule.
        quiet: mean error without Byzantine workers.
        worst: mean, over rounds, of the largest error under any attack; None if not below 1e6.
    """

    rule: str
    quiet: float
    worst: float | None


def worst_errors(reproduction: Reproduction, path: Path, q: int = BYZANTINE) -> dict[str, Errors]:
    """Measure all rules of a reproduction on gradients of a run with the mean, by label.

    Rules that are in the file at ``path`` are not measured again. The file then contains all rules.
    """
    known = _read(path)
    config = reproduction.figures[0].cases[0].config
    rules = _rules(reproduction)
    found = {label: known[rule] for label, rule in rules.items() if rule in known}
    missing = {label: rule for label, rule in rules.items() if label not in found}
    if missing:
        rounds = gradients(config, reproduction.front)
        found |= {label: measure(rule, rounds, q) for label, rule in missing.items()}
        text = json.dumps([asdict(each) for each in found.values()], indent=1)
        write_atomically(path, f"{text}\n".encode())
    return found


def known_errors(
    reproduction: Reproduction, known: Sequence[Mapping[str, Any]]
) -> dict[str, Errors]:
    """Return the errors that a curves file has, by label; measure nothing."""
    by_rule = {each["rule"]: Errors(**each) for each in known}
    rules = _rules(reproduction)
    missing = [rule for rule in rules.values() if rule not in by_rule]
    if missing:
        raise MissingError(f"no worst error of {missing[0]} in the curves")
    return {label: by_rule[rule] for label, rule in rules.items()}


def _rules(reproduction: Reproduction) -> dict[str, str]:
    return {
        label_of(case.config): case.config.rule
        for figure in reproduction.figures
        for case in figure.cases
    }


def _read(path: Path) -> Mapping[str, Errors]:
    if not path.exists():
        return {}
    return {each["rule"]: Errors(**each) for each in json.loads(path.read_text("utf-8"))}


def gradients(config: RunConfig, rounds: Sequence[int]) -> list[NDArray[np.float32]]:
    """Return the workers' gradients in some rounds of a run with the mean and no attack."""
    quiet = config.model_copy(update={"rule": "mean", "attack": None})
    with build_trainer(quiet) as trainer:
        return [
            trainer.server.rows.numpy().copy()
            for done in trainer.rounds(max(rounds))
            if done.number in rounds
        ]


def measure(rule: str, rounds: Sequence[NDArray[np.float32]], q: int = BYZANTINE) -> Errors:
    """Measure a rule on gradients of some rounds, without attack and with q Byzantine workers.

    >>> rng = np.random.default_rng(0)
    >>> rows = rng.normal(size=(9, 50)).astype(np.float32) + 3
    >>> [measure(rule, [rows], q=2).worst for rule in ("mean", "trimmed-mean:b=2")]
    [None, 0.1...]
    """
    quiet = [_error(rule, rows, rows) for rows in rounds]
    worst = []
    for number, rows in enumerate(rounds):
        tried = []
        for text in ATTACKS:
            attacked = rows.copy()
            attack = parse_attack(text.format(rule=rule, q=q))
            attack.corrupt(attacked, rng=attack_rng(0, number), round=number)
            tried.append(_error(rule, attacked, rows[q:]))
        worst.append(max(tried))
    mean = float(np.mean(worst))
    return Errors(rule, float(np.mean(quiet)), mean if math.isfinite(mean) and mean < 1e6 else None)


def _error(rule: str, rows: NDArray[np.float32], honest: NDArray[np.float32]) -> float:
    mean = honest.mean(axis=0, dtype=np.float64)
    with np.errstate(all="ignore"):
        off = np.asarray(parse_rule(rule)(rows), np.float64) - mean
        error = float(np.sqrt(np.square(off).sum() / np.square(mean).sum()))
    return error if math.isfinite(error) else math.inf
