"""Run one configuration: from its checkpoint if there is one, into its results file."""

from __future__ import annotations

import platform
import socket
import time
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from phocas.data import load
from phocas.engines import EngineError
from phocas.experiments.blame import MOST_PICTURES, picture_sample
from phocas.experiments.locks import checkpoint_path, claim, previous_path, state_path
from phocas.experiments.results import ENDED, Results, RunRecord, Status
from phocas.experiments.trackers import TrackedRun, Tracking
from phocas.files import check_writable
from phocas.machine import available_cores
from phocas.training.attendance import Attendance
from phocas.training.checkpoints import (
    DamagedCheckpointError,
    discard_checkpoint,
    load_checkpoint,
    read_model,
    save_checkpoint,
    save_model,
)
from phocas.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from phocas.data import Dataset
    from phocas.experiments.config import RunConfig
    from phocas.rules.sampling import Sample
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

FLUSH_SECONDS = 0.5


def build_trainer(config: RunConfig, data: Dataset | None = None) -> Trainer:
    """Make the trainer of a configuration; what only the model can tell is checked here."""
    return Trainer(
        config.model,
        functional.cross_entropy,
        load(config.dataset, config.data_dir) if data is None else data,
        engine=config.make_engine(),
        **config.task_settings(),
    )


def execute(
    config: RunConfig,
    *,
    restart: bool = False,
    watch: Callable[[RunConfig, Round, Metrics | None], None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    model_file: Path | None = None,
    data: Dataset | None = None,
    patience: float = 1.0,
    warn: Callable[[str], None] | None = None,
) -> RunRecord:
    """Run a configuration to its end, or to where it is told to stop, and return what was recorded.

    A run of the same configuration that has come to its end is returned as it is. One that was
    interrupted or killed goes on from its checkpoint, to the same bits as if nothing had happened,
    and so does one with fewer rounds, as a run of its own. Code of the user's own that has changed
    makes another run, which begins at round 0. With ``restart`` all that is left as it is, and
    another run begins. ``tell`` gets a line about which of these it was, and ``warn``, or else
    ``tell``, one of what fails and ends nothing, and one of changed code. A run that another
    process is running is waited for so many seconds, and then refused.
    """
    check_writable(Path(config.results), "the results file")
    if model_file is not None:
        check_writable(model_file, "the model")
    with claim(config.results, config.identity(), patience):
        known = _known(config)
        earlier = next((r for r in reversed(known) if r.identity == config.identity()), None)
        if earlier is not None and earlier.status in ENDED and not restart:
            tell(f"run {earlier.id} in {config.results} is {earlier.status} already")
            if model_file is not None:
                save_model(model_file, final_model(config.results, earlier.id))
            return earlier
        # What is impossible is found out before there is a results file.
        tracking = Tracking(config.track, warn or tell)
        with _build(config, data) as trainer, Results(Path(config.results)) as results:
            run = _Run(config, results, trainer, watch, tell, tracking)
            if restart:
                run.begin_beside(earlier)
            elif earlier is not None:
                run.go_on(earlier)
            else:
                run.extend(known, warn or tell)
            run.track()
            try:
                status, message = run.loop(should_stop)
                run.keep(status)
                if model_file is not None:
                    save_model(model_file, trainer.model.state_dict())
            except BaseException as error:
                results.end(run.id, "failed", f"{type(error).__name__}: {error}")
                tracking.finish("failed")
                error.add_note(f"what was done is in {config.results}, run {run.id}")
                raise
            results.end(run.id, status, message)
            tracking.finish(status)
            if status in ENDED:
                run.discard()
            return results.run(run.id)


def final_model(results: str | Path, run: int) -> dict[str, torch.Tensor]:
    """Return the model of a run that has come to its end, by the names of its state dict."""
    path = state_path(results, run)
    if not path.exists():
        raise ValueError(
            f"the model of run {run} is not there any more, in {path}: running it again makes it"
        )
    return read_model(path)


def _known(config: RunConfig) -> list[RunRecord]:
    if not Path(config.results).exists():
        return []
    with Results(Path(config.results)) as results:
        return results.runs()


@contextmanager
def _fitting(config: RunConfig) -> Iterator[None]:
    """Say of which model and data it was that torch found shapes which do not fit."""
    try:
        yield
    except EngineError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{config.model} cannot be trained on {config.dataset}: {reason}"
        ) from error


