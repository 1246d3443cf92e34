"""One colour, dash and mark for each rule, in every figure.

The colours are Okabe and Ito's, which the colour-blind can tell apart; dashes and marks tell the
lines apart in black and white, and rules that share a colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS

_DOTS = (0, (1.5, 1.5))
_SHORT = (0, (3, 1.5))
_LONG = (0, (7, 2))
_DASH_DOT = (0, (5, 1.5, 1, 1.5))


@dataclass(frozen=True)
class Style:
    """How a line is drawn, wherever it appears."""

    colour: str
    dash: Any
    marker: str


BASELINE = Style("#777777", (0, (1, 1.2)), "")
"""The mean without failures, to which the others are compared."""

STYLES = {
    "mean": Style(BLACK, "-", "x"),
    "krum": Style(YELLOW, _DASH_DOT, "v"),
    "multi-krum": Style(PINK, _SHORT, "s"),
    "trimmed-mean": Style(ORANGE, _LONG, "^"),
    "phocas": Style(BLUE, "-", "o"),
    "heraclius": Style(GREEN, "-", "D"),
    "median": Style(SKY, _LONG, "P"),
    "meamed": Style(SKY, "-", "*"),
    "bulyan": Style(YELLOW, _LONG, "<"),
    "geometric-median": Style(GREEN, _DASH_DOT, ">"),
    "centered-clipping": Style(PINK, _DASH_DOT, "d"),
    "mda": Style(ORANGE, _DOTS, "h"),
    "cge": Style(BLACK, _DOTS, "+"),
    "watch": Style(BLACK, _DASH_DOT, "p"),
}
_TAKEN = {(style.colour, style.marker) for style in STYLES.values()}
_OTHERS = tuple(
    Style(colour, dash, marker)
    for dash, markers in (("-", "sxv^oDP"), ((0, (4, 2)), "d*<>hX+"))
    for colour, marker in zip(COLOURS, markers, strict=True)
    if (colour, marker) not in _TAKEN
)


def style_of(rule: str | None, index: int = 0) -> Style:
    """Return the style of a rule, written as in a configuration; of others one by their place.

    >>> style_of("phocas:b=8") == style_of("phocas:b=6") != style_of("my.rules:Mine")
    True
    >>> style_of("heraclius:b=8,reach=2") == style_of("heraclius:b=8")
    False
    """
    name, _, told = (rule or "").partition(":")
    other = _OTHERS[index % len(_OTHERS)]
    return other if "," in told or "|" in told else STYLES.get(name, other)
