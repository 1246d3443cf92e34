"""The HTML report: a style sheet, a script and data in one file.

The script is a folder of JavaScript modules. They are joined without a build tool: each module
becomes a function that returns its exports.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from phocas.report import palette

MODULES = (
    "dom",
    "format",
    "styles",
    "tooltip",
    "chart",
    "heat",
    "rules",
    "store",
    "detection",
    "accuracy",
    "guards",
    "matrix",
    "cost",
    "runs",
    "playground",
    "main",
)
"""The modules of the script, each after those that it imports."""

_COLOURS = ("blue", "orange", "green", "pink", "yellow", "sky", "grey")
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.MULTILINE)


def render(data: dict[str, Any], *, live: bool = False) -> str:
    """Return the HTML report of some data; a live report asks its server for changes.

    >>> page = render({"source": {"name": "</script>"}, "runs": [], "guards": []})
    >>> page.count("</script>"), "unpkg" in page
    (2, False)
    """
    title = f"{data['source']['name']} · phocas"
    values = {
        "policy": policy(live=live),
        "title": html.escape(title),
        "source": "stream" if live else "embedded",
        "style": style(),
        "script": script(),
        "data": embedded(data),
    }
    template = _text("page.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def policy(*, live: bool) -> str:
    """Return the content security policy, which allows only this script and this style sheet.

    >>> policy(live=False).startswith("default-src 'none'; script-src 'sha256-")
    True
    """
    ask = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src '{_digest(script())}'; style-src '{_digest(style())}';"
        f" connect-src {ask}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def embedded(data: Any) -> str:
    r"""Return JSON without the characters that could end its script element.

    >>> print(embedded({"name": "</script><!--"}))
    {"name":"\u003c/script\u003e\u003c!--"}
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@functools.cache
def script() -> str:
    """Return all JavaScript modules of the HTML report as one script."""
    return "".join(_wrapped(name, _text(f"script/{name}.js")) for name in MODULES)


@functools.cache
def style() -> str:
    """Return the style sheet, with the colours of the palette as variables."""
    colours = {name: getattr(palette, name.upper()) for name in _COLOURS}
    variables = " ".join(f"--{name}: {colour};" for name, colour in colours.items())
    return f":root {{ {variables} }}\n{_text('style.css')}"


def _wrapped(name: str, module: str) -> str:
    """Return a module as a function that returns its exports."""
    exported = ", ".join(found[1] for found in _EXPORT.findall(module))
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = \2_module;", module))
    return f"const {name}_module = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
