"""Run one configuration: from its checkpoint if there is one, into its results file."""

from __future__ import annotations

import platform
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from phocas import engines
from phocas.data import load, parse_split
from phocas.experiments.locks import checkpoint_path, claim
from phocas.experiments.results import Results, RunRecord, Status
from phocas.machine import available_cores
from phocas.training.checkpoints import (
    discard_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from phocas.training.models import build_model
from phocas.training.optimizers import parse_optimizer
from phocas.training.schedules import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from phocas.data import Dataset
    from phocas.experiments.config import RunConfig
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round, Trainer

FLUSH_SECONDS = 0.5


def build_trainer(config: RunConfig, data: Dataset | None = None) -> Trainer:
    """Make the trainer of a configuration; what only the model can tell is checked here."""
    data = load(config.dataset, config.data_dir) if data is None else data
    return engines.start(
        config.engine,
        build_model(config.model, data.shape, data.num_classes, config.seed),
        functional.cross_entropy,
        data,
        num_workers=config.workers,
        num_servers=config.servers,
        batch_size=config.batch_size,
        rule=config.rule,
        attack=config.attack,
        optimizer=parse_optimizer(config.optimizer),
        optimizer_options=config.optimizer_options,
        lr=config.lr,
        schedule=SCHEDULES.parse(config.schedule),
        weight_decay=config.weight_decay,
        worker_momentum=config.worker_momentum,
        reduction=config.reduction,
        split=parse_split(config.split),
        standardise=config.standardise,
        seed=config.seed,
        on_nonfinite=config.on_nonfinite,
        threads=config.threads,
        **config.engine_settings(),
    )


def execute(
    config: RunConfig,
    *,
    resume: bool = False,
    watch: Callable[[RunConfig, Round, Metrics | None], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    model_file: Path | None = None,
    data: Dataset | None = None,
    patience: float = 1.0,
) -> RunRecord:
    """Run a configuration to its end, or to where it is told to stop, and return what was recorded.

    With ``resume``, a complete run of the same configuration is returned as it is, and one that was
    interrupted or killed goes on from its checkpoint, to the same bits as if nothing had happened.
    A run that another process is running is waited for so many seconds, and then refused.
    """
    with claim(config.results, config.identity(), patience):
        earlier = _earlier(config) if resume else []
        for record in earlier:
            if record.status in ("complete", "stopped"):
                return record
        # What is impossible is found out before there is a results file.
        with build_trainer(config, data) as trainer, Results(Path(config.results)) as results:
            run = _Run(config, results, trainer, watch)
            run.enter(earlier[-1] if earlier else None)
            try:
                status, message = run.loop(should_stop)
            except BaseException as error:
                results.end(run.id, "failed", f"{type(error).__name__}: {error}")
                raise
            if model_file is not None:
                save_model(model_file, trainer)
            results.end(run.id, status, message)
            if status in ("complete", "stopped"):
                discard_checkpoint(checkpoint_path(config.results, config.identity()))
            return results.run(run.id)


def _earlier(config: RunConfig) -> list[RunRecord]:
    if not Path(config.results).exists():
        return []
    with Results(Path(config.results)) as results:
        return results.runs(config.identity())


class _Run:
    """The state of a run between two writes."""

    def __init__(
        self,
        config: RunConfig,
        results: Results,
        trainer: Trainer,
        watch: Callable[[RunConfig, Round, Metrics | None], None] | None,
    ) -> None:
        self.config = config
        self.results = results
        self.trainer = trainer
        self.watch = watch
        self.id = 0
        self._path = checkpoint_path(config.results, config.identity())
        self._rounds: list[Round] = []
        self._evaluations: list[tuple[int, Metrics]] = []
        self._dropped: list[tuple[int, list[float]]] = []
        self._window = np.zeros(
            config.workers + 1
        )  # sums of dropped shares, and of how many rounds
        self._flushed = self._saved = time.monotonic()

    def enter(self, earlier: RunRecord | None) -> None:
        """Start anew, or go on from the checkpoint of an earlier attempt."""
        path = self._path
        if earlier is None:
            discard_checkpoint(path)
            self.id = self.results.begin(self.config, versions(), host())
            self._evaluations.append((0, self.trainer.evaluate()))
            return
        self.id = earlier.id
        if path.exists():
            extra = load_checkpoint(path, self.trainer, self.config.identity())
            self._window[:] = extra["window"].numpy()
        self.results.rewind(self.id, self.trainer.rounds_done if path.exists() else -1)
        if not path.exists():
            self._evaluations.append((0, self.trainer.evaluate()))

    def loop(self, should_stop: Callable[[], bool]) -> tuple[Status, str | None]:
        """Run the rounds that are left."""
        config = self.config
        while self.trainer.rounds_done < config.rounds:
            number = self.trainer.rounds_done + 1
            due = number % config.evaluate_every == 0 or number == config.rounds
            done = self.trainer.step(detailed=due)
            self._window[:-1] += done.dropped
            self._window[-1] += 1
            evaluation = self.trainer.evaluate() if due or done.action == "stopped" else None
            self._keep(done, evaluation)
            if self.watch is not None:
                self.watch(config, done, evaluation)
            if done.action == "stopped":
                self._flush()
                return "stopped", f"the aggregate of round {done.number} was not finite"
            if self._checkpoint_is_due():
                self._checkpoint()
            if should_stop() and self.trainer.rounds_done < config.rounds:
                return self._interrupt()
        self._flush()
        return "complete", None

    def _interrupt(self) -> tuple[Status, str | None]:
        self._checkpoint()
        return "interrupted", f"interrupted after round {self.trainer.rounds_done}"

    def _keep(self, done: Round, evaluation: Metrics | None) -> None:
        self._rounds.append(done)
        if evaluation is not None:
            self._evaluations.append((done.number, evaluation))
            self._dropped.append((done.number, (self._window[:-1] / self._window[-1]).tolist()))
            self._window[:] = 0
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self.results.record(self.id, self._rounds, self._evaluations, self._dropped)
        for waiting in (self._rounds, self._evaluations, self._dropped):
            waiting.clear()
        self._flushed = time.monotonic()

    def _checkpoint_is_due(self) -> bool:
        every = self.config.checkpoint_rounds
        if every is not None and self.trainer.rounds_done % every == 0:
            return True
        return time.monotonic() - self._saved >= self.config.checkpoint_seconds

    def _checkpoint(self) -> None:
        """Write results before the checkpoint: they may be ahead of it, never behind."""
        self._flush()
        save_checkpoint(
            self._path,
            self.trainer,
            self.config.identity(),
            {"window": torch.from_numpy(self._window)},
        )
        self._saved = time.monotonic()


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("phocas", "numpy", "llvmlite"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def host() -> dict[str, Any]:
    """Return what machine this is."""
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": available_cores(),
    }
