"""Progress of runs: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column

from phocas.experiments.sweep import Begun, Ended, Note
from phocas.report.tables import HEADINGS, comparison, labels, listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import TaskID

    from phocas.experiments.config import RunConfig
    from phocas.experiments.sweep import Message
    from phocas.training.evaluation import Metrics
    from phocas.training.trainer import Round

PLAIN_LINES = 10
_BAR = 10
_TIME = 7
_NEWS = 26  # the least that is left for what a run says


class _Shown:
    """Base class: bars that are shown from entry to exit, on a terminal."""

    _bars: Bars | None = None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


class Progress(_Shown):
    """Progress of one run: round, loss, accuracy, speed, time left and flagged workers."""

    def __init__(self, config: RunConfig, *, quiet: bool = False) -> None:
        self.config = config
        self.console = Console(stderr=True, quiet=quiet)
        self._accuracy: float | None = None
        self._first: tuple[float, int] | None = None
        if self.console.is_terminal and not quiet:
            self.console.print(
                f"{config.title()}: {config.workers} workers on {config.dataset}, {config.model}",
                highlight=False,
                markup=False,
            )
            self._bars = _bars(self.console, ["round"], config.rounds)
            self._task = self._bars.add_task("round", total=config.rounds, news="")

    def say(self, line: str) -> None:
        """Print a line, whether or not a progress bar is shown."""
        _say(self.console, line, always=True)

    def show(self, _config: RunConfig, done: Round, evaluation: Metrics | None) -> None:
        """Show the progress after one round."""
        for line in done.news:
            _say(self.console, f"round {done.number}: {line}")
        now = time.monotonic()
        if self._first is None:
            self._first = now, done.number
        if evaluation is not None:
            self._accuracy = evaluation.top1
        elapsed = now - self._first[0]
        speed = (done.number - self._first[1]) / elapsed if elapsed else 0.0
        news = _news(done.loss, self._accuracy) + f"  {speed:.0f}/s"
        if done.flagged:
            news += f"  {_word(self.config)} {listing(done.flagged)}"
        if done.flagged_servers:
            news += f"  servers {listing(done.flagged_servers)} get wrong values"
        if done.lost is not None:
            news += f"  model lost in round {done.lost}"
        if done.action != "applied":
            why = "row rejected" if done.finite else "NaN or inf"
            news += f"  round {done.number} {done.action}: {why}"
        if self._bars is not None:
            self._bars.update(self._task, completed=done.number, news=news)
        else:
            step = max(1, self.config.rounds // PLAIN_LINES)
            if done.number % step == 0 or done.number == self.config.rounds:
                left = (self.config.rounds - done.number) / speed if speed else 0.0
                total = self.config.rounds
                _say(self.console, f"round {done.number}/{total}  {news}  {left:.0f} s left")


class SweepProgress(_Shown):
    """Progress of a sweep: one bar for all runs, and one for each that is running."""

    def __init__(self, configs: Sequence[RunConfig], *, quiet: bool = False) -> None:
        self.configs = configs
        self.labels = labels([config.model_dump() for config in configs])
        self.console = Console(stderr=True, quiet=quiet)
        self._done = 0
        self._begun = False
        self._started = time.monotonic()
        self._tasks: dict[int, TaskID] = {}
        if self.console.is_terminal and not quiet:
            self._bars = _bars(self.console, self.labels, max(c.rounds for c in configs))
            self._all = self._bars.add_task("runs", total=len(configs), news="")

    def show(self, news: Message) -> None:
        """Show a message of one run."""
        label = self.labels[news.index]
        if isinstance(news, Note):
            _say(self.console, f"{label}: {news.text}", always=True)
        elif isinstance(news, Ended):
            self._end(news, label)
        elif self._bars is None:
            if isinstance(news, Begun) and not self._begun:
                self._begun = True
                _say(self.console, f"{len(self.configs) - self._done} runs are starting")
        elif isinstance(news, Begun):
            rounds = self.configs[news.index].rounds
            self._tasks[news.index] = self._bars.add_task(label, total=rounds, news="starting")
        else:
            text = _news(news.loss, news.accuracy)
            if news.suspects:
                text += f"  {_word(self.configs[news.index])} {listing(news.suspects)}"
            self._bars.update(self._tasks[news.index], completed=news.round, news=text)

    def _end(self, news: Ended, label: str) -> None:
        self._done += 1
        text = f"{label}: {news.status}"
        if news.error:
            text += f" ({news.error})"
        if self._bars is None and self._done < len(self.configs):
            text += f"; {self._left()} left"
        _say(self.console, f"[{self._done}/{len(self.configs)}] {text}")
        if self._bars is not None:
            self._bars.update(self._all, completed=self._done)
            if news.index in self._tasks:
                self._bars.remove_task(self._tasks.pop(news.index))

    def _left(self) -> str:
        """Return the time that the other runs take at the present speed."""
        elapsed = time.monotonic() - self._started
        return time_left(elapsed / self._done * (len(self.configs) - self._done))


def time_left(seconds: float) -> str:
    """Write a duration in seconds, or in minutes from 90 seconds on."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _word(config: RunConfig) -> str:
    """Return the word for flagged workers, which depends on what they are compared with."""
    return HEADINGS[comparison(config.model_dump())]


def _bars(console: Console, descriptions: Sequence[str], rounds: int) -> Bars:
    """Return bars that show the count and the time left at any width."""
    count = 2 * len(str(rounds)) + 1
    free = console.width - _BAR - count - _TIME - 4
    wanted = max(map(len, [*descriptions, "runs"]))
    described = min(wanted, max(len("runs"), free - _NEWS))
    told = max(1, free - described)
    return Bars(
        TextColumn("{task.description}", markup=False, table_column=_column(described)),
        BarColumn(bar_width=_BAR),
        MofNCompleteColumn(table_column=_column(count)),
        TimeRemainingColumn(compact=True, table_column=_column(_TIME)),
        TextColumn("{task.fields[news]}", markup=False, table_column=_column(told)),
        console=console,
    )


def _column(width: int) -> Column:
    return Column(width=width, no_wrap=True, overflow="ellipsis")


def _news(loss: float, accuracy: float | None) -> str:
    return f"loss {loss:.4g}" + ("" if accuracy is None else f"  accuracy {accuracy:.3f}")


def _say(console: Console, line: str, *, always: bool = False) -> None:
    if always and console.quiet:
        print(line, file=sys.stderr)
    else:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn the first SIGINT or SIGTERM into an event; a second SIGINT interrupts as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def ask(_number: int, _frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = "stopping after this round; press again to stop at once"
        try:
            print(text, file=sys.stderr)
        except RuntimeError:  # the signal came within a write to the same stream
            os.write(2, f"{text}\n".encode())

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
