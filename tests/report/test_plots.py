"""Figures of a sweep, from real runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import matplotlib.image
import numpy as np
import pytest

from phocas.experiments.config import expand_grid, make_config
from phocas.experiments.curves import read_curve
from phocas.experiments.results import Results, latest
from phocas.experiments.runner import execute
from phocas.report.figures import BANDS, Looks, band_of
from phocas.report.palette import BASELINE, STYLES
from phocas.report.plots import CLEAN, Choice, _arranged, plot

if TYPE_CHECKING:
    from pathlib import Path

COMMON: dict[str, Any] = {
    "dataset": "synthetic:train=60,test=20,side=8",
    "model": "softmax",
    "workers": 7,
    "servers": 2,
    "rounds": 6,
    "evaluate_every": 3,
}
GRID: list[dict[str, Any]] = [
    {"rule": ["mean", "phocas:b=2", "nnm:b=2|median"], "attack": ["gaussian:q=2", "sign-flip:q=2"]},
    {"rule": "mean"},
]
SEEDS = [0, 1]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen runs: three rules under two attacks, and the mean under none, two seeds each."""
    path = tmp_path_factory.mktemp("plots") / "swept.sqlite"
    for config in expand_grid(
        {**COMMON, "results": str(path), "grid": [{**each, "seed": SEEDS} for each in GRID]}, "grid"
    ):
        execute(config)
    return path


def drawn(path: Path, figure: Path, **choice: Any) -> str:
    with Results(path, read=True) as results:
        plot(results, latest(results.runs()), [figure], Choice(**choice))
    return figure.read_text("utf-8")


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_one_panel_per_attack_and_one_curve_per_rule(swept: Path, tmp_path: Path) -> None:
    svg = drawn(swept, tmp_path / "curves.svg")
    told = words(svg)
    for word in ("sign-flip:q=2", "gaussian:q=2", "mean", "phocas:b=2", "nnm:b=2|median", CLEAN):
        assert told.count(word) == 1, word
    assert "no attack" not in told  # its only line is the baseline of the others
    assert "2 seeds a line; line: mean, band: lowest to highest" in " ".join(told)
    for style in (STYLES["mean"], STYLES["phocas"], BASELINE):
        assert style.colour.lower() in svg.lower()
    assert drawn(swept, tmp_path / "again.svg") == svg


def test_every_axis_and_metric(swept: Path, tmp_path: Path) -> None:
    for choice, told in (
        ({"x": "seconds"}, "seconds of rounds and evaluations"),
        ({"y": "loss"}, "loss on the test set"),
        ({"y": "top3", "x": "round"}, "top-3 accuracy on the test set"),
    ):
        assert told in words(drawn(swept, tmp_path / "curves.svg", **choice))
    with Results(swept, read=True) as results:
        plot(results, latest(results.runs()), [tmp_path / "curves.png"], Choice(by="rule"))
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.01


def test_panels_and_lines_by_any_setting(swept: Path, tmp_path: Path) -> None:
    told = words(drawn(swept, tmp_path / "curves.svg", by="rule", lines=("attack", "seed")))
    for word in ("phocas:b=2", "nnm:b=2|median", "sign-flip:q=2, seed 1", "no attack, seed 0"):
        assert word in told
    assert "1 seed a line" in " ".join(told)


def test_a_curve_has_the_values_of_its_seeds(swept: Path) -> None:
    with Results(swept, read=True) as results:
        runs = latest(results.runs())
        curves = {run.id: read_curve(results, run.id) for run in runs}
        panels, _ = _arranged(runs, curves, Choice())
        for attack, lines in panels.items():
            for line in lines:
                wanted = [
                    [row["top1"] for row in results.table("evaluations", run.id)]
                    for run in runs
                    if (run.rule, run.attack) == (line.label, attack)
                    or (line.label == CLEAN and run.attack is None)
                ]
                assert list(line.x) == [0, 3, 6]
                np.testing.assert_array_equal(line.repeats, wanted)


def test_the_shortest_run_ends_a_curve_unless_it_stopped(swept: Path) -> None:
    with Results(swept, read=True) as results:
        runs = [run for run in latest(results.runs()) if run.rule == "phocas:b=2"][:2]
        first, second = (read_curve(results, run.id) for run in runs)
    cut = {name: getattr(second, name)[:2] for name in ("round", "seconds", "top1", "top3", "loss")}
    curves = {runs[0].id: first, runs[1].id: replace(second, **cut)}
    runs = [replace(run, attack=None) for run in runs]
    (lines,) = _arranged(runs, curves, Choice())[0].values()
    assert list(lines[0].x) == [0, 3]
    runs[1] = replace(runs[1], status="stopped")
    (lines,) = _arranged(runs, curves, Choice())[0].values()
    assert list(lines[0].x) == [0, 3, 6]
    assert lines[0].repeats[1, 1] == lines[0].repeats[1, 2] == second.top1[1]


