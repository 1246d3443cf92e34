"""Threads: concurrent callers, forks, interruptions and invalid settings."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import bits, num_threads

import phocas
from phocas.kernels import jit, threads

RULES = ("phocas:b=3", "krum:b=3", "nnm:b=3|median", "geometric-median")


def rows_for(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(11, 30_000)).astype(np.float32)


def answer(seed: int) -> bytes:
    rule = RULES[seed % len(RULES)]
    return bits(phocas.aggregate(rows_for(seed), rule))


def explained(seed: int) -> tuple[bytes, bytes]:
    explanation = phocas.parse_rule(RULES[seed % len(RULES)]).explain(rows_for(seed))
    return bits(explanation.value), bits(explanation.dropped)


def test_concurrent_callers_get_correct_results() -> None:
    with num_threads(1):
        wanted = [explained(seed) for seed in range(8)]
    with num_threads(3), ThreadPoolExecutor(6) as callers:
        for _ in range(5):
            assert list(callers.map(explained, range(8))) == wanted


def test_concurrent_callers_may_change_the_number_of_threads() -> None:
    wanted = [answer(seed) for seed in range(4)]
    stop = threading.Event()

    def restless() -> None:
        number = 1
        while not stop.is_set():
            phocas.set_num_threads(number)
            number = number % 6 + 1

    with num_threads(2), ThreadPoolExecutor(5) as callers:
        turning = callers.submit(restless)
        try:
            for _ in range(10):
                assert list(callers.map(answer, range(4))) == wanted
        finally:
            stop.set()
        turning.result()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_compute_the_same_bits(method: str) -> None:
    wanted = [answer(seed) for seed in range(4)]  # the parent has helpers by now
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(answer, range(4)).get(timeout=300) == wanted
    assert [answer(seed) for seed in range(4)] == wanted


def _helpers_of_a_child(seed: int) -> int:
    answer(seed)
    return sum(thread.name == "phocas-kernel" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_start_their_own_helpers() -> None:
    with num_threads(3):
        answer(0)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map_async(_helpers_of_a_child, [0]).get(timeout=300) == [2]


def _compile_in_child(results: Any) -> None:
    results.put(bits(phocas.Median()(np.arange(51.0).reshape(17, 3))))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_compiles_does_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's first kernel must not wait for a thread that only the parent has."""
    monkeypatch.setenv("PHOCAS_CACHE", str(tmp_path))  # empty, so that compilation takes long
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    compiling = threading.Thread(target=lambda: phocas.Phocas(b=60)(np.ones((149, 3))))
    compiling.start()
    while not jit._lock.locked():
        assert compiling.is_alive()
    child = context.Process(target=_compile_in_child, args=(results,))
    child.start()
    try:
        assert results.get(timeout=300) == bits(np.array([24.0, 25.0, 26.0]))
    finally:
        child.kill()
        child.join()
        compiling.join()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt even if tests run in the background of a shell."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_during_a_job_leaves_the_pool_usable() -> None:
    """The signal is delivered when the machine code returns, and the helpers stay usable."""
    rows = np.random.default_rng(0).normal(size=(20, 1_000_000)).astype(np.float32)
    rule = phocas.Phocas(b=6)
    with num_threads(2):
        wanted = bits(rule(rows))
        interrupted = 0
        end = time.monotonic() + 300
        while interrupted < 3:
            assert time.monotonic() < end
            _let_helpers_sleep()
            timer = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()  # on a busy machine the signal may come before this returns
                for _ in range(1000):
                    rule(rows)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert not threads.POOL.busy()
        assert bits(rule(rows)) == wanted


def test_interruption_at_any_moment_releases_the_pool() -> None:
    """A signal's exception may be raised between any two instructions of a call."""
    rows = rows_for(0)[:, :5000]
    rule = phocas.Phocas(b=3)

    def interrupt(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, interrupt)
    rng = np.random.default_rng(0)
    try:
        with num_threads(2):
            wanted = bits(rule(rows))
            for delay in rng.uniform(2e-5, 4e-4, size=3000):
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    while True:
                        rule(rows)
                except TimeoutError:
                    assert not threads.POOL.busy()
            assert bits(rule(rows)) == wanted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("late", [False, True])
def test_interruption_while_taking_the_helpers_releases_them(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised just before or just after, the exception leaves the helpers' owner known."""

    class Interrupting(dict[str, bytes]):
        def setdefault(self, key: str, default: bytes) -> bytes:
            if late:
                super().setdefault(key, default)
            raise KeyboardInterrupt

    rows = rows_for(0)
    with num_threads(2):
        monkeypatch.setattr(threads.POOL, "_leading", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            phocas.Phocas(b=3)(rows)
        assert not threads.POOL.busy()


@pytest.mark.parametrize("after", [0, 1])
def test_interruption_leaves_no_helper_running(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a job was posted: its memory is freed only when no helper uses it."""
    rows = rows_for(0)
    rule = phocas.Phocas(b=3)
    wake = threads.Helper.wake
    woken: list[threads.Helper] = []

    def interrupted(helper: threads.Helper) -> None:
        if len(woken) == after:
            raise KeyboardInterrupt
        woken.append(helper)
        wake(helper)

    with num_threads(3):
        wanted = bits(rule(rows))
        _let_helpers_sleep()
        monkeypatch.setattr(threads.Helper, "wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rule(rows)
        monkeypatch.undo()
        states = threads.POOL.states()
        assert threads.POSTED not in states
        assert threads.RUNNING not in states
        assert not threads.POOL.busy()
        assert bits(rule(rows)) == wanted
        _let_helpers_sleep()  # no helper is lost


def _let_helpers_sleep() -> None:
    end = time.monotonic() + 300
    while set(threads.POOL.states()) != {threads.ASLEEP}:
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_invalid_numbers_of_threads_are_rejected(wrong: Any) -> None:
    before = phocas.get_num_threads()
    with pytest.raises(ValueError, match=r"integer >= 1: got"):
        phocas.set_num_threads(wrong)
    assert phocas.get_num_threads() == before


def test_numpy_integer_is_a_valid_number_of_threads() -> None:
    with num_threads(np.int64(2)):  # type: ignore[arg-type]
        assert phocas.get_num_threads() == 2


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "²"])
def test_invalid_environment_variable_is_rejected(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOCAS_NUM_THREADS", text)
    with pytest.raises(ValueError, match=r"PHOCAS_NUM_THREADS must be a whole number >= 1: got"):
        threads.default_threads()


def test_environment_variable_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOCAS_NUM_THREADS", "7")
    assert threads.default_threads() == 7
    monkeypatch.setenv("PHOCAS_NUM_THREADS", "")
    assert threads.default_threads() >= 1


def test_process_exits_while_helpers_sleep() -> None:
    code = (
        "import numpy as np, phocas; phocas.set_num_threads(4);"
        "print(phocas.Median()(np.ones((5, 100_000)))[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", "")
