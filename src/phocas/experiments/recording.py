"""The writing of a run into a results file, by ``phocas train`` and by :meth:`Trainer.run`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import socket
import time
import types
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phocas.attacks import ATTACKS
from phocas.data import SPLITS
from phocas.experiments.config import RunConfig, key_of
from phocas.experiments.locks import claim, state_path
from phocas.experiments.results import ENDED, Results
from phocas.files import check_writable
from phocas.machine import available_cores
from phocas.provenance import RESULTS_VERSION, describe_code, describe_error
from phocas.rules import RULES
from phocas.specs import Spec, Table, place_of
from phocas.training.checkpoints import save_checkpoint
from phocas.training.server import ParticipationShares
from phocas.training.task import written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phocas.experiments.results import Described, Status
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round, Trainer

FLUSH_SECONDS = 0.5


class RunRecorder:
    """A run's connection to a results file, which is written every half second.

    Attributes:
        run: the number of the run in the file; 0 before :meth:`begin`.
        evaluations: evaluations that are not written yet, by round.
        window: the dropped shares of the workers since the last evaluation.
    """

    def __init__(self, results: Results, trainer: Trainer, evaluate_every: int) -> None:
        self.results = results
        self.trainer = trainer
        self.run = 0
        self.evaluations: list[tuple[int, Metrics]] = []
        task = trainer.task
        self.window = ParticipationShares(task.clients or task.num_workers)
        self._evaluate_every = evaluate_every
        self._rounds: list[Round] = []
        self._dropped: list[tuple[int, list[float]]] = []
        self._flushed = time.monotonic()

    def begin(self, config: Described, origin: str | None = None) -> None:
        """Add the run to the file.

        Args:
            config: the settings of the run.
            origin: the run and round that this run continues, if any.
        """
        layers = self.trainer.server.parameters.layers
        byzantine = self._byzantine(config.recorded())
        self.run = self.results.begin(config, versions(), host(), origin, layers, byzantine)

    def _byzantine(self, settings: dict[str, Any]) -> tuple[int, ...] | None:
        """Return the workers that are Byzantine by the attack alone.

        Return None if other workers may send no row: with another engine, or with speeds.
        """
        if settings["engine"] != "local" or settings["speeds"] is not None:
            return None
        attack = self.trainer.task.attack
        return () if attack is None else attack.byzantine()

    def keep(self, done: Round, evaluation: Metrics | None) -> None:
        """Add a round, and the evaluation after it, if any."""
        self.window.update(done.participants, done.dropped)
        self._rounds.append(done)
        if evaluation is not None:
            self.evaluations.append((done.number, evaluation))
            self._dropped.append((done.number, self.window.means().tolist()))
            if done.number % self._evaluate_every == 0:
                # Not at an end between two evaluations: a longer run continues from there.
                self.window.clear()
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last write."""
        self.results.record(
            self.run,
            self._rounds,
            self.evaluations,
            self._dropped,
            self.trainer.detector.evidence() if self.trainer.cluster.same_rows else (),
            self.trainer.detector.absurd,
        )
        for buffer in (self._rounds, self.evaluations, self._dropped):
            buffer.clear()
        self._flushed = time.monotonic()


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """The settings of a run that a user's own :class:`Trainer` makes, for a results file."""

    settings: dict[str, Any]
    start: str
    """A digest of the first parameters, of some training samples and of the code."""

    @classmethod
    def of(cls, trainer: Trainer, start: str, **more: Any) -> TrainerConfig:
        """Return the settings of a trainer, values as text; ``more`` are settings of the run."""
        given = dict(trainer.given)
        engine = given.pop("engine", "local")
        if not isinstance(engine, str):
            given |= {
                field.name: getattr(engine, field.name)
                for field in (
                    dataclasses.fields(engine) if dataclasses.is_dataclass(engine) else ()
                )
            }
            engine = type(engine).__name__.removesuffix("Settings").lower()
        settings = RunConfig.model_construct().model_dump()
        settings |= {key_of(name): written(value) for name, value in given.items()}
        tables: dict[str, Table[Any]] = {"rule": RULES, "attack": ATTACKS, "split": SPLITS}
        for name, table in tables.items():
            if not isinstance(given.get(name), str | None):
                settings[name] = str(table.of(given[name], "Trainer"))
        settings |= {"model": _name(given.get("model")), "dataset": _name(given.get("data"))}
        settings |= {"servers": trainer.task.num_servers, "engine": engine, **more}
        settings = {key: value for key, value in settings.items() if key in RunConfig.model_fields}
        if RESULTS_VERSION > 1:
            settings["results_version"] = RESULTS_VERSION
        if trainer.code:
            settings["code"] = describe_code(trainer.code)
        return cls(settings, start)

    def identity(self) -> str:
        """Return a digest of the settings, the code, the parameters and the data."""
        told = {
            key: value for key, value in self.settings.items() if key not in ("name", "results")
        }
        content = json.dumps([told, self.start], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def recorded(self) -> dict[str, Any]:
        """Return the settings for a results file."""
        return self.settings


def _name(value: object) -> str:
    """Return the text of a model or of data, their own name, or that of their type."""
    if isinstance(value, str | Spec):
        return str(value)
    if isinstance(value, type | types.FunctionType):
        return place_of(value)
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else type(value).__name__


def _start(trainer: Trainer) -> str:
    numbers = np.linspace(0, len(trainer.task.samples) - 1, 64).astype(np.int64)
    digest = hashlib.sha256(json.dumps(trainer.code, sort_keys=True).encode())
    for tensor in (trainer.server.vector, *trainer.task.samples.draw(numbers[None])):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def recorded_run(
    trainer: Trainer, path: Path, rounds: int, evaluate_every: int, name: str | None
) -> Iterator[RunRecorder]:
    """Add a trainer's next rounds to a results file, as a run; a trainer has one run in a file.

    Args:
        trainer: the trainer.
        path: the results file.
        rounds: the number of rounds that the trainer has done at the end.
        evaluate_every: rounds between evaluations.
        name: the name of the run in tables.
    """
    check_writable(path, "the results file")
    run, start = trainer.recorded.get(path.resolve(), (None, None))
    settings = {"rounds": rounds, "evaluate_every": evaluate_every, "name": name}
    config = TrainerConfig.of(trainer, start or _start(trainer), **settings, results=str(path))
    with claim(path, config.identity(), patience=1.0), Results(path) as results:
        recorder = RunRecorder(results, trainer, evaluate_every)
        done = trainer.rounds_done
        if run is None:
            recorder.begin(config, f"round {done} of its trainer" if done else None)
            trainer.recorded[path.resolve()] = recorder.run, config.start
        else:
            recorder.run = run
            results.extend(run, config, done)
        status: Status = "complete"
        message = None
        try:
            yield recorder
            if trainer.rounds_done < rounds:
                status, message = "stopped", "the last aggregate was not finite"
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            message = describe_error(error)
            raise
        finally:
            recorder.flush()
            results.end(recorder.run, status, message)
        if status in ENDED:
            save_checkpoint(state_path(path, recorder.run), trainer, config.identity())


def versions() -> dict[str, str]:
    """Return the versions of packages that a result may depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("phocas", "numpy", "llvmlite"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def host() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": available_cores(),
    }
