"""Many runs on all cores: one process a core, one thread a process, nothing done twice.

Two torch threads on a contended machine can be 8 times slower than one, so runs never share a core.
The data sets are mapped files, which the processes share.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phocas.data import load
from phocas.experiments.config import RunConfig
from phocas.experiments.results import ENDED, Results, RunRecord
from phocas.experiments.runner import execute
from phocas.machine import available_cores
from phocas.provenance import describe_code
from phocas.specs import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.synchronize import Event

    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

NEWS_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a whole group gets them, and the parent decides
PATIENCE = 60.0  # a process whose sweep was killed finishes its round and lets go of its run


@dataclass(frozen=True)
class News:
    """How one run of a sweep is doing."""

    index: int
    """Which of the configurations."""
    round: int
    loss: float
    accuracy: float | None
    suspects: tuple[int, ...]


@dataclass(frozen=True)
class Begun:
    """That a process has been given one run of a sweep."""

    index: int


@dataclass(frozen=True)
class Note:
    """What one run of a sweep has to say: that it goes on from a checkpoint, and which."""

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """How one run of a sweep ended; ``error`` if it did not end well."""

    index: int
    status: str
    error: str | None = None


Message = Begun | News | Note | Ended
Watch = Callable[[Message], None]


def sweep(
    configs: Sequence[RunConfig],
    *,
    processes: int | None = None,
    watch: Watch = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RunRecord | None]:
    """Run the configurations that have no complete run yet, and return a record for each.

    A run that fails is recorded as failed, and the others go on. A run whose process is killed is
    recorded too, and its next attempt goes on from its checkpoint.
    """
    number = available_cores() if processes is None else count("sweep", "processes", processes, 1)
    waiting = []
    for index, record in enumerate(attempts(configs)):
        if record is not None and record.status in ENDED:
            watch(Ended(index, record.status))
        else:
            waiting.append(index)
    pool = _Pool(configs, min(number, len(waiting)))
    try:
        pool.run(waiting, watch, should_stop)
    finally:
        pool.close()
    return attempts(configs)


class _Pool:
    """Processes that each run one configuration at a time."""

    def __init__(self, configs: Sequence[RunConfig], size: int) -> None:
        self.configs = configs
        self.context = multiprocessing.get_context("spawn")
        self.stop: Event = self.context.Event()
        self.workers = [self._start() for _ in range(size)]

    def _start(self) -> _Worker:
        return _Worker(self.context, self.stop)

    def run(
        self,
        waiting: list[int],
        watch: Watch,
        should_stop: Callable[[], bool],
    ) -> None:
        """Give each idle process the next configuration until all are done."""
        queue = list(waiting)
        while True:
            if should_stop():
                self.stop.set()
                queue.clear()
            for worker in self.workers:
                if worker.index is None and queue:
                    watch(Begun(queue[0]))
                    worker.give(queue[0], self.configs[queue.pop(0)])
            busy = {worker.pipe: worker for worker in self.workers if worker.index is not None}
            if not busy:
                return
            for ready in connection.wait(list(busy), timeout=0.2):
                self._listen(busy[ready], watch)

    def _listen(self, worker: _Worker, watch: Watch) -> None:
        index = worker.index
        assert index is not None
        try:
            news = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            reason = f"its process ended with status {worker.process.exitcode}"
            _record_death(self.configs[index], reason)
            self.workers[self.workers.index(worker)] = self._start()
            news = Ended(index, "failed", reason)
        if isinstance(news, Ended):
            worker.index = None
        watch(news)

    def close(self) -> None:
        """Let the processes finish their rounds, and end them."""
        self.stop.set()
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join()


class _Worker:
    def __init__(self, context: Any, stop: Event) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, stop, os.getpid()))
        with _blocked_signals():  # the process inherits the mask
            self.process.start()
        theirs.close()
        self.index: int | None = None

    def give(self, index: int, config: RunConfig) -> None:
        self.index = index
        self.pipe.send((index, config.model_dump(), config.code()))


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that end a sweep; those that arrive are delivered afterwards."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: connection.Connection, stop: Event, parent: int) -> None:
    """Run what comes through the pipe until it closes; stop soon when the parent is gone."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    torch.set_num_threads(1)

    def should_stop() -> bool:
        return stop.is_set() or os.getppid() != parent

    while True:
        try:
            index, values, code = pipe.recv()
        except (EOFError, OSError):
            return
        config = RunConfig(**values)
        ended = _reject_other_code(index, config, code) or _run_one(
            pipe, index, config, should_stop
        )
        with suppress(OSError):
            pipe.send(ended)


def _reject_other_code(index: int, config: RunConfig, code: dict[str, str]) -> Ended | None:
    """Reject a run whose code was changed after the sweep had begun: it would be another run."""
    now = config.code()
    if now == code:
        return None
    return Ended(
        index,
        "failed",
        f"your code was changed while the sweep ran ({describe_code(code)}, now"
        f" {describe_code(now)}): start the sweep again to run it with the new code",
    )


def _run_one(
    pipe: connection.Connection, index: int, config: RunConfig, should_stop: Callable[[], bool]
) -> Ended:
    last = 0.0
    accuracy: float | None = None

    def watch(_config: RunConfig, done: Round, evaluation: Metrics | None) -> None:
        nonlocal last, accuracy
        if evaluation is not None:
            accuracy = evaluation.top1
        if time.monotonic() - last >= NEWS_SECONDS:
            last = time.monotonic()
            with suppress(OSError):  # the parent is gone, and should_stop knows it
                pipe.send(News(index, done.number, done.loss, accuracy, done.suspects))

    def tell(text: str) -> None:
        with suppress(OSError):
            pipe.send(Note(index, text))

    try:
        record = execute(
            config.model_copy(update={"threads": 1}),
            watch=watch,
            tell=tell,
            should_stop=should_stop,
            data=_data(config.dataset, config.data_dir),
            patience=PATIENCE,
        )
    except Exception as error:  # noqa: BLE001  # one run's failure is not the sweep's
        return Ended(index, "failed", f"{type(error).__name__}: {error}")
    return Ended(index, record.status)


@functools.lru_cache(maxsize=2)
def _data(dataset: str, data_dir: str | None) -> Any:
    return load(dataset, data_dir)


def attempts(configs: Sequence[RunConfig]) -> list[RunRecord | None]:
    """Return for each configuration the run that came to its end, or else the last attempt."""
    found: dict[tuple[str, str], RunRecord] = {}
    for place in {config.results for config in configs}:
        if not Path(place).exists():
            continue
        with Results(Path(place)) as results:
            for record in results.runs():
                before = found.get((place, record.identity))
                if before is None or record.status in ENDED or before.status not in ENDED:
                    found[place, record.identity] = record
    return [found.get((config.results, config.identity())) for config in configs]


def _record_death(config: RunConfig, reason: str) -> None:
    (record,) = attempts([config])
    if record is not None and record.status == "running":
        with Results(Path(config.results)) as results:
            results.end(record.id, "failed", reason)
