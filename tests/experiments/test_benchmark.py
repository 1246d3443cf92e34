"""The benchmark: what it rejects, and the reliability that it reports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from phocas.cli.bench import _table
from phocas.experiments.benchmark import BenchmarkCase, Timing, Turns, default_cases, in_turns


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from phocas.cli import main; main()", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rule", "median", "--dims", "0"), "bench needs dims >= 1: got dims=0"),
        (("--rule", "median", "--num-workers", "0"), "bench needs workers >= 1: got workers=0"),
        (("--rule", "median", "--dtype", "int8"), "float16, bfloat16, float32, float64: got int8"),
        (("--rule", "median", "--dtype", "half2"), "half2"),
        (("--rule", "krum:b=9"), "2b + 2 < m"),
        (("--rule", "median", "--seconds", "0"), "seconds"),
    ],
)
def test_invalid_cases_are_rejected_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_rule_is_timed() -> None:
    size = ("--num-workers", "5", "--dims", "1000", "--seconds", "0.02")
    done = bench("--rule", "trimmed-mean:b=2", *size)
    assert done.returncode == 0, done.stderr
    assert "trimmed-mean:b=2" in done.stdout
    report = json.loads(bench("--rule", "median", *size, "--json").stdout)
    (timing,) = report["timings"]
    assert timing["lowest"] <= timing["highest"]
    assert timing["past"] is False


def test_the_table_fits_into_80_columns() -> None:
    from rich.console import Console

    timings = [
        Timing(case, 1234.5, 12.5, 98.76, 91.23, 123.45, 2.5, 10.0) for case in default_cases()
    ]
    screen = io.StringIO()
    Console(width=80, file=screen).print(_table(timings))
    lines = [line for line in screen.getvalue().splitlines() if line.strip()]
    for timing in timings:
        assert any(timing.case.rule.startswith(line.split()[0]) for line in lines)
    assert max(map(len, lines)) <= 80
    long = [timing for timing in timings if len(timing.case.rule) > 23]
    assert len(lines) == len(timings) + len(long) + 2  # only long rules take two lines


def test_unsteady_baseline_is_reported() -> None:
    quiet = Turns((1.0, 1.1, 1.2), (2.0, 2.0, 2.4))
    assert quiet.ratio == 2.0
    assert quiet.ratios == (2.0 / 1.1, 2.0)
    busy = Turns((1.0, 90.0), (2.0, 3.6))
    assert busy.moved == 90.0
    case = BenchmarkCase("median", 5, 10, limit=1.5)

    def timing(ratio: float, moved: float) -> Timing:
        return Timing(case, 1.0, 1.0, ratio, ratio, ratio, moved, 1.0)

    assert timing(1.4, 1.1).steady
    assert not timing(1.4, 1.1).past
    assert not timing(1.6, 2.0).steady
    assert timing(1.6, 2.0).past


def test_turns_alternate() -> None:
    calls: list[str] = []
    turns = in_turns(lambda: calls.append("a"), lambda: calls.append("b"), 1e-9, 3)
    assert calls == ["a", "b"] * 4  # one call each to warm up
    assert len(turns.baseline) == len(turns.work) == 3


LIMITED = """
import phocas.experiments.benchmark as benchmark
from phocas.cli import main
benchmark.default_cases = lambda: [benchmark.BenchmarkCase("phocas:b=2", 7, 4000, limit=1e-6)]
main()
"""


def test_rule_beyond_its_limit_is_reported_in_words_and_status() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "bench", "--seconds", "0.02"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
    )
    assert done.returncode == 1, done.stderr
    assert "Slower than its limit: phocas:b=2, 7 x 4,000" in done.stdout
