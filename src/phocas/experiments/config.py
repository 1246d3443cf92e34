"""The configuration of a run: a TOML file, the command line over it, checked before it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
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

from phocas.attacks import parse_attack
from phocas.data import DATASETS, parse_split
from phocas.engines import ENGINES
from phocas.engines.faults import FaultScript
from phocas.rules import parse_rule
from phocas.specs import unknown
from phocas.training.models import MODELS, parse_model
from phocas.training.optimizers import parse_optimizer
from phocas.training.schedules import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

_PLACES = frozenset(
    {"name", "results", "data_dir", "threads", "checkpoint_rounds", "checkpoint_seconds"}
)

_RAY_PLACES = frozenset({"address", "processes", "deadline", "server_deadline", "wait_seconds"})
_RAY_ONLY = _RAY_PLACES | {"on_missing", "missing", "faults"}


class ConfigError(ValueError):
    """A configuration that cannot be run; the text names the keys."""


class RunConfig(BaseModel):
    """One run. The defaults are the paper's MNIST settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dataset: str = Field("mnist", description="mnist, fashion-mnist, cifar10 or synthetic")
    model: str = Field("mlp", description="mlp, cnn, softmax or module:callable")
    workers: int = Field(20, ge=1, description="m, the number of workers")
    servers: int = Field(20, ge=1, description="s, the servers that share the columns")
    rounds: int = Field(500, ge=1, description="rounds of training")
    batch_size: int = Field(32, ge=1, description="n, samples a worker and round")
    lr: float = Field(0.1, gt=0, allow_inf_nan=False, description="learning rate")
    rule: str = Field("phocas:b=8", description="the aggregation rule")
    attack: str | None = Field(None, description="what goes wrong, or none")
    seed: int = Field(0, ge=0, lt=1 << 63, description="everything random depends on it")
    split: str = Field("iid", description="who holds which samples")
    optimizer: str = Field("sgd", description="a torch optimiser, run by the servers")
    optimizer_options: dict[str, Any] = Field(default_factory=dict, description="its arguments")
    schedule: str = Field("constant", description="the learning rate over the rounds")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="passed to the optimiser"
    )
    worker_momentum: float = Field(
        0.0, ge=0, lt=1, description="workers send v = beta v + (1-beta) g"
    )
    reduction: Literal["mean", "sum"] = Field("mean", description="a batch's mean or sum")
    standardise: bool = Field(
        default=False, description="subtract the mean of the images, divide by std"
    )
    on_nonfinite: Literal["skip", "stop", "apply"] = Field(
        "skip", description="what to do when the aggregate is not finite"
    )
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations")
    engine: str = Field("local", description="where rounds run: local, or ray")
    address: str | None = Field(None, description="ray: auto or host:port; none is this machine")
    processes: int | None = Field(None, ge=1, description="ray: processes that workers share")
    deadline: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="ray: seconds after which a worker is late"
    )
    server_deadline: float = Field(
        120.0, gt=0, allow_inf_nan=False, description="ray: seconds before a server is restored"
    )
    on_missing: Literal["wait", "stop"] = Field(
        "wait", description="ray: what to do when more rows are missing than the rule survives"
    )
    missing: int | None = Field(
        None, ge=0, description="ray: rows that may be missing; none is what the rule survives"
    )
    wait_seconds: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="ray: the longest wait for missing rows"
    )
    faults: list[str] = Field(default_factory=list, description="ray: what goes wrong, and when")
    name: str | None = Field(None, description="a name for the run in tables and figures")
    results: str = Field("phocas.sqlite", description="the file that keeps the results")
    data_dir: str | None = Field(None, description="the folder that keeps the data sets")
    threads: int | None = Field(None, ge=1, description="cores to use; changes no bit")
    checkpoint_rounds: int | None = Field(None, ge=1, description="rounds between checkpoints")
    checkpoint_seconds: float = Field(30.0, ge=0, description="seconds between checkpoints")

    @field_validator(
        "lr",
        "weight_decay",
        "worker_momentum",
        "checkpoint_seconds",
        "deadline",
        "server_deadline",
        "wait_seconds",
        mode="before",
    )
    @classmethod
    def _whole_numbers_are_numbers(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("attack", mode="before")
    @classmethod
    def _none_is_no_attack(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in ("none", "") else value

    @field_validator(
        "rule", "attack", "split", "schedule", "dataset", "model", "optimizer", "engine"
    )
    @classmethod
    def _readable(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None:
            return None
        match info.field_name:
            case "rule":
                return str(parse_rule(text))
            case "attack":
                attack = parse_attack(text)
                if "servers=" not in text and hasattr(attack, "servers"):
                    servers = info.data.get("servers", 20)
                    attack = dataclasses.replace(attack, servers=servers)  # type: ignore[type-var]  # every Spec is a dataclass
                return str(attack)
            case "split":
                return str(parse_split(text))
            case "schedule":
                return str(SCHEDULES.parse(text))
            case "dataset":
                return str(DATASETS.parse(text))
            case "model":
                parse_model(text)
                known = text.partition(":")[0] in MODELS
                return str(MODELS.parse(text)) if known else text.strip()
            case "optimizer":
                parse_optimizer(text)
            case _:
                if text not in ENGINES:
                    raise ValueError(unknown("engine", text, ENGINES))
        return text

    @field_validator("faults")
    @classmethod
    def _script(cls, lines: list[str]) -> list[str]:
        return str(FaultScript.parse(lines)).splitlines()

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        problems = []
        for name in sorted(_RAY_ONLY):
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if self.engine != "ray" and getattr(self, name) != default:
                problems.append(f"{name} is a setting of the ray engine: set engine to ray too")
        try:
            FaultScript.parse(self.faults).check(self.workers, self.servers)
        except ValueError as error:
            problems.append(f"faults: {error}")
        try:
            parse_rule(self.rule).check(self.workers)
        except ValueError as error:
            problems.append(f"rule: {error}")
        if self.attack is not None:
            try:
                parse_attack(self.attack).check(self.workers, servers=self.servers)
            except ValueError as error:
                problems.append(f"attack: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def identity(self) -> str:
        """Return a digest of all that the result depends on: not of names, places and threads."""
        foreign = _RAY_PLACES if self.engine == "ray" else _RAY_ONLY
        content = self.model_dump(exclude=set(_PLACES | foreign))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def engine_settings(self) -> dict[str, Any]:
        """Return what the engine is told besides the settings of a trainer."""
        return self.model_dump(include=set(_RAY_ONLY)) if self.engine == "ray" else {}

    def title(self) -> str:
        """Return the run's name, or its rule and attack."""
        return self.name or (f"{self.rule} under {self.attack}" if self.attack else self.rule)


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
            runs.setdefault(config.identity(), config)
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
