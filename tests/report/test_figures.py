"""The demo and its figure, tables, and plain progress."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING

import matplotlib.image
import pytest

from phocas import RULES
from phocas.cli import main
from phocas.report.figures import Curve, accuracy_figure
from phocas.report.palette import BASELINE, STYLES, style_of
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
    curve = Curve("one", [0, 10, 20], [0.1, 0.5, 0.9], style_of("mean"))
    accuracy_figure([curve], few, title="t")
    other = Curve("two", [0, 20], [0.1, 0.2], style_of("phocas:b=2"))
    accuracy_figure([curve, other], many, title="t")
    assert few.read_bytes() != many.read_bytes()


def test_a_rule_on_the_line_of_the_baseline_does_not_hide_it(tmp_path: Path) -> None:
    def drawn(*styles: Style) -> bytes:
        curves = [Curve(str(i), [0, 20], [0.1, 0.9], style) for i, style in enumerate(styles)]
        accuracy_figure(curves, tmp_path / "figure.png", title="t")
        pixels = matplotlib.image.imread(tmp_path / "figure.png")
        return pixels[:, : pixels.shape[1] * 3 // 4].tobytes()  # without the legend

    rule = dataclasses.replace(style_of("heraclius"), marker="")
    assert drawn(BASELINE, rule) == drawn(rule, BASELINE) != drawn(rule, rule)


def test_every_rule_has_a_look_of_its_own() -> None:
    assert set(RULES) <= set(STYLES)
    looks = [(style.colour, style.marker) for style in STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)
    others = {style_of("own.rules:Mine:b=2", index) for index in range(10)}
    assert len(others) == 10
    assert not others & set(STYLES.values())


@pytest.mark.parametrize(
    ("workers", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0, 1"), ((0, 1, 2), "0-2"), ((1, 3, 4, 5, 9), "1, 3-5, 9")],
)
def test_worker_numbers_are_written_short(workers: tuple[int, ...], text: str) -> None:
    assert listing(workers) == text
