"""The study as data, and its results: a file with one finished run in each line."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phocas.experiments.config import ConfigError, read_toml
from phocas.experiments.reproduction.rare.simulation import (
    HONEST,
    SimulationSettings,
    frequencies,
    octaves,
    simulate,
)
from phocas.experiments.reproduction.tasks import label_of_rule, task_path
from phocas.machine import available_cores
from phocas.provenance import RESULTS_VERSION
from phocas.specs import unknown

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

BINS = (0, 32, 256, 1024, 2048)
"""Lower ends of the ranges of tokens in tables; each is an end of an octave."""
DIGITS = 4
"""Digits of a loss in the results file."""


class _PartFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    title: str
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: list[dict[str, Any]] = Field(min_length=1)


class _RareStudyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    settings: dict[str, Any]
    rates: dict[str, float]
    repeats: int = Field(default=1, ge=1)
    scale: dict[str, dict[str, Any]] = Field(default={"paper": {}})
    parts: list[_PartFile] = Field(min_length=1)


@dataclass(frozen=True)
class StudyCase:
    """One line of a table: a run to be repeated.

    Attributes:
        label: name of the rule, and the settings that only some cases of the part have.
        setting: the settings, with the seed of the first repeat.
    """

    label: str
    setting: SimulationSettings

    def repeats(self, number: int) -> list[SimulationSettings]:
        """Return the settings of so many repeats."""
        seed = self.setting.seed
        return [self.setting.model_copy(update={"seed": seed + k}) for k in range(number)]


@dataclass(frozen=True)
class StudyPart:
    """One table and one figure of the study.

    Attributes:
        name: name of the figure's file.
        title: what is special about the part.
        reference: the mean without a fault, with which the part is compared.
        cases: the runs to be repeated.
    """

    name: str
    title: str
    reference: StudyCase
    cases: tuple[StudyCase, ...]

    @property
    def faults(self) -> list[str]:
        """Return the faults of the part, in the order of the file."""
        return list(dict.fromkeys(case.setting.fault for case in self.cases))


@dataclass(frozen=True)
class Study:
    """The parts of the study and the number of repeats of each run."""

    title: str
    parts: tuple[StudyPart, ...]
    repeats: int

    def runs(self) -> list[SimulationSettings]:
        """Return all distinct runs; all first repeats come before the second ones."""
        cases = [case for part in self.parts for case in (part.reference, *part.cases)]
        every = [case.repeats(self.repeats) for case in cases]
        return list(dict.fromkeys(itertools.chain.from_iterable(zip(*every, strict=True))))

    def names(self) -> dict[SimulationSettings, str]:
        """Return the name of each run, for messages: its part, its case and its fault."""
        found: dict[SimulationSettings, str] = {}
        for part in self.parts:
            for case in (part.reference, *part.cases):
                name = f"{part.name}: {case.label}, {case.setting.fault}"
                for setting in case.repeats(self.repeats):
                    found.setdefault(setting, name)
        return found


def is_study(task: str) -> bool:
    """Return whether a task of ``phocas reproduce`` is a study of rare features."""
    return "parts" in read_toml(task_path(task))


def plan_study(
    task: str, *, scale: str = "paper", repeats: int | None = None, only: Sequence[str] = ()
) -> Study:
    """Read a study.

    Args:
        task: the name of a study of the package, or the path of a TOML file.
        scale: the scale of the file to use.
        repeats: number of repeats; by default that of the file.
        only: names of the parts to include; by default all.

    >>> [part.name for part in plan_study("rare", only=["base", "tied"]).parts]
    ['base', 'tied']
    """
    path = task_path(task)
    try:
        file = _RareStudyFile.model_validate(read_toml(path))
    except ValidationError as error:
        raise _explained(error, str(path)) from None
    if scale not in file.scale:
        raise ConfigError(unknown("scale", scale, file.scale))
    names = [part.name for part in file.parts]
    for name in only:
        if name not in names:
            raise ConfigError(unknown("figure", name, names))
    shared = {**file.settings, **file.scale[scale]}
    return Study(
        title=file.title,
        parts=tuple(
            _part(part, shared, file.rates, str(path))
            for part in file.parts
            if not only or part.name in only
        ),
        repeats=file.repeats if repeats is None else repeats,
    )


def _part(file: _PartFile, shared: dict[str, Any], rates: dict[str, float], path: str) -> StudyPart:
    where = f"{path}: part {file.name}"
    plain = {**shared, **file.settings}
    cases = []
    for block in file.grid:
        values = [each if isinstance(each, list) else [each] for each in block.values()]
        for chosen in itertools.product(*values):
            own = dict(zip(block, chosen, strict=True))
            setting = _setting({**plain, **own}, rates, where)
            named = [
                f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in own.items()
                if key not in ("rule", "fault")
            ]
            cases.append(StudyCase(", ".join([label_of_rule(setting.rule), *named]), setting))
    reference = StudyCase(
        "Mean", _setting({**plain, "rule": "mean", "fault": HONEST}, rates, where)
    )
    return StudyPart(file.name, file.title, reference, tuple(cases))


def _setting(values: dict[str, Any], rates: dict[str, float], where: str) -> SimulationSettings:
    optimizer = str(values.get("optimizer", "adamw"))
    if "lr" not in values and optimizer in rates:
        values = {**values, "lr": rates[optimizer]}
    try:
        return SimulationSettings.model_validate(values)
    except ValidationError as error:
        raise _explained(error, where) from None


def _explained(error: ValidationError, where: str) -> ConfigError:
    """Return an error of one line for each problem."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, problem["loc"]))
        lines.append(f"{where}: {key}: {message}" if key else f"{where}: {message}")
    return ConfigError("\n".join(lines))


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a case, means over its finished repeats.

    Attributes:
        setting: the settings of the first repeat.
        repeats: losses by octave, of each finished repeat; NaN if the model was lost.
    """

    setting: SimulationSettings
    repeats: tuple[tuple[float, ...], ...]

    @property
    def by_octave(self) -> list[float]:
        """Return the loss by octave."""
        return [float(value) for value in np.mean(self.repeats, axis=0)]

    def within(self, low: int, high: int) -> float:
        """Return the loss of a range of tokens; its ends must be ends of octaves."""
        weights = frequencies(self.setting.vocabulary)
        used = [
            (weights[start:end].sum(), loss)
            for (start, end), loss in zip(
                octaves(self.setting.vocabulary), self.by_octave, strict=True
            )
            if low <= start and end <= high
        ]
        return float(sum(w * loss for w, loss in used) / sum(w for w, _ in used))

    @property
    def total(self) -> float:
        """Return the mean loss over all tokens, weighted by their frequencies."""
        return self.within(0, self.setting.vocabulary)

    @property
    def bins(self) -> dict[tuple[int, int], float]:
        """Return the loss by range of tokens."""
        size = self.setting.vocabulary
        ends = [*(low for low in BINS if low < size), size]
        return {(a, b): self.within(a, b) for a, b in itertools.pairwise(ends)}


@dataclass
class StudyResults:
    """A file of finished runs, one JSON object in each line.

    Runs of another version of the results are ignored. Processes may append to one file at once.
    """

    path: Path
    found: dict[SimulationSettings, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file, if there is one."""
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            try:
                values = json.loads(line)
                version, losses = values.pop("version"), values.pop("losses")
                if version == RESULTS_VERSION:
                    setting = SimulationSettings.model_validate(values)
                    self.found[setting] = _read_losses(losses, setting)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(
                    f"{self.path}, line {number} is no result ({type(error).__name__}: {reason}):"
                    " delete the line to run it again"
                ) from None

    def add(self, setting: SimulationSettings, losses: Sequence[float]) -> None:
        """Append a finished run."""
        rounded = [float(f"{loss:.{DIGITS}g}") for loss in losses]
        finite = [loss if math.isfinite(loss) else None for loss in rounded]
        self.found[setting] = _read_losses(finite, setting)
        line = {**setting.model_dump(exclude_defaults=True), "version": RESULTS_VERSION}
        text = json.dumps({**line, "losses": finite})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{text}\n".encode())  # in one write: other processes append too

    def missing(self, runs: Sequence[SimulationSettings]) -> list[SimulationSettings]:
        """Return the runs that are not finished."""
        return [setting for setting in runs if setting not in self.found]

    def losses(self, case: StudyCase, repeats: int) -> Losses | None:
        """Return the losses of a case, or None if none of its repeats is finished."""
        done = [self.found[s] for s in case.repeats(repeats) if s in self.found]
        return Losses(case.setting, tuple(done)) if done else None


