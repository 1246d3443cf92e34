"""Threads for torch code whose bits must not depend on how many there are.

torch splits a product differently for each number of its own threads, and the last bits follow:
with two threads instead of one, 65% of the paper's MLP's gradient values changed. So work is cut
into pieces of a size that never depends on the threads, every piece runs with one torch thread, and
only the number of pieces that run side by side changes.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from phocas.kernels import get_num_threads, set_num_threads
from phocas.specs import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run a block with one torch thread, and give the caller's setting back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kernel_threads(number: int | None) -> Iterator[None]:
    """Run a block with so many threads for aggregation, and give the caller's setting back.

    Others in this process who aggregate meanwhile share the setting; it changes no bit.
    """
    if number is None:
        yield
        return
    before = get_num_threads()
    set_num_threads(number)
    try:
        yield
    finally:
        set_num_threads(before)


class Lanes:
    """Run pieces of work side by side in so many threads, each with one torch thread.

    >>> with Lanes(2) as lanes:
    ...     lanes.map(lambda k: k * k, range(4))
    [0, 1, 4, 9]
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = (
            get_num_threads() if threads is None else count("Lanes", "threads", threads, 1)
        )
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> list[R]:
        """Return ``[work(piece) for piece in pieces]``; an exception in a piece comes out here."""
        waiting = list(pieces)
        results: list[R] = [None] * len(waiting)  # type: ignore[list-item]  # filled below
        numbers = itertools.count()

        def drain() -> None:
            for number in iter(numbers.__next__, None):
                if number >= len(waiting):
                    return
                results[number] = work(waiting[number])

        helpers = min(self.threads, len(waiting)) - 1
        if helpers > 0 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, "phocas-lane", _enter_lane)
        with one_torch_thread():  # also puts back what a new lane's setting does to later threads
            futures = [self._pool.submit(drain) for _ in range(helpers)] if self._pool else []
            try:
                drain()  # the caller's thread works too
            finally:
                wait(futures)
        for future in futures:
            future.result()
        return results

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _enter_lane() -> None:
    torch.set_num_threads(1)
