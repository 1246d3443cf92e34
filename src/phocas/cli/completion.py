"""What the Tab key completes in a shell: names of rules, attacks and so on, and one's own.

``phocas --install-completion bash`` (or zsh, fish, powershell) sets it up. Names of one's own are
those in the Python files of the working directory, which are read and not imported.
"""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

MODELS = ("mlp", "cnn", "softmax", "cnn-bucketing", "cnn-byzfl", "resnet18")
"""The names of the models, whose table would load torch."""
_LARGEST = 200_000  # bytes of a file that is searched for names


def complete_rule(incomplete: str) -> list[str]:
    """Return the rules that begin so; after ``|``, those of the next step of a pipeline."""
    from phocas.rules import PRE_AGGREGATORS, RULES

    before, bar, rest = incomplete.rpartition("|")
    return [f"{before}{bar}{name}" for name in _matching((*RULES, *PRE_AGGREGATORS), rest)]


def complete_attack(incomplete: str) -> list[str]:
    """Return the attacks that begin so."""
    from phocas.attacks import ATTACKS

    return _matching(ATTACKS, incomplete)


def _split(incomplete: str) -> list[str]:
    from phocas.data import SPLITS

    return _matching(SPLITS, incomplete)


def _dataset(incomplete: str) -> list[str]:
    from phocas.data import DATASETS

    return _matching(DATASETS, incomplete)


def _model(incomplete: str) -> list[str]:
    return _matching(MODELS, incomplete)


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks of ``phocas reproduce`` that begin so, and each with its scales.

    The files are read here because :mod:`phocas.experiments.reproduction.tasks` would load torch.
    """
    folder = Path(str(resources.files("phocas.experiments.reproduction")))
    files = {path.stem: tomllib.loads(path.read_text("utf-8")) for path in folder.glob("*.toml")}
    found = []
    for name, file in files.items():
        scales = file.get("scale") or files.get(file.get("like", ""), {}).get("scale", {})
        found += [name, *(f"{name}-{scale}" for scale in scales)] if scales else []
    return sorted(name for name in found if name.startswith(incomplete))


SETTINGS: dict[str, Callable[[str], list[str]]] = {
    "rule": complete_rule,
    "attack": complete_attack,
    "split": _split,
    "dataset": _dataset,
    "model": _model,
}
"""Settings of ``phocas train`` whose values are completed."""


def option_is_asked() -> bool:
    """Return whether the word that the shell completes is the name of an option."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.rpartition(" ")[2].startswith("-")


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in (*names, *_own_names()) if name.startswith(incomplete)]


def _own_names() -> Iterator[str]:
    """Yield ``module:name`` of the functions and classes in the files of the working directory."""
    for path in sorted(Path.cwd().glob("*.py"))[:50]:
        try:
            if path.stat().st_size > _LARGEST:
                continue
            body = ast.parse(path.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            continue
        for each in body:
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and not each.name.startswith("_"):
                yield f"{path.stem}:{each.name}"
