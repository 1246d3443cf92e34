"""Execute one configuration: continue from its checkpoint if there is one, and store results."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from phocas.data import load
from phocas.engines import EngineError
from phocas.experiments.detection_tables import MOST_PICTURES, picture_sample
from phocas.experiments.locks import checkpoint_path, claim, previous_path, state_path
from phocas.experiments.recording import RunRecorder
from phocas.experiments.results import ENDED, Results, RunRecord, Status
from phocas.experiments.trackers import TrackedRun, Tracking
from phocas.files import check_writable
from phocas.provenance import describe_error
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
    from phocas.detection.comparison import Sample
    from phocas.experiments.config import RunConfig
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round


def build_trainer(config: RunConfig, data: Dataset | None = None) -> Trainer:
    """Create the trainer of a configuration; raise for settings that do not fit the model."""
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
    """Execute a configuration until it finishes or is stopped, and return its record.

    A finished run of the same configuration is returned unchanged. An interrupted or killed run
    continues from its checkpoint and ends with the same bits as an uninterrupted run. A finished
    run with fewer rounds is continued as a new run. If user-defined code has changed, a new run
    starts at round 0.

    Args:
        config: the configuration.
        restart: start a new run at round 0 and keep earlier runs unchanged.
        watch: called with every round and its evaluation, if there is one.
        tell: called with one line that says how the run started.
        should_stop: checked after every round; the run stops if it returns true.
        model_file: file that the final model is written to.
        data: the data set; by default that of the configuration is loaded.
        patience: seconds to wait for another process that executes the same run.
        warn: called with failures that do not end the run, and with changed code; by default
            ``tell``.

    Returns:
        The run as stored in the results file.

    Raises:
        RunTakenError: if another process executes the same run for longer than ``patience``.
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
        # Raise for impossible settings before creating a results file.
        tracking = Tracking(config.track, warn or tell)
        with _build(config, data) as trainer, Results(Path(config.results)) as results:
            run = _Run(config, results, trainer, watch, tell, tracking)
            if restart:
                run.begin_beside(earlier)
            elif earlier is not None:
                run.resume(earlier)
            else:
                run.extend(known, warn or tell)
            run.track()
            try:
                status, message = run.loop(should_stop)
                run.test(status)
                run.keep(status)
                if model_file is not None:
                    save_model(model_file, trainer.model.state_dict())
            except BaseException as error:
                results.end(run.id, "failed", describe_error(error))
                tracking.finish("failed")
                error.add_note(f"what was done is in {config.results}, run {run.id}")
                raise
            results.end(run.id, status, message)
            tracking.finish(status)
            if status in ENDED:
                run.discard()
            return results.run(run.id)


def final_model(results: str | Path, run: int) -> dict[str, torch.Tensor]:
    """Return the model of a finished run as a state dict."""
    path = state_path(results, run)
    if not path.exists():
        raise ValueError(
            f"the model of run {run} is not there any more, in {path}: run it again to create it"
        )
    return read_model(path)


def _known(config: RunConfig) -> list[RunRecord]:
    if not Path(config.results).exists():
        return []
    with Results(Path(config.results)) as results:
        return results.runs()


@contextmanager
def _explain_shape_errors(config: RunConfig) -> Iterator[None]:
    """Convert torch's errors about shapes to a ValueError that names the model and the data."""
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
    with _explain_shape_errors(config):
        return build_trainer(config, data)


