"""One class name has one meaning in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import phocas

PACKAGE = Path(phocas.__file__).parent
CALLBACKS = {
    name: ["integrations/lightning.py", "integrations/transformers.py"]
    for name in ("Protect", "Watch")
}
"""The exception: the callbacks of Lightning and of Hugging Face have the same names by design."""


def test_class_names_are_unique() -> None:
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in files.items() if len(found) > 1} == CALLBACKS
