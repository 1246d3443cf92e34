"""One colour, dash and marker for each rule, in every figure and in the HTML report.

Rules of the table have a colour each. The first seven colours are Okabe and Ito's, which
colour-blind readers can tell apart; dashes and markers tell all curves apart in black and white.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phocas.specs import split

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
GREY = "#777777"

_DOTS = (0, (1.5, 1.5))
_SHORT = (0, (3, 1.5))
_LONG = (0, (7, 2))
_DASH_DOT = (0, (5, 1.5, 1, 1.5))
_DASHES = ("-", _LONG, _DOTS, _DASH_DOT, _SHORT)


@dataclass(frozen=True)
class Style:
    """Colour, dash and marker of one curve."""

    colour: str
    """Hexadecimal colour, ``#rrggbb``."""
    dash: Any
    """``"-"`` for a solid line, or matplotlib's (offset, lengths of dashes and gaps)."""
    marker: str
    """Matplotlib's name of the marker; empty for none."""


BASELINE = Style(GREY, (0, (1, 1.2)), "")
"""The mean without an attack, with which the other curves are compared."""

STYLES = {
    "mean": Style(BLACK, "-", "x"),
    "krum": Style(YELLOW, _DASH_DOT, "v"),
    "multi-krum": Style(PINK, _SHORT, "s"),
    "trimmed-mean": Style(ORANGE, _LONG, "^"),
    "phocas": Style(BLUE, "-", "o"),
    "heraclius": Style(GREEN, "-", "D"),
    "median": Style(SKY, _LONG, "P"),
    "meamed": Style("#9B5DE5", "-", "*"),
    "bulyan": Style("#9C6B30", _LONG, "<"),
    "geometric-median": Style("#B03A6E", _DASH_DOT, ">"),
    "centered-clipping": Style("#8F8F1A", _DASH_DOT, "d"),
    "mda": Style("#D9304C", _DOTS, "h"),
    "cge": Style("#6C8299", _DOTS, "+"),
    "fl-trust": Style("#1B6B93", _LONG, "X"),
    "monitor": Style("#5A5FD0", _DASH_DOT, "p"),
    "dnc": Style("#4E7A2E", _SHORT, "8"),
    "flame": Style("#F2542D", _SHORT, "|"),
    "foolsgold": Style("#A1887F", _SHORT, "_"),
}
"""The style of each rule of the table; no two have the same colour or the same marker."""

_MARKERS = "oDsv^Pd*<>hpXx+"
_MORE_COLOURS = (
    "#17A2A2",
    "#74A919",
    "#C23B93",
    "#2F7F8F",
    "#E57B63",
    "#A779C2",
    "#C9A227",
    "#B58B6B",
    "#D28FD8",
    "#B3BE3C",
    "#8C9BE0",
    "#E09A7A",
)
_OTHERS = tuple(
    Style(colour, dash, marker)
    for marker, dash in zip(_MARKERS, 3 * _DASHES, strict=True)
    for colour in _MORE_COLOURS
)
"""Styles for pipelines, rules with parameters besides b, and user-defined rules."""
_B = re.compile(r"(?<=[:,])\s*b=\d+\s*(,|$)")


def without_b(rule: str) -> str:
    """Return a rule's text without b: rules that differ only in b have the same colour.

    >>> without_b("nnm:b=6|phocas:b=6"), without_b("heraclius:b=8,cutoff=2.0")
    ('nnm|phocas', 'heraclius:cutoff=2.0')
    """
    return "|".join(_B.sub("", step.strip()).rstrip(":,") for step in split(rule, "|"))


class Palette:
    """The styles of one figure; two rules never have the same style.

    A rule of the table has the same style in every figure. The style of another rule follows from
    its text; if a rule of this figure has that colour already, the next free colour is taken.

    >>> palette = Palette()
    >>> palette.style("phocas:b=8") == palette.style("phocas:b=6") == STYLES["phocas"]
    True
    >>> palette.style("heraclius:b=8,cutoff=2.0").colour == palette.style("heraclius:b=8").colour
    False
    """

    def __init__(self) -> None:
        self._given: dict[str, Style] = {}

    def style(self, rule: str) -> Style:
        """Return the style of a rule, written as in a configuration."""
        return self.named(without_b(rule))

    def named(self, name: str) -> Style:
        """Return the style of a curve by its name."""
        if name not in self._given:
            self._given[name] = STYLES.get(name) or self._other(name)
        return self._given[name]

    def _other(self, name: str) -> Style:
        start = zlib.crc32(name.encode()) % len(_OTHERS)
        ahead = [*_OTHERS[start:], *_OTHERS[:start]]
        taken = set(self._given.values())
        colours = {style.colour for style in taken}
        free = [style for style in ahead if style not in taken] or ahead
        return next((style for style in free if style.colour not in colours), free[0])


def distinct_dashes(styles: Sequence[Style]) -> list[Style]:
    """Return the styles, with a different dash for each curve that has the same style.

    >>> one, two = distinct_dashes([STYLES["phocas"], STYLES["phocas"]])
    >>> (one.colour, one.marker) == (two.colour, two.marker), one.dash == two.dash
    (True, False)
    """
    seen: Counter[Style] = Counter()
    found = []
    for style in styles:
        dashes = [style.dash, *(dash for dash in _DASHES if dash != style.dash)]
        found.append(replace(style, dash=dashes[seen[style] % len(dashes)]))
        seen[style] += 1
    return found