def test_values_that_are_not_finite_leave_a_gap(swept: Path, tmp_path: Path) -> None:
    with Results(swept, read=True) as results:
        runs = latest(results.runs())
        curves = {run.id: read_curve(results, run.id) for run in runs}
        curves = {
            run: replace(curve, loss=np.array([2.0, np.inf, np.nan]))
            for run, curve in curves.items()
        }
        panels, _ = _arranged(runs, curves, Choice(y="loss"))
    for lines in panels.values():
        for line in lines:
            assert np.isnan(line.repeats[:, 1:]).all()


def test_asynchronous_runs_are_drawn_by_virtual_time(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    common = {**COMMON, "results": str(path), "speeds": "slow:workers=1"}
    for seed in SEEDS:
        for options in (
            {"rule": "phocas:b=2"},
            {"rule": "phocas:b=2", "asynchronous": "buffers=5"},
            {"asynchronous": "kardam:b=1"},
        ):
            execute(make_config({**common, **options, "seed": seed}))
    told = words(drawn(path, tmp_path / "curves.svg", x="virtual"))
    assert "virtual seconds" in told
    labels = " ".join(told)
    assert re.search(r"phocas:b=2 {2}0\.\d", labels)
    assert "phocas:b=2, asynchronous buffered:buffers=5" in labels
    assert re.search(r"asynchronous kardam:b=1 {2}", labels)


def test_unknown_axes_metrics_and_settings_are_rejected(swept: Path, tmp_path: Path) -> None:
    for choice, message in (
        ({"x": "time"}, "unknown axis 'time'"),
        ({"y": "top5"}, "unknown metric 'top5'"),
        ({"by": "attac"}, "did you mean 'attack'"),
        ({"lines": ("rul",)}, "did you mean 'rule'"),
        ({"x": "virtual"}, "no runs with a virtual clock"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            drawn(swept, tmp_path / "curves.svg", **choice)
    with pytest.raises(ValueError, match=r"written as \.png, \.svg or \.pdf: got .*curves.gif"):
        drawn(swept, tmp_path / "curves.gif")
    assert not list(tmp_path.iterdir())


def test_long_labels_of_a_paper_are_below_one_another() -> None:
    short, long = {"mean", "krum:b=2"}, {"my_ideas:dnc:b=2,c=1.5, dirichlet:alpha=0.3", "mean"}
    assert [Looks("paper").columns(each) for each in (short, long)] == [2, 1]
    assert Looks("paper", width=6.75).columns(long) == 2
    assert Looks().columns(short) == 1
    assert Looks("paper").size(1, 1, long) > Looks("paper").size(1, 1, short)


def test_figures_for_a_paper(swept: Path, tmp_path: Path) -> None:
    figure = tmp_path / "paper.svg"
    svg = drawn(swept, figure, looks=Looks("paper", band="interval"))
    assert re.search(r'width="234(\.0+)?pt"', svg)  # 3.25 inches
    assert not any("seeds a line" in word for word in words(svg))
    assert "top-1 accuracy" in words(svg)
    wide = drawn(swept, figure, looks=Looks("paper", width=6.75))
    assert re.search(r'width="486(\.0+)?pt"', wide)
    assert "95% interval of the mean" in drawn(swept, figure, looks=Looks(band="interval"))
    with Results(swept, read=True) as results:
        for name in ("one.pdf", "two.pdf"):
            plot(results, latest(results.runs()), [tmp_path / name], Choice(looks=Looks("paper")))
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "one.pdf").read_bytes() == (tmp_path / "two.pdf").read_bytes()


def test_bands_of_repeats() -> None:
    repeats = np.array([[1.0], [2.0], [3.0]])
    ends = {band: [float(end[0]) for end in band_of(repeats, band)] for band in BANDS}
    assert ends["range"] == [1, 3]
    assert ends["deviation"] == [1, 3]
    np.testing.assert_allclose(ends["interval"], [2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ({"style": "poster"}, "unknown style of a figure 'poster'"),
        ({"band": "all"}, "unknown band of a figure 'all'"),
        ({"width": 0}, "needs a finite width > 0"),
    ],
)
def test_unknown_looks_are_rejected(looks: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Looks(**looks)


def test_a_policy_that_drops_rows_is_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "refusing.sqlite"
    common = {**COMMON, "results": str(path)}
    grid = {"asynchronous": ["zeno:validation=30", "mean"], "attack": ["none", "gaussian:q=2"]}
    for config in expand_grid({**common, "grid": grid}, "grid"):
        execute(config)
    with Results(path, read=True) as results:
        runs = latest(results.runs())
        curves = {run.id: read_curve(results, run.id) for run in runs}
        panels, _ = _arranged(runs, curves, Choice())
        zeno = [run for run in runs if run.config["asynchronous"].startswith("zeno")]
        alone, _ = _arranged(zeno, curves, Choice())
    assert set(panels) == {"gaussian:q=2", "no attack"}
    (baseline,) = [line for line in panels["gaussian:q=2"] if line.label == CLEAN]
    (averaging,) = [
        run for run in runs if run.attack is None and run.config["asynchronous"] == "mean"
    ]
    np.testing.assert_array_equal(baseline.repeats, [curves[averaging.id].top1])
    assert any("zeno" in line.label for line in panels["no attack"])
    assert CLEAN not in [line.label for lines in alone.values() for line in lines]
