"""Time complexity: aggregations timed against m and d, and their instructions counted.

Times of one thread are processor times, which other load affects little; times of several threads
are those of the clock.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phocas.experiments.benchmark import best_time, machine, matrix, read_bandwidth
from phocas.experiments.config import ConfigError, read_toml
from phocas.experiments.reproduction.tasks import label_of_rule, task_path
from phocas.rules import parse_rule
from phocas.specs import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Axis = Literal["m", "d"]
BOUND = 0.5
"""An aggregation that reads at this share of the bandwidth of memory or faster is memory-bound."""
ENOUGH = 20.0
"""Seconds of timing on one matrix after which two turns of the rules are enough."""
_COUNT = Path(__file__).with_name("count_instructions.py")


class Timings(BaseModel):
    """The sizes to measure; ``complexity.toml`` says what each is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    m: list[int] = Field(min_length=3)
    at_d: int = Field(ge=1)
    d: list[int] = Field(min_length=3)
    at_m: int = Field(ge=1)
    threads: list[int] = Field(min_length=1)
    turns: int = Field(ge=1)
    seconds: float = Field(gt=0)
    counts: list[int]
    count_values: int = Field(ge=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    rules: list[str] = Field(min_length=1)
    timings: dict[str, Any]
    scale: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Complexity:
    """The study at a scale: rules as text with ``{b}``, and the sizes to measure."""

    title: str
    scale: str
    rules: tuple[str, ...]
    sizes: Timings

    def cases(self) -> list[tuple[int, int]]:
        """Return the shapes (m, d) to be timed."""
        sizes = self.sizes
        both = [*((m, sizes.at_d) for m in sizes.m), *((sizes.at_m, d) for d in sizes.d)]
        return list(dict.fromkeys(both))

    def specs(self, m: int) -> dict[str, str]:
        """Return the text of each rule for m workers, by its label."""
        every = [rule.format(b=m // 4) for rule in self.rules]
        return {label_of_rule(rule): rule for rule in every}


@dataclass(frozen=True)
class Point:
    """One measurement: for each turn, the seconds of the best call.

    With ``threads`` = 0, the value is a number of instructions for one dimension, and d is 1.
    """

    rule: str
    m: int
    d: int
    threads: int
    values: tuple[float, ...]

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Return what identifies the measurement."""
        return self.rule, self.m, self.d, self.threads

    @property
    def best(self) -> float:
        """Return the smallest value; other load on the machine only adds to it."""
        return min(self.values)


@dataclass
class Measurements:
    """A file of measurements, one JSON object in each line, the first about the machine."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    bandwidth: dict[int, float] = field(default_factory=dict)
    """GB/s at which memory is read, by number of threads."""
    points: dict[tuple[str, int, int, int], Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file, if there is one."""
        if not self.path.exists():
            return
        try:
            head, *lines = self.path.read_text("utf-8").splitlines()
            first = json.loads(head)
            self.machine = dict(first["machine"])
            self.bandwidth = {int(key): float(each) for key, each in first["bandwidth"].items()}
            for line in lines:
                rule, m, d, threads, values = json.loads(line)
                self._keep(Point(str(rule), int(m), int(d), int(threads), tuple(values)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} has no measurements of complexity, or is damaged"
                f" ({type(error).__name__}): delete it to measure again"
            ) from None

    def start(self, threads: Sequence[int]) -> None:
        """Measure the machine, or raise ValueError if the file is of another machine."""
        here = {key: machine()[key] for key in ("cpu", "vector_bits")}
        if self.machine and {key: self.machine.get(key) for key in here} != here:
            raise ValueError(
                f"{self.path} was measured on another machine, {self.machine.get('cpu')}: this one"
                f" is {here['cpu']}; give another --output"
            )
        if not self.machine:
            for number in threads:
                with _threads(number), _torch_threads(number):
                    self.bandwidth[number] = round(read_bandwidth(256), 2)
            self.machine = machine()
            self._append({"machine": self.machine, "bandwidth": self.bandwidth})

    def add(self, point: Point) -> None:
        """Append a measurement."""
        self._keep(point)
        self._append([*point.key, list(point.values)])

    def _keep(self, point: Point) -> None:
        if not point.values or min(point.values) <= 0:
            raise ValueError("a measurement needs values above 0")
        self.points[point.key] = point

    def _append(self, content: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def memory_bound(self, point: Point) -> bool:
        """Return whether an aggregation reads its input about as fast as memory can be read."""
        speed = 4 * point.m * point.d / point.best / 1e9
        return point.threads > 0 and speed >= BOUND * self.bandwidth[point.threads]


def is_complexity(task: str) -> bool:
    """Return whether a task of ``phocas reproduce`` is a study of time complexity."""
    return "timings" in read_toml(task_path(task))


def plan_complexity(task: str, *, scale: str = "paper") -> Complexity:
    """Read a study of time complexity.

    >>> plan_complexity("complexity").specs(20)["Phocas"]
    'phocas:b=5'
    """
    path = task_path(task)
    try:
        file = _File.model_validate(read_toml(path))
        if scale not in file.scale:
            raise ConfigError(unknown("scale", scale, file.scale))
        sizes = Timings.model_validate({**file.timings, **file.scale[scale]})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{path}: {where}: {problem['msg']}") from None
    study = Complexity(file.title, scale, tuple(file.rules), sizes)
    for m in {*sizes.m, sizes.at_m, *sizes.counts}:
        for rule in study.specs(m).values():
            parse_rule(rule).check(m)
    return study


def measure(study: Complexity, found: Measurements, say: Callable[[str], None]) -> None:
    """Time and count what is missing; sizes beyond half of the free memory are left out."""
    sizes = study.sizes
    found.start(sizes.threads)
    for m, d in study.cases():
        specs = study.specs(m)
        wanted = list(itertools.product(sizes.threads, specs))
        if all((label, m, d, number) in found.points for number, label in wanted):
            continue
        if 8 * m * d > _free_memory():
            say(f"m = {m}, d = {d} is left out: it needs {8e-9 * m * d:.1f} GB of free memory")
            continue
        rows = matrix(m, d, "float32")
        for number in sizes.threads:
            for point in _timed(specs, rows, number, sizes):
                found.add(point)
        del rows
        say(f"m = {m}, d = {d}: timed")
    if missing := [m for m in sizes.counts if ("Mean", m, 1, 0) not in found.points]:
        if reason := cannot_count():
            say(f"instructions are not counted: {reason}")
            return
        say(f"counting instructions for m = {', '.join(map(str, missing))}")
        for point in count_instructions(study, missing):
            found.add(point)


def _timed(specs: dict[str, str], rows: Any, threads: int, sizes: Timings) -> Iterator[Point]:
    """Time all rules on one matrix in turns, so that all of them run under the same load."""
    clock = time.process_time if threads == 1 else time.perf_counter
    rules = {label: parse_rule(spec) for label, spec in specs.items()}
    turns: dict[str, list[float]] = {label: [] for label in rules}
    with _threads(threads):
        for rule in rules.values():
            rule(rows)  # compiled, and the pages are there
        started = time.monotonic()
        for turn in range(sizes.turns):
            if turn >= 2 and time.monotonic() - started > ENOUGH:
                break
            for label, rule in rules.items():
                turns[label].append(best_time(partial(rule, rows), sizes.seconds, clock))
    m, d = rows.shape
    for label, values in turns.items():
        yield Point(label, m, d, threads, tuple(float(f"{value:.4g}") for value in values))


def _threads(number: int) -> Any:
    from phocas.training.pool import kernel_threads  # noqa: PLC0415 - imports torch

    return kernel_threads(number)


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _free_memory() -> float:
    """Return the bytes of free memory, or infinity if the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return math.inf
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return 1024.0 * int(found[1]) if found else math.inf


def cannot_count() -> str:
    """Return why instructions cannot be counted here, or an empty text if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the counted code is that of AVX2, and this is {platform.machine()}"
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    return "" if importlib.util.find_spec("llvmlite") else "llvmlite is not installed"


def count_instructions(study: Complexity, workers: Sequence[int]) -> list[Point]:
    """Return the instructions of each rule for one dimension, counted by callgrind.

    They are the difference between matrices of 2d and of d dimensions, divided by d: what Python
    does around the kernels is the same for both. The code is that for AVX2 on every machine. It is
    compiled outside of callgrind first.
    """
    cases = [
        (label, spec, m, max(1024, study.sizes.count_values // m))
        for m in workers
        for label, spec in study.specs(m).items()
    ]
    shapes = json.dumps([(spec, m, size) for _, spec, m, d in cases for size in (d, 2 * d)])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        program = [sys.executable, str(_COUNT), shapes]
        watched = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for command in (program, [*watched, "--dump-before=getppid", *program]):
            subprocess.run(command, check=True, capture_output=True, env=env)  # noqa: S603
        # The program calls getppid before and after each counted call: the even dumps.
        dumps = [Path(f"{out}.{2 * number + 2}") for number in range(2 * len(cases))]
        totals = [_total(path.read_text("utf-8")) for path in dumps]
    return [
        Point(label, m, 1, 0, (round((totals[2 * i + 1] - totals[2 * i]) / d, 2),))
        for i, (label, _, m, d) in enumerate(cases)
    ]


def _total(dump: str) -> int:
    found = re.search(r"^(?:summary|totals): (\d+)", dump, re.MULTILINE)
    if found is None:
        raise ValueError("callgrind wrote no total: is this version of valgrind too old?")
    return int(found[1])


def series(
    study: Complexity, found: Measurements, label: str, axis: Axis, threads: int
) -> list[Point]:
    """Return the points of a rule along m or d, in order; with 0 threads the counts."""
    sizes = study.sizes
    if threads == 0:
        keys = [(label, m, 1, 0) for m in sizes.counts]
    elif axis == "m":
        keys = [(label, m, sizes.at_d, threads) for m in sizes.m]
    else:
        keys = [(label, sizes.at_m, d, threads) for d in sizes.d]
    return [found.points[key] for key in keys if key in found.points]
