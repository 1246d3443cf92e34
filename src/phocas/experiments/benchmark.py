"""Speed of the rules as ratios to ``torch.mean`` in the same run, best of several.

Baseline and rule are timed in turns, so that both see the same machine. Times are wall-clock; the
matrix is made once and never changes.
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
from phocas.rules.base import Stage, Told
from phocas.specs import count, positive

EXPLAIN = "explain "
Clock = Callable[[], float]
STEADY = 1.5  # the most that a baseline's turns may differ by on a quiet machine


@dataclass(frozen=True, slots=True)
class Case:
    """A rule on an (m, d) matrix, and the ratio that it should stay under, if one is set."""

    rule: str
    m: int
    d: int
    dtype: str = "float32"
    limit: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be timed before anything is."""
        count("bench", "workers", self.m, minimum=1)
        count("bench", "dims", self.d, minimum=1)
        format_of(self.dtype, "bench")
        self.parsed().check(self.m)

    def parsed(self) -> Rule:
        """Return the rule."""
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
        """Return how much longer the work takes, at best."""
        return min(self.work) / min(self.baseline)

    @property
    def ratios(self) -> tuple[float, float]:
        """Return the least and the largest ratio of a turn."""
        each = [work / baseline for baseline, work in zip(self.baseline, self.work, strict=True)]
        return min(each), max(each)

    @property
    def moved(self) -> float:
        """Return how many times longer the baseline took in its worst turn than in its best."""
        return max(self.baseline) / min(self.baseline)


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured: the best times, their ratio to the baseline's, and how sure it is."""

    case: Case
    milliseconds: float
    baseline: float
    ratio: float
    lowest: float
    highest: float
    moved: float
    gigabytes: float

    @property
    def past(self) -> bool:
        """Tell whether the ratio is past its limit."""
        return self.case.limit is not None and self.ratio > self.case.limit

    @property
    def steady(self) -> bool:
        """Tell whether the baseline stayed where it was, so that the ratio means something."""
        return self.moved <= STEADY

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        row = asdict(self)
        return {**row.pop("case"), **row, "past": self.past, "steady": self.steady}


def _column_rules(m: int, b: int, d: int, limit: float) -> list[Case]:
    names = ("median", f"trimmed-mean:b={b}", f"phocas:b={b}", f"meamed:b={b}")
    return [Case(name, m, d, limit=limit) for name in names]


def _heraclius(large: int, small: int, million: int) -> list[Case]:
    told = "heraclius:b=8"
    return [
        Case(told, 20, large, limit=1.3),
        Case(told, 20, small),
        Case("heraclius:b=16", 64, million, limit=2.2),
        *(
            Case(EXPLAIN + rule, 20, d, limit=1.5)
            for rule in ("phocas:b=8", told)
            for d in (large, small)
        ),
    ]


def default_cases() -> list[Case]:
    """Return the cases of the README: the paper's two models, many workers, distance rules."""
    large, small, million = 2_431_018, 118_282, 1_000_000
    return [
        *_column_rules(20, 8, large, 1.15),
        *_column_rules(20, 8, small, 1.6),
        *_column_rules(64, 16, million, 1.8),
        *_column_rules(128, 32, million, 2.5),
        *_column_rules(1024, 256, small, 6.0),
        Case("krum:b=6", 20, million, limit=2.2),
        Case("krum:b=30", 100, small, limit=8.0),
        Case("krum:b=300", 1024, small, limit=90.0),
        Case("multi-krum:b=6", 20, million, limit=3.0),
        Case("geometric-median", 20, million, limit=3.0),
        Case("nnm:b=6|phocas:b=6", 20, million, limit=6.0),
        *_heraclius(large, small, million),
        *(Case("phocas:b=8", 20, million, dtype) for dtype in ("float16", "bfloat16", "float64")),
    ]


_TOLD = {
    "centered-clipping": "centered-clipping:radius=1000",
    "watch": "watch:rule=(phocas:b=6)",
    "bucketing": "bucketing:size=2",
    "clipping": "clipping:radius=1000",
}
"""What steps are told in their costs, where b does not say it all."""


