"""A thread pool for torch code whose bits do not depend on the number of threads.

torch splits a product differently for each number of its own threads, and the last bits differ:
with two threads instead of one, 65% of the gradient values of the paper's MLP changed. Here, work
is cut into pieces whose size does not depend on the threads, and every piece runs with one torch
thread. Only the number of pieces that run at the same time depends on the threads.
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
    """Run a block with one torch thread, and restore the caller's setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kernel_threads(number: int | None) -> Iterator[None]:
    """Run a block with a number of threads for aggregation, and restore the caller's setting.

    Other aggregations in this process use the same setting meanwhile; it does not change results.
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


class DeterministicPool:
    """A thread pool in which every thread has one torch thread.

    >>> with DeterministicPool(2) as pool:
    ...     pool.map(lambda k: k * k, range(4))
    [0, 1, 4, 9]
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = (
            get_num_threads()
            if threads is None
            else count("DeterministicPool", "threads", threads, 1)
        )
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> list[R]:
        """Return ``[work(piece) for piece in pieces]``; raise the exception of a piece."""
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
            self._pool = ThreadPoolExecutor(self.threads - 1, "phocas-pool", _begin_thread)
        with (
            one_torch_thread()
        ):  # also undoes the effect of a new thread's setting on later threads
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


def _begin_thread() -> None:
    torch.set_num_threads(1)
