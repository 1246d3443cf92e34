"""The configuration of a run, from a TOML file and the command line, checked before it runs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from phocas.attacks import ATTACKS, parse_attack
from phocas.data import DATASETS, SPLITS
from phocas.detection.exclusion import EXCLUSIONS
from phocas.engines.asynchronous.policies import read_policy
from phocas.engines.asynchronous.policy import Policy
from phocas.engines.asynchronous.speeds import SPEEDS
from phocas.engines.faults import FaultScript
from phocas.experiments.trackers import check_tracker
from phocas.provenance import RESULTS_VERSION, code_of, describe_code
from phocas.rules import RULES
from phocas.specs import Foreign, imported_callable, split_place, unknown
from phocas.training.cluster import ENGINES, Engine, find_engine
from phocas.training.devices import find_device
from phocas.training.models import MODELS, check_model_text
from phocas.training.optimizers import check_optimizer_text, parse_server_optimizer
from phocas.training.schedules import SCHEDULES
from phocas.training.task import TaskSettings

if TYPE_CHECKING:
    from pathlib import Path

    from phocas.settings import Spelling


class ConfigError(ValueError):
    """A configuration that cannot be run; the text names the keys."""


class _ConflictError(ValueError):
    """Settings that are impossible together, by the key to change."""

    def __init__(self, found: Mapping[str, str]) -> None:
        super().__init__("; ".join(found.values()))
        self.found = found


# Results files name two settings without the num_ of their Python names.
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
"""Keys that a results file keeps among the settings of a run, and that no user sets."""


def key_of(name: str) -> str:
    """Return the key of a setting in results files, by any of its spellings.

    >>> key_of("num-workers"), key_of("workers"), key_of("batch_size")
    ('workers', 'workers', 'batch_size')
    """
    key = name.replace("-", "_")
    short = key.removeprefix("num_")
    return short if short in _DECLARED else key


def name_of(key: str) -> str:
    """Return the name of a setting in Python and TOML: ``num_workers``."""
    return _DECLARED[key].name if key in _DECLARED else key


def option_of(key: str) -> str:
    """Return a setting as an option of ``phocas train``.

    >>> option_of("workers"), option_of("optimizer_options")
    ('--num-workers', '--set optimizer_options')
    """
    field = RunConfig.model_fields.get(key)  # results may have settings of another version
    if field is not None and field.annotation == dict[str, Any]:
        return f"--set {key}"
    return f"--{name_of(key).replace('_', '-')}"


def owners_of(key: str) -> list[str]:
    """Return what a setting belongs to: the task, the run, or the names of engines.

    >>> owners_of("lr"), owners_of("results"), owners_of("asynchronous"), owners_of("deadline")
    (['task'], ['run'], ['local', 'ray'], ['ray'])
    """
    engines = [engine for engine, keys in _OF_ENGINES.items() if key in keys]
    return engines or ["task" if key in _TASK else "run"]


def _declared(key: str) -> Any:
    """Return the field of a declared setting: its type as text, its default and its help."""
    declared = _DECLARED[key]
    owner = TaskSettings if key in _TASK else _ENGINES[owners_of(key)[0]]
    kind = _text_type(typing.get_type_hints(owner)[declared.name])
    text = declared.metadata["help"]
    if declared.default_factory is not dataclasses.MISSING:
        default = declared.default_factory
        kind = list[str] if isinstance(default(), list) else kind
        return kind, Field(default_factory=default, description=text)
    return kind, Field(_PAPER.get(key, declared.default), description=text)


def _text_type(hint: Any) -> Any:
    """Return the type of a setting in TOML: text for all values that can be given as text."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        if str in parts:
            return str | None if type(None) in parts else str
        return hint
    return dict[str, Any] if typing.get_origin(hint) is Mapping else hint


_PAPER = {"servers": 20, "rule": "phocas:b=8"}
"""Defaults of a run that are those of the paper, and differ from those of a trainer."""


# The text of a setting, read without importing the user's code -> the text that is kept.
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
    "exclude": lambda text: str(EXCLUSIONS.parse(text)),
}


