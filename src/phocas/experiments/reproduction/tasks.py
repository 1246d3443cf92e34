"""Experiments as data, the paper's and ours: tasks and figures in TOML, expanded to runs.

A task file contains the settings that its figures share (the paper's Table 1) and its scales. With
``like`` it names another task whose values it takes for all missing keys. A figure file contains a
title, the axes, and a grid of runs. The files are in this folder. Each says what was chosen where
the paper is silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phocas.attacks import parse_attack
from phocas.attacks.base import RowAttack
from phocas.experiments.config import ConfigError, RunConfig, expand_grid, read_toml
from phocas.rules import parse_rule
from phocas.specs import unknown
from phocas.training.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Metric = Literal["top1", "top3"]
ClaimsOf = Literal["paper", "heraclius", "choosing", "choosing-cifar10", "choosing-momentum"]
LABELS = {
    "mean": "Mean",
    "krum": "Krum",
    "multi-krum": "Multi-Krum",
    "trimmed-mean": "Trmean",
    "phocas": "Phocas",
    "heraclius": "Heraclius",
    "median": "Median",
    "meamed": "MeaMed",
    "nnm": "NNM",
    "cell-filter": "CellFilter",
    "geometric-median": "Geometric median",
}
REPEATS = 10  # as in the paper
BASELINE = "Mean without Byzantine"
_File = TypeVar("_File", bound=BaseModel)


class _Scale(BaseModel):
    """A scale of a task: its repeats, skipped figures, values of b, batch sizes and settings."""

    model_config = ConfigDict(extra="allow", strict=True)

    repeats: int = Field(default=REPEATS, ge=1)
    skip: list[str] = Field(default_factory=list)
    b: list[int] | None = None
    batch_sizes: list[int] | None = None


class _TaskFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    metric: Metric
    claims: ClaimsOf = "paper"
    figures: list[str]
    front: list[int] = Field(default_factory=list)
    """Rounds whose gradients are used for the front of worst errors; empty for no front."""
    rules: list[str] | None = None
    """Rules that replace each list of rules in the figures, except in figures over b."""
    settings: dict[str, Any]
    zoom: dict[str, list[float]] = Field(default_factory=dict)
    scale: dict[str, _Scale] = Field(default_factory=lambda: {"paper": _Scale()})


class _FigureFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    axis: Literal["rounds", "b"]
    value: Literal["final", "best"] = "final"
    panel: Literal["batch_size"] | None = None
    grid: list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One line of a figure, or one point of a sensitivity figure: a run to be repeated."""

    label: str
    config: RunConfig
    """The configuration, with the seed of the first repeat."""

    @property
    def b(self) -> int | None:
        """Return the b of the rule, or None if it has none."""
        return getattr(parse_rule(self.config.rule), "b", None)

    def repeat(self, number: int) -> RunConfig:
        """Return the configuration of a repeat, from 0."""
        return self.config.model_copy(update={"seed": self.config.seed + number})


@dataclass(frozen=True)
class Figure:
    """A figure of the paper and its cases.

    Attributes:
        name: name of the figure's file.
        title: title of the figure.
        axis: horizontal axis.
        value: accuracy that is shown against b: at the end, or the best.
        panel: setting that has a panel for each value, if any.
        zoom: range of accuracies of the zoomed panel, if any.
        cases: the runs to be repeated.
    """

    name: str
    title: str
    axis: Literal["rounds", "b"]
    value: Literal["final", "best"]
    panel: Literal["batch_size"] | None
    zoom: tuple[float, float] | None
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Reproduction:
    """A task at a scale: all figures with their runs.

    Attributes:
        task: name of the task.
        title: title of the task.
        scale: name of the scale.
        metric: accuracy that figures and claims use.
        claims: name of the set of claims.
        figures: the figures.
        repeats: number of repeats of each case.
        front: rounds whose gradients the front of worst errors uses.
    """

    task: str
    title: str
    scale: str
    metric: Metric
    claims: ClaimsOf
    figures: tuple[Figure, ...]
    repeats: int
    front: tuple[int, ...] = ()

    def runs(self) -> list[RunConfig]:
        """Return all distinct runs; all first repeats come before the second ones."""
        found: dict[str, RunConfig] = {}
        for number in range(self.repeats):
            for figure in self.figures:
                for case in figure.cases:
                    config = case.repeat(number)
                    found.setdefault(config.settings_digest(), config)
        return list(found.values())


