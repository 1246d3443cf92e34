"""A progress bar over bytes for terminals; elsewhere it prints nothing. It imports only rich."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BAR = 10


@contextmanager
def byte_bar(description: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (bytes done, bytes in total) that updates the bar."""
    console = Console(stderr=True, quiet=quiet)
    if quiet or not console.is_terminal:
        yield lambda _done, _size: None
        return
    from rich import progress  # noqa: PLC0415 - its import is a tenth of the time of merging small files

    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=_BAR),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    ) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, size: bars.update(task, completed=done, total=size)
