"""List the public names, from the source without importing it: some modules need extra packages.

A name is public if it is in the ``__all__`` of a module below. In a module without ``__all__``
every definition without a leading underscore is public.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MODULES = {
    "phocas": "Rules",
    "phocas.attacks": "Attacks",
    "phocas.attacks.audit": "Audit",
    "phocas.results": "Results",
    "phocas.theory": "Theory",
    "phocas.detection": "Detection",
    "phocas.data": "Data",
    "phocas.training": "Training",
    "phocas.engines": "Engines",
    "phocas.engines.local": "The local engine",
    "phocas.engines.ray": "The Ray engine",
    "phocas.engines.asynchronous": "Asynchronous training",
    "phocas.integrations.parallel": "DDP or FSDP2",
    "phocas.integrations.ddp": "DDP",
    "phocas.integrations.fsdp": "FSDP2",
    "phocas.integrations.outer": "Outer steps",
    "phocas.integrations.flower": "Flower",
    "phocas.integrations.nvflare": "NVFlare",
    "phocas.integrations.merging": "Merged files",
    "phocas.integrations.lightning": "Lightning",
    "phocas.integrations.transformers": "Hugging Face's Trainer",
}

INSIDE = {
    "phocas.kernels": "arrays and machine code, for the rules alone",
    "phocas.rules": "what users need of it is in phocas",
}
"""Modules with an ``__all__`` for other parts of the package, and why they are not public."""

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Name:
    """A public name and its definition, which is None for a constant, a type or a module."""

    module: str
    name: str
    home: str
    definition: Definition | None

    @property
    def path(self) -> str:
        """Return the name with its public module."""
        return f"{self.module}.{self.name}"

    @property
    def docstring(self) -> str:
        """Return the docstring, or an empty string."""
        return "" if self.definition is None else ast.get_docstring(self.definition) or ""


def public_names(module: str) -> list[Name]:
    """Return the public names of a module, in the order of its ``__all__`` or its source."""
    tree = _tree(module)
    names = _listed(tree)
    if names is None:
        names = [
            node.name
            for node in tree.body
            if isinstance(node, Definition) and not node.name.startswith("_")
        ]
    return [_found(module, name) for name in names if not name.startswith("__")]


def modules_with_lists() -> Iterator[str]:
    """Yield every module of the package that has an ``__all__``."""
    for path in sorted((SOURCE / "phocas").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if _listed(_tree(module)) is not None:
            yield module


def defines(tree: ast.Module, name: str) -> ast.stmt | None:
    """Return the statement of a module that binds a name, or None."""
    for node in _statements(tree):
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in _imported(node):
            return node
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and those inside its ``if`` blocks (TYPE_CHECKING)."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body


def _found(module: str, name: str) -> Name:
    """Follow a name through imports to its definition."""
    home, sought = module, name
    while True:
        node = defines(_tree(home), sought)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            onward = node.module, _imported(node)[sought]
            if onward != (home, sought):
                home, sought = onward
                continue
        if isinstance(node, ast.ImportFrom | None):
            if _file(f"{home}.{sought}") is not None:
                return Name(module, name, f"{home}.{sought}", None)
            raise LookupError(f"{module} has {name!r} in its __all__, and {home} does not have it")
        return Name(module, name, home, node if isinstance(node, Definition) else None)


def _imported(node: ast.ImportFrom) -> dict[str, str]:
    return {alias.asname or alias.name: alias.name for alias in node.names}


def _listed(tree: ast.Module) -> list[str] | None:
    node = defines(tree, "__all__")
    value = ast.literal_eval(node.value) if isinstance(node, ast.Assign) else None
    return None if value is None else list(value)


def _file(module: str) -> Path | None:
    path = SOURCE.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    return None


@cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    if file is None:
        raise LookupError(f"there is no module {module} under {SOURCE}")
    return ast.parse(file.read_text())
