"""Convert the formulas of pages from LaTeX to MathML, which browsers render without a script."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET

from latex2mathml.converter import convert

PAGES = ("theory.md", "concepts.md", "choosing.md")
"""Pages with formulas. On other pages a text between dollar signs is an error."""

_FORMULA = re.compile(  # the output of pymdownx.arithmatex, and punctuation after it
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>([,.;:)]*)', re.DOTALL
)
_FENCE = re.compile(r"\\([lr])([vV]ert)(?![a-zA-Z])")
_SPACING = {
    "<mo>&#x0002F;</mo>": '<mo lspace="0" rspace="0">/</mo>',
    "<mo>max</mo>": '<mo lspace="0.17em" rspace="0">max</mo>',
    "<mo>min</mo>": '<mo lspace="0.17em" rspace="0">min</mo>',
    "<mi>&#x00394;</mi>": '<mi mathvariant="normal">&#x00394;</mi>',
}
"""Output of latex2mathml that browsers would space or slant otherwise than LaTeX does."""
_TWO = ("mfrac", "msub", "msup", "munder", "mover")


class FormulaError(ValueError):
    """A formula that cannot be converted, or on a page without formulas."""


def typeset(page: str, *, allowed: bool = True) -> str:
    r"""Replace the formulas of an HTML page by MathML.

    >>> typeset(r'if <span class="arithmatex">\(x &lt; y\)</span>').partition("inline")[2]
    '"><mrow><mi>x</mi><mo>&#x0003C;</mo><mi>y</mi></mrow></math></span>'
    >>> typeset(r'from <span class="arithmatex">\(5 to\)</span>6', allowed=False)
    Traceback (most recent call last):
    tools.site.maths.FormulaError: $5 to$ looks like a formula: write \$, or add the page to PAGES
    """

    def replace(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        if not allowed:
            raise FormulaError(
                f"${latex}$ looks like a formula: write \\$, or add the page to PAGES"
            )
        if found[1] == "div":
            return f'<div class="formula">{mathml(latex, "block")}</div>{found[3]}'
        return f'<span class="formula">{mathml(latex)}{found[3]}</span>'

    return _FORMULA.sub(replace, page)


def mathml(latex: str, display: str = "inline") -> str:
    r"""Convert a formula, or raise with the formula if a command or a brace of it is wrong.

    >>> mathml(r"\sqroot{x}")
    Traceback (most recent call last):
    tools.site.maths.FormulaError: the formula \sqroot{x} cannot be converted: unknown \sqroot
    >>> mathml(r"\frac{1}")
    Traceback (most recent call last):
    tools.site.maths.FormulaError: the formula \frac{1} cannot be converted: incomplete mfrac
    >>> mathml("{x")
    Traceback (most recent call last):
    tools.site.maths.FormulaError: the formula {x cannot be converted: braces do not match
    """
    reason = "" if latex.count("{") == latex.count("}") else "braces do not match"
    made = ""
    try:
        # \left and \right say which of two equal bars opens: browsers space them by that
        sides = {"l": r"\left", "r": r"\right"}
        made = convert(_FENCE.sub(lambda bar: rf"{sides[bar[1]]}\{bar[2]}", latex), display=display)
    except Exception as error:  # noqa: BLE001 - the package has no common class of errors
        reason = reason or type(error).__name__
    for element in ET.fromstring(made).iter() if made else ():  # noqa: S314 - made above
        tag = element.tag.rpartition("}")[2]
        if "\\" in (element.text or ""):
            reason = reason or f"unknown {element.text}"
        if tag in _TWO and len(element) != 2:
            reason = reason or f"incomplete {tag}"
    if reason:
        raise FormulaError(f"the formula {latex} cannot be converted: {reason}")
    for before, after in _SPACING.items():
        made = made.replace(before, after)
    return made
