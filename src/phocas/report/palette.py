"""One colour, dash and mark for each rule, in every figure.

The colours are Okabe and Ito's, which the colour-blind can tell apart; dashes and marks tell the
lines apart in black and white, and rules that share a colour.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phocas.specs import split

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = COLOURS

_DOTS = (0, (1.5, 1.5))
_SHORT = (0, (3, 1.5))
_LONG = (0, (7, 2))
_DASH_DOT = (0, (5, 1.5, 1, 1.5))
_DASHES = ("-", _LONG, _DOTS, _DASH_DOT, _SHORT)


@dataclass(frozen=True)
class Style:
    """How a line is drawn, wherever it appears."""

    colour: str
    dash: Any
    """Solid, or an offset and lengths of ink and gap."""
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
_MARKS = "oDsv^Pd*<>hpXx+"
_TAKEN = {(style.colour, style.marker) for style in STYLES.values()}
_OTHERS = tuple(
    Style(colour, dash, marker)
    for marker, dash in zip(_MARKS, 3 * _DASHES, strict=True)
    for colour in COLOURS
    if (colour, marker) not in _TAKEN
)
"""For what is in no table: pipelines, rules that are told more than b, rules of users."""
_B = re.compile(r"(?<=[:,])\s*b=\d+\s*(,|$)")


def look_of(rule: str) -> str:
    """Return what of a rule's text decides its look: all but b, which a dash tells apart.

    >>> look_of("nnm:b=6|phocas:b=6"), look_of("heraclius:b=8,reach=2.0")
    ('nnm|phocas', 'heraclius:reach=2.0')
    """
    return "|".join(_B.sub("", step.strip()).rstrip(":,") for step in split(rule, "|"))


class Palette:
    """The styles of one figure: the same for a rule in every figure, never one for two rules.

    Rules of the table have theirs; of all others the text decides, or, where another has that one
    already, it is the next that is free.

    >>> palette = Palette()
    >>> palette.style("phocas:b=8") == palette.style("phocas:b=6") == STYLES["phocas"]
    True
    >>> palette.style("heraclius:b=8,reach=2.0") == palette.style("heraclius:b=8")
    False
    """

    def __init__(self) -> None:
        self._given: dict[str, Style] = {}

    def style(self, rule: str) -> Style:
        """Return the style of a rule, written as in a configuration."""
        return self.named(look_of(rule))

    def named(self, name: str) -> Style:
        """Return the style of what has a name and is no rule."""
        if name not in self._given:
            self._given[name] = STYLES.get(name) or self._other(name)
        return self._given[name]

    def _other(self, name: str) -> Style:
        start = zlib.crc32(name.encode()) % len(_OTHERS)
        ahead = [*_OTHERS[start:], *_OTHERS[:start]]
        taken = set(self._given.values())
        return next((style for style in ahead if style not in taken), ahead[0])


def told_apart(styles: Sequence[Style]) -> list[Style]:
    """Give lines of one style, as of one rule with another b, each a dash of its own.

    >>> one, two = told_apart([STYLES["phocas"], STYLES["phocas"]])
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
