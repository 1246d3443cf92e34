"""Figures of curves and the palette."""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib import resources
from typing import TYPE_CHECKING

import matplotlib.image
import pytest

from phocas import PRE_AGGREGATORS, RULES
from phocas.cli import main
from phocas.report.figures import (
    RunCurve,
    accuracy_figure,
    panel_figure,
    save_figure,
    save_png_and_svg,
)
from phocas.report.palette import BASELINE, STYLES, Palette, distinct_dashes, without_b
from phocas.report.tables import listing

if TYPE_CHECKING:
    from pathlib import Path

    from phocas.report.palette import Style


def test_the_demo_writes_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["phocas", "demo", "--dataset", "synthetic:train=300,test=100", "--rounds", "12"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    output, progress = capsys.readouterr()
    assert not ended.value.code, progress
    rules = ["mean", "mean", "krum", "multi-krum", "trimmed-mean", "phocas", "heraclius"]
    lines = [line.split() for line in output.splitlines() if re.match(r"\d+ {2}", line)]
    assert [line[1].removesuffix(":b=8") for line in lines] == rules
    assert "[7/7]" in progress
    figure = tmp_path / "phocas-demo" / "accuracy.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 10_000


def test_a_figure_draws_every_curve(tmp_path: Path) -> None:
    few = tmp_path / "few.png"
    many = tmp_path / "many.png"
    curve = RunCurve("one", [0, 10, 20], [0.1, 0.5, 0.9], STYLES["mean"])
    accuracy_figure([curve], few, title="t")
    other = RunCurve("two", [0, 20], [0.1, 0.2], STYLES["phocas"])
    accuracy_figure([curve, other], many, title="t")
    assert few.read_bytes() != many.read_bytes()


def test_png_and_svg_of_a_figure_have_the_same_layout(tmp_path: Path) -> None:
    curve = RunCurve("one", [0, 10, 20], [0.1, 0.5, 0.9], STYLES["mean"])
    figure = panel_figure("t", {"left": [curve], "right": [curve]}, "accuracy")
    drawn = 0

    def count(*_: object) -> None:
        nonlocal drawn
        drawn += 1

    figure.canvas.mpl_connect("draw_event", count)
    png, svg = save_png_and_svg(figure, tmp_path / "figure")
    places = [axes.get_position().bounds for axes in figure.axes]
    alone = panel_figure("t", {"left": [curve], "right": [curve]}, "accuracy")
    save_figure(alone, tmp_path / "alone.svg")
    assert [axes.get_position().bounds for axes in alone.axes] == places
    assert svg.read_bytes() == (tmp_path / "alone.svg").read_bytes()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert drawn == 2  # once for each file


def test_a_coinciding_curve_does_not_hide_the_baseline(tmp_path: Path) -> None:
    def drawn(*styles: Style) -> bytes:
        curves = [RunCurve(str(i), [0, 20], [0.1, 0.9], style) for i, style in enumerate(styles)]
        accuracy_figure(curves, tmp_path / "figure.png", title="t")
        pixels = matplotlib.image.imread(tmp_path / "figure.png")
        return pixels[:, : pixels.shape[1] * 3 // 4].tobytes()  # without the legend

    rule = dataclasses.replace(STYLES["heraclius"], marker="")
    assert drawn(BASELINE, rule) == drawn(rule, BASELINE) != drawn(rule, rule)


def test_every_rule_of_the_table_has_its_own_colour_and_marker() -> None:
    assert set(STYLES) <= set(RULES)
    assert len({style.colour for style in STYLES.values()}) == len(STYLES)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_two_rules_of_one_figure_never_have_the_same_colour() -> None:
    pipelines = [f"{before}:b=3|phocas:b=3" for before in PRE_AGGREGATORS]
    rules = [
        *RULES,
        *pipelines,
        "heraclius:b=3,cutoff=2.0",
        "own.rules:Mine:b=2",
        "own.rules:Other",
    ]
    for order in (rules, rules[::-1]):
        palette = Palette()
        assert len({palette.style(rule).colour for rule in order}) == len(rules)


def test_two_rules_never_share_a_colour_and_a_marker() -> None:
    cutoffs = [f"heraclius:b=8,cutoff={cutoff}.0" for cutoff in (1, 2, 8, 16)]
    pairs = [f"{before}:b=3|{rule}:b=3" for before in PRE_AGGREGATORS for rule in STYLES]
    rules = [*RULES, *cutoffs, *pairs, "own.rules:Mine:b=2", "own.rules:Other"]
    for order in (rules, rules[::-1]):
        palette = Palette()
        looks = {rule: palette.style(rule) for rule in order}
        assert len({(style.colour, style.marker) for style in looks.values()}) == len(rules)
        assert all(looks[rule] == style for rule, style in STYLES.items())
        assert {style.marker for style in looks.values()} <= set(markers_of_the_report())


def test_a_rule_has_the_same_style_in_every_figure() -> None:
    for rule in ("nnm:b=6|trimmed-mean:b=6", "cell-filter:b=8|nnm:b=6|trimmed-mean:b=6"):
        alone, among = Palette(), Palette()
        for other in (*RULES, "nnm:b=6|phocas:b=6", "heraclius:b=8,cutoff=2.0"):
            among.style(other)
        assert alone.style(rule) == among.style(rule) == among.style(rule.replace("b=6", "b=3"))


def test_one_rule_with_many_b_has_one_colour_and_many_dashes() -> None:
    palette = Palette()
    lines = distinct_dashes([palette.style(f"trimmed-mean:b={b}") for b in range(5)])
    assert len({(line.colour, line.marker) for line in lines}) == 1
    assert len({str(line.dash) for line in lines}) == 5


@pytest.mark.parametrize(
    ("rule", "look"),
    [
        ("phocas:b=6", "phocas"),
        ("median", "median"),
        ("multi-krum:b=6,select=3", "multi-krum:select=3"),
        ("multi-krum:select=3,b=6", "multi-krum:select=3"),
        ("own.rules:Mine:b=2", "own.rules:Mine"),
        ("monitor:rule=(nnm:b=6|phocas:b=6)", "monitor:rule=(nnm:b=6|phocas:b=6)"),
        ("clipping:radius=3.0|bulyan:b=3", "clipping:radius=3.0|bulyan"),
    ],
)
def test_style_depends_on_the_rule_without_b(rule: str, look: str) -> None:
    assert without_b(rule) == look


def markers_of_the_report() -> list[str]:
    """Return the markers that the HTML report can draw."""
    text = (resources.files("phocas.report.page") / "script" / "styles.js").read_text("utf-8")
    table = text.partition("const MARKERS = {")[2].partition("};")[0]
    return re.findall(r'^ {2}"?([^":\s]+)"?: \[', table, re.MULTILINE)


@pytest.mark.parametrize(
    ("workers", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0, 1"), ((0, 1, 2), "0-2"), ((1, 3, 4, 5, 9), "1, 3-5, 9")],
)
def test_worker_numbers_are_written_as_ranges(workers: tuple[int, ...], text: str) -> None:
    assert listing(workers) == text
