"""Write the pages of rules, attacks, commands and public names from the tables of the code."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer.main

from phocas import PRE_AGGREGATORS, RULES, Mean, PreAggregator, Rule, parse_rule
from phocas.attacks import ATTACKS, Attack, parse_attack
from phocas.cli import application, train
from phocas.report.rules_table import entries
from phocas.rules.algebra import Distances, Norms, Signs
from phocas.rules.base import plan_of
from phocas.rules.execution import Execution
from phocas.specs import Spec
from tools.site import pictures
from tools.site.public import MODULES, public_names

WORKERS = 20

# Parameters of the rules in the pictures: nine workers in the plane, two of them Byzantine.
RULE_EXAMPLES = {
    "bulyan": "bulyan:b=1",
    "centered-clipping": "centered-clipping:radius=80",
    "monitor": "monitor:rule=(phocas:b=2)",
    "bucketing": "bucketing:size=3",
    "clipping": "clipping:radius=70",
}
ATTACK_EXAMPLES = {
    "bit-flip": "bit-flip:columns=8",
    "gambler": "gambler:servers=4,server=1,probability=0.2",
    "a-little-is-enough": "a-little-is-enough:q=2,z=1.5",
    "optimal-alie": "optimal-alie:q=2,against=(phocas:b=2)",
    "optimal-ipm": "optimal-ipm:q=2,against=(phocas:b=2)",
    "constant": "constant:q=2,value=nan",
    "crash": "crash:worker=3",
    "stuck": "stuck:worker=3,column=6",
    "random-cells": "random-cells:rate=0.1",
    "silent-corruption": "silent-corruption:worker=3,stride=4,first=1",
    "worst-case": "worst-case:rule=(phocas:b=2),q=2",
}


@dataclass(frozen=True)
class Words:
    """A docstring in parts: first line, paragraphs, and sections with a heading."""

    line: str
    body: tuple[str, ...]
    sections: dict[str, str]

    @property
    def formulas(self) -> tuple[str, ...]:
        """Return the formulas: the indented paragraphs."""
        return tuple(each for each in self.body if each.startswith("    "))


def words(cls: type) -> Words:
    """Split a docstring into its parts; examples are left out: the reference page has them.

    >>> class Rule:
    ...     '''Do something.
    ...
    ...         y = x
    ...
    ...     Breakdown: none.
    ...     '''
    >>> words(Rule).formulas, words(Rule).sections
    (('    y = x',), {'Breakdown': 'none.'})
    """
    text = re.sub(r"^ *>>>.*?(\n\n|\Z)", "", _docstring(cls), flags=re.DOTALL | re.MULTILINE)
    line, *rest = text.strip().split("\n\n")
    body, sections = [], {}
    for paragraph in rest:
        heading = re.match(r"(Breakdown|Reference|Args|Attributes):\s+", paragraph)
        if heading is None:
            body.append(paragraph.strip("\n"))
        else:
            sections[heading[1]] = paragraph[heading.end() :].strip()
    return Words(line, tuple(body), sections)


def _docstring(cls: type) -> str:
    first, _, rest = (cls.__doc__ or "").strip().partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}"


def passes(rule: Rule) -> str:
    """Describe the measurements of a rule before the last pass, and its order of cost.

    >>> passes(parse_rule("phocas:b=2")), passes(parse_rule("nnm:b=2|krum:b=2"))
    ('one pass: O(m d)', 'distances, then one pass: O(m² d)')
    """
    if rule.needs_reference is not None:
        rule = rule.referenced()
    execution = Execution(plan_of(rule, 9), 9)
    found: list[str] = []
    while execution.request is not None:
        request = execution.request
        weights = request.weights if isinstance(request, Distances | Norms) else None
        rows = np.arange(9 if weights is None else len(weights))
        if isinstance(request, Distances):
            squared = np.square(np.subtract.outer(rows, rows), dtype=np.float64)
            alone = request.origin is not None
            found.append("distances from one row" if alone else "distances")
            execution.reply(squared[request.origin] if alone else squared)
        elif isinstance(request, Signs):
            found.append("signs")
            execution.reply(np.ones((3, 9)))
        else:
            found.append("norms" if isinstance(request, Norms) else "marks")
            execution.reply(rows + 1.0 if isinstance(request, Norms) else np.zeros(9))
    asked = " and ".join(dict.fromkeys(found))
    order = "m²" if "distances" in found else "m"
    return f"{asked}, then one pass: O({order} d)" if asked else f"one pass: O({order} d)"


def rules_page() -> str:
    """Return the page of rules."""
    introduction = (
        "Look up what a rule computes, what it tolerates and what it costs. This page is generated"
        " from the table of rules in the code. There are m workers; b is the number of Byzantine"
        " workers, or of wrong values per column, that a rule tolerates. In the pictures nine"
        " workers send two numbers each. The two at the right are Byzantine. Dots fade with the"
        " share of values that was dropped.\n"
    )
    parts = [
        "# Rules\n",
        introduction,
        _legend("honest worker", "Byzantine worker", "plain mean", "result of the rule"),
        "## What each rule tolerates and costs\n",
        f"| rule | tolerates among {WORKERS}, at most | cost |\n|---|---|---|",
    ]
    survival = {entry["name"]: _survives(entry["survives"]) for entry in entries(WORKERS)}
    for name, cls in RULES.items():
        cost = _unbroken(passes(parse_rule(_example(cls, RULE_EXAMPLES))))
        parts.append(f"| [`{name}`](#{name}) | {survival[name]} | {cost} |")
    parts.append("\nMeasured times are on the page about [speed](../speed.md).\n")
    for name, cls in RULES.items():
        rule = parse_rule(_example(cls, RULE_EXAMPLES))
        parts.append(_entry(name, cls, str(rule), pictures.of_rule(rule), passes(rule)))
    parts.append("## Before a rule\n\nPre-aggregators change the rows that a rule then reduces: ")
    parts.append("`nnm:b=6|phocas:b=6`. Faint dots are rows before, full ones after.\n")
    for name, kind in PRE_AGGREGATORS.items():
        stage = PRE_AGGREGATORS.parse(_example(kind, RULE_EXAMPLES))
        cost = passes(stage | Mean())
        parts.append(_entry(name, kind, str(stage), pictures.of_stage(stage), cost))
    return "\n".join(parts)


def attacks_page() -> str:
    """Return the page of attacks."""
    introduction = (
        "Look up what an attack does and which parameters it has. This page is generated from the"
        " table of attacks in the code. The pictures show a round of eight workers and twenty"
        " columns after the attack: changed cells are framed, colours are signs, and NaN is grey."
        " [The guide](../attacks.md) shows how to use attacks.\n"
    )
    parts = ["# Attacks and faults\n", introduction]
    for name, cls in ATTACKS.items():
        attack = parse_attack(_example(cls, ATTACK_EXAMPLES))
        parts.append(_entry(name, cls, str(attack), pictures.of_attack(attack), None))
    return "\n".join(parts)


def _legend(*names: str) -> str:
    kinds = ("honest", "byzantine", "mean", "result")
    keys = [f'<span class="{kind}">{name}</span>' for kind, name in zip(kinds, names, strict=True)]
    return f'<p class="legend">{" ".join(keys)}</p>\n'


def _example(cls: type[Spec], examples: dict[str, str]) -> str:
    """Return a value of the class as text: q = b = 2 unless something else is needed."""
    if cls.name in examples:
        return examples[cls.name]
    required = [part for part in cls.parameters().split(", ") if part and "=" not in part]
    return cls.name + (":" + ",".join(f"{each}=2" for each in required) if required else "")


def _survives(known: dict[str, int] | None) -> str:
    if known is None:
        return "depends on its parameters"
    if known["values"]:
        return f"{known['values']} wrong values in every column"
    return f"{known['rows']} wrong rows" if known["rows"] else "nothing"


def _unbroken(cost: str) -> str:
    return cost.replace(" d)", "&nbsp;d)")


def _entry(name: str, cls: type[Spec], spec: str, picture: str, cost: str | None) -> str:
    found = words(cls)
    parts = [f"## {name}\n", f"**{found.line}**\n"]
    parts.append(f"Shown: `{spec}`. Parameters: `{cls.parameters() or 'none'}`.")
    if cls.aliases:
        parts.append("Also called " + ", ".join(f"`{alias}`" for alias in cls.aliases) + ".")
    parts.append("")
    body = [f"{paragraph}\n" for paragraph in found.body]
    # Text flows around the picture; the formulas before it have the whole width of the page.
    after = max((at for at, each in enumerate(found.body, 1) if each in found.formulas), default=0)
    body.insert(after, f'<div class="entry">{picture}</div>\n')
    parts += body
    for heading in ("Breakdown", "Reference"):
        if heading in found.sections:
            parts.append(f"**{heading}.** {_capital(found.sections[heading])}\n")
    if cost is not None:
        parts.append(f"**Cost.** {_capital(_unbroken(cost))}.\n")
    parts.append(f"[{cls.__name__} in the reference]({_reference(cls)})\n")
    return "\n".join(parts)


def _reference(cls: type[Spec]) -> str:
    module = "phocas.attacks" if issubclass(cls, Attack) else "phocas"
    assert issubclass(cls, Attack | Rule | PreAggregator)
    return f"{module}.md#{module}.{cls.__name__}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def commands_page() -> str:
    """Return the page of commands, from the texts of ``--help``."""
    group: Any = typer.main.get_command(application())
    commands: dict[str, Any] = {}
    for name in group.list_commands(None):
        command = train.complete() if name == "train" else group.commands[name]
        inner = getattr(command, "commands", {})
        commands |= {f"{name} {each}": inner[each] for each in inner} or {name: command}
    introduction = (
        "What `phocas COMMAND --help` prints, on one page. `phocas --version` prints the version,"
        " and `python -m phocas` does the same as `phocas`.\n"
    )
    described = ["\n".join(_command(name, commands[name])) for name in commands]
    return "\n".join(["# Commands\n", introduction, *described])


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{(command.help or '').strip()}\n"
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["phocas", name, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    options = [each for each in command.params if getattr(each, "help", None)]
    if not options:
        return
    yield "| option | what it is |\n|---|---|"
    for option in options:
        spelt = ", ".join([*option.opts, *option.secondary_opts])
        if option.param_type_name == "argument":
            spelt = option.name.upper()
        yield f"| `{spelt}` | {_cell(option.help)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def reference_pages() -> dict[str, str]:
    """Return one page for each public module, which mkdocstrings fills from the docstrings."""
    pages = {}
    for module, title in MODULES.items():
        parts = [f"# {title}: `{module}`\n"]
        constants = []
        for name in public_names(module):
            if name.definition is None:
                constants.append(name.name)
            else:
                parts.append(f"::: {name.path}\n")
        if constants:
            listed = ", ".join(f"`{each}`" for each in constants)
            parts.insert(1, f"Also in this module: {listed}.\n")
        pages[f"reference/{module}.md"] = "\n".join(parts)
    return pages
