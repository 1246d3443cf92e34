"""Speed of the rules as ratios to ``torch.mean`` in the same run, best of several.

Baseline and rule are timed alternately, so that both run under the same load. Times are wall-clock
times. The matrix is created once and never changes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

import phocas
from phocas.floats import format_of
from phocas.rules import PRE_AGGREGATORS, RULES, Rule, parse_rule
from phocas.rules.base import Bounded, Stage
from phocas.specs import count, positive

EXPLAIN = "explain "
Clock = Callable[[], float]
STEADY = 1.5  # largest ratio between a baseline's slowest and fastest turn on a quiet machine


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A rule on an (m, d) matrix to be timed.

    Attributes:
        rule: spec of the rule; with the prefix ``explain`` its explanation is timed.
        m: number of workers.
        d: number of columns.
        dtype: dtype of the values.
        limit: largest acceptable ratio to the baseline, or None.
    """

    rule: str
    m: int
    d: int
    dtype: str = "float32"
    limit: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a case that cannot be timed."""
        count("bench", "workers", self.m, minimum=1)
        count("bench", "dims", self.d, minimum=1)
        format_of(self.dtype, "bench")
        self.parsed().check(self.m)

    def parsed(self) -> Rule:
        """Return the rule as an object."""
        return parse_rule(self.rule.removeprefix(EXPLAIN))

    def __str__(self) -> str:
        kind = "" if self.dtype == "float32" else f" {self.dtype}"
        return f"{self.rule}{kind}, {self.m} x {self.d:,}"


@dataclass(frozen=True, slots=True)
class Turns:
    """The best seconds of baseline and work in each of several turns."""

    baseline: tuple[float, ...]
    work: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Return the best time of the work divided by the best time of the baseline."""
        return min(self.work) / min(self.baseline)

    @property
    def ratios(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio of a single turn."""
        each = [work / baseline for baseline, work in zip(self.baseline, self.work, strict=True)]
        return min(each), max(each)

    @property
    def moved(self) -> float:
        """Return the baseline's time in its slowest turn divided by that in its fastest."""
        return max(self.baseline) / min(self.baseline)


@dataclass(frozen=True, slots=True)
class Timing:
    """The measured times of a case and their reliability.

    Attributes:
        case: the case that was timed.
        milliseconds: best time of the work.
        baseline: best time of the baseline, in milliseconds.
        ratio: ``milliseconds`` divided by ``baseline``.
        lowest: smallest ratio of a turn.
        highest: largest ratio of a turn.
        moved: slowest turn of the baseline divided by its fastest.
        gigabytes: GB of input read per second.
    """

    case: BenchmarkCase
    milliseconds: float
    baseline: float
    ratio: float
    lowest: float
    highest: float
    moved: float
    gigabytes: float

    @property
    def past(self) -> bool:
        """Return whether the ratio exceeds its limit."""
        return self.case.limit is not None and self.ratio > self.case.limit

    @property
    def steady(self) -> bool:
        """Return whether the baseline's times varied so little that the ratio is meaningful."""
        return self.moved <= STEADY

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        row = asdict(self)
        return {**row.pop("case"), **row, "past": self.past, "steady": self.steady}


def _column_rules(m: int, b: int, d: int, limit: float) -> list[BenchmarkCase]:
    names = ("median", f"trimmed-mean:b={b}", f"phocas:b={b}", f"meamed:b={b}")
    return [BenchmarkCase(name, m, d, limit=limit) for name in names]


def _heraclius(large: int, small: int, million: int) -> list[BenchmarkCase]:
    spec = "heraclius:b=8"
    return [
        BenchmarkCase(spec, 20, large, limit=1.3),
        BenchmarkCase(spec, 20, small),
        BenchmarkCase("heraclius:b=16", 64, million, limit=2.2),
        *(
            BenchmarkCase(EXPLAIN + rule, 20, d, limit=1.5)
            for rule in ("phocas:b=8", spec)
            for d in (large, small)
        ),
    ]


def default_cases() -> list[BenchmarkCase]:
    """Return the cases of the README: the paper's two models, many workers, distance rules."""
    large, small, million = 2_431_018, 118_282, 1_000_000
    return [
        *_column_rules(20, 8, large, 1.15),
        *_column_rules(20, 8, small, 1.6),
        *_column_rules(64, 16, million, 1.8),
        *_column_rules(128, 32, million, 2.5),
        *_column_rules(1024, 256, small, 6.0),
        BenchmarkCase("krum:b=6", 20, million, limit=2.2),
        BenchmarkCase("krum:b=30", 100, small, limit=8.0),
        BenchmarkCase("krum:b=300", 1024, small, limit=90.0),
        BenchmarkCase("multi-krum:b=6", 20, million, limit=3.0),
        BenchmarkCase("geometric-median", 20, million, limit=3.0),
        BenchmarkCase("nnm:b=6|phocas:b=6", 20, million, limit=6.0),
        BenchmarkCase("cc:radius=median,start=previous", 20, large, limit=2.5),
        BenchmarkCase("smea:b=4", 20, million, limit=9.0),  # three times NNM and the median
        *_heraclius(large, small, million),
        *(
            BenchmarkCase("phocas:b=8", 20, million, dtype)
            for dtype in ("float16", "bfloat16", "float64")
        ),
    ]


_EXAMPLES = {
    "centered-clipping": "centered-clipping:radius=1000",
    "monitor": "monitor:rule=(phocas:b=6)",
    "bucketing": "bucketing:size=2",
    "clipping": "clipping:radius=1000",
}
"""Example specs of stages that need parameters other than b."""


def cost_cases(m: int = 20, d: int = 1_000_000, b: int = 6) -> dict[str, BenchmarkCase]:
    """Return a case for every rule, and one for every pre-aggregator followed by the median."""
    rules = {name: BenchmarkCase(_example(cls, m, b), m, d) for name, cls in RULES.items()}
    before = {
        name: BenchmarkCase(f"{_example(cls, m, b)}|median", m, d)
        for name, cls in PRE_AGGREGATORS.items()
    }
    return rules | before


def _example(cls: type[Stage], m: int, b: int) -> str:
    if not issubclass(cls, Bounded):
        return _EXAMPLES.get(cls.name, cls.name)
    return f"{cls.name}:b={min(b, cls.largest_b(m))}"


@dataclass(frozen=True, slots=True)
class Costs:
    """Published processor times, single-threaded, relative to ``torch.mean``.

    Attributes:
        machine: the machine that they were measured on.
        m: number of workers.
        d: number of columns.
        rules: the timed spec, by name of the rule or pre-aggregator.
        ratios: the relative time, by the same names.
    """

    machine: dict[str, Any]
    m: int
    d: int
    rules: dict[str, str]
    ratios: dict[str, float]


def published_costs() -> Costs:
    """Return the costs that ship with the package, measured by ``phocas bench --costs``.

    >>> published_costs().ratios["krum"] > published_costs().ratios["phocas"]
    True
    """
    text = resources.files("phocas.experiments").joinpath("costs.json").read_text("utf-8")
    return Costs(**json.loads(text))


def measure_cost(case: BenchmarkCase, seconds: float) -> Timing:
    """Time a case in processor time with one thread, which other load hardly affects."""
    from phocas.training.pool import kernel_threads, one_torch_thread  # noqa: PLC0415 - torch

    with one_torch_thread(), kernel_threads(1):
        return measure(case, seconds=seconds, rounds=7, clock=time.process_time)


def measured_costs(timings: Mapping[str, Timing]) -> Costs:
    """Convert the timings of :func:`cost_cases` to what :func:`published_costs` returns."""
    first = next(iter(timings.values())).case
    return Costs(
        {key: value for key, value in machine().items() if not key.endswith("threads")},
        first.m,
        first.d,
        {name: timing.case.rule for name, timing in timings.items()},
        {name: round(timing.ratio, 2) for name, timing in timings.items()},
    )


def matrix(m: int, d: int, dtype: str, seed: int = 0) -> Any:
    """Return an (m, d) tensor that repeats a random block of columns."""
    import torch  # noqa: PLC0415 - the baseline; everything else here runs without

    drawn = np.random.default_rng(seed).normal(size=(m, min(d, 1 << 14))).astype(np.float32)
    tiled = np.tile(drawn, (1, -(-d // drawn.shape[1])))[:, :d]
    return torch.from_numpy(np.ascontiguousarray(tiled)).to(getattr(torch, dtype))


def measure(
    case: BenchmarkCase,
    *,
    seconds: float = 0.5,
    rounds: int = 5,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> Timing:
    """Time one case against its baseline: the mean, or for explain the plain rule."""
    import torch  # noqa: PLC0415

    rows = matrix(case.m, case.d, case.dtype).to(device)
    rule = case.parsed()
    vector = None if rule.needs_reference is None else torch.mean(rows, 0)
    aggregate, explain = partial(rule, rows), partial(rule.explain, rows)
    if case.rule.startswith(EXPLAIN):
        work, baseline = partial(explain, reference=vector), partial(aggregate, reference=vector)
    else:
        work, baseline = partial(aggregate, reference=vector), partial(torch.mean, rows, 0)
    turns = in_turns(completed(baseline, device), completed(work, device), seconds, rounds, clock)
    lowest, highest = turns.ratios
    best = min(turns.work)
    return Timing(
        case,
        milliseconds=best * 1e3,
        baseline=min(turns.baseline) * 1e3,
        ratio=turns.ratio,
        lowest=lowest,
        highest=highest,
        moved=turns.moved,
        gigabytes=rows.numel() * rows.element_size() / best / 1e9,
    )


def device_cases() -> list[BenchmarkCase]:
    """Return the default cases that an accelerator has kernels for, without limits."""
    return [replace(case, limit=None) for case in default_cases() if case.m <= 128]


def completed(function: Callable[[], object], device: str) -> Callable[[], object]:
    """Return a function that calls ``function`` and waits until the device has finished."""
    import torch  # noqa: PLC0415

    if device == "cpu":
        return function

    def wait() -> None:
        function()
        torch.accelerator.synchronize(device)

    return wait


def in_turns(
    baseline: Callable[[], object],
    work: Callable[[], object],
    seconds: float,
    rounds: int,
    clock: Clock = time.perf_counter,
) -> Turns:
    """Return the best times of both functions in alternating batches."""
    positive("bench", "seconds", seconds)
    baseline(), work()
    share = seconds / (2 * rounds)
    turns = [
        (best_time(baseline, share, clock), best_time(work, share, clock)) for _ in range(rounds)
    ]
    return Turns(*zip(*turns, strict=True))


def best_time(function: Callable[[], object], seconds: float, clock: Clock) -> float:
    """Return the best time of a function that is called at least once, for ``seconds``."""
    best = float("inf")
    end = clock() + seconds
    while True:
        start = clock()
        function()
        stop = clock()
        best = min(best, stop - start)
        if stop >= end:
            return best


def read_bandwidth(megabytes: int = 512, device: str = "cpu") -> float:
    """Return the bandwidth in GB/s at which ``torch.sum`` reads memory, the best of several."""
    import torch  # noqa: PLC0415

    block = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    read = completed(block.sum, device)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        read()
        best = min(best, time.perf_counter() - start)
    return block.numel() * 4 / best / 1e9


_FIRST_USE = """
import json, sys, time
import numpy as np
start = time.perf_counter()
import phocas
imported = time.perf_counter() - start
rule = phocas.parse_rule(sys.argv[1])
rows = np.ones((int(sys.argv[2]), 64), np.float32)
start = time.perf_counter()
rule(rows)
print(json.dumps([imported, time.perf_counter() - start]))
"""


def first_use(rule: str, m: int) -> dict[str, float]:
    """Return the seconds of a process's first call, with an empty and with a filled cache."""
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "remembered"):
            answer = subprocess.run(  # noqa: S603 - this interpreter, this program
                [sys.executable, "-c", _FIRST_USE, rule, str(m)],
                env={**os.environ, "PHOCAS_CACHE": folder},
                check=True,
                capture_output=True,
                text=True,
            )
            result["import"], result[name] = json.loads(answer.stdout)
    return result


def peers() -> Iterator[tuple[str, str, Callable[[Any], object], Rule]]:
    """Yield (library, name, its function, our rule) for the installed public libraries."""
    if importlib.util.find_spec("byzfl"):
        import byzfl  # noqa: PLC0415

        pairs: list[tuple[Any, Rule]] = [
            (byzfl.TrMean(f=6), phocas.TrimmedMean(6)),
            (byzfl.Median(), phocas.Median()),
            (byzfl.Meamed(f=6), phocas.MeaMed(6)),
            (byzfl.MultiKrum(f=6), phocas.MultiKrum(6)),
            (byzfl.GeometricMedian(), phocas.GeometricMedian()),
        ]
        for theirs, ours in pairs:
            yield "byzfl", type(theirs).__name__, theirs, ours
    if importlib.util.find_spec("flwr"):
        from flwr.server.strategy.aggregate import aggregate_trimmed_avg  # noqa: PLC0415

        def flower(rows: Any) -> object:
            return aggregate_trimmed_avg([([row], 1) for row in rows.numpy()], 0.3)

        yield "flwr", "aggregate_trimmed_avg", flower, phocas.TrimmedMean(6)


def peer_ratios(seconds: float) -> list[dict[str, Any]]:
    """Return the times of installed libraries relative to ours, on the paper's MLP.

    The matrix has 20 workers and 118,282 parameters.
    """
    found = []
    for peer, name, theirs, ours in peers():
        rows = matrix(20, 118_282, "float32")
        turns = in_turns(partial(ours, rows), partial(theirs, rows), seconds, 3)
        found.append({"peer": peer, "rule": name, "ours": str(ours), "ratio": turns.ratio})
    return found


def machine() -> dict[str, Any]:
    """Return a description of the machine that the numbers come from."""
    import torch  # noqa: PLC0415

    from phocas.kernels.target import host  # noqa: PLC0415

    target = host()
    return {
        "cpu": target.cpu,
        "vector_bits": target.vector_bits,
        "threads": phocas.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "phocas": phocas.__version__,
    }
