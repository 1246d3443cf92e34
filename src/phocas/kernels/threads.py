"""Run a kernel over many columns on several threads, outside the interpreter's lock.

A job is cut into chunks, and every thread takes the next chunk from a shared counter until none is
left, in machine code: a thread that wakes late takes fewer, and one that has not begun when the
work is done is not waited for. A chunk's result does not depend on who computes it, so the number
of threads changes no bit.

Waking a sleeping thread takes 60-120 microseconds on a virtual machine, as long as a small
aggregation. A helper therefore watches for the next job a little while before it sleeps.
"""

from __future__ import annotations

import ctypes
import numbers
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from phocas.kernels import jit
from phocas.kernels.target import Target

# A mailbox is a line of its own with the state, then the job: work, args, local, total, chunk,
# counter. The state is one of:
IDLE, POSTED, ASLEEP, RUNNING = range(4)
JOB = 8  # where the job begins, in words
MAILBOX_WORDS = 16
WATCH_TURNS = 2000  # about 100 microseconds of pauses


def write_threads(target: Target) -> str:
    """Write ``lead`` (the caller's share), ``post`` and ``serve`` (a helper's life)."""
    if target.triple.startswith(("aarch64", "arm64")):
        declare, pause = "declare void @llvm.aarch64.hint(i32)", "@llvm.aarch64.hint(i32 1)"
    else:
        declare, pause = "declare void @llvm.x86.sse2.pause()", "@llvm.x86.sse2.pause()"
    fields = "\n".join(
        f"""  %slot{i} = getelementptr i64, ptr %box, i64 {JOB + i}
  %{name} = load {kind}, ptr %slot{i}"""
        for i, (kind, name) in enumerate(
            [
                ("ptr", "work"),
                ("ptr", "args"),
                ("ptr", "local"),
                ("i64", "total"),
                ("i64", "chunk"),
                ("ptr", "counter"),
            ]
        )
    )
    return f"""
{declare}

define internal void @drain(ptr %box) {{
entry:
{fields}
  br label %next
next:
  %start = atomicrmw add ptr %counter, i64 %chunk monotonic
  %more = icmp slt i64 %start, %total
  br i1 %more, label %run, label %done
run:
  %end = add i64 %start, %chunk
  %over = icmp sgt i64 %end, %total
  %stop = select i1 %over, i64 %total, i64 %end
  call void %work(ptr %args, ptr %local, i64 %start, i64 %stop)
  br label %next
done:
  ret void
}}

define i64 @post(ptr %box) {{
  %old = atomicrmw xchg ptr %box, i64 {POSTED} acq_rel
  ret i64 %old
}}

define void @lead(ptr %own, ptr %boxes, i64 %helpers) {{
entry:
  call void @drain(ptr %own)
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %following, %free ]
  %more = icmp slt i64 %i, %helpers
  br i1 %more, label %recall, label %done
recall:
  %offset = mul i64 %i, {MAILBOX_WORDS}
  %box = getelementptr i64, ptr %boxes, i64 %offset
  %pair = cmpxchg ptr %box, i64 {POSTED}, i64 {IDLE} acq_rel acquire
  %recalled = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %recalled, label %free, label %wait
wait:
  %state = load atomic i64, ptr %box acquire, align 8
  %running = icmp eq i64 %state, {RUNNING}
  call void {pause}
  br i1 %running, label %wait, label %free
free:
  %following = add i64 %i, 1
  br label %each
done:
  ret void
}}

define void @serve(ptr %box, i64 %turns) {{
entry:
  br label %watch
watch:
  %left = phi i64 [ %turns, %entry ], [ %turns, %finish ], [ %fewer, %idle ], [ 1, %doze ]
  %pair = cmpxchg ptr %box, i64 {POSTED}, i64 {RUNNING} acq_rel acquire
  %mine = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %mine, label %finish, label %idle
finish:
  call void @drain(ptr %box)
  store atomic i64 {IDLE}, ptr %box release, align 8
  br label %watch
idle:
  call void {pause}
  %fewer = sub i64 %left, 1
  %tired = icmp sle i64 %fewer, 0
  br i1 %tired, label %doze, label %watch
doze:
  %nap = cmpxchg ptr %box, i64 {IDLE}, i64 {ASLEEP} acq_rel acquire
  %slept = extractvalue {{ i64, i1 }} %nap, 1
  br i1 %slept, label %done, label %watch
done:
  ret void
}}
"""


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any, Any]:
    """Return ``lead``, ``post`` and ``serve`` as functions that release the interpreter's lock."""
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    lead = ctypes.CFUNCTYPE(None, pointer, pointer, word)
    post = ctypes.CFUNCTYPE(word, pointer)
    serve = ctypes.CFUNCTYPE(None, pointer, word)
    return (
        lead(jit.address("threads", write_threads, "lead")),
        post(jit.address("threads", write_threads, "post")),
        serve(jit.address("threads", write_threads, "serve")),
    )