def _callable(text: str) -> Foreign | None:
    place = split_place(text)
    return None if place is None else Foreign(place[0], imported_callable)


# The text of a setting -> its value, or a Foreign, which imports the user's code when loaded.
_READERS: dict[str, Callable[[str], Any]] = {
    "rule": RULES.read,
    "attack": ATTACKS.read,
    "split": SPLITS.read,
    "schedule": SCHEDULES.read,
    "dataset": DATASETS.read,
    "asynchronous": read_policy,
    "speeds": SPEEDS.read,
    "model": lambda text: None if text.partition(":")[0] in MODELS else _callable(text),
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
    "byzantine_data",
    "validation",
    "worker_momentum_form",
    "trusted",
    "worker_data",
    "augmentation",
    "exclude",
}


if TYPE_CHECKING:

    class _Declared(BaseModel):
        """Every setting of the task and of the engines, as mypy sees it."""

        def __getattr__(self, key: str) -> Any: ...
else:
    _Declared = create_model("_Declared", **{key: _declared(key) for key in _DECLARED})


class RunConfig(_Declared):
    """One run: the settings of its task and its engine, and those below.

    The defaults are the paper's MNIST settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dataset: str = Field(
        "mnist", description="Data set: mnist, fashion-mnist, cifar10, synthetic or module:name."
    )
    model: str = Field(
        "mlp", description="Model: mlp, cnn, softmax, cnn-bucketing, cnn-byzfl or module:callable."
    )
    rounds: int = Field(500, ge=1, description="Number of rounds.")
    evaluate_every: int = Field(10, ge=1, description="Rounds between evaluations.")
    engine: str = Field("local", description="Engine: local (one process) or ray (a cluster).")
    name: str | None = Field(None, description="Name of the run in tables and figures.")
    results: str = Field("phocas.sqlite", description="Results file.")
    data_dir: str | None = Field(
        None, description="Folder of the data sets; by default in the user's cache."
    )
    checkpoint_rounds: int | None = Field(
        None, ge=1, description="Rounds between checkpoints, in addition to those by time."
    )
    checkpoint_seconds: float = Field(30.0, ge=0, description="Seconds between checkpoints.")
    record_matrix: int | None = Field(
        None,
        ge=1,
        description="Rounds between samples of the matrix for the HTML report; at most 100.",
    )
    track: list[str] = Field(
        default_factory=list,
        description="Experiment tracker: tensorboard:DIR, wandb, mlflow or module:Name.",
    )

    @model_validator(mode="before")
    @classmethod
    def _policy_without_rule(cls, values: Any) -> Any:
        """Set the rule to the mean for asynchronous policies that aggregate single rows."""
        said = values.get("asynchronous") if isinstance(values, dict) else None
        if not isinstance(said, str) or "rule" in values:
            return values
        try:
            policy = read_policy(said)
        except ValueError:
            return values  # rejected later, with its key
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
        """Check one setting by its declaration, or by the table that reads its text."""
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
        return value if check is None else check("a run", _say(info)(key), value)

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> RunConfig:
        """Raise an error if the task or the engine finds settings that conflict."""
        say = _say(info)
        found: dict[str, str] = {}
        for key in sorted(self._foreign()):
            if getattr(self, key) != _default(key):
                engine = owners_of(key)[0]
                found[key] = (
                    f"{say(key)} is a setting of the {engine} engine: set {say('engine')} to"
                    f" {engine} too"
                )
        if self.record_matrix is not None and (self.clients or self.asynchronous):
            found["record_matrix"] = (
                f"{say('record_matrix')} is for rounds in which every worker has its row: leave it"
                f" out with {say('clients')} or {say('asynchronous')}"
            )
        task = TaskSettings(**self.task_settings())
        of_engine = getattr(self.make_engine(), "conflicts", lambda *_: ())
        for name, text in (*of_engine(task, say), *task.conflicts(say)):
            found.setdefault(key_of(name), text)
        if found:
            raise _ConflictError(found)
        return self

    def _foreign(self) -> set[str]:
        """Return the settings of other engines that this one does not have."""
        every = {key for keys in _OF_ENGINES.values() for key in keys}
        return every - _OF_ENGINES[self.engine].keys()

    def identity(self) -> str:
        """Return a digest of the settings and of the user's code: the result depends on both.

        Without code of the user's own it is the digest of the settings.
        """
        code = self.code()
        return _digest([self.settings_digest(), code]) if code else self.settings_digest()

    def settings_digest(self) -> str:
        """Return a digest of the settings that change the result; import nothing."""
        unset = {key for key in _LATER if getattr(self, key) == _default(key)}
        content = self.model_dump(exclude=_PLACES | self._foreign() | unset)
        if RESULTS_VERSION > 1:  # the first is that of results which name none
            content["results_version"] = RESULTS_VERSION
        return _digest(content)

    def code(self) -> dict[str, str]:
        """Import the user's code that the settings name, and return its digests by module."""
        values: list[Any] = []
        broken: dict[str, str] = {}
        for key, read in _READERS.items():
            text = getattr(self, key)
            found = None if text is None else read(text)
            if not isinstance(found, Foreign):
                continue
            try:
                values += [found.load(), text]
            except (ValueError, TypeError):  # the run raises it; no result has this digest
                broken[text] = "broken"
        return code_of(values) | broken

    def recorded(self) -> dict[str, Any]:
        """Return the settings for a results file, with the digests of the user's code."""
        code = self.code()
        version = {"results_version": RESULTS_VERSION} if RESULTS_VERSION > 1 else {}
        return self.model_dump() | version | ({"code": describe_code(code)} if code else {})

    def same_settings(self, recorded: Mapping[str, Any]) -> bool:
        """Return whether a recorded run has the same settings, apart from code and rounds."""
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


