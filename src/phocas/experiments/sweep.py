"""Execution of many runs on all cores: one process per core, one thread per process.

Finished runs are not repeated. Two torch threads on a contended machine can be 8 times slower than
one, so runs never share a core. The data sets are memory-mapped files, which the processes share.
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
from phocas.provenance import describe_code, describe_error
from phocas.specs import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.synchronize import Event

    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

NEWS_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # sent to the whole group; the parent handles them
PATIENCE = 60.0  # seconds; a process of a killed sweep finishes its round and releases its run


@dataclass(frozen=True)
class News:
    """The progress of one run of a sweep."""

    index: int
    """Index of the configuration."""
    round: int
    """Number of the last round."""
    loss: float
    """Training loss of that round."""
    accuracy: float | None
    """Accuracy of the last evaluation, if there was one."""
    suspects: tuple[int, ...]
    """Flagged workers."""


@dataclass(frozen=True)
class Begun:
    """The start of one run of a sweep."""

    index: int


@dataclass(frozen=True)
class Note:
    """A message of one run of a sweep, such as that it continues from a checkpoint."""

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """The end of one run of a sweep; ``error`` is set if it failed."""

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
    """Execute the configurations that have no finished run, and return a record for each.

    A failed run is recorded as failed, and the other runs continue. A run whose process is killed
    is also recorded, and its next attempt continues from its checkpoint.
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
    """Processes that each execute one configuration at a time."""

    def __init__(self, configs: Sequence[RunConfig], size: int) -> None:
        self.configs = configs
        self.context = multiprocessing.get_context("spawn")
        self.stop: Event = self.context.Event()
        self.workers = [self._start() for _ in range(size)]

    def _start(self) -> _SweepProcess:
        return _SweepProcess(self.context, self.stop)

    def run(
        self,
        waiting: list[int],
        watch: Watch,
        should_stop: Callable[[], bool],
    ) -> None:
        """Assign the next configuration to each idle process until all have finished."""
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

    def _listen(self, worker: _SweepProcess, watch: Watch) -> None:
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
        """Wait until the processes finish their rounds, and end them."""
        self.stop.set()
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join()


class _SweepProcess:
    def __init__(self, context: Any, stop: Event) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, stop, os.getpid()))
        with _blocked_signals():  # the process inherits the signal mask
            self.process.start()
        theirs.close()
        self.index: int | None = None

    def give(self, index: int, config: RunConfig) -> None:
        self.index = index
        self.pipe.send((index, config.model_dump(), config.code()))


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that end a sweep; pending ones are delivered afterwards."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: connection.Connection, stop: Event, parent: int) -> None:
    """Execute the runs received through the pipe until it closes or the parent ends."""
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
    """Return a failure if user-defined code has changed since the sweep began, otherwise None."""
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
            with suppress(OSError):  # the parent has ended, which should_stop detects
                pipe.send(News(index, done.number, done.loss, accuracy, done.flagged))

    def send_note(text: str) -> None:
        with suppress(OSError):
            pipe.send(Note(index, text))

    try:
        record = execute(
            config.model_copy(update={"threads": 1}),
            watch=watch,
            tell=send_note,
            should_stop=should_stop,
            data=_data(config.dataset, config.data_dir),
            patience=PATIENCE,
        )
    except Exception as error:  # noqa: BLE001  # one failed run must not end the sweep
        return Ended(index, "failed", describe_error(error))
    return Ended(index, record.status)


@functools.lru_cache(maxsize=2)
def _data(dataset: str, data_dir: str | None) -> Any:
    return load(dataset, data_dir)


def attempts(configs: Sequence[RunConfig]) -> list[RunRecord | None]:
    """Return each configuration's finished run, or else its last attempt."""
    found: dict[tuple[str, str], RunRecord] = {}
    for path in {config.results for config in configs}:
        if not Path(path).exists():
            continue
        with Results(Path(path)) as results:
            for record in results.runs():
                before = found.get((path, record.identity))
                if before is None or record.status in ENDED or before.status not in ENDED:
                    found[path, record.identity] = record
    return [found.get((config.results, config.identity())) for config in configs]


def _record_death(config: RunConfig, reason: str) -> None:
    (record,) = attempts([config])
    if record is not None and record.status == "running":
        with Results(Path(config.results)) as results:
            results.end(record.id, "failed", reason)