class _Run:
    """The state of a run between two writes."""

    def __init__(
        self,
        config: RunConfig,
        results: Results,
        trainer: Trainer,
        watch: Callable[[RunConfig, Round, Metrics | None], None] | None,
        notify: Callable[[str], None],
        tracking: Tracking,
    ) -> None:
        self.tracking = tracking
        self.config = config
        self.results = results
        self.trainer = trainer
        self.watch = watch
        self.notify = notify
        self.recorder = RunRecorder(results, trainer, config.evaluate_every)
        self._path = checkpoint_path(config.results, config.identity())
        self._before = previous_path(config.results, config.identity())
        self._saved = time.monotonic()

    @property
    def id(self) -> int:
        """Return the number of the run in the results file."""
        return self.recorder.run

    def begin_beside(self, earlier: RunRecord | None) -> None:
        """Start at round 0, and keep the state of an earlier attempt that has not finished."""
        existing = [path for path in (self._path, self._before) if path.exists()]
        if earlier is not None and earlier.status not in ENDED and existing:
            existing[0].replace(state_path(self.config.results, earlier.id))
        self._begin()

    def resume(self, earlier: RunRecord) -> None:
        """Continue an earlier attempt from its newest intact checkpoint."""
        self.recorder.run = earlier.id
        existing = [path for path in (self._path, self._before) if path.exists()]
        problems: list[str] = []
        for path in existing:
            try:
                self._load(path, self.config.identity())
            except DamagedCheckpointError as error:
                problems.append(str(error))
            else:
                damage = "".join(f"{problem}; the previous one is intact: " for problem in problems)
                done = self.trainer.rounds_done
                self.notify(f"{damage}continuing run {self.id} from round {done}")
                self.results.rewind(self.id, done)
                return
        if problems:
            raise DamagedCheckpointError(
                f"{' and '.join(problems)}: no checkpoint of run {self.id} is intact;"
                " delete them to run it again from round 0, or start another run with --restart"
            )
        self.notify(f"run {self.id} has no checkpoint: it starts again at round 0")
        self.results.rewind(self.id, -1)
        self.recorder.evaluations.append((0, self.trainer.evaluate()))

    def extend(self, known: Sequence[RunRecord], warn: Callable[[str], None]) -> None:
        """Start from the longest run that differs only in having fewer rounds.

        This is exact, because no round depends on the number of rounds to come.
        """
        for origin, path in _origins(self.config, known):
            try:
                self._load(path, origin.identity)
            except DamagedCheckpointError as error:
                self.notify(f"run {origin.id} cannot be continued: {error}")
                continue
            done = self.trainer.rounds_done
            self._begin(f"run {origin.id}, round {done}")
            self.results.copy(origin.id, self.id, done, self.config.evaluate_every)
            self._checkpoint()  # a run killed before its next checkpoint must not start at round 0
            self.notify(
                f"run {self.id} is run {origin.id} with more rounds: continuing from round {done}"
            )
            return
        self._begin()
        _report_changed_code(self.config, known, self.id, warn)

    def _begin(self, origin: str | None = None) -> None:
        self.discard()
        if origin is None:
            with _explain_shape_errors(self.config):
                self.recorder.evaluations.append((0, self.trainer.evaluate()))
        self.recorder.begin(self.config, origin)

    def track(self) -> None:
        """Send trackers the run's settings and the evaluation before its first round."""
        config, done = self.config, self.trainer.rounds_done
        settings = config.recorded()
        run = TrackedRun(self.id, config.identity(), config.title(), settings, done)
        self.tracking.start(run)
        for number, evaluation in self.recorder.evaluations:
            self.tracking.evaluated(number, evaluation)

    def _load(self, path: Path, identity: str) -> None:
        extra = load_checkpoint(path, self.trainer, identity)
        np.copyto(self.recorder.window.sums, extra["window"].numpy())

    def loop(self, should_stop: Callable[[], bool]) -> tuple[Status, str | None]:
        """Execute the remaining rounds."""
        config = self.config
        while self.trainer.rounds_done < config.rounds:
            number = self.trainer.rounds_done + 1
            due = number % config.evaluate_every == 0 or number == config.rounds
            done = self.trainer.step(detailed=due, picture=self._picture(number))
            evaluation = self.trainer.evaluate() if due or done.action == "stopped" else None
            self.recorder.keep(done, evaluation)
            if self.watch is not None:
                self.watch(config, done, evaluation)
            self.tracking.log(done, evaluation)
            if done.action == "stopped":
                self.recorder.flush()
                return "stopped", f"the aggregate of round {done.number} was not finite"
            if self._checkpoint_is_due():
                self._checkpoint()
            if should_stop() and self.trainer.rounds_done < config.rounds:
                return self._interrupt()
        self.recorder.flush()
        return "complete", None

    def _picture(self, number: int) -> Sample | None:
        every = self.config.record_matrix
        if every is None or number % every or number > every * MOST_PICTURES:
            return None
        return picture_sample(self.trainer.server.parameters.size, self.config.workers)

    def _interrupt(self) -> tuple[Status, str | None]:
        self._checkpoint()
        return "interrupted", f"interrupted after round {self.trainer.rounds_done}"

    def _checkpoint_is_due(self) -> bool:
        every = self.config.checkpoint_rounds
        if every is not None and self.trainer.rounds_done % every == 0:
            return True
        return time.monotonic() - self._saved >= self.config.checkpoint_seconds

    def _checkpoint(self) -> None:
        """Write results, then the checkpoint: results may be ahead of it, never behind."""
        self.recorder.flush()
        self._save(self._path, keep=self._before)
        self._saved = time.monotonic()

    def test(self, status: Status) -> None:
        """Evaluate the test samples of a finished run, if it has evaluated others so far."""
        samples = self.trainer.task.samples
        if status in ENDED and samples.validation is not None and samples.test is not None:
            metrics = self.trainer.evaluate(test=True)
            self.results.record_test(self.id, metrics)
            self.tracking.evaluated(self.trainer.rounds_done, metrics, test=True)

    def keep(self, status: Status) -> None:
        """Store the final state of a finished run, from which a longer run can continue."""
        if status in ENDED:
            self._save(state_path(self.config.results, self.id))

    def _save(self, path: Path, keep: Path | None = None) -> None:
        window = {"window": torch.from_numpy(self.recorder.window.sums)}
        save_checkpoint(path, self.trainer, self.config.identity(), window, keep=keep)

    def discard(self) -> None:
        """Remove the checkpoints of a run."""
        for path in (self._path, self._before):
            discard_checkpoint(path)


def _report_changed_code(
    config: RunConfig, known: Sequence[RunRecord], run: int, notify: Callable[[str], None]
) -> None:
    """Report the latest earlier run that has the same settings and other code, if there is one."""
    now = config.recorded().get("code")
    matching = [each for each in known if now and config.same_settings(each.config)]
    was = matching[-1].config.get("code", "not recorded") if matching else now
    if was != now:
        notify(
            f"run {run} has the settings of run {matching[-1].id} and other code: {now}, was {was}"
        )


def _origins(config: RunConfig, known: Sequence[RunRecord]) -> list[tuple[RunRecord, Path]]:
    """Return the runs that differ only in their rounds and have a state, longest first."""
    found = []
    for record in known:
        shorter = config.model_copy(update={"rounds": record.rounds})
        if record.rounds >= config.rounds or record.identity != shorter.identity():
            continue
        if record.status == "complete":
            path = state_path(config.results, record.id)
        elif record.status == "stopped":
            continue  # it would stop again in the same round
        else:
            path = checkpoint_path(config.results, record.identity)
        if path.exists():
            found.append((record, path))
    return sorted(found, key=lambda pair: -pair[0].rounds_done)
