"""Run a kernel over many columns on several threads, outside the interpreter's lock.

A job is divided into chunks. Every thread takes the next chunk from a shared counter until none is
left, in machine code. A thread that wakes late takes fewer chunks, and the caller does not wait for
a thread that has not started when the work is done. A chunk's result does not depend on the thread,
so the number of threads changes no bit.

Waking a sleeping thread takes 60-120 microseconds on a virtual machine, as long as a small
aggregation. So a helper polls for the next job for a short time before it sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import numbers
import os
import struct
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phocas.kernels import jit
from phocas.kernels.target import Target
from phocas.machine import available_cores

# The board consists of cache lines: first the counter, then a mailbox for each helper with its
# state, the state to restore if it does not start, and the job. The state is one of:
IDLE, POSTED, ASLEEP, RUNNING = range(4)
LINE_WORDS = 16
BACK, JOB = 1, 8  # offsets of the state to restore and of the job, in words
CHUNK_COLUMNS = 4096  # columns that a thread takes at a time
WATCH_TURNS = 2000  # polls before a helper sleeps, about 100 microseconds
# The fields of an order of the caller (``local`` is the memory of the first thread, ``stride`` the
# bytes to the next), and the fields that are copied to a mailbox.
ORDER = ("ptr work", "ptr local", "i64 stride", "i64 total", "i64 chunk")
POST = ("ptr work", "ptr args", "ptr own", "i64 total", "i64 chunk", "ptr board")
_ORDER = struct.Struct(f"{len(ORDER)}Q").pack


def write_threads(target: Target) -> str:
    """Generate the LLVM IR of the functions that run a job on several threads.

    The caller's thread calls ``alone`` to run a job without helpers, or ``begin`` to post a job to
    helper threads. ``begin`` returns the number of helpers that are asleep. If the number is 0, the
    job is done. Otherwise the caller wakes these helpers, and calls ``lead`` to do its own part and
    to wait for them. ``serve`` is the loop of a helper.
    """
    if target.triple.startswith(("aarch64", "arm64")):
        declare, pause = "declare void @llvm.aarch64.hint(i32)", "@llvm.aarch64.hint(i32 1)"
    else:
        declare, pause = "declare void @llvm.x86.sse2.pause()", "@llvm.x86.sse2.pause()"
    order, job = _fields("%order", 0, *ORDER), _fields("%box", JOB, *POST)
    posted = "\n".join(
        f"""  %to{i} = getelementptr i64, ptr %box, i64 {JOB + i}
  store {field.replace(" ", " %")}, ptr %to{i}"""
        for i, field in enumerate(POST)
    )
    return f"""
{declare}