def _say(info: ValidationInfo) -> Spelling:
    """Return how the user writes the names of settings."""
    return (info.context or {}).get("say", name_of)  # type: ignore[no-any-return]


def check_setting(name: str) -> str:
    """Return the key of a recorded setting, ``b`` or ``q``; raise ValueError for other names."""
    key = key_of(name)
    if key not in (*RunConfig.model_fields, *RECORDED, "b", "q"):
        raise ValueError(unknown("setting", name, map(name_of, RunConfig.model_fields)))
    return key


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def make_config(
    values: Mapping[str, Any],
    source: str = "configuration",
    options: Collection[str] | None = None,
) -> RunConfig:
    """Return the configuration of some values; an error names the keys and the source.

    Args:
        values: the settings by name; two spellings of one setting are an error.
        source: the file, which errors name.
        options: the settings given as options, if there is a command line.
    """
    written: dict[str, str] = {}
    for name in values:
        key = key_of(name)
        if key in written:
            raise ConfigError(f"{source}: {written[key]} and {name} are the same: give one of them")
        written[key] = name
    say = functools.partial(_spell, written, options)
    given = {key: values[name] for key, name in written.items()}
    try:
        return RunConfig.model_validate(given, context={"say": say})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, source, say))) from None


def _spell(written: Mapping[str, str], options: Collection[str] | None, name: str) -> str:
    """Return a setting's name as the user wrote or would write it: as an option, or as in TOML."""
    key = key_of(name)
    if options is None:
        return written.get(key, name_of(key))
    if key in written and written[key] not in options:
        return written[key]
    return option_of(key)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an error names the line."""
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
    """Return the runs of a sweep: every combination of the lists in ``grid``.

    Keys outside ``grid`` are common to all runs. Of several ``[[grid]]`` tables, each is expanded
    on its own. ``{q}`` in a text is the value of the key ``q`` of the grid, which need not be a
    setting. A value ``"q"``, ``"q+2"`` or ``"2*q"`` is computed from another key, so that both
    change together.

    >>> grid = {"dataset": "synthetic", "grid": {"rule": ["mean", "phocas:b=3"], "seed": [0, 1, 2]}}
    >>> len(expand_grid(grid, "grid.toml"))
    6
    >>> tied = {"rule": "phocas:b={b}", "attack": "gaussian:q={q}", "q": [2, 4], "b": "q+2"}
    >>> [run.title() for run in expand_grid({"grid": tied}, "grid.toml")]
    ['phocas:b=4 under gaussian:q=2', 'phocas:b=6 under gaussian:q=4']
    """
    common = {key: value for key, value in values.items() if key != "grid"}
    blocks = values.get("grid", {})
    runs: dict[str, RunConfig] = {}
    for block in [blocks] if isinstance(blocks, Mapping) else blocks:
        for choice in _product(block):
            config = make_config(_filled({**common, **choice}, choice, source), source)
            runs.setdefault(config.settings_digest(), config)
    return list(runs.values())


_TIE = re.compile(
    r"(?:(?P<factor>\d+)\s*\*\s*)?(?P<key>[A-Za-z_]\w*)\s*(?:(?P<sign>[+-])\s*(?P<add>\d+))?"
)
_SLOT = re.compile(r"\{([A-Za-z_]\w*)\}")


def _filled(values: Mapping[str, Any], grid: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Compute the values of one run of a grid that depend on others, and fill the slots of texts.

    Args:
        values: the settings of the run, and other keys of the grid.
        grid: the keys of the grid.
        source: the file, which errors name.
    """
    used: set[str] = set()

    def value_of(key: str, waiting: tuple[str, ...] = ()) -> Any:
        if key in waiting:
            raise ConfigError(f"{source}: grid.{key} depends on itself: {' -> '.join(waiting)}")
        value = values[key]
        tie = _TIE.fullmatch(value.strip()) if isinstance(value, str) and key in grid else None
        if tie is None or tie["key"] not in values:
            return value
        other = value_of(tie["key"], (*waiting, key))
        used.add(tie["key"])
        if tie.group("factor") is tie.group("add") is None:
            return other
        if isinstance(other, bool) or not isinstance(other, int | float):
            raise ConfigError(
                f"{source}: grid.{key} = {value!r} needs a number {tie['key']}: got {other!r}"
            )
        add = int(f"{tie['sign']}{tie['add']}") if tie["add"] else 0
        return int(tie["factor"] or 1) * other + add

    found = {key: value_of(key) for key in values}

    def fill(slot: re.Match[str]) -> str:
        if slot[1] not in found:
            raise ConfigError(f"{source}: {unknown('key in braces', slot[1], grid, 'keys')}")
        used.add(slot[1])
        return str(found[slot[1]])

    found = {
        key: _SLOT.sub(fill, value) if isinstance(value, str) else value
        for key, value in found.items()
    }
    settings = {*RunConfig.model_fields, *map(name_of, RunConfig.model_fields)}
    return {key: value for key, value in found.items() if key in settings or key not in used}


def _product(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = [value if isinstance(value, list) else [value] for value in block.values()]
    for key, axis in zip(block, axes, strict=True):
        if not axis:
            raise ConfigError(f"grid.{key} must have at least one value: got an empty list")
    for choice in itertools.product(*axes):
        yield dict(zip(block, choice, strict=True))


def _explain(error: ValidationError, source: str, say: Spelling) -> Iterator[str]:
    """Write one line for each problem, with the setting that is to be changed."""
    for problem in error.errors():
        conflict = problem.get("ctx", {}).get("error")
        if isinstance(conflict, _ConflictError):
            for key, text in conflict.found.items():
                yield _line(source, say(key), text)
            continue
        key, *inner = map(str, problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            known = map(name_of, RunConfig.model_fields)
            yield f"{source}: {unknown('key', key, known)}"
        elif problem["type"] == "value_error":
            yield _line(source, ".".join([say(key), *inner]), message)
        else:
            got = f"{message[:1].lower()}{message[1:]}: got {problem['input']!r}"
            yield _line(source, ".".join([say(key), *inner]), got)


def _line(source: str, name: str, text: str) -> str:
    return f"{name}: {text}" if name.startswith("--") else f"{source}: {name}: {text}"