def default_threads() -> int:
    """Return ``PHOCAS_NUM_THREADS``, or the number of cores this process may use."""
    text = os.environ.get("PHOCAS_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"PHOCAS_NUM_THREADS must be a whole number >= 1: got {text!r}")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Helper:
    """A thread that serves a mailbox, and sleeps on a lock when there is nothing to do."""

    def __init__(self, mailbox: int) -> None:
        self._mailbox = mailbox
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._live, name="phocas-kernel", daemon=True).start()

    def post(self) -> None:
        """Announce the job that was written to the mailbox."""
        if _functions()[1](self._mailbox) == ASLEEP:
            self._wake.release()

    def _live(self) -> None:
        serve = _functions()[2]
        while True:
            self._wake.acquire()
            serve(self._mailbox, WATCH_TURNS)


class Pool:
    """The helpers of this process; the caller's thread works too."""

    def __init__(self) -> None:
        self._helpers: list[Helper] = []
        self._boxes = np.zeros((0, MAILBOX_WORDS), np.uint64)
        self._busy = threading.Lock()
        self.threads: int | None = None

    def size(self) -> int:
        """Return how many threads a job may use."""
        if self.threads is None:
            self.threads = default_threads()
        return self.threads

    def run(
        self,
        work: int,
        arguments: np.ndarray,
        local: Sequence[np.ndarray | None],
        total: int,
        chunk: int,
    ) -> None:
        """Call ``work(args, local, start, stop)`` for all of range(total), a chunk at a time.

        ``local`` has one block of memory for each thread that may take part.
        """
        counter = np.zeros(1, np.int64)
        chunks = -(-total // chunk)
        job = np.zeros((min(len(local), max(1, chunks)), 6), np.uint64)
        job[:] = (work, arguments.ctypes.data, 0, total, chunk, counter.ctypes.data)
        for i in range(len(job)):
            block = local[i]
            if block is not None:
                job[i, 2] = block.ctypes.data
        own = np.zeros(MAILBOX_WORDS, np.uint64)
        own[JOB : JOB + 6] = job[0]
        lead = _functions()[0]
        helpers = len(job) - 1
        # A second caller at the same time works alone rather than wait.
        if not helpers or not self._busy.acquire(blocking=False):
            lead(own.ctypes.data, 0, 0)
            return
        done = False
        try:
            if len(self._helpers) < helpers:
                self._hire(helpers)
            self._boxes[:helpers, JOB : JOB + 6] = job[1:]
            for helper in self._helpers[:helpers]:
                helper.post()
            lead(own.ctypes.data, self._boxes.ctypes.data, helpers)
            done = True
        finally:
            # Ctrl-C between the two must not free memory that helpers still write to.
            if not done and len(self._boxes) >= helpers:
                lead(own.ctypes.data, self._boxes.ctypes.data, helpers)
            self._busy.release()

    def _hire(self, number: int) -> None:
        """Replace the helpers by more; the old ones sleep for good."""
        words = np.zeros((number + 1) * MAILBOX_WORDS, np.uint64)
        skip = -words.ctypes.data % (8 * MAILBOX_WORDS) // 8
        boxes = words[skip : skip + number * MAILBOX_WORDS].reshape(number, MAILBOX_WORDS)
        _retired.append(words)  # a helper may look at its mailbox as long as the process lives
        boxes[:, 0] = ASLEEP
        start = boxes.ctypes.data
        helpers = [Helper(start + 8 * MAILBOX_WORDS * i) for i in range(number)]
        self._boxes, self._helpers = boxes, helpers


_retired: list[np.ndarray] = []
POOL = Pool()


def set_num_threads(number: int) -> None:
    """Set how many threads aggregation may use in this process."""
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 1:
        raise ValueError(f"the number of threads must be an integer >= 1: got {number!r}")
    POOL.threads = int(number)


def get_num_threads() -> int:
    """Return how many threads aggregation may use in this process."""
    return POOL.size()


def _after_fork() -> None:
    """Forget the parent's helpers: threads do not survive a fork."""
    threads = POOL.threads
    POOL.__init__()  # type: ignore[misc]
    POOL.threads = threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