define internal void @drain(
    ptr %work, ptr %args, ptr %local, i64 %total, i64 %chunk, ptr %counter
) {{
entry:
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

define void @alone(ptr %order, ptr %args) {{
{order}
  %counter = alloca i64, align 8
  store i64 0, ptr %counter
  call void @drain(ptr %work, ptr %args, ptr %local, i64 %total, i64 %chunk, ptr %counter)
  ret void
}}

define i64 @begin(ptr %board, i64 %helpers, ptr %order, ptr %args) {{
entry:
{order}
  store atomic i64 0, ptr %board monotonic, align 8
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %following, %post ]
  %asleep = phi i64 [ 0, %entry ], [ %more, %post ]
  %left = icmp slt i64 %i, %helpers
  br i1 %left, label %post, label %posted
post:
  %following = add i64 %i, 1
  %place = mul i64 %following, {LINE_WORDS}
  %box = getelementptr i64, ptr %board, i64 %place
  %offset = mul i64 %following, %stride
  %own = getelementptr i8, ptr %local, i64 %offset
{posted}
  %old = atomicrmw xchg ptr %box, i64 {POSTED} acq_rel
  %back = getelementptr i64, ptr %box, i64 {BACK}
  store i64 %old, ptr %back
  %sleeps = icmp eq i64 %old, {ASLEEP}
  %one = zext i1 %sleeps to i64
  %more = add i64 %asleep, %one
  br label %each
posted:
  %awake = icmp eq i64 %asleep, 0
  br i1 %awake, label %go, label %done
go:
  call void @lead(ptr %board, i64 %helpers, ptr %order, ptr %args)
  br label %done
done:
  ret i64 %asleep
}}

define void @lead(ptr %board, i64 %helpers, ptr %order, ptr %args) {{
entry:
{order}
  call void @drain(ptr %work, ptr %args, ptr %local, i64 %total, i64 %chunk, ptr %board)
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %following, %free ]
  %more = icmp slt i64 %i, %helpers
  br i1 %more, label %recall, label %done
recall:
  %following = add i64 %i, 1
  %place = mul i64 %following, {LINE_WORDS}
  %box = getelementptr i64, ptr %board, i64 %place
  %back = getelementptr i64, ptr %box, i64 {BACK}
  %idle = load i64, ptr %back
  %pair = cmpxchg ptr %box, i64 {POSTED}, i64 %idle acq_rel acquire
  %recalled = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %recalled, label %free, label %wait
wait:
  %state = load atomic i64, ptr %box acquire, align 8
  %running = icmp eq i64 %state, {RUNNING}
  call void {pause}
  br i1 %running, label %wait, label %free
free:
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
{job}
  call void @drain(ptr %work, ptr %args, ptr %own, i64 %total, i64 %chunk, ptr %board)
  store atomic i64 {IDLE}, ptr %box release, align 8
  br label %watch
idle:
  call void {pause}
  %fewer = sub i64 %left, 1
  %tired = icmp sle i64 %fewer, 0
  br i1 %tired, label %doze, label %watch
doze:
  %nap = cmpxchg ptr %box, i64 {IDLE}, i64 {ASLEEP} acq_rel acquire
  %state = extractvalue {{ i64, i1 }} %nap, 0
  %called = icmp eq i64 %state, {POSTED}
  br i1 %called, label %watch, label %done
done:
  ret void
}}
"""


def _fields(table: str, first: int, *fields: str) -> str:
    """Return the IR lines that load the words of a table into values named like the fields."""
    lines = []
    for i, field in enumerate(fields, first):
        kind, name = field.split()
        lines.append(f"  %slot{i} = getelementptr i64, ptr {table}, i64 {i}")
        lines.append(f"  %{name} = load {kind}, ptr %slot{i}")
    return "\n".join(lines)


class Functions(NamedTuple):
    """The functions of :func:`write_threads`, called without the interpreter's lock."""

    alone: Any
    begin: Any
    lead: Any
    serve: Any


@lru_cache(maxsize=1)
def _functions() -> Functions:
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    kinds = {
        "alone": ctypes.CFUNCTYPE(None, pointer, pointer),
        "begin": ctypes.CFUNCTYPE(word, pointer, word, pointer, pointer),
        "lead": ctypes.CFUNCTYPE(None, pointer, word, pointer, pointer),
        "serve": ctypes.CFUNCTYPE(None, pointer, word),
    }
    return Functions(
        **{name: kind(jit.address("threads", write_threads, name)) for name, kind in kinds.items()}
    )


_byte: Any = ctypes.c_char.from_buffer


def address(block: NDArray[Any] | bytearray) -> int:
    """Return the address of a block of memory."""
    try:
        # A fifth of the time of ``block.ctypes``, but only for contiguous writable memory.
        return ctypes.addressof(_byte(block))
    except (TypeError, ValueError):
        return int(block.ctypes.data)  # type: ignore[union-attr]


