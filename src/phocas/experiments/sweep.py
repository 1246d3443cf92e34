"""Many runs on all cores: one process a core, one thread a process, nothing done twice.

Two torch threads on a contended machine can be 8 times slower than one, so runs never share a core.
The data sets are mapped files, which the processes share.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phocas.data import load
from phocas.experiments.config import RunConfig
from phocas.experiments.results import Results, RunRecord
from phocas.experiments.runner import execute
from phocas.machine import available_cores
from phocas.specs import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Event

    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

NEWS_SECONDS = 0.2
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
class Ended:
    """How one run of a sweep ended; ``error`` if it did not end well."""

    index: int
    status: str
    error: str | None = None


def sweep(
    configs: Sequence[RunConfig],
    *,
    processes: int | None = None,
    watch: Callable[[News | Ended], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[RunRecord | None]:
    """Run the configurations that have no complete run yet, and return a record for each.

    A run that fails is recorded as failed, and the others go on. A run whose process is killed is
    recorded too, and its next attempt goes on from its checkpoint.
    """
    number = available_cores() if processes is None else count("sweep", "processes", processes, 1)
    waiting = [index for index, config in enumerate(configs) if not _is_complete(config)]
    for index in sorted(set(range(len(configs))) - set(waiting)):
        watch(Ended(index, "complete"))
    pool = _Pool(configs, min(number, len(waiting)))
    try:
        pool.run(waiting, watch, should_stop)
    finally:
        pool.close()
    return [_latest(config) for config in configs]


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
        watch: Callable[[News | Ended], None],
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
                    worker.give(queue[0], self.configs[queue.pop(0)])
            busy = {worker.pipe: worker for worker in self.workers if worker.index is not None}
            if not busy:
                return
            for ready in connection.wait(list(busy), timeout=0.2):
                self._listen(busy[ready], watch)

    def _listen(self, worker: _Worker, watch: Callable[[News | Ended], None]) -> None:
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
        self.process.start()
        theirs.close()
        self.index: int | None = None

    def give(self, index: int, config: RunConfig) -> None:
        self.index = index
        self.pipe.send((index, config.model_dump()))


def _serve(pipe: connection.Connection, stop: Event, parent: int) -> None:
    """Run what comes through the pipe until it closes; stop soon when the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a whole group gets them: the parent decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)

    def should_stop() -> bool:
        return stop.is_set() or os.getppid() != parent

    while True:
        try:
            index, values = pipe.recv()
        except (EOFError, OSError):
            return
        ended = _run_one(pipe, index, RunConfig(**values), should_stop)
        with suppress(OSError):
            pipe.send(ended)


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

    try:
        record = execute(
            config.model_copy(update={"threads": 1}),
            resume=True,
            watch=watch,
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


def _is_complete(config: RunConfig) -> bool:
    record = _latest(config)
    return record is not None and record.status in ("complete", "stopped")


def _latest(config: RunConfig) -> RunRecord | None:
    """Return the complete run of a configuration, or its last attempt."""
    if not Path(config.results).exists():
        return None
    with Results(Path(config.results)) as results:
        records = results.runs(config.identity())
    complete = [record for record in records if record.status in ("complete", "stopped")]
    return complete[-1] if complete else records[-1] if records else None


def _record_death(config: RunConfig, reason: str) -> None:
    record = _latest(config)
    if record is not None and record.status == "running":
        with Results(Path(config.results)) as results:
            results.end(record.id, "failed", reason)