def tasks() -> list[str]:
    """Return the names of the tasks that ship with the package.

    >>> tasks()[:5]
    ['bucketing', 'byzfl', 'choosing', 'choosing-cifar10', 'choosing-momentum']
    """
    wanted = {"figures", "like", "parts", "tables", "timings"}
    return sorted(path.stem for path in _folder().glob("*.toml") if wanted & set(read_toml(path)))


def plan(
    task: str,
    *,
    scale: str = "paper",
    repeats: int | None = None,
    only: Sequence[str] = (),
    places: Mapping[str, Any] | None = None,
) -> Reproduction:
    """Read a task and its figures.

    Args:
        task: the name of a task of the package, or the path of a TOML file.
        scale: the scale of the task file to use.
        repeats: number of repeats; by default that of the scale.
        only: names of the figures to include; by default all.
        places: settings that change no result, such as ``results`` and ``data_dir``.

    >>> mnist = plan("mnist", repeats=1)
    >>> len(mnist.runs()), [figure.name for figure in mnist.figures][:3]
    (100, ['none', 'batch-size', 'gaussian'])
    """
    path = task_path(task)
    file = _read(path, _TaskFile, _read_with_base(path))
    if scale not in file.scale:
        raise ConfigError(unknown("scale", scale, file.scale))
    chosen = file.scale[scale]
    names = [name for name in file.figures if name not in chosen.skip]
    for name in only:
        if name not in names:
            raise ConfigError(unknown("figure", name, names))
    settings = {**file.settings, **(chosen.model_extra or {}), **(places or {})}
    figures = [
        _figure(_figure_path(name, path), file, settings, chosen)
        for name in names
        if not only or name in only
    ]
    return Reproduction(
        task=path.stem,
        title=file.title,
        scale=scale,
        metric=file.metric,
        claims=file.claims,
        figures=tuple(figures),
        repeats=chosen.repeats if repeats is None else repeats,
        front=tuple(file.front),
    )


def byzantine_workers(config: RunConfig) -> range:
    """Return the workers that are Byzantine in every round of a run."""
    attack = parse_attack(config.attack) if config.attack else None
    return range(attack.q if isinstance(attack, RowAttack) and attack.who == "fixed" else 0)


def label_of(config: RunConfig) -> str:
    """Return a rule's name in figures and claims, or its spec if it has no name.

    Parameters other than b are part of the name.

    >>> label_of(RunConfig(rule="nnm:b=6|heraclius:b=6,cutoff=2"))
    'NNM + Heraclius cutoff 2'
    """
    return label_of_rule(config.rule)


def label_of_rule(rule: str) -> str:
    """Return the name of a rule, given as text."""
    steps = [step.partition(":") for step in rule.split("|")]
    if not all(name in LABELS for name, _, _ in steps):
        return rule
    return " + ".join(" ".join([LABELS[name], *_other_parameters(text)]) for name, _, text in steps)


def _other_parameters(text: str) -> list[str]:
    """Return the parameters of a step other than b, in readable form."""
    parts = text.split(",") if text else []
    return [
        part.removesuffix(".0").replace("=", " ") for part in parts if not part.startswith("b=")
    ]


def _folder() -> Path:
    return Path(str(resources.files("phocas.experiments.reproduction")))