def default_threads() -> int:
    """Return ``PHOCAS_NUM_THREADS``, or the number of cores that this process may use."""
    text = os.environ.get("PHOCAS_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"PHOCAS_NUM_THREADS must be a whole number >= 1: got {text!r}")
        return int(text)
    return available_cores()


class Helper:
    """A thread that executes the jobs of a mailbox, and sleeps on a lock while there is none."""

    def __init__(self, mailbox: int) -> None:
        self._mailbox = mailbox
        self._wake = threading.Lock()
        self._wake.acquire()
        threading.Thread(target=self._serve_forever, name="phocas-kernel", daemon=True).start()

    def wake(self) -> None:
        """Wake the thread, unless it is already awake."""
        with contextlib.suppress(RuntimeError):
            self._wake.release()

    def _serve_forever(self) -> None:
        serve = _functions().serve
        while True:
            self._wake.acquire()
            serve(self._mailbox, WATCH_TURNS)


class Pool:
    """The helper threads of this process; the caller's thread works too."""

    def __init__(self) -> None:
        self._helpers: list[Helper] = []
        self._board = np.zeros((1, LINE_WORDS), np.uint64)
        self._start = 0
        self._leading: dict[str, bytes] = {}  # the order that the helpers work on, if any
        self.threads: int | None = None

    def size(self) -> int:
        """Return the number of threads that a job may use."""
        if self.threads is None:
            self.threads = default_threads()
        return self.threads

    def busy(self) -> bool:
        """Return whether the helpers are working on a job."""
        return bool(self._leading)

    def states(self) -> list[int]:
        """Return the state of each helper."""
        return [int(state) for state in self._board[1:, 0]]

    def run(
        self, work: int, arguments: bytes, local: NDArray[Any] | None, total: int, chunk: int
    ) -> None:
        """Call ``work(args, local, start, stop)`` for all of range(total), a chunk at a time.

        ``local``, if the work needs it, has one row of memory for each thread that may participate.
        """
        threads = min(self.size() if local is None else len(local), -(-total // chunk))
        base, stride = (0, 0) if local is None else (address(local), local.strides[0])
        order = _ORDER(work, base, stride, total, chunk)
        functions = _functions()
        helpers = threads - 1
        asleep = 0
        # Not a lock: a signal may raise an exception after a lock is acquired and before the
        # acquisition is recorded. The order in this dictionary is always known. It is checked below
        # without a call, because Python handles signals after a call.
        try:
            # A second caller at the same time works alone instead of waiting.
            if helpers < 1 or self._leading.setdefault("order", order) is not order:
                functions.alone(order, arguments)
                return
            if len(self._helpers) < helpers:
                self._start_helpers(helpers)
            # From here on, Ctrl-C must not free memory that helpers still write to.
            asleep = helpers
            asleep = functions.begin(self._start, helpers, order, arguments)
            if asleep:
                for helper, box in zip(self._helpers[:helpers], self._board[1:], strict=False):
                    if box[BACK] == ASLEEP:
                        helper.wake()
                        box[BACK] = IDLE
        finally:
            try:
                if asleep:
                    functions.lead(self._start, helpers, order, arguments)
            finally:  # Ctrl-C during the work is delivered when the work is done
                if "order" in self._leading and self._leading["order"] is order:
                    del self._leading["order"]

    def _start_helpers(self, number: int) -> None:
        """Replace the helper threads by a larger number of them; the old threads sleep forever."""
        words = np.zeros((number + 2) * LINE_WORDS, np.uint64)
        skip = -address(words) % (8 * LINE_WORDS) // 8
        board = words[skip : skip + (number + 1) * LINE_WORDS].reshape(-1, LINE_WORDS)
        _retired.append(words)  # an old helper may read its mailbox as long as the process lives
        board[1:, 0] = ASLEEP
        start = address(board)
        helpers = [Helper(start + 8 * LINE_WORDS * (i + 1)) for i in range(number)]
        self._board, self._start, self._helpers = board, start, helpers


_retired: list[np.ndarray] = []
POOL = Pool()


def set_num_threads(number: int) -> None:
    """Set the number of threads that aggregation may use in this process.

    Args:
        number: at least 1; results have the same bits for any number.

    >>> import phocas
    >>> phocas.set_num_threads(phocas.get_num_threads())
    """
    if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < 1:
        raise ValueError(f"the number of threads must be an integer >= 1: got {number!r}")
    POOL.threads = int(number)


def get_num_threads() -> int:
    """Return the number of threads that aggregation may use in this process.

    >>> import phocas
    >>> before = phocas.get_num_threads()
    >>> phocas.set_num_threads(1)
    >>> phocas.get_num_threads()
    1
    >>> phocas.set_num_threads(before)
    """
    return POOL.size()


def _after_fork() -> None:
    """Discard the parent's helpers, because threads do not survive a fork."""
    threads = POOL.threads
    POOL.__init__()  # type: ignore[misc]
    POOL.threads = threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
