"""Runs in other people's trackers: TensorBoard, Weights & Biases, MLflow, or one of the user's.

A tracker has three methods, :class:`Tracker`. It is told of a run that begins or goes on, of every
round, and of the end. What fails in it never ends a run: it is said once, and the tracker is left
out from there. The libraries are imported when a run begins.
"""

from __future__ import annotations

import importlib.util
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from phocas.specs import imported, is_place, unknown

if TYPE_CHECKING:
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run before its first round."""

    id: int
    """Its number in the results file."""
    identity: str
    """The same for every attempt at one configuration."""
    title: str
    config: Mapping[str, Any]
    rounds_done: int
    """More than 0 where a run goes on: rounds after these may be told a second time."""

    @property
    def key(self) -> str:
        """A name that no other run has, and that the same run has when it goes on."""
        return f"{self.identity}-{self.id}"


@runtime_checkable
class Tracker(Protocol):
    """What is told of runs; any class with these methods, as ``package.module:Name``."""

    def start(self, run: TrackedRun) -> None:
        """Take a run that begins, or goes on."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a round: losses, evaluations, what was dropped of suspects."""

    def finish(self, status: str) -> None:
        """Take the status in which the run ended: complete, stopped, interrupted or failed."""


class TensorBoard:
    """Event files in a folder for each run."""

    def __init__(self, folder: str = "runs") -> None:
        self.folder = Path(folder or "runs")

    def start(self, run: TrackedRun) -> None:
        """Open the run's folder; what is told again replaces what was there."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        name = re.sub(r"[^\w.=-]+", "-", run.title).strip("-")
        self.writer = SummaryWriter(
            str(self.folder / f"{name}-{run.key}"), purge_step=run.rounds_done + 1
        )
        if not run.rounds_done:
            lines = "\n".join(f"    {key} = {value!r}" for key, value in run.config.items())
            self.writer.add_text("config", lines)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def finish(self, status: str) -> None:
        """Write the status and close the file."""
        self.writer.add_text("status", status)
        self.writer.close()


class WeightsAndBiases:
    """A run in a project of wandb's; ``WANDB_MODE=offline`` keeps it here."""

    def __init__(self, project: str = "phocas") -> None:
        self.project = project or "phocas"

    def start(self, run: TrackedRun) -> None:
        """Open the run, or the same one again; the axis is the round."""
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
        """Log one step."""
        self.run.log({"round": round, **values})

    def finish(self, status: str) -> None:
        """Say how it ended."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))


class MLflow:
    """A run in the experiment ``phocas`` of a tracking server, or of a local store."""

    TAG = "phocas.run"
    BATCH = 500
    SECONDS = 2.0
    _STATES: Mapping[str, str] = {"complete": "FINISHED", "interrupted": "KILLED"}

    def __init__(self, address: str = "") -> None:
        self.address = address or None
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def start(self, run: TrackedRun) -> None:
        """Make the run, or find the one that goes on."""
        from mlflow import MlflowClient  # noqa: PLC0415
        from mlflow.entities import Param  # noqa: PLC0415

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
        """Send metrics, many rounds at a time: a request a round would slow a run down."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, round) for name, value in values.items()]
        if len(self._waiting) >= self.BATCH or time.monotonic() - self._sent > self.SECONDS:
            self._send()

    def finish(self, status: str) -> None:
        """Send what waits, and say how it ended."""
        self._send()
        self.client.set_tag(self.run_id, "status", status)
        self.client.set_terminated(self.run_id, self._STATES.get(status, "FAILED"))

    def _send(self) -> None:
        for place in range(0, len(self._waiting), self.BATCH):
            self.client.log_batch(self.run_id, metrics=self._waiting[place : place + self.BATCH])
        self._waiting.clear()
        self._sent = time.monotonic()


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_tracker(text: str) -> str:
    """Return a tracker's text, or say what is wrong with it; nothing of the user's is imported.

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
    """Make a tracker of its text: ``tensorboard:DIR``, ``wandb:PROJECT``, ``mlflow:URI``."""
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
    """The trackers of one run; one that fails is left out, and that is said once."""

    def __init__(self, texts: Sequence[str], tell: Callable[[str], None]) -> None:
        self._trackers = {text: open_tracker(text) for text in texts}
        self._tell = tell
        self._suspects: set[int] = set()

    def start(self, run: TrackedRun) -> None:
        """Tell of a run that begins, or goes on."""
        self._all(lambda tracker: tracker.start(run))

    def evaluated(self, number: int, evaluation: Metrics) -> None:
        """Tell of an evaluation before the first round."""
        self._log(number, _evaluation(evaluation))

    def log(self, done: Round, evaluation: Metrics | None) -> None:
        """Tell of a round: its numbers, its evaluation, and what was dropped of suspects so far."""
        if not self._trackers:
            return
        self._suspects |= set(done.suspects)
        numbers = {
            "train/loss": done.loss,
            "train/lr": done.lr,
            "train/gradient_norm": done.gradient_norm,
            "train/honest_distance": done.honest_distance,
            "train/skipped": float(done.action != "applied"),
            "train/ms": 1e3 * math.fsum(done.seconds.values()),
            "train/virtual_seconds": done.virtual_seconds,
            "suspects/number": float(len(done.suspects)),
            **{f"suspects/dropped_{each}": _dropped(done, each) for each in sorted(self._suspects)},
            **({} if evaluation is None else _evaluation(evaluation)),
        }
        self._log(done.number, numbers)

    def finish(self, status: str) -> None:
        """Tell how the run ended."""
        self._all(lambda tracker: tracker.finish(status))

    def _log(self, number: int, values: Mapping[str, float | None]) -> None:
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._all(lambda tracker: tracker.log(number, known))

    def _all(self, call: Callable[[Tracker], None]) -> None:
        for text, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  # a tracker's failure is not the run's
                del self._trackers[text]
                reason = " ".join(str(error).split())
                self._tell(f"{text} is told no more of this run: {type(error).__name__}: {reason}")


def _evaluation(evaluation: Metrics) -> dict[str, float | None]:
    return {
        "test/loss": evaluation.loss,
        "test/top1": evaluation.top1,
        "test/top3": evaluation.top3,
    }


def _dropped(done: Round, worker: int) -> float | None:
    """Return what was dropped of a worker, if it took part."""
    if done.participants is None:
        return float(done.dropped[worker])
    places = (done.participants == worker).nonzero()[0]
    return float(done.dropped[places[0]]) if len(places) else None
