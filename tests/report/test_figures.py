"""The demo and its figure, tables, and plain progress."""

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
from phocas.report.figures import Curve, accuracy_figure
from phocas.report.palette import BASELINE, STYLES, Palette, look_of, told_apart
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
    curve = Curve("one", [0, 10, 20], [0.1, 0.5, 0.9], STYLES["mean"])
    accuracy_figure([curve], few, title="t")
    other = Curve("two", [0, 20], [0.1, 0.2], STYLES["phocas"])
    accuracy_figure([curve, other], many, title="t")
    assert few.read_bytes() != many.read_bytes()


def test_a_rule_on_the_line_of_the_baseline_does_not_hide_it(tmp_path: Path) -> None:
    def drawn(*styles: Style) -> bytes:
        curves = [Curve(str(i), [0, 20], [0.1, 0.9], style) for i, style in enumerate(styles)]
        accuracy_figure(curves, tmp_path / "figure.png", title="t")
        pixels = matplotlib.image.imread(tmp_path / "figure.png")
        return pixels[:, : pixels.shape[1] * 3 // 4].tobytes()  # without the legend

    rule = dataclasses.replace(STYLES["heraclius"], marker="")
    assert drawn(BASELINE, rule) == drawn(rule, BASELINE) != drawn(rule, rule)


def test_every_look_is_of_a_rule_and_of_no_other() -> None:
    assert set(STYLES) <= set(RULES)
    looks = [(style.colour, style.marker) for style in STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_two_rules_never_share_a_colour_and_a_mark() -> None:
    reaches = [f"heraclius:b=8,reach={reach}.0" for reach in (1, 2, 8, 16)]
    pairs = [f"{before}:b=3|{rule}:b=3" for before in PRE_AGGREGATORS for rule in STYLES]
    rules = [*RULES, *reaches, *pairs, "own.rules:Mine:b=2", "own.rules:Other"]
    for order in (rules, rules[::-1]):
        palette = Palette()
        looks = {rule: palette.style(rule) for rule in order}
        assert len({(style.colour, style.marker) for style in looks.values()}) == len(rules)
        assert all(looks[rule] == style for rule, style in STYLES.items())
        assert {style.marker for style in looks.values()} <= set(marks_of_the_page())


def test_a_rule_looks_the_same_in_every_figure() -> None:
    for rule in ("nnm:b=6|trimmed-mean:b=6", "cleaning:b=8|nnm:b=6|trimmed-mean:b=6"):
        alone, among = Palette(), Palette()
        for other in (*RULES, "nnm:b=6|phocas:b=6", "heraclius:b=8,reach=2.0"):
            among.style(other)
        assert alone.style(rule) == among.style(rule) == among.style(rule.replace("b=6", "b=3"))


def test_one_rule_with_many_b_has_one_colour_and_many_dashes() -> None:
    palette = Palette()
    lines = told_apart([palette.style(f"trimmed-mean:b={b}") for b in range(5)])
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
        ("watch:rule=(nnm:b=6|phocas:b=6)", "watch:rule=(nnm:b=6|phocas:b=6)"),
        ("clipping:radius=3.0|bulyan:b=3", "clipping:radius=3.0|bulyan"),
    ],
)
def test_all_but_b_decides_how_a_rule_looks(rule: str, look: str) -> None:
    assert look_of(rule) == look


def marks_of_the_page() -> list[str]:
    """Return the marks that the page can draw."""
    text = (resources.files("phocas.report.page") / "script" / "styles.js").read_text("utf-8")
    table = text.partition("const MARKS = {")[2].partition("};")[0]
    return re.findall(r'^ {2}"?([^":\s]+)"?: \[', table, re.MULTILINE)


@pytest.mark.parametrize(
    ("workers", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0, 1"), ((0, 1, 2), "0-2"), ((1, 3, 4, 5, 9), "1, 3-5, 9")],
)
def test_worker_numbers_are_written_short(workers: tuple[int, ...], text: str) -> None:
    assert listing(workers) == text
