"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, or a user-defined one.

A tracker has the three methods of :class:`Tracker`. They are called when a run starts or continues,
after every round, and at the end. An error in a tracker never ends a run: it is reported once, and
the tracker is disabled. The libraries are imported when a run starts.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from phocas.specs import imported, is_place, unknown

if TYPE_CHECKING:
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives before the first round."""

    id: int
    """Number of the run in the results file."""
    identity: str
    """Identity of the configuration, the same for every attempt."""
    title: str
    config: Mapping[str, Any]
    rounds_done: int
    """Rounds done before; if greater than 0, later rounds may be logged a second time."""

    @property
    def key(self) -> str:
        """Return a unique name of the run, which stays the same when the run continues."""
        return f"{self.identity}-{self.id}"


@runtime_checkable
class Tracker(Protocol):
    """The interface of a tracker: any class with these methods, as ``package.module:Name``."""

    def start(self, run: TrackedRun) -> None:
        """Begin tracking a run that starts or continues."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a round: losses, evaluations, dropped shares of flagged workers."""

    def finish(self, status: str) -> None:
        """Finish with the run's status: complete, stopped, interrupted or failed."""


class TensorBoard:
    """A tracker that writes TensorBoard event files, in one folder per run."""

    def __init__(self, folder: str = "runs") -> None:
        self.folder = Path(folder or "runs")

    def start(self, run: TrackedRun) -> None:
        """Open the run's folder; rounds that are logged again replace earlier ones."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        name = re.sub(r"[^\w.=-]+", "-", run.title).strip("-")
        self.writer = SummaryWriter(
            str(self.folder / f"{name}-{run.key}"), purge_step=run.rounds_done + 1
        )
        if not run.rounds_done:
            lines = "\n".join(f"    {key} = {value!r}" for key, value in run.config.items())
            self.writer.add_text("config", lines)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write the values as scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def finish(self, status: str) -> None:
        """Write the status and close the file."""
        self.writer.add_text("status", status)
        self.writer.close()


class WeightsAndBiases:
    """A tracker for a wandb project; ``WANDB_MODE=offline`` keeps the run local."""

    def __init__(self, project: str = "phocas") -> None:
        self.project = project or "phocas"

    def start(self, run: TrackedRun) -> None:
        """Open the run, or reopen it when it continues; the x axis is the round."""
        import wandb  # noqa: PLC0415

        self.run = wandb.init(
            project=self.project,
            id=run.key,
            name=run.title,
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Log the values of one round."""
        self.run.log({"round": round, **values})

    def finish(self, status: str) -> None:
        """Store the status and finish the run."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))


class MLflow:
    """A tracker for the experiment ``phocas`` of an MLflow server or local store."""

    TAG = "phocas.run"
    BATCH = 500
    SECONDS = 2.0
    PATIENCE: Mapping[str, str] = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    }
    """Environment variables for MLflow, unless set: by its own defaults it retries for minutes."""
    _STATES: Mapping[str, str] = {"complete": "FINISHED", "interrupted": "KILLED"}

    def __init__(self, address: str = "") -> None:
        self.address = address or None
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def start(self, run: TrackedRun) -> None:
        """Create the run, or find it when it continues."""
        for name, least in self.PATIENCE.items():
            os.environ.setdefault(name, least)
        from mlflow import MlflowClient  # noqa: PLC0415
        from mlflow.entities import Param  # noqa: PLC0415

        with _warnings_only("mlflow"):  # a new store logs the creation of its tables
            self.client = MlflowClient(self.address)
            found = self.client.get_experiment_by_name("phocas")
        experiment = found.experiment_id if found else self.client.create_experiment("phocas")
        known = self.client.search_runs([experiment], f"tags.`{self.TAG}` = '{run.key}'")
        if known:
            self.run_id = known[0].info.run_id
            self.client.update_run(self.run_id, "RUNNING")
            return
        made = self.client.create_run(experiment, run_name=run.title, tags={self.TAG: run.key})
        self.run_id = made.info.run_id
        settings = [Param(key, str(value)[:500]) for key, value in run.config.items()]
        self.client.log_batch(self.run_id, params=settings)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Queue metrics and send them in batches: one request per round would slow a run."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, round) for name, value in values.items()]
        if len(self._waiting) >= self.BATCH or time.monotonic() - self._sent > self.SECONDS:
            self._send()

    def finish(self, status: str) -> None:
        """Send the queued metrics and store the status."""
        self._send()
        self.client.set_tag(self.run_id, "status", status)
        self.client.set_terminated(self.run_id, self._STATES.get(status, "FAILED"))

    def _send(self) -> None:
        for start in range(0, len(self._waiting), self.BATCH):
            self.client.log_batch(self.run_id, metrics=self._waiting[start : start + self.BATCH])
        self._waiting.clear()
        self._sent = time.monotonic()


@contextmanager
def _warnings_only(name: str) -> Iterator[None]:
    """Limit a library's logging to warnings inside the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_tracker(text: str) -> str:
    """Return a tracker's spec, or raise ValueError; user-defined modules are not imported.

    >>> check_tracker("tensorbord")
    Traceback (most recent call last):
        ...
    ValueError: unknown tracker 'tensorbord'; did you mean 'tensorboard'? trackers: tensorboard, ...
    """
    name = text.partition(":")[0].strip()
    if name in TRACKERS:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is not the package
            raise ValueError(f"{name} is not installed: pip install 'phocas[{name}]'")
    elif not is_place(text):
        known = [*TRACKERS, "package.module:Name"]
        raise ValueError(unknown("tracker", name, known))
    return text.strip()


