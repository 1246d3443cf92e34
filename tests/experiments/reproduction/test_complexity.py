"""Time complexity: exponents, verdicts on made-up times, the command, and counted instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phocas.cli import main
from phocas.experiments.reproduction.complexity import (
    Complexity,
    Measurements,
    Point,
    cannot_count,
    count_instructions,
    plan_complexity,
)
from phocas.experiments.reproduction.growth import exponent, judge_complexity, nearly_linear
from phocas.report.complexity import draw_complexity

Cost = Callable[[str, int, int], float]


def as_the_paper_says(label: str, m: int, d: int) -> float:
    """Return a time for which every claim holds."""
    return d * (m**2 if "Krum" in label else m) * (1 if label == "Mean" else 2)


def measured(path: Path, study: Complexity, cost: Cost) -> Measurements:
    found = Measurements(path)
    found.machine, found.bandwidth = {"cpu": "made up"}, {1: 1.0, 2: 2.0}
    sizes = study.sizes
    shapes = [(m, d, threads) for m, d in study.cases() for threads in sizes.threads]
    for m, d, threads in [*shapes, *((m, 1, 0) for m in sizes.counts)]:
        for label in study.specs(m):
            time = cost(label, m, d) * 1e-9
            found.add(Point(label, m, d, threads, (time * 1.001, time, time * 1.002)))
    return found


def verdicts(tmp_path: Path, cost: Cost) -> dict[str, str]:
    study = plan_complexity("complexity")
    found = measured(tmp_path / "x.jsonl", study, cost)
    return {each.claim.name: each.verdict for each in judge_complexity(study, found)}


def test_exponent_is_the_slope_with_the_interval_of_its_residuals() -> None:
    exact = exponent([2, 4, 8, 16], [3.0 * m**1.5 for m in (2, 4, 8, 16)])
    assert exact.mean == pytest.approx(1.5)
    assert exact.high - exact.low < 1e-12
    rough = exponent([1, 2, 4], [1.0, 4.0, 4.0])  # by hand: slope 1, residuals -1/3, 2/3, -1/3
    assert rough.mean == pytest.approx(1.0)
    assert rough.high - rough.mean == pytest.approx(12.706 * (6 / 9 / 2) ** 0.5)
    assert nearly_linear([8, 1024]) == pytest.approx(1.2481, abs=1e-3)


def test_every_claim_holds_for_times_like_the_papers(tmp_path: Path) -> None:
    assert set(verdicts(tmp_path, as_the_paper_says).values()) == {"holds"}


def test_times_that_contradict_a_claim_are_detected(tmp_path: Path) -> None:
    def slow(label: str, m: int, d: int) -> float:
        return as_the_paper_says(label, m, d) * (m**0.5 if label == "Phocas" else 1)

    found = verdicts(tmp_path, slow)
    wrong = {name for name, verdict in found.items() if verdict == "does not hold"}
    assert wrong == {"phocas-m", "phocas-order"}


def test_missing_sizes_leave_claims_undecided(tmp_path: Path) -> None:
    study = plan_complexity("complexity")
    found = Measurements(tmp_path / "none.jsonl")
    assert {each.verdict for each in judge_complexity(study, found)} == {"not decided"}


def test_claims_are_decided_without_counts(tmp_path: Path) -> None:
    study = plan_complexity("complexity")
    found = measured(tmp_path / "x.jsonl", study, as_the_paper_says)
    found.points = {key: point for key, point in found.points.items() if point.threads}
    results = judge_complexity(study, found)
    assert {each.verdict for each in results} == {"holds"}
    assert {len(each.checks) for each in results} == {2}
    paths = draw_complexity(study, found, tmp_path / "figure")
    assert "instructions" not in paths[1].read_text()


def test_memory_bound_sizes_are_those_near_the_bandwidth(tmp_path: Path) -> None:
    found = Measurements(tmp_path / "x.jsonl")
    found.bandwidth = {1: 10.0}
    assert found.memory_bound(Point("Mean", 10, 1_000_000, 1, (0.005,)))  # 8 GB/s
    assert not found.memory_bound(Point("Mean", 10, 1_000_000, 1, (0.02,)))  # 2 GB/s
    assert not found.memory_bound(Point("Mean", 10, 1_000_000, 0, (1.0,)))


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"machine": {}, "bandwidth": {}}\n[1, 2]'])
def test_damaged_measurements_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        Measurements(path)


def test_command_measures_judges_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(
            sys, "argv", ["phocas", "reproduce", "complexity", "--scale", "small", *words]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return status, capsys.readouterr().err

    status, text = command()
    assert status == 0, text
    assert text.count("timed") == 6
    folder = Path("phocas-complexity-small")
    assert {path.name for path in folder.iterdir()} == {
        "results.jsonl", "claims.md", "complexity.png", "complexity.svg"
    }  # fmt: skip
    report = (folder / "claims.md").read_text()
    assert "| Trmean is nearly linear in m: no more than m log m. | Time complexity |" in report
    status, text = command()
    assert (status, text) == (0, "")  # nothing is measured again
    status, text = command("--judge", "--output", "empty")
    assert status == 2
    assert "there is nothing to judge" in text
    again = ["--judge", "--results", str(folder / "results.jsonl"), "--output", "again"]
    status, text = command(*again)
    assert status == 0, text
    figures = [path / "complexity.svg" for path in (folder, Path("again"))]
    assert figures[0].read_text() == figures[1].read_text()
    found = Measurements(folder / "results.jsonl")
    content = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(content.replace(found.machine["cpu"], "another"))
    status, text = command()
    assert status == 2
    assert "was measured on another machine" in text
    assert command("--figure", "x")[0] == 2


@pytest.mark.slow
def test_instructions_are_counted_without_noise() -> None:
    if reason := cannot_count():
        pytest.skip(reason)
    study = plan_complexity("complexity")
    first, second = (count_instructions(study, [8, 16]) for _ in range(2))
    assert [(point.rule, point.m) for point in first] == [
        (label, m) for m in (8, 16) for label in ("Mean", "Trmean", "Phocas", "Krum", "Multi-Krum")
    ]
    assert first[2].best > first[0].best > 0
    for one, two in zip(first, second, strict=True):
        assert two.best == pytest.approx(one.best, rel=0.15)
