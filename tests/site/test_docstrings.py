"""Every public name says what it is, what it takes, and shows an example that runs.

Examples are doctests, which ``make test`` runs where they stand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tools.site.catalogue import words
from tools.site.public import MODULES, Definition, Name, public_names

from phocas import PRE_AGGREGATORS, RULES
from phocas.attacks import ATTACKS

PROCESSES = "several processes: docs/tutorials/protect.py is its example"
ELSEWHERE = "what it takes from elsewhere is not there where examples run"
WITHOUT_EXAMPLE = {
    "phocas.data.fetch": "a network",
    "phocas.engines.local.LocalCluster": "a task: Trainer makes it",
    "phocas.training.Round": "a training: Trainer shows it",
    "phocas.integrations.parallel.protect": PROCESSES,
    "phocas.integrations.parallel.watch": PROCESSES,
    "phocas.integrations.ddp.Guard": PROCESSES,
    "phocas.integrations.ddp.protect": PROCESSES,
    "phocas.integrations.ddp.watch": PROCESSES,
    "phocas.integrations.fsdp.protect": PROCESSES,
    "phocas.integrations.fsdp.watch": PROCESSES,
    "phocas.integrations.flower.Adam": ELSEWHERE,
    "phocas.integrations.flower.RobustStrategy": ELSEWHERE,
    "phocas.integrations.flower.UpdateOptimizer": "a protocol: Momentum shows it",
    "phocas.integrations.nvflare.RobustAggregator": ELSEWHERE,
    "phocas.integrations.lightning.Protect": ELSEWHERE,
    "phocas.integrations.lightning.Watch": ELSEWHERE,
    "phocas.integrations.transformers.Protect": ELSEWHERE,
    "phocas.integrations.transformers.Watch": ELSEWHERE,
    "phocas.integrations.merging.Merged": "a merge: merge_files shows it",
    "phocas.integrations.merging.TensorFile": "a file: open_tensors shows it",
    "phocas.integrations.merging.receipt": "a merge with a digest: docs/federated.md tells of it",
    "phocas.integrations.merging.write_receipt": "the same",
}
"""Those whose example would need more than a doctest has, and what."""

WITHOUT_ARGUMENTS = {
    "phocas.training.Task": "users make it by Task.make, from TaskSettings, which say them",
}


def names() -> Iterator[Name]:
    """Yield every public name that is defined by a class or a function, once."""
    seen = set()
    for module in MODULES:
        for name in public_names(module):
            definition = name.definition
            if definition is not None and (name.home, definition.name) not in seen:
                seen.add((name.home, definition.name))
                yield name


NAMES = {name.path: name for name in names()}


def taken(definition: Definition) -> list[str]:
    """Return what is taken: arguments, or those fields that do not say what they are themselves."""
    if isinstance(definition, ast.FunctionDef):
        arguments = definition.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return [each.arg for each in listed if each.arg not in ("self", "cls")]
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return taken(node)
    fields = []
    for place, node in enumerate(definition.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        following = definition.body[place + 1 : place + 2]
        said = following and isinstance(following[0], ast.Expr)
        declared = "" if node.value is None else ast.unparse(node.value)
        if not (
            said
            or "ClassVar" in ast.unparse(node.annotation)
            or declared.startswith(("setting(", "field(init=False"))
        ):
            fields.append(node.target.id)
    return fields


def undocumented(name: Name) -> list[str]:
    """Return what a name takes and does not say."""
    assert name.definition is not None
    parts = re.split(r"^(?:Args|Attributes):$", name.docstring, flags=re.MULTILINE)
    said = parts[1] if len(parts) > 1 else ""
    entries = re.findall(r"^ +\*{0,2}(\w+): ", said, re.MULTILINE)
    return [each for each in taken(name.definition) if each not in entries]


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_says_what_it_takes(path: str) -> None:
    missing = undocumented(NAMES[path])
    if path in WITHOUT_ARGUMENTS:
        assert missing, f"{path} says what it takes now: take it off the list"
    else:
        assert missing == [], f"{path} must say under Args: or Attributes: what these are"


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_has_an_example(path: str) -> None:
    shown = ">>>" in NAMES[path].docstring
    if path in WITHOUT_EXAMPLE:
        assert not shown, f"{path} has an example now: take it off the list"
    else:
        assert shown, f"{path} must have an example, as a doctest"


def test_those_on_the_lists_exist() -> None:
    assert set(WITHOUT_EXAMPLE) | set(WITHOUT_ARGUMENTS) <= set(NAMES)


@pytest.mark.parametrize("name", [*RULES, *PRE_AGGREGATORS])
def test_a_rule_has_its_formula_and_its_breakdown(name: str) -> None:
    said = words(RULES[name] if name in RULES else PRE_AGGREGATORS[name])
    assert said.formulas
    assert said.sections["Breakdown"]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_an_example_of_itself(name: str) -> None:
    cls = ATTACKS[name]
    assert re.search(rf">>> .*{cls.__name__}\(", cls.__doc__ or "")