def _build(config: RunConfig, data: Dataset | None) -> Trainer:
    with _fitting(config):
        return build_trainer(config, data)


class _Run:
    """The state of a run between two writes."""

    def __init__(
        self,
        config: RunConfig,
        results: Results,
        trainer: Trainer,
        watch: Callable[[RunConfig, Round, Metrics | None], None] | None,
        tell: Callable[[str], None],
        tracking: Tracking,
    ) -> None:
        self.tracking = tracking
        self.config = config
        self.results = results
        self.trainer = trainer
        self.watch = watch
        self.tell = tell
        self.id = 0
        self._path = checkpoint_path(config.results, config.identity())
        self._before = previous_path(config.results, config.identity())
        self._rounds: list[Round] = []
        self._evaluations: list[tuple[int, Metrics]] = []
        self._dropped: list[tuple[int, list[float]]] = []
        self._window = Attendance(config.clients or config.workers)  # since the last evaluation
        self._flushed = self._saved = time.monotonic()

    def begin_beside(self, earlier: RunRecord | None) -> None:
        """Begin at round 0, and keep the state of an earlier attempt that had not ended."""
        there = [path for path in (self._path, self._before) if path.exists()]
        if earlier is not None and earlier.status not in ENDED and there:
            there[0].replace(state_path(self.config.results, earlier.id))
        self._begin()

    def go_on(self, earlier: RunRecord) -> None:
        """Go on with an earlier attempt, from its newest checkpoint that is whole."""
        self.id = earlier.id
        there = [path for path in (self._path, self._before) if path.exists()]
        problems: list[str] = []
        for path in there:
            try:
                self._load(path, self.config.identity())
            except DamagedCheckpointError as error:
                problems.append(str(error))
            else:
                damage = "".join(f"{problem}; the one before it is whole: " for problem in problems)
                done = self.trainer.rounds_done
                self.tell(f"{damage}going on with run {self.id} from round {done}")
                self.results.rewind(self.id, done)
                return
        if problems:
            raise DamagedCheckpointError(
                f"{' and '.join(problems)}: no checkpoint of run {self.id} is whole;"
                " delete them to run it again from round 0, or begin another run beside it"
            )
        self.tell(f"run {self.id} left no checkpoint: it begins again at round 0")
        self.results.rewind(self.id, -1)
        self._evaluations.append((0, self.trainer.evaluate()))

    def extend(self, known: Sequence[RunRecord], warn: Callable[[str], None]) -> None:
        """Begin where the longest run that differs only in having fewer rounds has got to.

        Nothing in a round depends on how many are to come, so that this is exact.
        """
        for origin, path in _origins(self.config, known):
            try:
                self._load(path, origin.identity)
            except DamagedCheckpointError as error:
                self.tell(f"run {origin.id} cannot be gone on from: {error}")
                continue
            done = self.trainer.rounds_done
            self._begin(f"run {origin.id}, round {done}")
            self.results.copy(origin.id, self.id, done, self.config.evaluate_every)
            self._checkpoint()  # whoever is killed before the next one does not begin at round 0
            self.tell(
                f"run {self.id} is run {origin.id} with more rounds: going on from round {done}"
            )
            return
        self._begin()
        _tell_other_code(self.config, known, self.id, warn)

    def _begin(self, origin: str | None = None) -> None:
        self.discard()
        if origin is None:
            with _fitting(self.config):
                self._evaluations.append((0, self.trainer.evaluate()))
        layers = self.trainer.server.parameters.layers
        self.id = self.results.begin(
            self.config, versions(), host(), origin, layers, self._byzantine()
        )

    def _byzantine(self) -> tuple[int, ...] | None:
        """Return the Byzantine workers, where nothing but the attack can make a worker wrong."""
        if self.config.engine != "local" or self.config.speeds is not None:
            return None
        attack = self.trainer.task.attack
        return () if attack is None else attack.byzantine()

    def track(self) -> None:
        """Tell trackers what runs, and of the evaluation before its first round."""
        config, done = self.config, self.trainer.rounds_done
        settings = config.recorded()
        run = TrackedRun(self.id, config.identity(), config.title(), settings, done)
        self.tracking.start(run)
        for number, evaluation in self._evaluations:
            self.tracking.evaluated(number, evaluation)

    def _load(self, path: Path, identity: str) -> None:
        extra = load_checkpoint(path, self.trainer, identity)
        np.copyto(self._window.sums, extra["window"].numpy())

    def loop(self, should_stop: Callable[[], bool]) -> tuple[Status, str | None]:
        """Run the rounds that are left."""
        config = self.config
        while self.trainer.rounds_done < config.rounds:
            number = self.trainer.rounds_done + 1
            due = number % config.evaluate_every == 0 or number == config.rounds
            done = self.trainer.step(detailed=due, picture=self._picture(number))
            self._window.update(done.participants, done.dropped)
            evaluation = self.trainer.evaluate() if due or done.action == "stopped" else None
            self._keep(done, evaluation)
            if self.watch is not None:
                self.watch(config, done, evaluation)
            self.tracking.log(done, evaluation)
            if done.action == "stopped":
                self._flush()
                return "stopped", f"the aggregate of round {done.number} was not finite"
            if self._checkpoint_is_due():
                self._checkpoint()
            if should_stop() and self.trainer.rounds_done < config.rounds:
                return self._interrupt()
        self._flush()
        return "complete", None

    def _picture(self, number: int) -> Sample | None:
        every = self.config.record_matrix
        if every is None or number % every or number > every * MOST_PICTURES:
            return None
        return picture_sample(self.trainer.server.parameters.size, self.config.workers)

    def _interrupt(self) -> tuple[Status, str | None]:
        self._checkpoint()
        return "interrupted", f"interrupted after round {self.trainer.rounds_done}"

    def _keep(self, done: Round, evaluation: Metrics | None) -> None:
        self._rounds.append(done)
        if evaluation is not None:
            self._evaluations.append((done.number, evaluation))
            self._dropped.append((done.number, self._window.means().tolist()))
            if done.number % self.config.evaluate_every == 0:
                self._window.clear()  # not at an end between two evaluations: see extend
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self.results.record(
            self.id,
            self._rounds,
            self._evaluations,
            self._dropped,
            self.trainer.suspicion.evidence() if self.trainer.cluster.same_rows else (),
            self.trainer.suspicion.absurd,
        )
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
        self._save(self._path, keep=self._before)
        self._saved = time.monotonic()

    def keep(self, status: Status) -> None:
        """Keep the state of a run that has come to its end: its model, and where to go on from."""
        if status in ENDED:
            self._save(state_path(self.config.results, self.id))

    def _save(self, path: Path, keep: Path | None = None) -> None:
        window = {"window": torch.from_numpy(self._window.sums)}
        save_checkpoint(path, self.trainer, self.config.identity(), window, keep=keep)

    def discard(self) -> None:
        """Remove the checkpoints of a run that needs them no more."""
        for path in (self._path, self._before):
            discard_checkpoint(path)


def _tell_other_code(
    config: RunConfig, known: Sequence[RunRecord], run: int, tell: Callable[[str], None]
) -> None:
    """Say of which earlier run this one has the settings and not the code, if there is one."""
    now = config.recorded().get("code")
    alike = [each for each in known if now and config.same_settings(each.config)]
    was = alike[-1].config.get("code", "not recorded") if alike else now
    if was != now:
        tell(f"run {run} has the settings of run {alike[-1].id} and other code: {now}, was {was}")


def _origins(config: RunConfig, known: Sequence[RunRecord]) -> list[tuple[RunRecord, Path]]:
    """Return the runs that differ in their rounds alone and have a state, the longest first."""
    found = []
    for record in known:
        shorter = config.model_copy(update={"rounds": record.rounds})
        if record.rounds >= config.rounds or record.identity != shorter.identity():
            continue
        if record.status == "complete":
            path = state_path(config.results, record.id)
        elif record.status == "stopped":
            continue  # it would stop there again
        else:
            path = checkpoint_path(config.results, record.identity)
        if path.exists():
            found.append((record, path))
    return sorted(found, key=lambda pair: -pair[0].rounds_done)


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