def task_path(task: str) -> Path:
    """Return the file of a task: one of the package by its name, or any TOML file."""
    if task.endswith(".toml"):
        return Path(task)
    if task not in tasks():
        raise ConfigError(unknown("task", task, tasks()) + ", or the path of a TOML file")
    return _folder() / f"{task}.toml"


def task_and_scale(text: str) -> tuple[str, str | None]:
    """Split ``TASK-SCALE``, such as ``cifar10-medium``; the scale of a task alone is None.

    >>> task_and_scale("cifar10-medium"), task_and_scale("choosing-cifar10")
    (('cifar10', 'medium'), ('choosing-cifar10', None))
    """
    task, _, scale = text.rpartition("-")
    if text.endswith(".toml") or text in tasks() or task not in tasks():
        return text, None
    return (task, scale) if scale in scales(task) else (text, None)


def scales(task: str) -> list[str]:
    """Return the scales of a task of the package.

    >>> scales("cifar10"), scales("choosing-momentum")
    (['paper', 'medium', 'small'], ['paper', 'small'])
    """
    return list(_read_with_base(task_path(task))["scale"])


def _read_with_base(path: Path) -> dict[str, Any]:
    """Read a task; take missing keys from the task named by ``like``, if there is one."""
    own = read_toml(path)
    like = own.pop("like", None)
    return own if like is None else {**read_toml(task_path(str(like))), **own}


def _figure_path(name: str, task: Path) -> Path:
    """Return the figure's file beside the task, or else that of the package."""
    beside = task.parent / f"{name}.toml"
    return beside if beside.exists() else _folder() / f"{name}.toml"


def _read(path: Path, kind: type[_File], content: Mapping[str, Any]) -> _File:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from None


def _figure(path: Path, task: _TaskFile, settings: Mapping[str, Any], scale: _Scale) -> Figure:
    file = _read(path, _FigureFile, read_toml(path))
    model = str(settings.get("model", "mlp"))
    blocks = [
        block for given in file.grid for block in _blocks(given, file, scale, model, task.rules)
    ]
    configs = expand_grid({**settings, "grid": blocks}, str(path))
    window = task.zoom.get(path.stem, task.zoom.get("default"))
    attacked = any(config.attack for config in configs)
    cases = []
    for config in configs:
        plain = attacked and config.attack is None and config.rule == "mean"
        label = config.name or (BASELINE if plain else label_of(config))
        name = f"{path.stem}: {label}"
        if file.axis == "b" and not plain:
            name += f" b={Case(label, config).b}"
        elif file.panel:
            name += f" {file.panel}={getattr(config, file.panel)}"
        cases.append(Case(label, config.model_copy(update={"name": name})))
    return Figure(
        name=path.stem,
        title=file.title,
        axis=file.axis,
        value=file.value,
        panel=file.panel,
        zoom=None if window is None else (window[0], window[1]),
        cases=tuple(cases),
    )


def _blocks(
    block: dict[str, Any], file: _FigureFile, scale: _Scale, model: str, rules: list[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield a block of a figure's grid for a task at a scale, or nothing if the scale omits it.

    The rules are those of the task, or those of the block with each b of the scale. A value of
    ``init`` is written into the text of the task's model, if the model has this parameter.
    """
    block = dict(block)
    if "init" in block:
        name, colon, options = model.partition(":")
        if name not in MODELS or "init=" in options:
            return  # a user-defined model, or one for which the task sets init
        block["model"] = f"{name}:{options}{',' if colon else ''}init={block.pop('init')}"
    if file.panel and scale.batch_sizes and block.get("batch_size") not in scale.batch_sizes:
        return
    values = block.pop("b", None)
    if values is not None:
        named = block["rule"] if isinstance(block["rule"], list) else [block["rule"]]
        wanted = [b for b in values if scale.b is None or b in scale.b]
        block["rule"] = [f"{rule}:b={b}" for rule in named for b in wanted]
    elif rules is not None and isinstance(block.get("rule"), list):
        block["rule"] = rules
    yield block