def _read_losses(values: Sequence[float | None], setting: SimulationSettings) -> tuple[float, ...]:
    expected = len(octaves(setting.vocabulary))
    if len(values) != expected:
        raise ValueError(f"{len(values)} losses instead of {expected}")
    return tuple(math.nan if value is None else float(value) for value in values)


def run_all(
    missing: Sequence[SimulationSettings],
    results: StudyResults,
    *,
    processes: int | None = None,
    watch: Callable[[SimulationSettings], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Execute runs, one in each process, and store each when it is finished.

    A run that is stopped leaves nothing: it takes seconds, and starts again next time.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    number = min(processes or available_cores(), len(missing))
    with ProcessPoolExecutor(
        number, mp_context=context, initializer=_begin, initargs=(stop,)
    ) as pool:
        running: dict[Future[list[float] | None], SimulationSettings] = {
            pool.submit(_run, setting): setting for setting in missing
        }
        try:
            while running and not should_stop():
                for done in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    setting, losses = running.pop(done), done.result()
                    if losses is not None:
                        results.add(setting, losses)
                        watch(setting)
        except BrokenProcessPool:
            raise OSError("a process of the study was killed: the same command resumes") from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


_stops: list[Event] = []
"""In a process of the pool: the event that ends its run."""


def _begin(stop: Event) -> None:
    """Prepare a process: the parent handles signals, and the process ends with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _stops.append(stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(setting: SimulationSettings) -> list[float] | None:
    return simulate(setting, _stops[0].is_set)
