"""Curves of dots: every point is where it belongs, whatever the values."""

from __future__ import annotations

import numpy as np
import pytest

from phocas.report.terminal import draw_curve

BLANK = 0x2800
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def dots(lines: list[str], width: int) -> np.typing.NDArray[np.bool_]:
    """Return which dots are set, row by row, read one by one."""
    rows = [line.partition("|")[2].ljust(width) for line in lines if "|" in line]
    found = np.zeros((4 * len(rows), 2 * width), np.bool_)
    for top, row in enumerate(rows):
        for left, letter in enumerate(row):
            code = 0 if letter == " " else ord(letter) - BLANK
            for down in range(4):
                for across in range(2):
                    found[4 * top + down, 2 * left + across] = bool(code & BITS[down][across])
    return found


def test_dots_are_at_the_values_and_joined() -> None:
    rng = np.random.default_rng(3)
    values = rng.uniform(0, 1, 40)
    lines = draw_curve(range(40), values.tolist(), width=40, height=5, braille=True)
    shown = dots(lines, 40)
    wanted = np.interp(np.linspace(0, 39, 80), range(40), values)
    wanted = (wanted - values.min()) / np.ptp(values)
    before = None
    for column, value in enumerate(wanted):
        row = round((1 - value) * 19)
        assert shown[row, column]
        set_here = np.flatnonzero(shown[:, column])
        assert (np.diff(set_here) == 1).all()
        if before is not None:
            nearest = min(abs(set_here - before))
            assert nearest <= 1
        before = row
    assert f"{values.max():.3f}" in lines[0]
    assert f"{values.min():.3f}" in lines[4]
    assert lines[-1].split() == ["0", "39"]


@pytest.mark.parametrize("braille", [True, False])
def test_hostile_values(braille: bool) -> None:
    nan, inf = float("nan"), float("inf")
    assert draw_curve([], [], braille=braille) == []
    assert draw_curve([0, 1], [nan, inf], braille=braille) == []
    flat = draw_curve([0, 5], [0.5, 0.5], braille=braille)
    assert len({line[8:] for line in flat[1:5]}) == 1
    for values in ([0.1, nan, 0.9], [inf, 0.2, 0.3], [1e30, -1e30, 0.0], [0.3]):
        lines = draw_curve(range(len(values)), values, width=40, braille=braille)
        assert len(lines) == 8
        assert max(map(len, lines)) <= 80