def cost_cases(m: int = 20, d: int = 1_000_000, b: int = 6) -> dict[str, Case]:
    """Return a case for every rule, and for every pre-aggregator before the median."""
    rules = {name: Case(_example(cls, m, b), m, d) for name, cls in RULES.items()}
    before = {
        name: Case(f"{_example(cls, m, b)}|median", m, d) for name, cls in PRE_AGGREGATORS.items()
    }
    return rules | before


def _example(cls: type[Stage], m: int, b: int) -> str:
    if not issubclass(cls, Told):
        return _TOLD.get(cls.name, cls.name)
    return f"{cls.name}:b={min(b, cls.largest_b(m))}"


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor times over that of ``torch.mean``, one thread, as measured once, and where."""

    machine: dict[str, Any]
    m: int
    d: int
    rules: dict[str, str]
    """What was timed, by the name of a rule or pre-aggregator."""
    ratios: dict[str, float]


def published_costs() -> Costs:
    """Return the costs that come with the package; ``phocas bench --costs`` measured them.

    >>> published_costs().ratios["krum"] > published_costs().ratios["phocas"]
    True
    """
    text = resources.files("phocas.experiments").joinpath("costs.json").read_text("utf-8")
    return Costs(**json.loads(text))


def measure_cost(case: Case, seconds: float) -> Timing:
    """Time a case by the processor's clock with one thread: who else works here matters little."""
    from phocas.training.lanes import kernel_threads, one_torch_thread  # noqa: PLC0415 - torch

    with one_torch_thread(), kernel_threads(1):
        return measure(case, seconds=seconds, rounds=7, clock=time.process_time)


def measured_costs(timings: Mapping[str, Timing]) -> Costs:
    """Keep of the timings of :func:`cost_cases` what :func:`published_costs` returns."""
    first = next(iter(timings.values())).case
    return Costs(
        {key: value for key, value in machine().items() if not key.endswith("threads")},
        first.m,
        first.d,
        {name: timing.case.rule for name, timing in timings.items()},
        {name: round(timing.ratio, 2) for name, timing in timings.items()},
    )


def matrix(m: int, d: int, dtype: str, seed: int = 0) -> Any:
    """Return a random (m, d) tensor; a block of columns is drawn and repeated."""
    import torch  # noqa: PLC0415 - the baseline; everything else here runs without

    drawn = np.random.default_rng(seed).normal(size=(m, min(d, 1 << 14))).astype(np.float32)
    tiled = np.tile(drawn, (1, -(-d // drawn.shape[1])))[:, :d]
    return torch.from_numpy(np.ascontiguousarray(tiled)).to(getattr(torch, dtype))


def measure(
    case: Case,
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
    if case.rule.startswith(EXPLAIN):
        work, baseline = (lambda: rule.explain(rows)), (lambda: rule(rows))
    else:
        work, baseline = (lambda: rule(rows)), (lambda: torch.mean(rows, 0))
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


def device_cases() -> list[Case]:
    """Return the default cases that an accelerator has kernels for; limits are not known yet."""
    return [replace(case, limit=None) for case in default_cases() if case.m <= 128]


def completed(function: Callable[[], object], device: str) -> Callable[[], object]:
    """Return a function that waits until the device is done."""
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
    """Return the best time of each in alternating batches."""
    positive("bench", "seconds", seconds)
    baseline(), work()
    share = seconds / (2 * rounds)
    turns = [(_best(baseline, share, clock), _best(work, share, clock)) for _ in range(rounds)]
    return Turns(*zip(*turns, strict=True))


def _best(function: Callable[[], object], seconds: float, clock: Clock) -> float:
    """Return the best time of a function that is called for so long, and at least once."""
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
    """Return how many GB/s of memory ``torch.sum`` reads, on all threads, best of several."""
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
    """Return the seconds of a process's first call, with an empty cache and with a full one."""
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
    """Yield (peer, rule, its call, our rule) for the public libraries that happen to be here."""
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
    """Time every peer against ours on the paper's MLP: 20 workers, 118,282 parameters."""
    found = []
    for peer, name, theirs, ours in peers():
        rows = matrix(20, 118_282, "float32")
        turns = in_turns(partial(ours, rows), partial(theirs, rows), seconds, 3)
        found.append({"peer": peer, "rule": name, "ours": str(ours), "ratio": turns.ratio})
    return found


def machine() -> dict[str, Any]:
    """Describe where the numbers come from."""
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
