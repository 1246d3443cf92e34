"""Progress of runs: a live bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from phocas.experiments.sweep import Ended
from phocas.report.tables import listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import TaskID

    from phocas.experiments.config import RunConfig
    from phocas.experiments.sweep import News
    from phocas.training.trainer import Evaluation, Round

PLAIN_LINES = 10


class Progress:
    """Show rounds as they are done: round, loss, accuracy, rounds a second, time left, suspects."""

    def __init__(self, config: RunConfig, *, quiet: bool = False) -> None:
        self.config = config
        self.console = Console(stderr=True, quiet=quiet)
        self._accuracy: float | None = None
        self._first: tuple[float, int] | None = None
        self._bars: Bars | None = None
        if self.console.is_terminal and not quiet:
            self._bars = _bars(self.console)
            self._task = self._bars.add_task(config.title(), total=config.rounds, news="")

    def show(self, _config: RunConfig, done: Round, evaluation: Evaluation | None) -> None:
        """Take the news of one round."""
        for line in done.news:
            self.console.print(
                f"round {done.number}: {line}", highlight=False, markup=False, soft_wrap=True
            )
        now = time.monotonic()
        if self._first is None:
            self._first = now, done.number
        if evaluation is not None:
            self._accuracy = evaluation.top1
        elapsed = now - self._first[0]
        speed = (done.number - self._first[1]) / elapsed if elapsed else 0.0
        news = f"loss {done.loss:.3f}"
        if self._accuracy is not None:
            news += f"  accuracy {self._accuracy:.3f}"
        news += f"  {speed:.0f} rounds/s"
        if done.suspects:
            news += f"  {_word(self.config)} {listing(done.suspects)}"
        if done.suspect_servers:
            news += f"  servers {listing(done.suspect_servers)} get wrong values"
        if done.action != "applied":
            news += f"  round {done.number} {done.action}: not finite"
        if self._bars is not None:
            self._bars.update(self._task, completed=done.number, news=news)
        else:
            step = max(1, self.config.rounds // PLAIN_LINES)
            if done.number % step == 0 or done.number == self.config.rounds:
                left = (self.config.rounds - done.number) / speed if speed else 0.0
                self.console.print(
                    f"round {done.number}/{self.config.rounds}  {news}  {left:.0f} s left",
                    highlight=False,
                    soft_wrap=True,
                )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


class SweepProgress:
    """Show the runs of a sweep: one bar for all of them, and one for each that is running."""

    def __init__(self, configs: Sequence[RunConfig], *, quiet: bool = False) -> None:
        self.configs = configs
        self.console = Console(stderr=True, quiet=quiet)
        self._done = 0
        self._started = time.monotonic()
        self._tasks: dict[int, TaskID] = {}
        self._bars: Bars | None = None
        if self.console.is_terminal and not quiet:
            self._bars = _bars(self.console)
            self._all = self._bars.add_task("runs", total=len(configs), news="")

    def show(self, news: News | Ended) -> None:
        """Take the news of one run."""
        config = self.configs[news.index]
        if isinstance(news, Ended):
            self._done += 1
            text = f"{config.title()}, seed {config.seed}: {news.status}"
            if news.error:
                text += f" ({news.error})"
            if self._bars is None and self._done < len(self.configs):
                text += f"; {self._left()} left"
            self.console.print(
                f"[{self._done}/{len(self.configs)}] {text}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            if self._bars is not None:
                self._bars.update(self._all, completed=self._done)
                if news.index in self._tasks:
                    self._bars.remove_task(self._tasks.pop(news.index))
        elif self._bars is not None:
            if news.index not in self._tasks:
                self._tasks[news.index] = self._bars.add_task(
                    f"{config.title()}, seed {config.seed}", total=config.rounds, news=""
                )
            text = f"loss {news.loss:.3f}"
            if news.accuracy is not None:
                text += f"  accuracy {news.accuracy:.3f}"
            if news.suspects:
                text += f"  {_word(config)} {listing(news.suspects)}"
            self._bars.update(self._tasks[news.index], completed=news.round, news=text)

    def _left(self) -> str:
        """Say how long the rest takes if it goes on as so far."""
        elapsed = time.monotonic() - self._started
        seconds = elapsed / self._done * (len(self.configs) - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def _word(config: RunConfig) -> str:
    """Say what a suspect is: who holds other data differs, and need not be wrong."""
    return "suspects" if config.split == "iid" else "differing"


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )


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
        print("stopping after this round; press again to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