def open_tracker(text: str) -> Tracker:
    """Create a tracker from its spec: ``tensorboard:DIR``, ``wandb:PROJECT``, ``mlflow:URI``."""
    name, _, rest = check_tracker(text).partition(":")
    if name in TRACKERS:
        return TRACKERS[name](rest.strip())
    try:
        make = imported(text.strip())
    except ModuleNotFoundError as error:
        known = unknown("tracker", name, TRACKERS)
        raise ValueError(f"{known}; and there is no module {error.name!r}") from None
    made = make() if callable(make) else make
    if not isinstance(made, Tracker):
        raise TypeError(f"{text} must make something with start, log and finish: got {made!r}")
    return made


class Tracking:
    """The trackers of one run; one that fails is disabled, which is reported once."""

    def __init__(self, texts: Sequence[str], notify: Callable[[str], None]) -> None:
        self._trackers = {text: open_tracker(text) for text in texts}
        self._notify = notify
        self._suspects: set[int] = set()
        self._judged = "test"

    def start(self, run: TrackedRun) -> None:
        """Start all trackers."""
        self._judged = "validation" if run.config.get("validation") else "test"
        self._all(lambda tracker: tracker.start(run))

    def evaluated(self, number: int, evaluation: Metrics, *, test: bool = False) -> None:
        """Log an evaluation; ``test``: it is of the test samples, not of the validation samples."""
        self._log(number, _evaluation(evaluation, "test" if test else self._judged))

    def log(self, done: Round, evaluation: Metrics | None) -> None:
        """Log a round: its numbers, its evaluation, and the dropped shares of flagged workers."""
        if not self._trackers:
            return
        self._suspects |= set(done.flagged)
        numbers = {
            "train/loss": done.loss,
            "train/lr": done.lr,
            "train/gradient_norm": done.gradient_norm,
            "train/honest_distance": done.honest_distance,
            "train/skipped": float(done.action != "applied"),
            "train/ms": 1e3 * math.fsum(done.seconds.values()),
            "train/virtual_seconds": done.virtual_seconds,
            "suspects/number": float(len(done.flagged)),
            **{f"suspects/dropped_{each}": _dropped(done, each) for each in sorted(self._suspects)},
            **({} if evaluation is None else _evaluation(evaluation, self._judged)),
        }
        self._log(done.number, numbers)

    def finish(self, status: str) -> None:
        """Finish all trackers with the run's status."""
        self._all(lambda tracker: tracker.finish(status))

    def _log(self, number: int, values: Mapping[str, float | None]) -> None:
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._all(lambda tracker: tracker.log(number, known))

    def _all(self, call: Callable[[Tracker], None]) -> None:
        for text, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  # a failing tracker must not end the run
                del self._trackers[text]
                reason = " ".join(str(error).split())
                message = f"{text} is disabled for the rest of this run"
                self._notify(f"{message}: {type(error).__name__}: {reason}")


def _evaluation(evaluation: Metrics, judged: str) -> dict[str, float | None]:
    return {
        f"{judged}/loss": evaluation.loss,
        f"{judged}/top1": evaluation.top1,
        f"{judged}/top3": evaluation.top3,
    }


def _dropped(done: Round, worker: int) -> float | None:
    """Return the dropped share of a worker, or None if it did not participate."""
    if done.participants is None:
        return float(done.dropped[worker])
    rows = (done.participants == worker).nonzero()[0]
    return float(done.dropped[rows[0]]) if len(rows) else None
