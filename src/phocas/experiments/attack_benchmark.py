"""Compare rules by their worst attack: rules x attacks x Byzantine workers x splits.

``phocas benchmark`` runs it; ``phocas.experiments.benchmark`` is another thing, which times rules.

A cell is one rule, one split and one number of Byzantine workers. Its runs differ in the settings
to choose from, the attack and the seed. The settings of a cell are those whose worst attack leaves
the highest accuracy on the validation samples. The result of a cell is the accuracy on the test
samples, with these settings, under the worst attack.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phocas.experiments.config import ConfigError, RunConfig, key_of, make_config
from phocas.experiments.results import ENDED

if TYPE_CHECKING:
    from phocas.experiments.reproduction.outcomes import RunOutcome
    from phocas.experiments.results import RunRecord

PLACEHOLDER = "{f}"
"""Text in rules and attacks that stands for the number of Byzantine workers."""
_OWN = {"rule": "rules", "attack": "attacks", "split": "splits", "seed": "seeds"}


class _BenchmarkTable(BaseModel):
    """The table ``[benchmark]`` of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rules: list[str] = Field(min_length=1)
    attacks: list[str] = Field(min_length=1)
    byzantine: list[int] = Field(min_length=1)
    splits: list[str] = Field(default=["iid"], min_length=1)
    seeds: list[int] = Field(default=[0], min_length=1)
    honest: int | None = Field(default=None, ge=1)
    choose: dict[str, list[Any]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One rule, one split and one number of Byzantine workers.

    Attributes:
        rule: the rule, as written in the file.
        split: the split.
        byzantine: f, the number of Byzantine workers.
        runs: the runs of each choice of settings, by the text of the choice and the attack.
    """

    rule: str
    split: str
    byzantine: int
    runs: Mapping[str, Mapping[str, Sequence[RunConfig]]]

    def configs(self) -> list[RunConfig]:
        """Return all runs of the cell."""
        return [run for attacks in self.runs.values() for runs in attacks.values() for run in runs]


@dataclass(frozen=True)
class Accuracy:
    """The mean accuracy over seeds, and its standard deviation.

    Attributes:
        mean: the mean.
        deviation: the standard deviation of a sample, with n - 1; None for one seed.
        seeds: number of seeds.
    """

    mean: float
    deviation: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Accuracy:
        """Return the accuracy of some repeats.

        >>> Accuracy.of([0.5, 0.75])
        Accuracy(mean=0.625, deviation=0.1767766952966369, seeds=2)
        """
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class CellResult:
    """The result of a cell whose runs are complete.

    Attributes:
        choice: the chosen settings as text; empty if there was nothing to choose from.
        worst: the attack with the lowest accuracy.
        accuracy: the accuracy under the worst attack.
        validation: the lowest mean accuracy on the validation samples; None without any.
        by_attack: the accuracy under each attack.
    """

    choice: str
    worst: str
    accuracy: Accuracy
    validation: float | None
    by_attack: Mapping[str, Accuracy]


@dataclass(frozen=True)
class Benchmark:
    """All cells of a benchmark."""

    cells: tuple[Cell, ...]

    def configs(self) -> list[RunConfig]:
        """Return all distinct runs; all first seeds come before the second ones."""
        found: dict[str, RunConfig] = {}
        groups = [runs for cell in self.cells for by in cell.runs.values() for runs in by.values()]
        for repeat in itertools.zip_longest(*groups):
            for config in repeat:
                if config is not None:
                    found.setdefault(config.settings_digest(), config)
        return list(found.values())


def plan_benchmark(values: Mapping[str, Any], source: str) -> Benchmark:
    """Read a benchmark: settings of a run, and a table ``benchmark`` with the lists to combine.

    Args:
        values: the content of the file.
        source: the file, which errors name.

    >>> lists = {"rules": ["median", "trimmed-mean:b={f}"], "attacks": ["sign-flip:q={f}"]}
    >>> file = {"dataset": "synthetic", "benchmark": lists | {"byzantine": [1, 2], "honest": 8}}
    >>> [(cell.rule, cell.byzantine) for cell in plan_benchmark(file, "my.toml").cells]
    [('median', 1), ('median', 2), ('trimmed-mean:b={f}', 1), ('trimmed-mean:b={f}', 2)]
    """
    common = {key_of(key): value for key, value in values.items() if key != "benchmark"}
    table = _read(values.get("benchmark"), source)
    for key, name in _OWN.items():
        if key in common and not (key == "split" and "splits" not in values["benchmark"]):
            raise ConfigError(f"{source}: {key} has its list in benchmark.{name}: leave {key} out")
    if table.honest is not None and "workers" in common:
        raise ConfigError(
            f"{source}: benchmark.honest and num_workers are two ways to give the number of"
            " workers: give one of them"
        )
    splits = table.splits if "splits" in values["benchmark"] else [common.pop("split", "iid")]
    choices = _choices(table, common, source)
    cells = []
    for rule, split, f in itertools.product(table.rules, splits, table.byzantine):
        workers = {} if table.honest is None else {"workers": table.honest + f}
        runs = {
            text: {
                attack: [
                    make_config(
                        {
                            **common,
                            **workers,
                            **choice,
                            "rule": rule.replace(PLACEHOLDER, str(f)),
                            "attack": attack.replace(PLACEHOLDER, str(f)),
                            "split": split,
                            "seed": seed,
                        },
                        f"{source}, f = {f}",
                    )
                    for seed in table.seeds
                ]
                for attack in table.attacks
            }
            for text, choice in choices.items()
        }
        cells.append(Cell(rule, split, f, runs))
    return Benchmark(tuple(cells))


def _read(table: Any, source: str) -> _BenchmarkTable:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{source} has no [benchmark]: give it lists of rules, attacks and byzantine, the"
            " numbers of Byzantine workers"
        )
    try:
        found = _BenchmarkTable.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, source))) from None
    if all(attack.strip().lower() in ("none", "") for attack in found.attacks):
        raise ConfigError(f"{source}: benchmark.attacks needs at least one attack: got none")
    for f in found.byzantine:
        if f < 0:
            raise ConfigError(f"{source}: benchmark.byzantine needs numbers >= 0: got {f}")
    return found


def _explain(error: ValidationError, source: str) -> Iterator[str]:
    for problem in error.errors():
        where = ".".join(map(str, ("benchmark", *problem["loc"])))
        if problem["type"] == "missing":
            yield f"{source}: {where} is missing: a benchmark needs rules, attacks and byzantine"
        elif problem["type"] == "too_short":
            yield f"{source}: {where} needs at least one value: got an empty list"
        else:
            message = problem["msg"]
            got = f"{message[:1].lower()}{message[1:]}: got {problem['input']!r}"
            yield f"{source}: {where}: {got}"


def _choices(
    table: _BenchmarkTable, common: Mapping[str, Any], source: str
) -> dict[str, dict[str, Any]]:
    """Return the settings to choose from, by their text."""
    for key, options in table.choose.items():
        if not options:
            raise ConfigError(f"{source}: benchmark.choose.{key} needs at least one value")
        if key_of(key) in {*common, *_OWN, "workers"}:
            raise ConfigError(
                f"{source}: benchmark.choose.{key} is set elsewhere in the file: leave one out"
            )
    found = {}
    for values in itertools.product(*table.choose.values()):
        choice = dict(zip(map(key_of, table.choose), values, strict=True))
        found[", ".join(f"{key} {value}" for key, value in choice.items())] = choice
    if len(found) > 1 and not common.get("validation"):
        raise ConfigError(
            f"{source}: benchmark.choose needs validation samples, on which settings are chosen:"
            " set validation, such as validation = 0.2"
        )
    return found


def judge_cell(cell: Cell, records: Mapping[str, RunRecord | RunOutcome]) -> CellResult | None:
    """Return the result of a cell, or None if one of its runs is not complete.

    Args:
        cell: the cell.
        records: finished runs, by identity.
    """
    validated: dict[str, float] = {}
    tested: dict[str, dict[str, Accuracy]] = {}
    for choice, attacks in cell.runs.items():
        for attack, runs in attacks.items():
            found = [records.get(run.identity()) for run in runs]
            ended = [record for record in found if record is not None and record.status in ENDED]
            if len(ended) < len(runs):
                return None
            seen = Accuracy.of([_known(record.final_accuracy) for record in ended])
            validated[choice] = min(validated.get(choice, math.inf), seen.mean)
            test = [record.test_accuracy for record in ended]
            judged = seen if None in test else Accuracy.of([_known(each) for each in test])
            tested.setdefault(choice, {})[attack] = judged
    choice = max(validated, key=lambda text: validated[text])
    by_attack = tested[choice]
    worst = min(by_attack, key=lambda attack: by_attack[attack].mean)
    held = any(run.validation for run in cell.configs())
    return CellResult(
        choice, worst, by_attack[worst], validated[choice] if held else None, by_attack
    )


def _known(accuracy: float | None) -> float:
    if accuracy is None:
        raise ValueError("a benchmark compares accuracies: the targets of the data are not classes")
    return accuracy
