"""Functions that mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from tools.site import catalogue, maths, pictures, public, sources

_PICTURE = re.compile(r"<!-- picture: (\w+) -->")


def on_pre_build(**_: Any) -> None:
    """Raise if a public name has no docstring, or a public module has no page."""
    missing = [
        name.path
        for module in public.MODULES
        for name in public.public_names(module)
        if name.definition is not None and not name.docstring
    ]
    unknown = set(public.modules_with_lists()) - set(public.MODULES) - set(public.INSIDE)
    if missing or unknown:
        raise PluginError(
            f"every public name must have a docstring: {', '.join(missing) or 'all do'}; every"
            f" module with an __all__ a place in tools/site/public.py:"
            f" {', '.join(sorted(unknown)) or 'all have'}"
        )


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and the pages whose files are outside of ``docs``."""
    made = {
        "reference/rules.md": catalogue.rules_page(),
        "reference/attacks.md": catalogue.attacks_page(),
        "reference/commands.md": catalogue.commands_page(),
        **catalogue.reference_pages(),
        **sources.pages_from_elsewhere(),
        **sources.tutorials(),
    }
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert pictures at their markers, and rewrite links that leave ``docs``."""
    uri = page.file.src_uri
    if page.file.generated_by is None:
        markdown = sources.turned(markdown, f"docs/{uri}", uri)
    return _PICTURE.sub(
        lambda found: f'<div class="concept">{pictures.CONCEPTS[found[1]]()}</div>',
        sources.bare_bars(markdown),
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Convert the formulas of a page; raise if one cannot be converted or should not be there."""
    try:
        return maths.typeset(sources.breakable(html), allowed=page.file.src_uri in maths.PAGES)
    except maths.FormulaError as error:
        raise PluginError(f"{page.file.src_uri}: {error} (tools/site/maths.py)") from error
