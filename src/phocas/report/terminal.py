"""Curves in a terminal, of the dots that braille letters are made of."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ACROSS, _DOWN = 2, 4


def draw_curve(
    x: Sequence[float],
    y: Sequence[float],
    *,
    width: int = 64,
    height: int = 6,
    braille: bool | None = None,
) -> list[str]:
    r"""Draw a line through points as text, its lowest and highest value beside it.

    Points that are not finite are left out. ``braille`` is by default what the output can show;
    without it a letter stands where there are dots.

    >>> print("\n".join(draw_curve([0, 1, 2], [0, 1, 1], width=8, height=2, braille=False)))
    1.000 |  ******
    0.000 |**
          +--------
           0      2
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(a) and np.isfinite(b)]
    if not points:
        return []
    across, values = np.array(points, np.float64).T
    dots = np.zeros((height * _DOWN, width * _ACROSS), np.bool_)
    places = np.linspace(across[0], across[-1], dots.shape[1])
    low, high = float(values.min()), float(values.max())
    scaled = (np.interp(places, across, values) - low) / ((high - low) or 1.0)
    rows = np.rint((1 - scaled) * (len(dots) - 1)).astype(int)
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        first, last = sorted((row, before + (row > before) - (row < before)))
        dots[first : last + 1, column] = True
    cells = dots.reshape(height, _DOWN, width, _ACROSS).transpose(0, 2, 3, 1)
    shown = _can_show_braille() if braille is None else braille
    labels = [f"{high:.3f}", *[""] * (height - 2), f"{low:.3f}"][:height]
    margin = max(map(len, labels))
    lines = [
        f"{label:>{margin}} |{''.join(_letter(cell, braille=shown) for cell in line)}".rstrip()
        for label, line in zip(labels, cells, strict=True)
    ]
    start, end = f"{across[0]:g}", f"{across[-1]:g}"
    empty = " " * margin
    return [
        *lines,
        f"{empty} +{'-' * width}",
        f"{empty}  {start}{end:>{max(1, width - len(start))}}",
    ]


def _letter(cell: np.typing.NDArray[np.bool_], *, braille: bool) -> str:
    if not cell.any():
        return " "
    if not braille:
        return "*"
    bits = [
        bit
        for side, on in zip(_DOTS, cell, strict=True)
        for bit, o in zip(side, on, strict=True)
        if o
    ]
    return chr(_BLANK + sum(bits))


def _can_show_braille() -> bool:
    try:
        chr(_BLANK).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
