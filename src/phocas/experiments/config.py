"""The configuration of a run: a TOML file, the command line over it, checked before it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from phocas.attacks import ATTACKS, Attack, parse_attack
from phocas.attacks.participation import check_among
from phocas.data import DATASETS, SPLITS
from phocas.engines.asynchronous.policies import read_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.speeds import SPEEDS
from phocas.engines.faults import FaultScript
from phocas.experiments.trackers import check_tracker
from phocas.provenance import RESULTS_VERSION, code_of, describe_code
from phocas.rules import RULES, Rule
from phocas.specs import Foreign, imported_callable, is_place, unknown
from phocas.training.cluster import ENGINES, Engine, find_engine
from phocas.training.devices import find_device
from phocas.training.models import check_model_text
from phocas.training.optimizers import check_optimizer_text, parse_server_optimizer
from phocas.training.schedules import SCHEDULES
from phocas.training.task import TaskSettings

if TYPE_CHECKING:
    from pathlib import Path


class ConfigError(ValueError):
    """A configuration that cannot be run; the text names the keys."""


# Keys are the names of Python's settings, without the num_ that says of a name that it is a number.
_TASK = {
    declared.name.removeprefix("num_"): declared
    for declared in dataclasses.fields(TaskSettings)
    if declared.name != "gradient_path"
}
_ENGINES: dict[str, Any] = {name: type(find_engine(name)) for name in ENGINES}
_OF_ENGINES = {
    name: {declared.name: declared for declared in dataclasses.fields(settings)}
    for name, settings in _ENGINES.items()
}
_DECLARED = _TASK | {key: said for keys in _OF_ENGINES.values() for key, said in keys.items()}
_PLACES = {key for key, declared in _DECLARED.items() if declared.metadata["place"]} | {
    "name",
    "results",
    "data_dir",
    "checkpoint_rounds",
    "checkpoint_seconds",
    "record_matrix",
    "track",
}

RECORDED = ("code", "results_version")
"""What a results file keeps among the settings of a run, and no user sets."""


def _engines_of(key: str) -> list[str]:
    """Return the engines that have a setting; none of them has one of the task."""
    return [engine for engine, keys in _OF_ENGINES.items() if key in keys]


def _declared(key: str, **instead: Any) -> Any:
    """Take a setting from where it is declared; ``default=`` gives a run another default."""
    declared = _DECLARED[key]
    said = declared.metadata["help"]
    engines = _engines_of(key)
    text = f"{engines[0]}: {said}" if engines and "local" not in engines else said
    if declared.default_factory is not dataclasses.MISSING:
        return Field(default_factory=declared.default_factory, description=text)
    return Field(description=text, **{"default": declared.default, **instead})


# How a key's text is read without running anybody's code, and how it is kept.
_TEXTS: dict[str, Callable[[str], str]] = {
    "rule": lambda text: str(RULES.read(text)),
    "split": lambda text: str(SPLITS.read(text)),
    "schedule": lambda text: str(SCHEDULES.read(text)),
    "dataset": lambda text: str(DATASETS.read(text)),
    "model": check_model_text,
    "optimizer": check_optimizer_text,
    "device": lambda text: str(find_device("a run", "device", text)),
    "asynchronous": lambda text: str(read_policy(text)),
    "speeds": lambda text: str(SPEEDS.read(text)),
    "server_optimizer": lambda text: str(parse_server_optimizer(text)),
}


def _callable(text: str) -> Foreign | None:
    return Foreign(text, imported_callable) if is_place(text) else None


# What a key's text stands for: a value, or something foreign, which is imported when it is loaded.
_READERS: dict[str, Callable[[str], Any]] = {
    "rule": RULES.read,
    "attack": ATTACKS.read,
    "split": SPLITS.read,
    "schedule": SCHEDULES.read,
    "dataset": DATASETS.read,
    "asynchronous": read_policy,
    "speeds": SPEEDS.read,
    "model": _callable,
    "optimizer": _callable,
    "server_optimizer": lambda text: _callable(parse_server_optimizer(text).kind),
}
# Settings that earlier versions did not have: a run without them keeps its identity.
_LATER = {
    "device",
    "local_steps",
    "server_optimizer",
    "clients",
    "asynchronous",
    "speeds",
    "virtual_deadline",
    "max_staleness",
}


class RunConfig(BaseModel):
    """One run. The defaults are the paper's MNIST settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dataset: str = Field(
        "mnist", description="the data set: mnist, fashion-mnist, cifar10 or synthetic"
    )
    model: str = Field("mlp", description="the model: mlp, cnn, softmax or module:callable")
    workers: int = _declared("workers")
    clients: int | None = _declared("clients")
    servers: int = _declared("servers", default=20)
    rounds: int = Field(500, ge=1, description="the rounds of training")
    batch_size: int = _declared("batch_size")
    lr: float = _declared("lr")
    rule: str = _declared("rule", default="phocas:b=8")
    attack: str | None = _declared("attack")
    seed: int = _declared("seed")
    split: str = _declared("split")
    optimizer: str = _declared("optimizer")
    optimizer_options: dict[str, Any] = _declared("optimizer_options")
    schedule: str = _declared("schedule")
    local_steps: int | None = _declared("local_steps")
    server_optimizer: str | None = _declared("server_optimizer")
    weight_decay: float = _declared("weight_decay")
    worker_momentum: float = _declared("worker_momentum")
    reduction: Literal["mean", "sum"] = _declared("reduction")
    standardise: bool = _declared("standardise")
    on_nonfinite: Literal["skip", "stop", "apply"] = _declared("on_nonfinite")
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations")
    engine: str = Field("local", description="where rounds run: local or ray")
    asynchronous: str | None = _declared("asynchronous")
    speeds: str | None = _declared("speeds")
    virtual_deadline: float | None = _declared("virtual_deadline")
    max_staleness: int = _declared("max_staleness")
    address: str | None = _declared("address")
    processes: int | None = _declared("processes")
    deadline: float = _declared("deadline")
    server_deadline: float = _declared("server_deadline")
    on_missing: Literal["wait", "stop"] = _declared("on_missing")
    missing: int | None = _declared("missing")
    wait_seconds: float = _declared("wait_seconds")
    faults: list[str] = _declared("faults")
    name: str | None = Field(None, description="a name for the run in tables and figures")
    results: str = Field("phocas.sqlite", description="the file that keeps the results")
    data_dir: str | None = Field(
        None, description="the folder that keeps the data sets; by default the user's cache"
    )
    device: str | None = _declared("device")
    threads: int | None = _declared("threads")
    checkpoint_rounds: int | None = Field(
        None, ge=1, description="rounds between checkpoints, besides those by time"
    )
    checkpoint_seconds: float = Field(30.0, ge=0, description="seconds between checkpoints")
    record_matrix: int | None = Field(
        None,
        ge=1,
        description="rounds between pictures of the matrix for the report; the first 100 are kept",
    )
    track: list[str] = Field(
        default_factory=list,
        description="who is told of the run: tensorboard:DIR, wandb, mlflow or module:Name",
    )

    @model_validator(mode="before")
    @classmethod
    def _who_decides_needs_no_rule(cls, values: Any) -> Any:
        """Let policies that decide by themselves have the mean of their one row as rule."""
        said = values.get("asynchronous") if isinstance(values, dict) else None
        if not isinstance(said, str) or "rule" in values:
            return values
        try:
            policy = read_policy(said)
        except ValueError:
            return values  # refused by its key
        lone = isinstance(policy, Policy) and not policy.uses_rule
        return {**values, "rule": "mean"} if lone else values

    @field_validator("*", mode="before")
    @classmethod
    def _whole_numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        wants = cls.model_fields[info.field_name or ""].annotation
        return float(value) if wants is float and type(value) is int else value

    @field_validator("attack", mode="before")
    @classmethod
    def _none_is_no_attack(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in ("none", "") else value

    @field_validator("*")
    @classmethod
    def _holds(cls, value: Any, info: ValidationInfo) -> Any:
        """Ask the declaration of a setting, or the table that its text is of."""
        key = info.field_name or ""
        if value is None:
            return None
        if key in _TEXTS:
            return _TEXTS[key](value)
        if key == "attack":
            attack = ATTACKS.read(value)
            return str(
                attack
                if isinstance(attack, Foreign)
                else parse_attack(value, info.data.get("servers", 20))
            )
        if key == "engine" and value not in ENGINES:
            raise ValueError(unknown("engine", value, ENGINES))
        if key == "track":
            return [check_tracker(text) for text in value]
        if key == "faults":
            return str(FaultScript.parse(value)).splitlines()
        check = _DECLARED[key].metadata["check"] if key in _DECLARED else None
        return value if check is None else check("a run", key, value)

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        problems = []
        for name in sorted(self._foreign()):
            if getattr(self, name) != _default(name):
                engine = _engines_of(name)[0]
                problems.append(
                    f"{name} is a setting of the {engine} engine: set engine to {engine} too"
                )
        if self.engine == "ray" and self.device not in (None, "cpu"):
            problems.append(f"device: the ray engine has none: got {self.device}; leave it out")
        if self.server_optimizer is not None and self.local_steps is None:
            problems.append("server_optimizer is for rounds of local steps: set local_steps too")
        if self.worker_momentum and self.local_steps is not None:
            problems.append(
                "worker_momentum is for workers that send gradients: with local_steps set"
                " optimizer_options to { momentum = ... }"
            )
        if self.clients is not None and self.clients < self.workers:
            problems.append(
                f"clients: workers are drawn from them, so there must be at least {self.workers}:"
                f" got {self.clients}"
            )
        if self.record_matrix is not None and (self.clients or self.asynchronous):
            problems.append(
                "record_matrix is for rounds in which every worker has its row: leave it out with"
                " clients or asynchronous"
            )
        if self.clients is not None and self.worker_momentum:
            problems.append("worker_momentum is for workers that take part in every round")
        problems += [
            f"{name}: where nobody waits, all workers send gradients: leave it or asynchronous out"
            for name in ("local_steps", "clients")
            if self.asynchronous is not None and getattr(self, name) is not None
        ]
        try:
            FaultScript.parse(self.faults).check(self.workers, self.servers)
        except ValueError as error:
            problems.append(f"faults: {error}")
        rule = RULES.read(self.rule)  # what is foreign is checked when it is loaded
        attack = None if self.attack is None else ATTACKS.read(self.attack)
        try:
            if isinstance(rule, Rule):
                policy = None if self.asynchronous is None else read_policy(self.asynchronous)
                if isinstance(policy, Policy):
                    policy.check(self.workers, rule)
                else:
                    rule.check(self.workers)
        except ValueError as error:
            problems.append(f"rule: {error}")
        try:
            if isinstance(attack, Attack):
                check_among(attack, self.clients, self.workers, self.servers)
        except ValueError as error:
            problems.append(f"attack: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _foreign(self) -> set[str]:
        """Return the settings that other engines have and this one has not."""
        every = {key for keys in _OF_ENGINES.values() for key in keys}
        return every - _OF_ENGINES[self.engine].keys()

    def identity(self) -> str:
        """Return a digest of all that the result depends on: the settings, and the user's code.

        Without code of the user's own that is the digest of the settings.
        """
        code = self.code()
        return _digest([self.settings_digest(), code]) if code else self.settings_digest()

    def settings_digest(self) -> str:
        """Return a digest of the settings, without names, places and threads; import nothing."""
        unset = {key for key in _LATER if getattr(self, key) == _default(key)}
        content = self.model_dump(exclude=_PLACES | self._foreign() | unset)
        if RESULTS_VERSION > 1:  # the first is that of results which name none
            content["results_version"] = RESULTS_VERSION
        return _digest(content)

    def code(self) -> dict[str, str]:
        """Return digests of the user's code that the settings name, by module; import it."""
        values: list[Any] = []
        broken: dict[str, str] = {}
        for key, read in _READERS.items():
            text = getattr(self, key)
            found = None if text is None else read(text)
            if not isinstance(found, Foreign):
                continue
            try:
                values += [found.load(), text]
            except (ValueError, TypeError):  # the run will say it; no result has this digest
                broken[text] = "broken"
        return code_of(values) | broken

    def recorded(self) -> dict[str, Any]:
        """Return what a results file keeps: the settings, and which code they were run with."""
        code = self.code()
        version = {"results_version": RESULTS_VERSION} if RESULTS_VERSION > 1 else {}
        return self.model_dump() | version | ({"code": describe_code(code)} if code else {})

    def same_settings(self, recorded: Mapping[str, Any]) -> bool:
        """Tell whether a recorded run differs from this one in its code and its rounds at most."""
        own = self.model_dump(exclude=_PLACES | self._foreign() | {"rounds"})
        return all(recorded.get(key, _default(key)) == value for key, value in own.items())

    def task_settings(self) -> dict[str, Any]:
        """Return the settings of the task, by their names in :class:`TaskSettings`."""
        return {declared.name: getattr(self, key) for key, declared in _TASK.items()}

    def make_engine(self) -> Engine:
        """Return the engine with its settings."""
        given = {name: getattr(self, name) for name in _OF_ENGINES[self.engine]}
        engine: Engine = _ENGINES[self.engine](**given)
        return engine

    def title(self) -> str:
        """Return the run's name, or its rule and attack."""
        rule = self.rule if self.asynchronous is None else f"{self.asynchronous}, {self.rule}"
        return self.name or (f"{rule} under {self.attack}" if self.attack else rule)


def _default(key: str) -> Any:
    return RunConfig.model_fields[key].get_default(call_default_factory=True)


def check_setting(key: str) -> str:
    """Return the name of what is recorded of a run, or raise and list the settings."""
    if key not in (*RunConfig.model_fields, *RECORDED):
        raise ValueError(unknown("setting", key, RunConfig.model_fields))
    return key


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def make_config(values: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Check values and make a configuration of them; an error names the keys and the source."""
    try:
        return RunConfig.model_validate(
            {key.replace("-", "_"): value for key, value in values.items()}
        )
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, source))) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an error says where it stops making sense."""
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def expand_grid(values: Mapping[str, Any], source: str) -> list[RunConfig]:
    """Make the runs of a sweep: keys outside ``grid`` are common, lists inside are multiplied.

    Several ``[[grid]]`` tables are several products, one after another.

    >>> grid = {"dataset": "synthetic", "grid": {"rule": ["mean", "phocas:b=3"], "seed": [0, 1, 2]}}
    >>> len(expand_grid(grid, "grid.toml"))
    6
    """
    common = {key: value for key, value in values.items() if key != "grid"}
    blocks = values.get("grid", {})
    runs: dict[str, RunConfig] = {}
    for block in [blocks] if isinstance(blocks, Mapping) else blocks:
        for choice in _product(block):
            config = make_config({**common, **choice}, source)
            runs.setdefault(config.settings_digest(), config)
    return list(runs.values())


def _product(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = [value if isinstance(value, list) else [value] for value in block.values()]
    for key, axis in zip(block, axes, strict=True):
        if not axis:
            raise ConfigError(f"grid.{key} must have at least one value: got an empty list")
    for choice in itertools.product(*axes):
        yield dict(zip(block, choice, strict=True))


def _explain(error: ValidationError, source: str) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            yield f"{source}: {unknown('key', key, RunConfig.model_fields)}"
        elif not key:
            yield f"{source}: {message}"
        elif problem["type"] == "value_error":
            yield f"{source}: {key}: {message}"
        else:
            yield f"{source}: {key}: {message[:1].lower()}{message[1:]}: got {problem['input']!r}"
